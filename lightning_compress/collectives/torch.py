"""Collectives of torch.distributed: NCCL, Gloo and any other backend of a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from hashlib import sha256
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_compress.collectives.collective import Collective, Operation, Overlapping, Wait

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_GATHER, _EXCHANGE = (
    new if hasattr(dist.ProcessGroup, new) else old
    for new, old in (("all_gather_single", "_allgather_base"), ("all_to_all_single", "alltoall_base"))
)


_LONG = 1 << 16
"""Bytes from which a message takes longer on the link than its calls on the CPU."""
_OPERATIONS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def backend_of(device: str, group: dist.ProcessGroup | None = None) -> str:
    """Return the backend of a process group for a device type: "gloo", "nccl", ...; "" if there is none.

    ``torch.distributed.get_backend`` returns "undefined" or "cpu:gloo,cuda:nccl" for groups with several backends.

    Args:
        device: "cpu" or "cuda".
        group: None means the default group.
    """
    try:
        return str(_whole(group)._get_backend(torch.device(device)).name())
    except RuntimeError:
        return ""


def _whole(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    whole = group or dist.group.WORLD
    assert whole is not None
    return whole


def _by_nccl(group: dist.ProcessGroup | None) -> bool:
    """Return whether CUDA tensors travel by NCCL, of which PyTorch has several backends: "nccl", "nccl2"."""
    return backend_of("cuda", group) not in ("", "gloo")


def _works(work: dist.Work | None) -> list[dist.Work]:
    return [] if work is None else [work]


def _wait(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()


class TorchCollective(Collective):
    """Collectives of one process group, issued synchronously.

    Args:
        group: the process group; None means the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._met = not _by_nccl(group)
        self._through_host = backend_of("cuda", group) == "gloo"
        self._gloo = backend_of("cpu", group) == "gloo"
        self._direct = _by_nccl(group)

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        """Sum or maximise over the ranks with the backend's own algorithm."""
        self._all_reduce(tensor, operation)

    def _all_reduce(self, tensor: Tensor, operation: Operation = "sum", async_op: bool = False) -> list[dist.Work]:
        return _works(dist.all_reduce(tensor, _OPERATIONS[operation], group=self.group, async_op=async_op))

    def begin(self, name: Overlapping, *arguments: Any) -> Wait:
        """Start the backend's asynchronous collective, or the transfers that replace it."""
        if name == "swap":
            return self._begin_swap(*arguments)
        if self._direct and arguments[0].is_cuda:
            return self.prepare(name, *arguments)()
        works: list[dist.Work] = getattr(self, f"_{name}")(*arguments, async_op=True)
        return lambda: _wait(works)

    def prepare(self, name: Overlapping, *arguments: Any) -> Callable[[], Wait]:
        """See ``Collective.prepare``; what the backend is given is made once."""
        if name == "swap" or not self._direct or not arguments[0].is_cuda:
            return super().prepare(name, *arguments)
        return partial(_waiting, prepare_directly(_whole(self.group), name, *arguments))

    def all_gather(self, tensor: Tensor, out: Tensor) -> None:
        """Collect one tensor from each rank."""
        _wait(self._all_gather(tensor, out))

    def _all_gather(self, tensor: Tensor, out: Tensor, async_op: bool = False) -> list[dist.Work]:
        if self.size == 2 and self._prefers_swap(tensor):  # among more ranks, Gloo's ring is as fast as the link
            rows, peer = out.view(2, -1), 1 - self.rank
            rows[self.rank].copy_(tensor)
            return self._transfers({peer: tensor}, {peer: rows[peer]})
        return _works(_all_gather(out.view(-1), tensor, group=self.group, async_op=async_op))

    def all_to_all(self, send: Tensor, receive: Tensor) -> None:
        """Exchange rows pairwise."""
        _wait(self._all_to_all(send, receive))

    def _all_to_all(self, send: Tensor, receive: Tensor, async_op: bool = False) -> list[dist.Work]:
        if self._prefers_swap(send[0]):
            receive[self.rank].copy_(send[self.rank])
            peers = [(self.rank + step) % self.size for step in range(1, self.size)]
            return self._transfers({peer: send[peer] for peer in peers}, {peer: receive[peer] for peer in peers})
        return _works(dist.all_to_all_single(receive.view(-1), send.view(-1), group=self.group, async_op=async_op))

    def _prefers_swap(self, row: Tensor) -> bool:
        """Return whether transfers are faster: Gloo's own calls send before they receive, one way after the other."""
        return self._gloo and row.device.type == "cpu" and row.nbytes >= _LONG

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Start all transfers at once, so that no order can deadlock: asynchronous on Gloo, one group call on NCCL."""
        self._begin_swap(sends, receives)()

    def _begin_swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Wait:
        # Gloo sends no accelerator memory point to point: copy through the host
        if self._through_host and any(tensor.is_cuda for tensor in (*sends.values(), *receives.values())):
            arriving = {peer: torch.empty_like(tensor, device="cpu") for peer, tensor in receives.items()}
            wait = self._begin_swap({peer: tensor.cpu() for peer, tensor in sends.items()}, arriving)

            def arrive() -> None:
                wait()
                for peer, tensor in receives.items():
                    tensor.copy_(arriving[peer])

            return arrive
        if not self._met:  # NCCL needs all ranks in a group's first call, each on its own device
            device = next((tensor.device for tensor in (*sends.values(), *receives.values())), "cuda")
            dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=self.group)
            self._met = True
        works = self._transfers(sends, receives)
        return lambda: _wait(works)

    def _transfers(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> list[dist.Work]:
        # receives first: on Gloo, their ready messages would wait behind the data sent over the same connection
        group = _whole(self.group)
        moves = [
            dist.P2POp(way, tensor, dist.get_global_rank(group, peer), group)
            for way, tensors in ((dist.irecv, receives), (dist.isend, sends))
            for peer, tensor in tensors.items()
            if tensor.numel()
        ]
        return dist.batch_isend_irecv(moves) if moves else []

    def apart(self) -> TorchCollective:
        """Return the same ranks over a separate process group, which ``close`` destroys; a collective call."""
        return TorchCollective(_part(_whole(self.group), (tuple(range(self.size)),)))

    def close(self) -> None:
        """Destroy the process group and its parts if they still exist; otherwise they may abort the exit."""
        parts = _parts.pop(self.group, {}).values() if self.group else ()
        for group in (*parts, self.group):
            if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)

    def part(self, ranks: Sequence[Sequence[int]]) -> Collective:
        """Return this rank's part, made once per partition with the same timeout; ``close`` destroys it too."""
        whole, partition = _whole(self.group), tuple(map(tuple, ranks))
        known = _parts.setdefault(whole, {})
        if partition not in known:
            known[partition] = _part(whole, partition)
        return TorchCollective(known[partition])


