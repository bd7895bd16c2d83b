"""PyTorch's tests of communication hooks: those of accumulation as installed, the others on CPU and compressed."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from tests.cases import CASES
from tests.conformance.installed import Attaches, borrowed

LOSSLESS = {case.name: case.lossless for case in CASES if case.lossless is not None and case.name != "none"}
LOSSLESS["fft"] = {"name": "fft", "theta": 0.0, "bits": 32, "mantissa": 23}
ALL = {"name": "topk", "density": 1.0}


class Wide(nn.Module):
    """The installed tests' model with layers that are compressed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 4))

    def forward(self, x):
        return self.layers(x)


def _accumulate(settings, models, view):
    """Runs the installed method; bytes sent."""
    torch.manual_seed(0)
    tests = borrowed(**models)
    tests._test_accumulate_gradients_no_sync(num_iters=4, ddp_comm_hook=settings, gradient_as_bucket_view=view)
    compression = Attaches.last
    compression.close()
    return compression.stats()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("view", [False, True])
def test_the_installed_accumulation_cases(pools, size, view):
    for models, least in (({}, 1), ({"Net": Wide}, 1024)):
        for compressor in (ALL, {"name": "none"}, LOSSLESS["fft"]):
            settings = {"compressor": compressor, "min_numel": least, "deterministic": True}
            for stats in pools[size].run(_accumulate, settings, models, view):
                assert stats["total_bytes_sent"] > 0
                assert (compressor == ALL) <= (stats["total_bytes_sent"] != stats["total_bytes_dense"])


def _notices():
    """What the installed method says of a hook that loses something."""
    try:
        _accumulate({"compressor": {"name": "topk", "density": 0.01}}, {"Net": Wide}, False)
    except AssertionError as error:
        return str(error)
    return ""


def test_the_installed_accumulation_cases_can_fail(pools):
    assert all("not close" in said for said in pools[2].run(_notices))


def _pair(settings, arguments, make):
    torch.manual_seed(0)
    module = make()
    with_hook, without = (
        DistributedDataParallel(copy.deepcopy(module), bucket_cap_mb=0.01, **arguments) for _ in range(2)
    )
    return with_hook, without, attach(with_hook, **settings)


class Branches(nn.Module):
    """A rank trains one branch more than the others in every other step, and none trains the last."""

    def __init__(self):
        super().__init__()
        self.trunk, self.tail = nn.Linear(32, 64), nn.Linear(64, 48)
        self.branch, self.idle = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, batch, branches=False):
        inner = self.trunk(batch).tanh()
        return self.tail(self.branch(inner) if branches else inner)


def _linear():
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 48))


def _parity(settings, arguments, steps=5):
    """Largest difference between gradients with our hook and without one, relative to the largest gradient."""
    unused = bool(arguments.get("find_unused_parameters"))
    with_hook, without, compression = _pair(settings, arguments, Branches if unused else _linear)
    optimizers = [torch.optim.SGD(each.parameters(), 0.05, momentum=0.9) for each in (with_hook, without)]
    generator = torch.Generator().manual_seed(dist.get_rank())
    worst = 0.0
    for step in range(steps):
        batch = torch.randn(16, 32, generator=generator)
        more = (step % 2 == 1 and dist.get_rank() == 1,) if unused else ()
        for model, optimizer in zip((with_hook, without), optimizers, strict=True):
            optimizer.zero_grad()
            model(batch, *more).square().mean().backward()
        pairs = list(zip(with_hook.parameters(), without.parameters(), strict=True))
        assert [a.grad is None for a, _ in pairs] == [b.grad is None for _, b in pairs]
        for ours, theirs in pairs:
            if ours.grad is not None:
                worst = max(worst, float((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max().clip(1e-3)))
        for optimizer in optimizers:
            optimizer.step()
    compression.close()
    return worst, compression.stats()


def _every_lossless(arguments):
    return {name: _parity({"compressor": method}, arguments, steps=3) for name, method in LOSSLESS.items()}


MODES = [
    {"static_graph": static, "find_unused_parameters": unused, "gradient_as_bucket_view": view}
    for static, unused, view in itertools.product((False, True), repeat=3)
    if not (static and unused)
]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            each,
            id="-".join(k for k, on in each.items() if on),
            marks=() if each["gradient_as_bucket_view"] else pytest.mark.thorough,
        )
        for each in MODES
    ],
)
def test_parity_of_every_method_without_loss(pools, arguments):
    ranks = pools[2].run(_every_lossless, arguments)
    for ours, others in itertools.pairwise(ranks):
        assert ours.keys() == others.keys() == LOSSLESS.keys()
    for name, (worst, stats) in itertools.chain.from_iterable(rank.items() for rank in ranks):
        assert worst < 1e-4, name
        assert stats["total_bytes_sent"] != stats["total_bytes_dense"], name


@pytest.mark.parametrize("arguments", MODES, ids=lambda arguments: "-".join(k for k, on in arguments.items() if on))
def test_parity_of_a_dense_sum_in_the_order_of_the_ranks(pools, arguments):
    settings = {"compressor": "none", "deterministic": True}
    assert [worst for worst, _ in pools[2].run(_parity, settings, arguments)] == [0.0, 0.0]
    assert max(worst for worst, _ in pools[3].run(_parity, settings, arguments)) < 1e-5


def test_parity_can_fail(pools):
    assert min(worst for worst, _ in pools[2].run(_parity, {"compressor": "onebit"}, {})) > 0.1


def _hook_rules():
    model = DistributedDataParallel(nn.Linear(64, 64))
    before = model._get_ddp_logging_data().get("comm_hook")
    compression = attach(model, "topk")
    after = model._get_ddp_logging_data().get("comm_hook")
    said = []
    for register in (lambda: attach(model, "onebit"), lambda: model.register_comm_hook(None, allreduce_hook)):
        try:
            register()
        except RuntimeError as error:
            said.append(str(error))
    model(torch.randn(4, 64)).square().mean().backward()  # the first is whole
    torch.optim.SGD(model.parameters(), 0.1).step()
    compression.close()
    return before, after, said, compression.stats()["ratio"]


def test_it_registers_once_and_by_its_name(pools):
    for before, after, said, ratio in pools[2].run(_hook_rules):
        assert before is None
        assert after == "ThreadHook.reduce"
        assert len(said) == 2
        assert all("can only be called once" in each for each in said)
        assert ratio > 5


def _sparse():
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(100, 20, sparse=True), nn.Linear(20, 64)))
    try:
        attach(model, "topk")
    except ValueError as error:
        return str(error)
    return ""


def test_sparse_gradients_are_refused(pools):
    assert pools[2].run(_sparse) == ["0 has sparse gradients; build it with sparse=False"] * 2
