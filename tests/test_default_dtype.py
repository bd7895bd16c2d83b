"""``torch.set_default_dtype``: what is trained does not depend on it, bit for bit, where the model says its dtype."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import (
    AsyncGossipStrategy,
    CommunicationMonitor,
    CompressedDDPStrategy,
    GossipStrategy,
    LocalSGDStrategy,
    MeProp,
    MeSimp,
    MinibatchSize,
    StepProfile,
    ThetaRecovery,
    attach,
)
from lightning_compress.codecs import CODECS
from lightning_compress.collectives import run_threads
from lightning_compress.gossip import ALGORITHMS
from lightning_compress.periodic import Gossip
from lightning_compress.planning.cost import Link, Speeds
from lightning_compress.settings.parsing import COMPRESSORS
from lightning_compress.testing import check_codec, thread_ranks
from tests.callbacks.test_sufficient_factors import factors
from tests.helpers.link import REAL
from tests.helpers.training import Net, fit, parameters
from tests.periodic.test_plain_loop import KINDS, train
from tests.test_laws import GRID, pattern

DEFAULTS = {2: torch.float64, 3: torch.bfloat16}
"""By the number of ranks."""


@contextmanager
def default(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def tensors(run):
    """All that a rank saw of some steps."""
    means = (part for each in (*run.steps, run.rolled, run.restored) for part in (each.after, each.mean, each.flag))
    return [*means, *run.shared.values()]


TRAVEL = {}
"""Exchanges of the grid by method and number of ranks."""
for _given in GRID:
    _case, _exchange, _size = _given.values
    if _size in DEFAULTS and not _given.marks:
        TRAVEL.setdefault((_case.name, _size), (_case, []))[1].append(_exchange)


@pytest.mark.parametrize(("name", "size"), TRAVEL)
def test_methods_and_exchanges(name, size):
    case, exchanges = TRAVEL[name, size]

    def rank(collective):
        runs = (thread_ranks.run_steps(collective, case.codec, pattern(each), 3) for each in exchanges)
        return [each for run in runs for each in tensors(run)]

    wanted = run_threads(size, rank)
    with default(DEFAULTS[size]):
        got = run_threads(size, rank)
    for one, other in zip(wanted, got, strict=True):
        for before, after in zip(one, other, strict=True):
            assert after.dtype == before.dtype
            assert after.equal(before)


@pytest.mark.parametrize("dtype", DEFAULTS.values())
@pytest.mark.parametrize("name", ["none", "onebit", "topk", "fft"])
def test_links_and_codecs_are_measured(dtype, name):
    time_link, time_codec = REAL
    with default(dtype):
        link = run_threads(2, lambda ranks: time_link(ranks, torch.device("cpu")))[0]
        assert isinstance(time_codec(CODECS[name](), torch.device("cpu")), Speeds)
    assert isinstance(link, Link)


def test_methods_of_ones_own_are_checked():
    with default(torch.float64):
        check_codec(CODECS["qsgd"]())


ROWS = {
    **{name: {"compressor": name} for name in sorted(COMPRESSORS.complete())},
    "atomo": {"compressor": "atomo", "rules": [{"kind": "embedding", "compressor": "none"}]},
    "onebit_adam, compressed": {"compressor": "onebit_adam", "warmup_steps": 2},
    "dgc, clipped": {"compressor": "dgc", "local_clip_norm": 1.0},
    "qsgd with loco": {"compressor": "qsgd", "error_feedback": "loco"},
    "residuals in bfloat16": {"compressor": "topk", "error_feedback": {"dtype": "bfloat16", "decay": 0.9}},
    "a delay": {"compressor": "rotated", "delay": 1},
    "clipped": {"compressor": "onebit", "local_clip_norm": 0.1, "on_nonfinite": "skip"},
    "rules": {"compressor": "topk", "rules": [{"match": "3.*", "compressor": "fft"}], "min_numel": 8},
    "a schedule": {"compressor": "fft", "schedule": {"theta": {"kind": "lr", "factor": 10}}},
    "one order": {"compressor": "none", "deterministic": True},
    "equal ranks": {"compressor": "qsgd", "check_drift_every": 1, "on_drift": "resync"},
}
"""Arguments of ``attach``."""


PARTS = 4
"""Of all rows, each in a test of its own."""


def attached(default_dtype, part):
    """Weights after five steps by each row of a part, of models in three dtypes by turns."""
    found = {}
    for number, (name, arguments) in list(enumerate(ROWS.items()))[part::PARTS]:
        dtype = (torch.float32, torch.float64, torch.bfloat16)[(number + dist.get_world_size()) % 3]
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(dtype)
        draw = torch.Generator().manual_seed(dist.get_rank())
        with default(default_dtype):
            ddp = DistributedDataParallel(model)
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            compression = attach(ddp, optimizer=optimizer, **arguments)
            for _ in range(5):
                optimizer.zero_grad()
                ddp(torch.randint(50, (8,), generator=draw)).square().mean().backward()
                optimizer.step()
            compression.close()
        found[name] = parameters(model).float().numpy()
    return found


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("size", DEFAULTS)
def test_attach(pools, size, part):
    wanted, got = (pools[size].run(attached, each, part)[0] for each in (torch.float32, DEFAULTS[size]))
    assert wanted
    assert [name for name in wanted if not np.array_equal(wanted[name], got[name])] == []


LOOPS = KINDS | {name: lambda name=name: Gossip(name) for name in ALGORITHMS.complete()}
LOOPS |= {
    "Moniqua": lambda: Gossip("dpsgd", compressor="moniqua"),
    "choco, fft": lambda: Gossip("choco", compressor="fft"),
}


@pytest.mark.parametrize("size", DEFAULTS)
@pytest.mark.parametrize("kind", LOOPS)
def test_local_steps_and_gossip(kind, size):
    wanted = run_threads(size, lambda ranks: train(ranks, LOOPS[kind]())[0])
    with default(DEFAULTS[size]):
        got = run_threads(size, lambda ranks: train(ranks, LOOPS[kind]())[0])
    assert all(one.equal(other) for pair in zip(wanted, got, strict=True) for one, other in zip(*pair, strict=True))


class Narrow(Net):
    """Layers alone whose neurons can be removed."""

    def __init__(self):
        super().__init__()
        self.body = nn.Flatten()
        self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


FITS = {
    "auto": (lambda: CompressedDDPStrategy(), lambda: [CommunicationMonitor()]),
    "local steps": (lambda: LocalSGDStrategy(sync_every=2, compressor="rotated", fragments=2, delay=1), list),
    "gossip": (lambda: GossipStrategy("d2", compressor="moniqua"), lambda: [CommunicationMonitor()]),
    "meProp": (lambda: CompressedDDPStrategy("qsgd"), lambda: [MeProp(0.2, memory=0.9, share=True)]),
    "meSimp": (lambda: CompressedDDPStrategy("qsgd"), lambda: [MeSimp(0.2, cycle=1)]),
    "sufficient factors": (lambda: CompressedDDPStrategy("qsgd"), lambda: [factors(layers=["head.0"], force=True)]),
    "minibatch": (lambda: CompressedDDPStrategy("qsgd"), lambda: [MinibatchSize(2, 1, probe=8)]),
    "theta": (
        lambda: CompressedDDPStrategy({"name": "fft", "theta": 0.9}),
        lambda: [ThetaRecovery(bound=0.1), CommunicationMonitor()],
    ),
}


def trained(given, strategy, callbacks, **options):
    """Weights of a model that is made before the default changes."""
    model = Narrow()
    with default(given):
        fit(strategy, -1, lambda: model, callbacks, max_epochs=2, limit_train_batches=8, **options)
    return parameters(model).numpy()


def fitted(given, name):
    strategy, callbacks = FITS[name]
    torch.manual_seed(0)
    return trained(given, strategy(), callbacks())


@pytest.mark.parametrize("size", DEFAULTS)
@pytest.mark.parametrize("name", FITS)
def test_trainers_and_callbacks(pools, size, name):
    wanted, got = (pools[size].run(fitted, given, name)[0] for given in (torch.float32, DEFAULTS[size]))
    assert np.array_equal(wanted, got)


@pytest.mark.parametrize("size", DEFAULTS)
@pytest.mark.parametrize("settings", [{"compressor": "moniqua"}, {"algorithm": "ssp", "compressor": "onebit"}])
def test_ranks_at_their_own_pace(pools, size, settings):
    """They do not do the same twice."""
    strategy = AsyncGossipStrategy(share_work=False, **settings)
    for weights in pools[size].run(trained, DEFAULTS[size], strategy, ()):
        assert np.isfinite(weights).all()


def test_a_profile(pools, tmp_path):
    path = tmp_path / "profile.json"
    pools[1].run(trained, torch.float64, "auto", [StepProfile(path, steps=2, warm=1)])
    assert path.exists()
