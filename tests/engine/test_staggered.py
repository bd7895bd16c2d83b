"""Optimizers that step at different times: what one of them waits for is neither lost nor applied twice."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import CompressedDDPStrategy, attach
from lightning_compress.codecs import Codec, TopK
from lightning_compress.collectives import run_threads
from lightning_compress.contrib.reducers.signsgd import SignSGD
from lightning_compress.corrections import DGC
from lightning_compress.engine.checks import trained
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.hook import bucket_of
from lightning_compress.settings.run_state import RunState
from tests.cases import CASES
from tests.helpers.training import Net, fit, parameters
from tests.turns import by_turns

EVERY = 4
"""Passes for each step of the slow optimizer; the fast one steps with each."""
CONSERVING = [case for case in CASES if case.codec.conserves]


class Parts(nn.Module):
    """Of the slow optimizer, of the fast one, and of the slow one but not in every pass; no multiples of any block."""

    def __init__(self):
        super().__init__()
        self.slow, self.fast = nn.Parameter(torch.zeros(61, 67)), nn.Parameter(torch.zeros(53, 47))
        self.rare = nn.Parameter(torch.zeros(41, 43))


class Run:
    """One rank: passes whose gradients are given, of parameters that are a bucket each or one together."""

    def __init__(self, ranks, settings, together, rate=1.0):
        self.ranks, self.together, self.model = ranks, together, Parts()
        self.compression = Compression(trained(self.model), settings, ranks)
        slow, fast, rare = self.model.parameters()
        self.slow, self.fast = (torch.optim.SGD(each, rate) for each in ([slow, rare], [fast]))
        self.brought = [torch.zeros_like(each) for each in self.model.parameters()]
        self.open = [torch.zeros_like(each) for each in self.model.parameters()]  # of that, not applied yet

    def backward(self, number, average=True):
        """Accumulate this rank's gradients, and average them."""
        generator = torch.Generator().manual_seed(100 * number + self.ranks.rank)
        parameters = list(self.model.parameters())
        gradients = [torch.randn(each.shape, generator=generator) for each in parameters]
        used = [0, 1] if number % EVERY == 1 else [0, 1, 2]
        self.compression.before_backward()
        sum((parameters[each] * gradients[each]).sum() for each in used).backward()
        for each in used:
            self.brought[each] += gradients[each]
            self.open[each] += gradients[each]
        if not average:
            return
        buckets = [parameters[::-1]] if self.together else [[each] for each in parameters[::-1]]
        for bucket in buckets:
            self.compression.reduce(bucket_of(self.compression, bucket), [each.grad for each in bucket])

    def residual(self):
        """What is kept, by parameter."""
        kept = {}
        for group in self.compression.groups:
            for segment in group.residual.layout.segments:
                kept[segment.name] = group.residual.committed[segment.offset : segment.end].clone()
        return [kept[name] for name, _ in self.model.named_parameters()]

    def train(self, passes, drop=(), to_none=True):
        """Step the fast optimizer with each pass, the slow one with every fourth; drop the gradients after some."""
        for number in range(passes):
            self.backward(number)
            if number in drop:
                self.discard(to_none)
                continue
            self._step(self.fast, [1])
            if number % EVERY == EVERY - 1:
                self._step(self.slow, [0, 2])
        return self

    def discard(self, to_none):
        """Throw all gradients away."""
        for total, one in zip(self.brought, self.open, strict=True):
            total -= one
            one.zero_()
        for each in (self.slow, self.fast):
            each.zero_grad(to_none)

    def _step(self, optimizer, places):
        optimizer.step()
        optimizer.zero_grad()
        for each in places:
            self.open[each].zero_()


def settings_of(method):
    exchange = "all_gather" if isinstance(method, Codec) else "auto"
    return RunState.of(method, exchange, error_feedback=True, min_numel=1, check_drift_every=0)


def unaccounted(runs):
    """Of each parameter: the share of the gradients that count which is neither applied nor kept."""
    parts = [list(zip(run.model.parameters(), run.brought, run.residual(), strict=True)) for run in runs]
    shares = []
    for part in zip(*parts, strict=True):
        applied = -len(runs) * part[0][0].detach()
        brought, kept = sum(mine for _, mine, _ in part), sum(rest for *_, rest in part).view_as(applied)
        assert all(each.equal(part[0][0]) for each, *_ in part)
        shares.append(float((applied + kept - brought).norm() / torch.stack([applied, brought]).norm()))
    return shares


@pytest.mark.parametrize("together", [True, False], ids=["bucket", "buckets"])
@pytest.mark.parametrize(("case", "size"), by_turns(CONSERVING, (2, 3, 4, 8), 1))
def test_nothing_is_lost(case, size, together):
    runs = run_threads(size, lambda ranks: Run(ranks, settings_of(case.codec), together).train(2 * EVERY))
    assert max(unaccounted(runs)) <= 1e-5 + 4 * case.rounding


