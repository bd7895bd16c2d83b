"""Buffers of a model: which of them travel, and what comes of them."""

import pytest
import torch
from torch import nn

from lightning_compress.collectives import run_threads
from lightning_compress.collectives.counting import all_reduce_bytes
from lightning_compress.core.failures import ExchangeError
from lightning_compress.local.statistics import Buffers


class Masked(nn.Module):
    """Two masks and a constant, which a mean of three would round; a mask and sums of each rank's own."""

    def __init__(self, rank=0):
        super().__init__()
        self.register_buffer("causal", torch.ones(64, 64, dtype=torch.bool).tril())
        self.register_buffer("scale", torch.linspace(0.1, 0.7, 50))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("rows", torch.arange(40) % 3 == rank)
        self.register_buffer("seen", torch.full((5,), 1.0 + rank))


def averaged(collective, change=lambda buffers: None):
    model = Masked(collective.rank)
    buffers = Buffers(lambda: dict(model.named_buffers()), collective)
    buffers.look()
    buffers.average()
    change(buffers)
    buffers.use(0.0)
    return model, buffers


def test_what_is_the_same_on_all_ranks_does_not_travel_and_stays():
    for model, buffers in run_threads(3, averaged):
        assert model.scale.equal(Masked().scale)
        assert model.causal.equal(Masked().causal)
        assert model.rows.equal(torch.arange(40) % 3 < 3)
        assert model.seen.tolist() == [2.0] * 5
        assert all(buffers.common[name].equal(each) for name, each in model.named_buffers())
        assert buffers.nbytes == sum(all_reduce_bytes(each, 3) for each in (16 * 5, 4 * 5, 40))


def test_averages_of_earlier_checkpoints_are_used():
    """They had masks among the numbers of 8 bytes."""

    def earlier(buffers):
        whole = [buffers.sums[torch.uint8][:4096], buffers.sums[torch.int64], buffers.sums[torch.uint8][4096:]]
        buffers.sums = {
            torch.float32: buffers.sums[torch.float32],
            torch.int64: torch.cat([each.long() for each in whole]),
        }

    for old, new in zip(run_threads(3, lambda ranks: averaged(ranks, earlier)), run_threads(3, averaged), strict=True):
        assert all(each.equal(dict(new[0].named_buffers())[name]) for name, each in old[0].named_buffers())


def test_a_rank_that_is_gone_is_said():
    class Gone:
        rank, size = 0, 2

        def all_reduce_max(self, tensor):
            raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:5173")

    with pytest.raises(ExchangeError, match="averaging the buffers: a rank died or stopped"):
        averaged(Gone())


class _One:
    rank, size = 0, 1

    def all_reduce_max(self, tensor):
        pass

    all_reduce = all_reduce_max


def test_a_round_waits_for_an_accelerator_some_times_and_not_for_each_buffer(monkeypatch):
    """What was taken is copied once a dtype, where it travels; all averages are asked at once whether they are finite.

    Taking waits for nothing: it is done between two local steps.
    """
    counts = {"cpu": 0, "__bool__": 0, "item": 0, "tolist": 0}
    for name in counts:
        real = getattr(torch.Tensor, name)

        def counted(self, *given, name=name, real=real):
            counts[name] += 1
            return real(self, *given)

        monkeypatch.setattr(torch.Tensor, name, counted)
    model = Masked()
    buffers = Buffers(lambda: dict(model.named_buffers()), _One())
    buffers.look()
    assert not any(counts.values())
    buffers.average()
    assert counts == {"cpu": 3, "__bool__": 0, "item": 0, "tolist": 1}  # float32, int64 and bytes; which differ
    buffers.use(0.0)
    assert counts == {"cpu": 3, "__bool__": 0, "item": 0, "tolist": 2}


def test_only_averages_that_are_not_finite_are_left_out():
    model = Masked()
    buffers = Buffers(lambda: dict(model.named_buffers()), _One())
    model.scale.fill_(torch.inf)
    model.seen.fill_(5.0)
    buffers.look()
    buffers.average()
    buffers.use(0.0)
    assert model.scale.equal(Masked().scale)
    assert model.seen.tolist() == [5.0] * 5
