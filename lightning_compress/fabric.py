"""``CompressedDDPStrategy`` for ``lightning.fabric.Fabric``, which has its own class tree and its own names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_compress.collectives import TorchCollective
from lightning_compress.core import errors
from lightning_compress.engine import checks
from lightning_compress.engine.attach import check_setup, compress, say, warn_of_epochs
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.optimizers import notifying
from lightning_compress.planning.decide import keep
from lightning_compress.strategies.advice import untested, warn, warn_beside
from lightning_compress.strategies.compression import DDPArgumentsMixin
from lightning_compress.strategies.resume import restore_compression, save_compression
from lightning_compress.strategies.sidecar import CHOSEN, KEY

__all__ = ["CompressedDDPStrategy"]


class CompressedDDPStrategy(DDPArgumentsMixin, DDPStrategy):
    """DistributedDataParallel with a compressed gradient average, for ``Fabric(strategy=...)``.

    It takes the arguments of ``lightning_compress.CompressedDDPStrategy``, which is for a Trainer. Fabric refuses that
    class, and a Trainer refuses this one. The names ``compressed_ddp`` and ``compressed_ddp_<compressor>`` exist in
    both.

    ``fabric.save`` and ``fabric.load`` save and restore each rank's residual together with the optimizer of its model:
    pass them the model and the optimizer that ``fabric.setup`` returned. The files of the ranks are in a folder beside
    the checkpoint, ``<checkpoint>.lc``; with several models in one checkpoint, in ``<checkpoint>.<key of the
    optimizer>.lc``. A checkpoint without an optimizer has no residual.

    If a schedule counts epochs, or ``dgc`` warms up, set ``fabric.strategy.compression.epoch`` at the start of each.

    Raises:
        ValueError: see ``lightning_compress.CompressedDDPStrategy``.
    """

    @cached_property
    def _models(self) -> WeakKeyDictionary[DistributedDataParallel, Compression]:
        """The models that were set up in this process."""
        return WeakKeyDictionary()

    @cached_property
    def _optimizers(self) -> WeakSet[Optimizer]:
        """The optimizers that were set up in this process."""
        return WeakSet()

    @property
    def compressions(self) -> list[Compression]:
        """The compression of each model, in the order in which they were set up."""
        return list(self._models.values())

    @property
    def compression(self) -> Compression:
        """The compression of the model, if there is one model.

        Raises:
            RuntimeError: no model was set up in this process, or several.
        """
        if len(self._models) != 1:
            raise RuntimeError(
                f"{len(self._models)} models were set up in this process. Use fabric.strategy.compressions, which has "
                "one for each, after fabric.setup()"
            )
        return self.compressions[0]

    def setup_environment(self) -> None:
        """Set up the process; all ranks agree on a number that identifies the run."""
        super().setup_environment()
        self._resume.begin(TorchCollective(), self.root_device)

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap the model; raise on every rank, before that, if settings cannot work with it."""
        check_setup(self._settings, module, TorchCollective(), self.root_device)
        self._choose_bucket_cap()
        model = super().setup_module(module)
        self._models[model] = compression = compress(model, self._settings, self._loss_scale)
        if self.is_global_zero:
            warn_of_epochs(self._settings)
        self._bind(model, compression)
        warn(untested(self.root_device))
        return model

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        """Set up a model and its optimizers, which a method may depend on."""
        self._optimizers.update(optimizers)
        return super().setup_module_and_optimizers(module, optimizers, scheduler)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Set up an optimizer, before or after its model."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            for model, compression in self._models.items():
                if compression.optimizers.owned(optimizer):
                    self._bind(model, compression)
        return super().setup_optimizer(optimizer)

    def _bind(self, model: DistributedDataParallel, compression: Compression) -> None:
        """Let the compression know its optimizers, and say what runs."""
        own = [optimizer for optimizer in self._optimizers if compression.optimizers.owned(optimizer)]
        compression.stepped_by(own)
        if self.is_global_zero:
            say(compression)
        if self.world_size > 1:
            warn_beside(compression.settings, own, model.module)

    def _loss_scale(self) -> torch.Tensor | None:
        return getattr(getattr(self.precision, "scaler", None), "_scale", None)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step; ``optimizer`` may be any object with an optimizer's methods."""
        if isinstance(optimizer, Optimizer):
            return super().optimizer_step(optimizer, **kwargs)
        closure: Any = kwargs.pop("closure", None)
        with notifying(optimizer, closure) as changed:
            given = {} if changed is None else {"closure": changed}  # a GradScaler takes no closure
            return super().optimizer_step(optimizer, **kwargs, **given)

    def clip_gradients_norm(
        self, module: nn.Module, optimizer: Optimizer, max_norm: float, *args: Any, **kwargs: Any
    ) -> Any:
        """Clip the averaged gradients by their norm.

        Raises:
            ValueError: the method gives the optimizer something other than averaged gradients.
        """
        self._check_clipping(optimizer, max_norm, "max_norm")
        return super().clip_gradients_norm(module, optimizer, max_norm, *args, **kwargs)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> Any:
        """Clip the averaged gradients by value.

        Raises:
            ValueError: the method gives the optimizer something other than averaged gradients.
        """
        self._check_clipping(optimizer, clip_val, "clip_val")
        return super().clip_gradients_value(module, optimizer, clip_val)

    def _check_clipping(self, optimizer: Optimizer, clip: float, given: str) -> None:
        for compression in self.compressions:
            if compression.optimizers.owned(optimizer):
                checks.check_clipping(compression.settings, clip, given)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state, with the settings that a method took over from it."""
        state = super().get_optimizer_state(optimizer)
        for compression in self.compressions:
            correction = compression.settings.correction
            if state and correction and compression.active and compression.optimizers.owned(optimizer):
                correction.restore_optimizer(state)
        return state

    @errors.called_by_all("fabric.save()")
    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Compare the ranks, write each rank's file beside the checkpoint, then the checkpoint itself (rank 0).

        Raises:
            ValueError: ``state`` contains a compression, of which only rank 0's would be saved.
            RuntimeError: the ranks' models differ; on every rank.
        """
        self._check_no_compression(state, "save")
        with errors.explained(f"saving {path}", self.global_rank):
            path = self.broadcast(str(path))
        manifests = dict[str, Any]()
        trained = self._trained(state)
        for compression, ending in trained.items():
            compression.compare_ranks(now=True)  # Fabric says of no step that it is the last
            key = ending if len(trained) > 1 else ""
            content: dict[str, Any] = {"optimizer_states": []}
            save_compression(self._resume, self.checkpoint_io, f"{path}{key}", content, compression)
            manifests |= {f"{name}{key}": content[name] for name in (KEY, CHOSEN) if name in content}
        if any(isinstance(each, Mapping) and {"state", "param_groups"} <= each.keys() for each in state.values()):
            warn(
                f"{path} has an optimizer's state_dict, but no residual beside it. Pass the optimizer itself to "
                'fabric.save(), as in {"model": model, "optimizer": optimizer}'
            )
        super().save_checkpoint(path, {**state, **manifests}, *args, **kwargs)

    @errors.called_by_all("fabric.load()")
    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the checkpoint, and the files beside it for the optimizers in ``state``.

        Raises:
            ValueError: ``state`` contains a compression, or ``strict_state`` is set and a file cannot be read.
        """
        objects = state if isinstance(state, dict) else {}
        self._check_no_compression(objects, "load")
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        for compression, ending in self._trained(objects).items():
            key = ending if f"{KEY}{ending}" in rest else ""  # else it was saved alone
            self._resume.path = f"{path}{key}"
            content = {name: rest.pop(f"{name}{key}") for name in (KEY, CHOSEN) if f"{name}{key}" in rest}
            warn(restore_compression(self._resume, self.checkpoint_io, content, compression))
            warn(_other_choice(content.get(CHOSEN), keep(compression.next_settings)))
        if not objects and self._models and any(name.startswith(KEY) for name in rest):
            warn(
                f"{path} has residuals, which were not restored. Pass the objects to restore, as in "
                'fabric.load(path, {"model": model, "optimizer": optimizer})'
            )
        return rest

    def _trained(self, state: Mapping[str, Any]) -> dict[Compression, str]:
        """Return the compressions with an optimizer in ``state``, each with an ending of its key and of its files."""
        found = dict[Compression, str]()
        for name, each in state.items():
            models = self.compressions if isinstance(each, Optimizer) else []
            owned = [model for model in models if model not in found and model.optimizers.owned(each)]
            for number, compression in enumerate(owned):
                found[compression] = f".{name}.{number}" if number else f".{name}"
        return found

    def _check_no_compression(self, state: Mapping[str, Any], verb: str) -> None:
        if wrong := [name for name, each in state.items() if isinstance(each, Compression)]:
            raise ValueError(
                f"fabric.{verb}() got a compression as {wrong[0]!r}, of which only rank 0's state would be in the "
                "checkpoint. Leave it out: each rank's state is saved and restored with the optimizer"
            )

    def teardown(self) -> None:
        """Stop watching the optimizers; ``comm_stats`` stays readable."""
        for compression in self.compressions:
            compression.close()
        super().teardown()

    def __repr__(self) -> str:
        return f"lightning_compress.fabric.{super().__repr__()}"  # a Trainer that refuses it prints this


def _other_choice(before: Any, now: Mapping[str, Any] | None) -> str:
    """Return a warning if ``compressor="auto"`` runs something else than the checkpoint's run did, or nothing."""
    saved = before.get("compressor") if isinstance(before, Mapping) else None
    if saved is None or now is None or saved == now["compressor"]:
        return ""
    return (
        f"compressor='auto' chose {now['compressor']}, and {saved} in the checkpoint's run. Give compressor={saved} to "
        "continue that run bit for bit"
    )


CompressedDDPStrategy.register_strategies(STRATEGY_REGISTRY)