NO_MEANS = {
    "dgc": ({"compressor": DGC(density=0.05)}, 0.1),
    "dgc_nesterov": ({"compressor": DGC(density=0.05, nesterov=True), "local_clip_norm": 1.0}, 0.1),
    "signsgd": ({"compressor": SignSGD("tally")}, 0.01),
    "clipped": ({"compressor": "topk", "local_clip_norm": 0.1}, 0.1),
}


@pytest.mark.parametrize(("name", "size"), by_turns(NO_MEANS, (2, 3), 1))
def test_passes_of_the_slow_optimizer_count_as_one(name, size):
    """As if the slow optimizer's parameters were a model of their own, whose passes but the last were not averaged."""
    given, rate = NO_MEANS[name]
    settings = RunState.of(**given, min_numel=1, check_drift_every=0)

    def rank(ranks):
        run = Run(ranks, settings, False, rate)
        run.train(3 * EVERY)
        alone = Run(ranks, settings, False, rate)
        for number in range(3 * EVERY):
            alone.backward(number, average=number % EVERY == EVERY - 1)
            if number % EVERY == EVERY - 1:
                alone.slow.step()
                alone.slow.zero_grad()
            alone.fast.zero_grad()
        return run.model.slow.detach(), alone.model.slow.detach()

    for run, alone in run_threads(size, rank):
        assert float((run - alone).norm() / alone.norm()) < 1e-5


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
def test_gradients_that_are_thrown_away_leave_nothing(size, to_none):
    """As sharpness-aware minimisation does, whose first gradients are for a look around."""
    settings = settings_of(TopK(density=0.05))
    runs = run_threads(size, lambda ranks: Run(ranks, settings, True).train(3 * EVERY, [1, 6], to_none))
    assert max(unaccounted(runs)) < 1e-5


@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
def test_gradients_that_are_thrown_away_after_ordinary_steps_leave_nothing(to_none):
    """As by a GradScaler: by now nobody looks whether a mean was zero."""

    def rank(ranks):
        run = Run(ranks, settings_of(TopK(density=0.05)), False)
        for number in range(2 * EVERY):
            run.backward(EVERY * number)
            if number == EVERY:
                run.discard(to_none)
                continue
            run._step(run.fast, [1])
            run._step(run.slow, [0, 2])
        return run

    assert max(unaccounted(run_threads(2, rank))) < 1e-5


class Staggered(Net):
    """The head steps with each batch, the body with each fourth, on gradients that add up in ``grad``."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.losses = []

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.02, momentum=0.9) for part in (self.head, self.body)]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        self.manual_backward(loss / 2)
        head, body = self.optimizers()
        head.step()
        head.zero_grad()
        if batch_idx % EVERY == EVERY - 1:
            body.step()
            body.zero_grad()


class EverySecond(Net):
    """Automatic optimization that steps on the gradients of two batches."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        return loss / 2

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        optimizer.step(closure=closure) if batch_idx % 2 else closure()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


def _train(make, compressor, steps):
    strategy = DDPStrategy() if compressor is None else CompressedDDPStrategy(compressor, min_numel=1)
    _, model = fit(strategy, steps, make, limit_train_batches=12)
    return parameters(model), model.losses


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (Staggered, 2),
        (EverySecond, 3),
        pytest.param(Staggered, 3, marks=pytest.mark.thorough),
        pytest.param(EverySecond, 2, marks=pytest.mark.thorough),
    ],
)
def test_training_in_lightning(pools, make, size):
    (stock, _), *_ = pools[size].run(_train, make, None, 20)
    (lossless, _), *_ = pools[size].run(_train, make, {"name": "topk", "density": 1.0}, 20)
    assert float((lossless - stock).norm() / stock.norm()) < 1e-4
    for compressor in ({"name": "topk", "density": 0.1}, {"name": "dgc", "density": 0.1}):
        ranks = pools[size].run(_train, make, compressor, 60 if make is EverySecond else 100)
        assert all(each.equal(ranks[0][0]) for each, _ in ranks)
        losses = ranks[0][1]
        assert sum(losses[-12:]) < 0.9 * sum(losses[:12])


class Plain:
    """An optimizer of Lightning's protocol whose class is not torch's."""

    def __init__(self, parameters):
        self.param_groups, self.state, self.defaults = [{"params": list(parameters), "lr": 0.05}], {}, {}

    def zero_grad(self, set_to_none=True):
        for each in self.param_groups[0]["params"]:
            each.grad = None

    def step(self, closure=None):
        closure()
        with torch.no_grad():
            for each in self.param_groups[0]["params"]:
                if each.grad is not None:
                    each.sub_(each.grad, alpha=0.05)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Own(Net):
    """One of its first gradients is not finite on one rank."""

    def __init__(self, plain, bad=None):
        super().__init__()
        self.plain, self.bad = plain, bad

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == self.bad and self.global_rank == 1 else loss

    def configure_optimizers(self):
        return Plain(self.parameters()) if self.plain else torch.optim.SGD(self.parameters(), 0.05)