def _waiting(begin: Callable[[], dist.Work | None]) -> Wait:
    work = begin()
    return work.wait if work else _nothing


def _nothing() -> None:
    """Wait for a collective that ended before it returned."""


def prepare_directly(group: dist.ProcessGroup, name: Overlapping, *arguments: Any) -> Callable[[], dist.Work | None]:
    """Return what starts a collective as ``torch.distributed`` does, but without its checks, which take longer.

    Args:
        group: the process group.
        name: see ``Collective.begin``; not "swap".
        arguments: of the method: dense tensors.
    """
    if name == "all_reduce":
        tensor, operation = arguments if len(arguments) > 1 else (*arguments, "sum")
        reducing = dist.distributed_c10d.AllreduceOptions()
        reducing.reduceOp, reducing.asyncOp = _OPERATIONS[operation], True
        return partial(group.allreduce, [tensor], reducing)
    first, second = arguments
    if name == "all_gather":
        gathering = dist.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
        gathering.asyncOp = True
        return partial(getattr(group, _GATHER), second.view(-1), first, gathering)
    exchanging = dist.distributed_c10d.AllToAllOptions()
    exchanging.asyncOp = True
    return partial(getattr(group, _EXCHANGE), second.view(-1), first.view(-1), [], [], exchanging)


_parts: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], ...], dist.ProcessGroup]] = WeakKeyDictionary()
_made: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""How many groups each group of some ranks, such as a column of a mesh, was parted into so far."""


def _part(whole: dist.ProcessGroup, ranks: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup:
    mine = next(part for part in ranks if dist.get_rank(whole) in part)
    everyone = whole.size() == dist.get_world_size()
    timeout = whole._get_backend(torch.device("cuda" if _by_nccl(whole) else "cpu")).options._timeout
    with nullcontext() if everyone else _own_number(whole, mine):
        made = {  # where all ranks are here, each has to create all parts, in the same order
            part: dist.new_group([dist.get_global_rank(whole, rank) for rank in part], timeout=timeout)
            for part in (ranks if everyone else [mine])
        }
    return cast(dist.ProcessGroup, made[mine])


@contextmanager
def _own_number(whole: dist.ProcessGroup, part: tuple[int, ...]) -> Iterator[None]:
    """Name the next group after ``whole`` and its part: PyTorch takes the number of groups that this rank has made.

    Columns of a mesh that make groups at the same time have the same number, and under one name ranks of one column
    would meet those of another. ``use_local_synchronization=True`` gives a group the name of a closed one again, and
    Gloo then finds the addresses of that.
    """
    world, number = dist.distributed_c10d._world, _made.get(whole, 0)
    _made[whole] = number + 1
    counted = world.group_count
    world.group_count = int(sha256(f"{whole.group_name} {number} {part}".encode()).hexdigest()[:15], 16)
    try:
        yield
    finally:
        world.group_count = counted
