"""Accumulate gradients under FSDP2 without reducing each micro-batch over the replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from lightning_compress.engine.sharded.hook import accumulating
from lightning_compress.engine.sharded.units import Unit, units_of

if TYPE_CHECKING:
    from lightning.pytorch.strategies.parallel import ParallelStrategy as _Base
else:
    _Base = object


class SyncFSDPAccumulation(_Base):
    """Let Lightning's ``ModelParallelStrategy`` reduce accumulated gradients once a step, without loss.

    With ``accumulate_grad_batches``, Lightning 2.6 has DistributedDataParallel reduce once a step, but FSDP2 in each
    micro-batch. This mixin makes FSDP2 wait, too: ``class Strategy(SyncFSDPAccumulation, ModelParallelStrategy): ...``.
    The gradient is the same up to the order of summation.

    What a rank sends less in a step of A micro-batches, with R replicas, S shards and P parameters of b bytes each:

    - ``accumulate = "sharded"``: ``(A - 1) 2 (R - 1) / R P b / S`` bytes, the all-reduces over replicas of all
      micro-batches but the last. Gradients are still reduced over the shards in each. No more memory. Without replicas
      (a mesh of one dimension) it changes nothing.
    - ``accumulate = "unsharded"``: another ``(A - 1) (S - 1) / S P b`` bytes, the reduce-scatters. Each rank keeps the
      whole gradient until the last micro-batch: ``(S - 1) / S P b`` bytes more memory.

    The gathering of parameters is unchanged: ``(S - 1) / S P b`` bytes for each forward and each backward pass.

    Attributes:
        accumulate: "sharded" or "unsharded"; default "sharded".
    """

    accumulate: Literal["sharded", "unsharded"] = "sharded"
    _units: Sequence[Unit] = ()

    def setup(self, trainer: Any) -> None:
        """Set up the model, and remember what FSDP reduces."""
        super().setup(trainer)
        if trainer.state.fn == "fit":
            assert self.lightning_module is not None
            self._units = units_of(self.lightning_module)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Do not reduce over the replicas in the backward passes inside the context."""
        with accumulating(self._units, self.accumulate):
            yield
