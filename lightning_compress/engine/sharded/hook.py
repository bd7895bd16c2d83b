"""What FSDP calls with the gradients that it has averaged over shards, so that they get averaged over replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_compress.engine.compression import Compression
from lightning_compress.engine.sharded.units import Unit


class ReplicaHook:
    """Average the gradients of one unit over the replicas.

    A backward pass with ``set_requires_all_reduce(False)`` averages over shards only, and FSDP adds the result to
    ``grad``. The next pass that averages over replicas takes it from there.

    Args:
        unit: of the model.
        compression: averages over the replicas.
    """

    def __init__(self, unit: Unit, compression: Compression) -> None:
        self._unit, self._compression = unit, compression
        self._carries = False  # ``grad`` holds what no replica but this has seen

    @torch.no_grad()
    def __call__(self, reduced: Tensor) -> None:
        """Replace gradients by their mean over the replicas; FSDP then adds them to ``grad``.

        Raises:
            RuntimeError: see ``Unit.pieces``.
        """
        pieces = self._unit.pieces(reduced)
        if reduced.is_cuda:  # FSDP holds the memory for its own all-reduce only
            reduced.record_stream(torch.cuda.current_stream(reduced.device))
        if not self._unit.averages:
            self._carries = True
            return
        here = [(each, piece) for each, piece in zip(self._unit.trained, pieces, strict=True) if each.numel]
        if self._carries:
            for shard, piece in here:
                if (gradient := shard.gradient()) is not None:
                    piece.add_(gradient.reshape(-1))
        if here:
            self._compression.reduce(tuple(shard.name for shard, _ in here), [piece for _, piece in here])
        else:  # the step begins here, too
            self._compression.count(0, 0)
        if self._carries:  # not before, because an earlier average that ``grad`` holds counts
            for shard in self._unit.trained:
                shard.parameter().grad = None
        self._carries = False


def _closed(_: Tensor) -> None:
    raise RuntimeError(
        "the compression of this model was closed, and nothing averages gradients over its replicas any more: call "
        "attach again before you go on training"
    )


class _Watch:
    """Notice when the model begins a forward pass.

    Args:
        compression: is told.
    """

    def __init__(self, compression: Compression) -> None:
        self._compression = compression

    def __call__(self, module: nn.Module, _: object) -> None:
        if torch.is_grad_enabled():
            self._compression.before_backward()
            if module.training:
                self._compression.compare_ranks()


def register(
    compression: Compression, units: Sequence[Unit], roots: Sequence[nn.Module], stream: torch.cuda.Stream | None
) -> None:
    """Let ``compression`` average for a sharded model until it is closed.

    Args:
        compression: averages over the replicas.
        units: of the model.
        roots: its outermost sharded modules.
        stream: on which it works; None on CPUs.
    """
    compression.active = True
    for unit in units:
        unit.reduce_unused()
        unit.hook(ReplicaHook(unit, compression), stream)
        compression.closing.callback(unit.hook, _closed)
    for root in roots:  # before FSDP gathers the parameters, which may be corrected
        handle = root.register_forward_pre_hook(_Watch(compression), prepend=True)
        compression.closing.callback(handle.remove)


@contextmanager
def accumulating(units: Sequence[Unit], way: Literal["sharded", "unsharded"] = "sharded") -> Iterator[None]:
    """Do not average over replicas in the backward passes inside the context; the settings are as before after it.

    Args:
        units: of the model.
        way: "sharded" averages over shards in each pass. "unsharded" sends nothing, and keeps the whole gradients.
    """
    with ExitStack() as stack:
        for unit in units:
            stack.enter_context(unit.unsynchronised(way == "sharded"))
        yield
