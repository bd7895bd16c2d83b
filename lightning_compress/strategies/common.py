"""What all strategies share: files beside checkpoints, and explained errors of Lightning's own collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_compress.core import errors
from lightning_compress.strategies import sidecar
from lightning_compress.strategies.resume import Resume

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class CommonMixin(_Base):
    """Turn a strategy of several processes into one that keeps files beside its checkpoints and explains lost ranks.

    Raises:
        ExchangeError: from ``barrier``, ``broadcast``, ``reduce`` and ``all_gather``: a rank died or does not answer.
            The last three raise other errors unchanged, such as that of an object that cannot be pickled.
    """

    _resume: Resume

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the checkpoint; the files beside it are read with the optimizers' states."""
        self._resume.path = str(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint and the files beside it."""
        super().remove_checkpoint(filepath)
        sidecar.remove(str(filepath), self.global_rank)

    @property
    def gives_up(self) -> bool:
        """Whether the fit is being aborted: other ranks may be gone, so do not wait for them."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        return trainer is not None and bool(trainer.interrupted)

    def _loss_scale(self) -> Tensor | None:
        """Return the factor of the loss, a scalar; None without a GradScaler."""
        return getattr(getattr(self.precision_plugin, "scaler", None), "_scale", None)

    def meet(self) -> None:
        """Do nothing before a collective of Lightning's; a subclass may first bring all ranks to the same batch."""

    def barrier(self, name: str | None = None) -> None:
        """Wait for the other ranks; after an error do not, so that this process ends and the others raise too."""
        if not self.gives_up:
            self.meet()
            with (
                errors.called_by_all(self._call(name)),
                errors.explained(f"waiting for the others at {name or 'a barrier'}", self.global_rank),
            ):
                super().barrier(name)

    def _call(self, barrier: str | None = None) -> str:
        """Return what the user has called that leads to a collective of Lightning's; empty if it is ``fit``."""
        if barrier == "Trainer.save_checkpoint":
            return "trainer.save_checkpoint()"
        trainer: Any = getattr(self.lightning_module, "_trainer", None)
        return "" if trainer is None or trainer.state.fn in (None, "fit") else f"trainer.{trainer.state.fn.value}()"

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank ``src``'s object on all ranks."""
        self.meet()
        what = f"receiving rank {src}'s object in Lightning's broadcast"
        with errors.called_by_all(self._call()), errors.of_transport(what, self.global_rank):
            return super().broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks: a metric, or a decision that all take together."""
        self.meet()
        with errors.of_transport("reducing a number over all ranks for Lightning", self.global_rank):
            return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return all ranks' tensors."""
        with errors.of_transport("gathering a tensor of all ranks for Lightning", self.global_rank):
            return super().all_gather(tensor, group, sync_grads)


def accumulation(trainer: Any) -> int:
    """Return the largest number of batches that are accumulated at any time of the training."""
    schedules = [getattr(callback, "scheduling", None) for callback in trainer.callbacks]
    scheduled = [max(schedule.values()) for schedule in schedules if isinstance(schedule, dict) and schedule]
    return int(max([trainer.accumulate_grad_batches, *scheduled]))


VARIANTS: dict[str, dict[str, object]] = {
    "": {},
    "_spawn": {"start_method": "spawn"},
    "_fork": {"start_method": "fork"},
    "_notebook": {"start_method": "fork"},
}
"""Suffixes of registered names, and the arguments that each adds."""


def register(
    registry: Any,
    make: Callable[..., Any],
    kind: str,
    named: Mapping[str, Mapping[str, object]],
    variants: Mapping[str, Mapping[str, object]] = VARIANTS,
) -> None:
    """Register a strategy under each name with each suffix; keep names that are already registered.

    Args:
        registry: Lightning's ``StrategyRegistry``.
        make: the strategy, or a function that returns one.
        kind: what it is, for the description.
        named: arguments of the strategy by name.
        variants: further arguments by suffix.
    """
    for name, arguments in named.items():
        for suffix, more in variants.items():
            if name + suffix not in registry:
                combined = {**arguments, **more}
                registry.register(name + suffix, make, description=f"{kind}: {combined or 'defaults'}", **combined)
