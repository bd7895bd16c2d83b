"""Point-to-point messages of every transport."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_compress.collectives import (
    CountingCollective,
    LocalCollective,
    OrderedCollective,
    TorchCollective,
    run_threads,
)
from lightning_compress.collectives import torch as transport
from lightning_compress.collectives.counting import Meter
from lightning_compress.collectives.torch import backend_of

CPU = torch.device("cpu")


def letter(sender, receiver, numel):
    """Different content for every pair."""
    return torch.arange(numel) * 1000 + 10 * sender + receiver


def swaps(collective, shifts, numel):
    """Rings in either direction, a round of nothing, one of two ranks, and one of all pairs."""
    rank, size = collective.rank, collective.size
    good = []
    for shift in shifts:
        to, source = (rank + shift) % size, (rank - shift) % size
        if to == rank:
            continue
        out = torch.zeros(numel, dtype=torch.int64)
        collective.swap({to: letter(rank, to, numel)}, {source: out})
        good.append(out.equal(letter(source, rank, numel)))
    collective.swap({}, {})
    out = torch.zeros(3, dtype=torch.int64)
    sends = {1: letter(0, 1, 3)} if rank == 0 else {}
    collective.swap(sends, {0: out} if rank == 1 else {})
    good.append(rank != 1 or out.equal(letter(0, 1, 3)))
    others = [peer for peer in range(size) if peer != rank]
    outs = {peer: torch.zeros(1 + peer, dtype=torch.int64) for peer in others}  # as long as the sender says
    collective.swap({peer: letter(rank, peer, 1 + rank) for peer in others}, outs)
    return good + [outs[peer].equal(letter(peer, rank, 1 + peer)) for peer in others]


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_threads(size):
    assert all(all(good) for good in run_threads(size, lambda each: swaps(OrderedCollective(each), (1, -1, 2), 7)))


def _collects(numel):
    """An all-to-all of rows and an all-gather of messages."""
    collective = TorchCollective()
    rank, size = collective.rank, collective.size
    rows, out = (torch.zeros(size, numel, dtype=torch.int64) for _ in range(2))
    for peer in range(size):
        rows[peer] = letter(rank, peer, numel)
    collective.all_to_all(rows, out)
    good = [out[peer].equal(letter(peer, rank, numel)) for peer in range(size)]
    collective.all_gather(letter(rank, 7, numel), out)
    return good + [out[peer].equal(letter(peer, 7, numel)) for peer in range(size)]


@pytest.mark.parametrize("numel", [5, 300_000])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_and_messages_of_any_length(pools, size, numel):
    """Long ones go from rank to rank."""
    assert all(all(good) for good in pools[size].run(_collects, numel))


def _over_sockets(numel):
    return swaps(TorchCollective(), (1, -1, 2), numel)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sockets(pools, size):
    """Large messages too: a send that waited for its receive would lock the ring."""
    assert all(all(good) for good in pools[size].run(_over_sockets, 300_000))


def _several_at_once(numel):
    """Rings that are begun before an earlier one is over, by the same links; and an all-reduce meanwhile."""
    collective, meter = TorchCollective(), Meter(CPU)
    counted, size = CountingCollective(collective, meter), collective.size
    to, source = (collective.rank + 1) % size, (collective.rank - 1) % size
    outs = [torch.zeros(numel, dtype=torch.int64) for _ in range(3)]
    sent = [letter(collective.rank, round_, numel) for round_ in range(3)]
    waits = [counted.begin("swap", {to: each}, {source: out}) for each, out in zip(sent, outs, strict=True)]
    total = torch.ones(1)
    collective.all_reduce(total)
    for wait in waits[::-1]:
        wait()
    good = [out.equal(letter(source, round_, numel)) for round_, out in enumerate(outs)]
    return [*good, total.item() == size, meter.bytes_sent == 3 * 8 * numel]


@pytest.mark.parametrize("numel", [5, 300_000])
@pytest.mark.parametrize("size", [2, 3])
def test_swaps_travel_together(pools, size, numel):
    assert all(all(good) for good in pools[size].run(_several_at_once, numel))


def _in_parts():
    part = TorchCollective().part([[3, 1], [0, 2]])  # ranks of the part are not those of the world
    return swaps(part, (1,), 5)


def test_inside_a_part(pools):
    assert all(all(good) for good in pools[4].run(_in_parts))


def test_what_goes_out_is_counted():
    def count(collective):
        meter = Meter(CPU)
        swaps(CountingCollective(collective, meter), (), 0)
        return meter.bytes_sent

    assert run_threads(3, count) == [8 * 3 + 2 * 8, 2 * 2 * 8, 2 * 3 * 8]


def test_one_rank_alone():
    LocalCollective().swap({}, {})


def test_a_message_of_another_length_is_an_error():
    def program(collective):
        if collective.rank == 0:
            collective.swap({1: torch.zeros(1)}, {})
        else:
            collective.swap({}, {0: torch.zeros(4)})

    with pytest.raises(RuntimeError, match=r"rank 0 sends \(1,\), not \(4,\)"):
        run_threads(2, program)


class CudaOnly:
    """A group as of ``init_process_group("nccl")``, by a backend of another name."""

    def size(self):
        return dist.get_world_size()

    def _get_backend(self, device):
        if device.type != "cuda":
            raise RuntimeError("No backend type associated with device type cpu")
        return SimpleNamespace(name=lambda: "nccl2", options=SimpleNamespace(_timeout=timedelta(seconds=7)))


def _by_another_nccl(size):
    """Collective calls before the first two swaps, and the time-outs of a part's groups."""
    rank, (found, timeouts) = dist.get_rank(), ([], [])
    with pytest.MonkeyPatch.context() as patch:
        reduce = dist.all_reduce
        patch.setattr(dist, "all_reduce", lambda *given, **more: found.append(given) or reduce(*given, **more))
        patch.setattr(transport, "backend_of", lambda device, group=None: {"cuda": "nccl2"}.get(device, ""))
        collective = TorchCollective()
        for _ in range(2):
            arrived = torch.zeros(3)
            collective.swap({(rank + 1) % size: torch.full((3,), float(rank))}, {(rank - 1) % size: arrived})
            assert arrived.tolist() == [(rank - 1) % size] * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_global_rank", lambda group, rank: rank)
        patch.setattr(dist, "new_group", lambda ranks, timeout: timeouts.append(timeout) or dist.group.WORLD)
        patch.setattr(dist, "get_rank", lambda group: 0)
        transport._part(CudaOnly(), (tuple(range(size)),))
    return len(found), timeouts


@pytest.mark.parametrize("size", [2, 3])
def test_nccl_may_have_another_name(pools, size):
    """All ranks of a group come together before the first transfer, and parts wait as long as the whole."""
    assert pools[size].run(_by_another_nccl, size) == [(1, [timedelta(seconds=7)])] * size


@pytest.mark.parametrize("given", [None, "gloo", "cpu:gloo,cuda:gloo"])
def test_what_a_group_speaks_is_known_by_device(given, tmp_path):
    dist.init_process_group(given, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert backend_of("cpu") == "gloo"
    assert backend_of("cuda") in (("", "nccl") if given is None else ("gloo",))
