"""Buffers of a model: which of them travel, and what comes of them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_compress.collectives import CountingCollective, run_threads
from lightning_compress.collectives.counting import Meter, all_reduce_bytes
from lightning_compress.core.errors import ExchangeError
from lightning_compress.periodic.module_buffers import BufferRules, Buffers
from lightning_compress.periodic.sync_schedule import Rounds
from tests.periodic.helpers import begun


class Masked(nn.Module):
    """Two masks and a constant, which a mean of three would round; a mask, sums and a mean of each rank's own."""

    def __init__(self, rank=0):
        super().__init__()
        self.register_buffer("causal", torch.ones(64, 64, dtype=torch.bool).tril())
        self.register_buffer("scale", torch.linspace(0.1, 0.7, 50))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("rows", torch.arange(40) % 3 == rank)
        self.register_buffer("seen", torch.full((5,), 1.0 + rank))
        self.register_buffer("running_mean", torch.full((6,), 1.0 + rank))


def averaged(collective, rules=None):
    model, meter = Masked(collective.rank), Meter(torch.device("cpu"))
    counted = CountingCollective(collective, meter)
    buffers = Buffers(lambda: dict(model.named_buffers()), counted, rules or BufferRules())
    buffers.collect()
    buffers.average()
    buffers.use(0.0)
    return model, buffers, meter


def test_what_is_the_same_on_all_ranks_does_not_travel_and_stays():
    for model, buffers, meter in run_threads(3, averaged):
        assert model.scale.equal(Masked().scale)
        assert model.causal.equal(Masked().causal)
        assert model.rows.equal(torch.arange(40) % 3 == 0)
        assert model.seen.tolist() == [1.0] * 5
        assert model.running_mean.tolist() == [2.0] * 6
        assert all(buffers.common[name].equal(each) for name, each in model.named_buffers())
        assert meter.bytes_sent == sum(all_reduce_bytes(each, 3) for each in (16 * 6, 4 * 5, 4 * 7, 40))


def test_a_rank_that_is_gone_is_said():
    class Gone:
        rank, size = 0, 2

        def all_reduce(self, tensor, operation):
            raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:5173")

    with pytest.raises(ExchangeError, match="averaging the buffers: a rank died or stopped"):
        averaged(Gone())


@pytest.mark.parametrize("size", [2, 3])
def test_the_first_pattern_that_matches_says_what_becomes_of_a_buffer(size):
    rules = BufferRules({"running_*": "rank0", "se*": "mean", "*n": "rank0"})
    for model, *_ in run_threads(size, lambda ranks: averaged(ranks, rules=rules)):
        assert model.running_mean.tolist() == [1.0] * 6
        assert model.seen.tolist() == [(1 + size) / 2] * 5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"*.queue": "max"}, r"buffers: '\*.queue' has 'max', and must have 'mean' or 'rank0'"),
        ("mean", "buffers='mean' must be a mapping of patterns"),
        ({"quee": "mean"}, "'quee' matches no floating-point buffer of the model, which has scale, seen, running_mean"),
        ({"steps": "mean"}, "'steps' matches no floating-point buffer"),
    ],
)
def test_rules_that_say_nothing_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        BufferRules(given).check(dict(Masked().named_buffers()))


def test_one_rank_whose_statistics_are_not_finite_does_not_spoil_the_mean():
    def rank(collective):
        model = Masked(collective.rank)
        if collective.rank == 1:
            model.running_mean[2] = torch.nan
        buffers = Buffers(lambda: dict(model.named_buffers()), collective, BufferRules())
        buffers.collect()
        buffers.average()
        buffers.use(0.0)
        return model.running_mean.tolist()

    assert run_threads(3, rank) == [[2.0] * 6] * 3  # of 1 and 3


class Contrast(nn.Module):
    """Layers with a spectral norm, as of a GAN's critic; and a queue of keys of length 1, as MoCo's."""

    def __init__(self):
        super().__init__()
        layers = [spectral_norm(nn.Linear(*sizes)) for sizes in ((8, 64), (64, 64), (64, 3))]
        self.layers = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
        self.register_buffer("queue", nn.functional.normalize(torch.randn(32, 3)))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        found = self.layers(inputs)
        keys = nn.functional.normalize(found.detach())
        self.queue[(self.place + torch.arange(len(keys))) % 32] = keys
        self.place += len(keys)
        return found


@pytest.mark.parametrize("rounds", [Rounds(16), Rounds(16, delay=3, alpha=0.5)], ids=["at once", "late"])
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_normed_stays_so_in_the_model_that_all_have(size, rounds):
    torch.manual_seed(2)
    made = Contrast()

    def rank(collective):
        model, draw = copy.deepcopy(made), torch.Generator().manual_seed(collective.rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        local = begun(model, collective, rounds, optimizers=[optimizer])
        for _ in range(35):
            inputs = torch.randn(8, 8, generator=draw)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), inputs[:, :3].argmax(1)).backward()
            optimizer.step()
            local.after_step()
        evaluated = copy.deepcopy(made)
        evaluated.load_state_dict(local.averaged_model())
        local.finish()
        return evaluated, model

    found = run_threads(size, rank)
    for model in (each for pair in found for each in pair):
        model.eval()
        largest = [float(torch.linalg.matrix_norm(each.weight.detach(), 2)) for each in model.layers[::2]]
        assert max(abs(each - 1) for each in largest) < 0.2  # without averages it is 0.1
        assert model.queue.norm(dim=1).allclose(torch.ones(32), atol=1e-5)
    for place in (0, 1):
        first, *others = (dict(each[place].named_buffers()) for each in found)
        assert all(each.equal(other[name]) for other in others for name, each in first.items())
    assert found[0][1].place == 8 * 35  # rank 0 lost none while its own were on their way


class _One:
    rank, size = 0, 1

    def all_reduce(self, tensor, operation="sum"):
        pass


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
    buffers = Buffers(lambda: dict(model.named_buffers()), _One(), BufferRules())
    buffers.collect()
    assert not any(counts.values())
    buffers.average()
    assert counts == {"cpu": 3, "__bool__": 0, "item": 0, "tolist": 1}  # float32, int64 and bytes; which differ
    buffers.use(0.0)
    assert counts == {"cpu": 3, "__bool__": 0, "item": 0, "tolist": 2}


def test_only_averages_that_are_not_finite_are_left_out():
    model = Masked()
    buffers = Buffers(lambda: dict(model.named_buffers()), _One(), BufferRules())
    model.scale.fill_(torch.inf)
    model.seen.fill_(5.0)
    buffers.collect()
    buffers.average()
    buffers.use(0.0)
    assert model.scale.equal(Masked().scale)
    assert model.seen.tolist() == [5.0] * 5
