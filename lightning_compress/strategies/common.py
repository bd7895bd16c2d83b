"""What all strategies have in common: files beside checkpoints, and errors of what Lightning itself sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DDPStrategy

from lightning_compress.core import errors
from lightning_compress.strategies.resume import Resume

if TYPE_CHECKING:
    _Base = DDPStrategy
else:
    _Base = object


class CommonMixin(_Base):
    """Turns a ``DDPStrategy`` into one with files beside its checkpoints, that explains why it waited in vain.

    Raises:
        ExchangeError: from ``barrier``, ``broadcast``, ``reduce`` and ``all_gather``, where a rank is gone or silent;
            what else goes wrong in the last three, as with an object that cannot be pickled, is raised as it is.
    """

    _resume: Resume

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the checkpoint; what is beside it is restored with the optimizers."""
        self._resume.remember(str(checkpoint_path))
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint and what is beside it."""
        super().remove_checkpoint(filepath)
        self._resume.remove(str(filepath), self.global_rank)

    @property
    def gives_up(self) -> bool:
        """The fit is being aborted, and other ranks may be gone: do not wait for them."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        return trainer is not None and bool(trainer.interrupted)

    def meet(self) -> None:
        """Lightning is about to talk over all ranks; a subclass may want them at the same batch first."""

    def barrier(self, name: str | None = None) -> None:
        """Wait for the other ranks; not after an error, so that this process ends and the others get an error too."""
        if not self.gives_up:
            self.meet()
            with errors.explained(f"waiting for the others at {name or 'a barrier'}", self.global_rank):
                super().barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Lightning's."""
        self.meet()
        with errors.of_transport(f"hearing from rank {src} in Lightning's broadcast", self.global_rank):
            return super().broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Lightning's: of metrics, and of what the ranks decide together."""
        self.meet()
        with errors.of_transport("reducing a number over all ranks for Lightning", self.global_rank):
            return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Lightning's."""
        with errors.of_transport("gathering a tensor of all ranks for Lightning", self.global_rank):
            return super().all_gather(tensor, group, sync_grads)


VARIANTS: dict[str, dict[str, object]] = {
    "": {},
    "_spawn": {"start_method": "spawn"},
    "_fork": {"start_method": "fork"},
    "_notebook": {"start_method": "fork"},
}
"""Suffixes of every name, and their arguments."""


def register(
    registry: Any,
    cls: type,
    kind: str,
    named: Mapping[str, Mapping[str, object]],
    variants: Mapping[str, Mapping[str, object]] = VARIANTS,
) -> None:
    """Register a strategy under each name with each suffix; a name that is there stays as it is.

    Args:
        registry: Lightning's.
        cls: the strategy.
        kind: what it is, for people.
        named: its arguments by name.
        variants: further arguments by suffix.
    """
    for name, arguments in named.items():
        for suffix, more in variants.items():
            if name + suffix not in registry:
                given = {**arguments, **more}
                registry.register(name + suffix, cls, description=f"{kind}: {given or 'defaults'}", **given)
