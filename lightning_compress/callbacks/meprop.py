"""Make backward passes sparse in a Lightning training: meProp."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_compress.backward import disable, enable
from lightning_compress.backward.layer_swap import pattern_of
from lightning_compress.backward.sparsity import Amount, Sparsity
from lightning_compress.backward.transform import FEW, LAYERS, amounts_of, check_settings, warn_of_few
from lightning_compress.core.kinds import kinds_of

__all__ = ["MeProp", "MePropMixin"]

Amounts = Amount | Mapping[str, Amount]
Memories = dict[str, dict[str, Tensor]]
"""Of layers, by their names; each under the name "", as checkpoints have it."""
MET = "lightning_compress.strategies.signals"
"""The module that calls Lightning's signal handler when all ranks have met."""


class MePropMixin:
    """Makes a ``Callback`` make backward passes sparse; see ``MeProp``."""

    def __init__(
        self,
        k: Amounts = 0.05,
        *,
        skip: Sequence[str] = (),
        output: bool = False,
        schedule: Mapping[int, Amounts] | None = None,
        memory: float = 0.0,
        share: bool = False,
        per_example: bool = False,
        sparse_bias: bool = False,
        per_sequence: bool = False,
    ) -> None:
        amounts_of(k)
        check_settings(skip, memory, per_example, share)
        self.k, self.skip, self.share, self.memory = k, tuple(skip), share, float(memory)
        self._options = {
            "output": output,
            "per_example": per_example,
            "sparse_bias": sparse_bias,
            "per_sequence": per_sequence,
        }
        self.schedule = _milestones(schedule or {})
        self.layers: dict[str, Sparsity] = {}
        self._group: Any = None
        self._scale: Tensor | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._trainer: Any = None
        self._ranks = 1

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Change the model's layers.

        Raises:
            ValueError: they cannot be changed; on every rank.
        """
        self._trainer, self._ranks, self._scale = trainer, trainer.world_size, None
        if self.share and "AsyncGossipMixin" in kinds_of(trainer.strategy):
            raise ValueError(
                "share=True: the ranks choose outputs together in each backward pass, and in asynchronous gossip they "
                "have different numbers of them; use share=False, or GossipStrategy"
            )
        if (self.share or self.memory) and torch.distributed.is_initialized() and trainer.world_size > 1:
            timeout = getattr(trainer.strategy, "_timeout", None)
            self._group = torch.distributed.new_group(timeout=timeout)  # apart from DDP's own traffic
        group = self._group if self.share else None
        self.layers = enable(pl_module, self.k, skip=self.skip, memory=self.memory, group=group, **self._options)
        self._try_schedule(pl_module)
        kept = ", ".join(f"{name} {each.k} of {each.width}" for name, each in self.layers.items())
        alike = [name for name, each in pl_module.named_modules() if isinstance(each, tuple(LAYERS))]
        whole = ", ".join(name for name in alike if name not in self.layers)
        rank_zero_info(f"meProp: backward passes keep {kept}" + (f", and all of {whole}" if whole else ""))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Continue from a checkpoint."""
        self._continue(trainer)

    def _continue(self, trainer: Any) -> None:
        if self._loaded is not None:
            self._restore(self._loaded["memory"], trainer)
            self._loaded = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keep as many outputs as the schedule says."""
        for step, amounts in self.schedule:  # all that are due, since each may name other layers
            if step <= trainer.global_step:
                self._resize(amounts)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Multiply the memory as the loss, whose gradients are added to it."""
        scale = getattr(getattr(trainer.precision_plugin, "scaler", None), "_scale", None)
        if scale is None or not self.memory:
            return
        factor = scale if self._scale is None else scale / self._scale
        for sparsity in self.layers.values():
            if sparsity.memory is not None:
                sparsity.memory.mul_(factor.to(sparsity.memory.device))
        self._scale = scale.clone()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore the model."""
        self._disable(pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore the model."""
        self._disable(pl_module)
        if self._group is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(self._group)
        self._group = self._trainer = None

    def _disable(self, module: Any) -> None:
        disable(module)
        for sparsity in self.layers.values():
            sparsity.gradients.clear()  # as large as the weights

    def state_dict(self) -> dict[str, Any]:
        """Return every rank's memory. A collective call, unless training is being aborted.

        A checkpoint has only rank 0's state of a callback, so rank 0 gathers all memories, and each rank resumes from
        its own. A save in a signal's handler, after an error or after the fit has only rank 0's.
        """
        if not self.memory or not self.layers:
            return {}
        own = self._unscaled()
        ranks: list[Memories | None] = [own if rank == 0 else None for rank in range(self._ranks)]
        if self._group is not None and self._together():
            torch.distributed.all_gather_object(ranks, own, group=self._group)
        return {"memory": ranks}

    def _together(self) -> bool:
        """Tell whether other ranks can be reached: not after an error, in a signal's handler, or after the fit."""
        return self._trainer is not None and self._ranks > 1 and not (self._trainer.interrupted or _in_handler())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See ``state_dict``."""
        self._loaded = state_dict if "memory" in state_dict else None
        if self._trainer is not None:  # within a fit: a search for a learning rate ends, which nothing else tells
            self._continue(self._trainer)

    def _unscaled(self) -> Memories:
        """Return the memory in units of the loss, on the CPU."""
        factor = 1.0 if self._scale is None else 1 / self._scale.item()
        return {
            layer: {"": (sparsity.memory * factor).cpu()}
            for layer, sparsity in self.layers.items()
            if sparsity.memory is not None
        }

    def _restore(self, ranks: Sequence[Memories | None], trainer: Any) -> None:
        """Restore this rank's memory. At another number of ranks each rank takes the mean."""
        if any(each is None for each in ranks):
            rank_zero_warn("MeProp: the checkpoint was saved in a hurry and has no memory of ranks other than 0")
        same = len(ranks) == trainer.world_size
        own = (ranks[trainer.global_rank] or {}) if same else _mean([each or {} for each in ranks])
        self._scale = None  # what is saved is in units of the loss
        for each in self.layers.values():
            each.memory = None
        for layer, named in own.items() if self.memory else ():
            sparsity = self.layers.get(layer)
            if sparsity is None or named[""].numel() != sparsity.width:
                rank_zero_warn(f"MeProp: {layer} is another layer than in the checkpoint; its memory is reset to 0")
                continue
            sparsity.memory = named[""].clone()

    def _try_schedule(self, model: Any) -> None:
        """Check each later ``k``, and warn as ``enable`` does for the first."""
        first = {name: each.k for name, each in self.layers.items()}
        least = dict(first)
        for step, amounts in self.schedule:
            for pattern in amounts.keys() - {pattern_of(name, amounts) for name in self.layers}:
                raise ValueError(
                    f"schedule: {pattern!r} of step {step} matches no layer whose backward pass is sparse, which are "
                    f"{', '.join(self.layers)}; k names these: give it k=1.0 there to begin with all of its outputs"
                )
            self._resize(amounts)
            least = {name: min(k, self.layers[name].k) for name, k in least.items()}
        shares = {name: (least[name] / each.width, first[name] / each.width) for name, each in self.layers.items()}
        warn_of_few(model, {name: later for name, (later, now) in shares.items() if now >= FEW})
        for name, sparsity in self.layers.items():
            sparsity.k = first[name]

    def _resize(self, amounts: Mapping[str, Amount]) -> None:
        for name, sparsity in self.layers.items():
            if (pattern := pattern_of(name, amounts)) is not None:
                sparsity.resize(amounts[pattern])