def _own(plain, bad):
    strategy = CompressedDDPStrategy({"name": "topk", "density": 0.05}, on_nonfinite="skip", warmup_steps=2)
    _, model = fit(strategy, 12, lambda: Own(plain, bad), limit_train_batches=12, max_epochs=1)
    return parameters(model), strategy.comm_stats()


@pytest.mark.parametrize("bad", [None, 5])
def test_an_optimizer_that_is_not_torchs_counts_steps(pools, bad):
    for (mine, stats), (theirs, expected) in zip(
        pools[2].run(_own, True, bad), pools[2].run(_own, False, bad), strict=True
    ):
        assert mine.equal(theirs)
        assert stats["steps"] == expected["steps"] == 12 - (bad is not None)
        assert stats["residual_norm"] == expected["residual_norm"] > 0
        assert stats["nonfinite_steps"] == expected["nonfinite_steps"] == (bad is not None)


class HeadAlone(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), 0.05)


def _head_alone(compressor):
    strategy = CompressedDDPStrategy(compressor, min_numel=1)
    fit(strategy, 5, HeadAlone, limit_train_batches=5)
    compression = strategy.compression
    return compression.step, len(compression._passes._hooks), compression._passes.patience


@pytest.mark.parametrize("compressor", ["topk", {"name": "dgc", "momentum": 0.0}])
def test_parameters_that_no_optimizer_has_wait_for_none(pools, compressor):
    assert pools[2].run(_head_alone, compressor) == [(5, 0, 0)] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_a_vote_may_be_followed_by_a_mean(size):
    def rank(ranks):
        run = Run(ranks, RunState.of(SignSGD("tally"), min_numel=1, check_drift_every=0), False)
        run.compression.active = True
        run.train(EVERY)
        run.compression.retune({"name": "topk", "density": 1.0})
        for each, brought in zip(run.model.parameters(), run.brought, strict=True):
            each.data.zero_()
            brought.zero_()
        return run.train(2 * EVERY)

    assert max(unaccounted(run_threads(size, rank))) < 1e-5


def test_a_gradient_that_is_only_asked_for_stays():
    """As by a gradient penalty, or where norms are logged."""

    def rank(ranks):
        run = Run(ranks, RunState.of(SignSGD("tally"), min_numel=1, check_drift_every=0), False)
        for number in range(EVERY):
            run.backward(number)
            before = run.model.slow.grad.clone()
            run.compression.before_backward()
            torch.autograd.grad(run.model.slow.square().sum(), [run.model.slow])
            assert run.model.slow.grad.equal(before)

    run_threads(2, rank)


class Rare(Parts):
    def __init__(self, channels_last):
        super().__init__()
        if channels_last:
            self.rare = nn.Parameter(torch.zeros(19, 17, 3, 3).to(memory_format=torch.channels_last))

    def forward(self, gradients, used):
        parameters = list(self.parameters())
        return sum((parameters[each] * gradients[each]).sum() for each in used)


def _rare(compressor, channels_last):
    """A clipped method, which makes no mean; its limit is never reached, so that nothing else is lost."""
    ddp, rank = DistributedDataParallel(Rare(channels_last), find_unused_parameters=True), dist.get_rank()
    compression = attach(ddp, compressor, error_feedback=True, local_clip_norm=1e9, min_numel=1)
    optimizer, owed = torch.optim.SGD(ddp.parameters(), 1.0), [torch.zeros_like(each) for each in ddp.parameters()]
    for number in range(2 * EVERY):
        generator = torch.Generator().manual_seed(100 * number + rank)
        gradients = [torch.randn(each.shape, generator=generator) for each in ddp.parameters()]
        used = [0, 1, 2] if number % EVERY == 0 else [0, 1]
        ddp(gradients, used).backward()
        for each in used:
            owed[each] += gradients[each]
        if number % EVERY == EVERY - 1:
            optimizer.step()
            optimizer.zero_grad()
    for group in compression.groups:
        for segment in group.residual.layout.segments:
            place = ["slow", "fast", "rare"].index(segment.name.removeprefix("module."))
            kept = torch.empty_like(owed[place])  # as it lies in memory, which owed has from the parameter
            kept.as_strided((kept.numel(),), (1,)).copy_(group.residual.committed[segment.offset : segment.end])
            owed[place] -= kept
    shares = []
    for each, missing in zip(ddp.parameters(), owed, strict=True):
        dist.all_reduce(missing)
        applied = dist.get_world_size() * each.detach()
        shares.append(float((missing + applied).norm() / applied.norm()))
    compression.close()
    return max(shares)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("compressor", [{"name": "randomk", "density": 0.05}, "qsgd"], ids=["randomk", "qsgd"])
def test_the_last_pass_may_leave_a_parameter_out_on_all_ranks(pools, compressor, channels_last):
    assert max(pools[2].run(_rare, compressor, channels_last)) < 1e-5
