"""meSimp: removes neurons whose gradients are rarely among the largest, once in a cycle of epochs."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress.backward.layer_swap import pattern_of
from lightning_compress.backward.sparsity import Amount, count_of
from lightning_compress.backward.transform import amounts_of
from lightning_compress.callbacks import wraps_model
from lightning_compress.callbacks.meprop import Amounts, MePropMixin
from lightning_compress.contrib.pruning import check_optimizers, cut, followers
from lightning_compress.core.kinds import kinds_of

__all__ = ["MeSimp", "MeSimpMixin"]


class MeSimpMixin(MePropMixin):
    """Turns a ``Callback`` into one that removes neurons; see ``MeSimp``."""

    def __init__(
        self,
        k: Amounts = 0.1,
        *,
        cycle: int = 5,
        prune: float = 0.1,
        pairs: Mapping[str, str] | None = None,
        skip: Sequence[str] = (),
        memory: float = 0.0,
        share: bool = False,
        per_example: bool = False,
        sparse_bias: bool = False,
    ) -> None:
        super().__init__(k, skip=skip, memory=memory, share=share, per_example=per_example, sparse_bias=sparse_bias)
        if isinstance(cycle, bool) or not isinstance(cycle, int) or cycle < 1:
            raise ValueError(f"MeSimp(cycle={cycle!r}): must be an integer number of epochs, 1 or more")
        if isinstance(prune, bool) or not isinstance(prune, (int, float)) or not 0 < prune < 1:
            raise ValueError(f"MeSimp(prune={prune!r}): must be a share of the examples between 0 and 1, such as 0.1")
        self._given = k
        self.cycle, self.prune, self.pairs = cycle, float(prune), dict(pairs or {})
        self.history: list[dict[str, int]] = []
        self._following: dict[str, str] = {}
        self._counted: Mapping[str, Any] | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Change the model's layers, and begin to count.

        Raises:
            ValueError: neurons cannot be removed with these layers, optimizers or strategy; on every rank.
        """
        _check_strategy(trainer.strategy)
        check_optimizers(trainer.optimizers)
        resumed = bool(self.history)
        self.k = _amounts_left(pl_module, self._given, self.skip) if resumed else self._given
        super().on_fit_start(trainer, pl_module)
        self._following = followers(pl_module, self.layers, self.pairs)
        for name, sparsity in self.layers.items():
            if sparsity.k == sparsity.width and not resumed:
                raise ValueError(
                    f"{name} keeps all of its {sparsity.width} outputs (k={sparsity.k}), so meSimp cannot rank them. "
                    f"Give a smaller k, or skip=[{name!r}]"
                )
            sparsity.hits, sparsity.seen = torch.zeros(sparsity.width, dtype=torch.int64), 0

    def _continue(self, trainer: Any) -> None:
        """Restore the counts of a checkpoint: rank 0 gets the counts of all ranks, the others begin at zero."""
        super()._continue(trainer)
        share = int(trainer.is_global_zero)
        for name, (hits, seen) in (self._counted or {}).items():
            if name in self.layers and len(hits) == self.layers[name].width:
                layer = self.layers[name]
                layer.hits, layer.seen = share * torch.tensor(hits, dtype=torch.int64), share * seen
        self._counted = None

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove neurons at the end of a cycle, but not at the end of training."""
        done = trainer.current_epoch + 1
        if done % self.cycle or done == trainer.max_epochs or 0 <= trainer.max_steps <= trainer.global_step:
            return
        if not trainer.strategy.reduce_boolean_decision(trainer.should_stop, all=False):
            self._prune(trainer, pl_module)

    def _prune(self, trainer: Any, pl_module: Any) -> None:
        remaining = {name: self._frequent(name) for name in self._following}
        cuts = {name: each for name, each in remaining.items() if len(each) < self.layers[name].width}
        for name, each in cuts.items():
            cut(pl_module, name, self._following[name], each, trainer.optimizers)
            self._narrow(name, each)
        for sparsity in self.layers.values():
            sparsity.hits, sparsity.seen = torch.zeros(sparsity.width, dtype=torch.int64), 0
        self.history.append({name: len(each) for name, each in remaining.items()})
        sizes = ", ".join(f"{name} {len(each)}" for name, each in remaining.items())
        rank_zero_info(f"meSimp: after epoch {trainer.current_epoch} neurons are {sizes}")
        if cuts:
            _wrap_again(trainer.strategy)

    def _counts(self, name: str) -> tuple[Tensor, int]:
        """Return ``hits`` and ``seen`` of a layer, summed over the ranks. Collective: every rank must call it."""
        sparsity = self.layers[name]
        assert sparsity.hits is not None
        counts = torch.cat([sparsity.hits.cpu(), torch.tensor([sparsity.seen], dtype=torch.int64)])
        if self._together():
            counts = counts.to(self._trainer.strategy.root_device)
            torch.distributed.all_reduce(counts)
        return counts[:-1].cpu(), int(counts[-1])

    def _frequent(self, name: str) -> Tensor:
        """Return the neurons of a layer to keep, at least one, the same on all ranks."""
        hits, seen = self._counts(name)
        if not seen:  # no choice was made: all outputs are kept
            return torch.arange(len(hits), dtype=torch.int64)
        frequent = hits >= self.prune * seen
        frequent[hits.argmax()] = True
        return frequent.nonzero().flatten()

    def _narrow(self, name: str, keep: Tensor) -> None:
        """Cut the layer's settings and memory to the neurons that are kept."""
        sparsity = self.layers[name]
        sparsity.width = len(keep)
        if sparsity.memory is not None:
            sparsity.memory = sparsity.memory[keep.to(sparsity.memory.device)]
        patterns = amounts_of(self._given)
        amount = patterns[pattern_of(name, patterns) or "*"]
        sparsity.k = count_of(min(amount, sparsity.width) if isinstance(amount, int) else amount, sparsity.width, name)
        for each in (name, self._following[name]):
            if each in self.layers:
                self.layers[each].gradients.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes so far and the counts of all ranks. Collective, like ``MeProp``'s."""
        by_layer = {name: self._counts(name) for name in self._following}
        counts = {name: (hits.tolist(), seen) for name, (hits, seen) in by_layer.items()}
        return {**super().state_dict(), "counts": counts, "history": self.history}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See ``state_dict``."""
        self._counted, self.history = state_dict["counts"], list(state_dict["history"])
        super().load_state_dict(state_dict)


def _amounts_left(model: nn.Module, given: Amounts, skip: Sequence[str]) -> dict[str, Amount]:
    """Return ``given`` with an entry for each layer, except the last, that has fewer neurons than it is to keep."""
    patterns, matched, narrow = amounts_of(given), {}, {}
    for name, layer in [each for each in model.named_modules() if isinstance(each[1], nn.Linear)][:-1]:
        pattern = None if any(fnmatchcase(name, each) for each in skip) else pattern_of(name, patterns)
        if pattern is None:
            continue
        matched[name], amount = pattern, patterns[pattern]
        if isinstance(amount, int) and layer.out_features < amount:
            narrow[name] = layer.out_features
    used = {pattern for name, pattern in matched.items() if name not in narrow}
    gone = {matched[name] for name in narrow} - used  # these patterns would match no other layer
    return {**narrow, **{pattern: amount for pattern, amount in patterns.items() if pattern not in gone}}


def _check_strategy(strategy: Any) -> None:
    if not (wraps_model(strategy) or "SingleDeviceStrategy" in kinds_of(strategy)):
        raise ValueError(
            f"MeSimp removes neurons on one device or under DDPStrategy (CompressedDDPStrategy too), and not under "
            f"{type(strategy).__name__}, which stores the parameters in another form"
        )
    if (method := getattr(strategy, "_start_method", "popen")) != "popen":
        raise ValueError(
            f"MeSimp cannot train with start_method={method!r} (strategies ..._spawn, _fork, _notebook): Lightning "
            "would load the smaller weights into the main process's model, which has all neurons. Use "
            "start_method='popen', as strategy='ddp' does, in a script"
        )
    settings: Any = getattr(strategy, "_settings", None)
    if getattr(settings, "correction", None) is not None:
        raise ValueError(
            f"MeSimp cannot cut the velocities and moments that {settings.compressor} keeps instead of the optimizer; "
            "use another compressor, such as 'topk' or 'rows'"
        )


def _wrap_again(strategy: Any) -> None:
    """Wrap the model again: DistributedDataParallel keeps the parameters and buckets that it was built with."""
    if not isinstance(strategy.model, DistributedDataParallel):
        return
    if hasattr(strategy, "rebuild"):
        strategy.rebuild()
        return
    strategy.model = strategy.lightning_module
    gc.collect()  # removes the old wrapper's hooks from the remaining parameters
    strategy.configure_ddp()


class MeSimp(MeSimpMixin, Callback):
    """meProp that removes neurons: meSimp (Sun et al., arXiv:1711.06528).

    While ``MeProp`` trains, it counts how often each output of a layer is among the ``k`` largest gradients and not
    zero. After every ``cycle`` epochs, it removes the outputs for which this was so in less than a share ``prune`` of
    the choices of all ranks (minibatches, or examples with ``per_example``): rows of the layer's weight and bias,
    columns of the next layer's weight, and the same parts of the optimizer's state. Training continues with a smaller
    model and a smaller ``state_dict``. Nothing is removed after the last epoch.

    If linear layers in an ``nn.Sequential`` have only activations and dropout between them, the next layer is found
    automatically; give others by ``pairs``. All ranks remove the same neurons. Then DistributedDataParallel is built
    again, with buckets of the new sizes. Under ``CompressedDDPStrategy``, residuals are reset to zero, and
    ``exchange="auto"`` chooses again. Other callbacks must not hold copies of parameters (weight averaging), and the
    main process must not hold the model for other processes that train it (``ddp_spawn``, ``ddp_notebook``).

    Before you resume or load, shrink the model:
    ``contrib.pruning.shrink(Model(), torch.load(path)["state_dict"])``.

    Args:
        k: as in ``MeProp``; an integer is limited to the number of remaining neurons.
        cycle: epochs from one removal to the next; the paper's code uses 5.
        prune: share of the choices, between 0 and 1; the paper's code uses 0.1.
        pairs: name of the next linear layer by layer. It must be the only one that takes the layer's outputs, with only
            elementwise operations between the two.
        skip: as in ``MeProp``.
        memory: as in ``MeProp``.
        share: as in ``MeProp``.
        per_example: as in ``MeProp``; the paper counts examples.
        sparse_bias: as in ``MeProp``.

    Raises:
        ValueError: a value is not allowed. When training begins: see ``MeProp``; or the next layer is unknown, or
            neurons cannot be removed with this optimizer or strategy.
    """