def _milestones(schedule: Mapping[Any, Amounts]) -> list[tuple[int, dict[str, Amount]]]:
    if not isinstance(schedule, Mapping):
        raise ValueError(f"schedule={schedule!r}: give {{step: k, ...}}, such as {{0: 1.0, 1000: 0.05}}")
    for step in schedule:
        if not str(step).isdecimal():
            raise ValueError(f"schedule: {step!r} must be a whole number of optimizer steps, 0 or more")
    return sorted(((int(step), amounts_of(each)) for step, each in schedule.items()), key=lambda each: each[0])


def _mean(ranks: Sequence[Memories]) -> Memories:
    total: Memories = {}
    for layer, named in (each for memories in ranks for each in memories.items()):
        before = total.get(layer, {"": torch.zeros_like(named[""])})
        total[layer] = {"": before[""] + named[""] / len(ranks)}
    return total


def _in_handler() -> bool:
    """Tell whether Lightning's signal handler is saving while ranks are at different places.

    Our strategies call the handler only when all ranks have met.
    """
    frame: Any = sys._getframe()
    found = False
    while frame is not None:
        found = found or frame.f_code.co_filename.endswith("signal_connector.py")
        if frame.f_globals.get("__name__") == MET:
            return False
        frame = frame.f_back
    return found


class MeProp(MePropMixin, Callback):
    """Backward passes that follow only the largest output gradients: meProp (Sun et al., ICML 2017, arXiv:1706.06197).

    In each linear, convolutional or recurrent layer but the output layer, only the ``k`` outputs with the largest
    gradients (sums of absolute values over the minibatch) take part in the backward pass. The others count as zero.
    That is two small matrix products instead of two large ones, and a weight gradient of ``k`` rows. The forward pass,
    checkpoints and the optimizer stay the same; an optimizer with momentum or weight decay still changes all rows.
    Gradients may be changed in place (clipping, ``on_after_backward``), but not through ``p.grad.data`` or
    ``p.grad.numpy()``: PyTorch does not count such changes, so the next step would still have them in other rows.

    Args:
        k: outputs that are kept, a count (80) or a fraction (0.05), of every layer. Or by shell-style patterns of layer
            names, ``{"encoder.*": 0.05, "decoder.out": 40}``: the first that matches decides, others are left alone.
        skip: patterns of layers that are left alone.
        output: change the output layer too: the last one in the order of ``model.modules()``.
        schedule: other values of ``k`` from these optimizer steps on: ``{0: 1.0, 1000: 0.05}`` trains 1000 steps with
            the ordinary backward pass first.
        memory: what is dropped is multiplied by this, 0 to 1, and added to the next gradient (memorized sparse
            backpropagation, Zhang et al., arXiv:1905.10194): one number an output and rank. 0 is plain meProp. The
            checkpoint has the memory of each rank. If a step is skipped because of its loss scale, a layer still
            remembers what it dropped, unless that was not finite.
        share: ranks first add up their sums, one all-reduce of as many floats as the layer has outputs, and keep the
            same outputs, so that the mean gradient has ``k`` rows as well. Every rank must run the same layers.
        per_example: each example keeps ``k`` outputs of its own: the paper's first variant, which saves little time.
            Convolutions are left alone then.
        sparse_bias: biases of dropped outputs get no gradient; in the paper's code all of them do.
        per_sequence: recurrent layers choose once for all time steps, which is several times as fast. Otherwise each
            step chooses, as in the paper.

    Raises:
        ValueError: a value is not allowed; when training begins: a pattern, of the schedule too, matches no layer, or a
            layer cannot be changed (its weight is tied, quantised or parametrized, or it is of another kind).
    """
