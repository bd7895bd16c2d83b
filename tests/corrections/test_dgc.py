"""Deep Gradient Compression: it is SGD with momentum where nothing is left out, and conserves velocities elsewhere."""

import math
import re

import numpy as np
import pytest
import torch

from lightning_compress.codecs import TopK
from lightning_compress.corrections import DGC, WARMUP_DENSITIES
from lightning_compress.exchanges import EXCHANGES
from lightning_compress.settings.options import Options
from lightning_compress.settings.parsing import build_compressor
from lightning_compress.settings.run_state import RunState
from tests.corrections.helpers import COMPRESSED, NAMES, PARAMETERS, Walker, gradient, named, on_ranks, walk
from tests.reference.dgc import Rank
from tests.test_laws import average

SIZES = [1, 2, 3, 4]
STEPS = 12


def sgd(size, steps, nesterov=False, momentum=0.9, gradients=gradient):
    """What SGD adds to the weights in each step, for the mean gradient, in float64."""
    buffer = torch.zeros(len(gradient(0, 0)), dtype=torch.float64)
    updates = []
    for step in range(steps):
        mean = sum(gradients(rank, step).double() for rank in range(size)) / size
        buffer = momentum * buffer + mean
        updates.append(mean + momentum * buffer if nesterov else buffer.clone())
    return updates


def check_sgd(size, out, nesterov=False, start=0):
    for mine, theirs in zip(out[start:], sgd(size, len(out), nesterov)[start:], strict=True):
        assert (mine.double() - theirs).abs().max() <= 1e-6 * theirs.abs().max()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("exchange", ["auto", "all_gather", "two_shot"])
@pytest.mark.parametrize("size", SIZES)
def test_sending_everything_is_sgd_with_momentum(size, exchange, nesterov):
    method = DGC(density=1.0, masking=False, nesterov=nesterov)
    check_sgd(size, walk(size, method, STEPS, exchange=exchange)[0], nesterov)


@pytest.mark.parametrize("method", [DGC(density=1.0), DGC(sparsifier={"name": "topk", "density": 1.0})])
def test_nothing_is_forgotten_where_everything_is_sent(method):
    check_sgd(3, walk(3, method, STEPS, exchange="all_gather")[0])


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_dense_steps_are_sgd_with_momentum(size, nesterov):
    out, walkers = walk(size, DGC(nesterov=nesterov), STEPS, warmup_steps=STEPS)
    check_sgd(size, out, nesterov)
    velocities = [torch.cat([walker.state("velocity")[name] for name in COMPRESSED]) for walker in walkers]
    if size > 1:
        assert not velocities[0].equal(velocities[1])


def test_where_auto_finds_dense_cheaper_nothing_is_forgotten():
    out, walkers = walk(2, DGC(density=0.9), STEPS, exchange={"name": "auto", "fallback": "dense"})
    plan, places = walkers[0].group.plan(0), walkers[0].group._plan.compressed
    assert all(plan.is_dense(place) for place in places)
    check_sgd(2, out)


def test_one_rank_alone_is_sgd_to_the_bit():
    weight = torch.nn.Parameter(torch.zeros(len(gradient(0, 0))))
    optimizer = torch.optim.SGD([weight], 1.0, momentum=0.9)
    out, _ = walk(1, "dgc", STEPS)
    for step, update in enumerate(out):
        weight.grad = gradient(0, step)
        optimizer.step()
        assert optimizer.state[weight]["momentum_buffer"].equal(update)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_it_is_the_papers(size, masking, nesterov):
    method = DGC(density=0.02, nesterov=nesterov, masking=masking)
    out, walkers = walk(size, method, STEPS, warmup_steps=2, exchange="all_gather", local_clip_norm=30.0)
    ranks = [{name: Rank(math.prod(shape)) for name, shape in PARAMETERS} for _ in range(size)]
    for step in range(STEPS):
        mean = dict.fromkeys(COMPRESSED, 0.0)
        for rank in range(size):
            for name in COMPRESSED:
                own = named(gradient(rank, step))[name].numpy()
                # the paper clips what is divided by the number of ranks already
                share = ranks[rank][name].send(
                    own / size, None if step < 2 else 0.02, 0.9, nesterov, masking, 30.0 * size**-0.5
                )
                mean[name] = mean[name] + share
        for name in COMPRESSED:
            assert np.abs(named(out[step])[name].numpy() - mean[name]).max() <= 1e-5
    for rank, walker in enumerate(walkers):
        for name in COMPRESSED:
            assert np.abs(walker.state("velocity")[name].numpy() / size - ranks[rank][name].u).max() <= 1e-5
            assert np.abs(walker.state("residual")[name].numpy() / size - ranks[rank][name].v).max() <= 1e-5


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_was_sent_and_what_stays_are_all_velocities(size):
    """W times the sum of the means, and the residuals: the sum of all u, followed outside from masks alone."""
    method = DGC(density=0.01)

    def program(collective):
        walker = Walker(collective, method, exchange="all_gather")
        u, total, means = 0.0, 0.0, 0.0
        for step in range(STEPS):
            u = 0.9 * u + gradient(collective.rank, step).double()
            total = total + u
            means = means + walker.reduce(gradient(collective.rank, step), step).double()
            walker.commit()
            for name, left in walker.state("residual").items():
                named(u)[name][left == 0] = 0  # views: what was sent is forgotten
        return total, means, walker.state("residual")

    ranks = on_ranks(size, program)
    for name in COMPRESSED:
        velocities = sum(named(total)[name] for total, _, _ in ranks)
        sent = size * named(ranks[0][1])[name]
        kept = sum(residual[name].double() for _, _, residual in ranks)
        assert (sent + kept - velocities).abs().max() <= 1e-6 * velocities.abs().max()
        assert kept.abs().max() > 1


def test_masking_forgets_velocity_and_residual_together():
    _, (walker, _) = walk(2, DGC(density=0.05), STEPS, exchange="all_gather")
    for name in COMPRESSED:
        u, v = walker.state("velocity")[name], walker.state("residual")[name]
        assert 0.04 < float((v == 0).float().mean()) < 0.06
        assert not u[v == 0].any()
        assert u[v != 0].all()
    _, (plain, _) = walk(2, DGC(density=0.05, masking=False), STEPS, exchange="all_gather")
    assert all(plain.state("velocity")[name].all() for name in COMPRESSED)


@pytest.mark.parametrize("size", [1, 4])
def test_clipping_bounds_each_parameter_before_it_is_accumulated(size):
    out, walkers = walk(size, DGC(density=0.05), 1, warmup_steps=1, local_clip_norm=2.0)
    for name in COMPRESSED:
        own = walkers[0].state("velocity")[name]
        assert float(own.norm()) / size == pytest.approx(2.0 * size**-0.5, rel=1e-5)
        assert float(named(out[0])[name].norm()) == pytest.approx(2.0, rel=0.05)  # of independent gradients
    small, _ = walk(size, DGC(density=0.05), 1, warmup_steps=1, local_clip_norm=1e6)
    assert small[0].equal(walk(size, DGC(density=0.05), 1, warmup_steps=1)[0][0])


def test_a_step_that_is_rolled_back_never_was():
    def program(collective):
        walker = Walker(collective, DGC(density=0.05), exchange="all_gather")
        for step in range(5):
            if step == 3:
                walker.reduce(gradient(collective.rank, 77), step)
                walker.roll_back()
            walker.reduce(gradient(collective.rank, step), step)
            walker.commit()
        return walker

    _, plain = walk(2, DGC(density=0.05), 5, exchange="all_gather")
    for walker, other in zip(on_ranks(2, program), plain, strict=True):
        for kind in ("velocity", "residual", "momentum"):
            assert all(walker.state(kind)[name].equal(value) for name, value in other.state(kind).items())


@pytest.mark.parametrize("warmup", [0, 9])
@pytest.mark.parametrize("without", [(0,), (0, 1)])
def test_a_parameter_that_no_rank_uses_keeps_velocity_and_residual(warmup, without):
    def gradients(rank, step):
        values = gradient(rank, step)
        if step in (3, 4) and rank in without:
            named(values)["linear"].zero_()
        return values

    def program(collective):
        walker = Walker(collective, DGC(density=0.05), exchange="all_gather", warmup_steps=warmup)
        seen = []
        for step in range(6):
            walker.reduce(gradients(collective.rank, step), step)
            walker.commit()
            seen.append((walker.state("velocity"), walker.state("residual")))
        return seen

    ranks = on_ranks(2, program)
    for kind in (0, 1):
        for seen in ranks:
            same = seen[2][kind]["linear"].equal(seen[4][kind]["linear"])
            assert same == (len(without) == 2 or (kind == 1 and warmup > 0))  # a dense step leaves no residual
    for seen in ranks:
        assert not seen[2][0]["conv"].equal(seen[4][0]["conv"])
        assert not seen[4][0]["linear"].equal(seen[5][0]["linear"])


def test_the_loss_scale_leaves_no_trace():
    def program(scales):
        def run(collective):
            walker = Walker(collective, DGC(density=0.05), exchange="all_gather")
            out = []
            for step, scale in enumerate(scales):
                values = gradient(collective.rank, step)
                out.append(walker.reduce(values * scale, step, None if scale == 1 else torch.tensor(scale)) / scale)
                walker.commit()
            return out

        return on_ranks(2, run)[0]

    assert torch.stack(program([1.0] * 4)).equal(torch.stack(program([1.0, 512.0, 256.0, 4.0])))


def test_what_stays_dense_has_the_momentum_of_the_mean():
    out, walkers = walk(3, DGC(), STEPS)
    expected = named(sgd(3, STEPS)[-1])
    for name in set(NAMES) - set(COMPRESSED):
        assert (named(out[-1])[name].double() - expected[name]).abs().max() <= 1e-5
        assert all(walker.state("momentum")[name].equal(named(out[-1])[name]) for walker in walkers)
    assert not walkers[0].state("velocity")["bias"].any()
    assert set(walkers[0].state("momentum")) == {"bias", "tiny"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"density": 0.0}, "density"),
        ({"momentum": 1.0}, "DGC(momentum=1.0): momentum must be in [0, 1)"),
        ({"momentum": "0.9"}, "momentum='0.9'"),
        ({"masking": 1}, "DGC(masking=1)"),
        ({"sparsifier": "onebit"}, "DGC(sparsifier='onebit'): a sparsifier must send few elements"),
        (
            {"sparsifier": {"name": "topk", "values": "fp16"}},
            "masking needs a sparsifier that sends elements exactly, and this one rounds them",
        ),
        ({"sparsifier": "adaptive"}, "and this one rounds them; set masking=False"),
        ({"sparsifier": "nosuch"}, "unknown sparsifier 'nosuch'; there are: none"),
        ({"sparsifier": {"name": "topk", "ratio": 1}}, "sparsifier 'topk' has no setting 'ratio'"),
        ({"sparsifier": "topk", "density": 0.1}, "give them to the sparsifier"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build_compressor({"name": "dgc", **settings})


def test_a_sparsifier_by_any_name_is_the_same():
    given = [TopK(0.1), {"name": "topk", "density": 0.1}]
    assert len({DGC(sparsifier=each) for each in given}) == 1
    assert repr(Options.of(DGC(sparsifier=given[1]))) == repr(Options.of(DGC(sparsifier=given[0])))
    assert repr(Options.of(DGC(momentum=0.8))) != repr(Options.of(DGC()))


def optimizers():
    weight = [torch.nn.Parameter(torch.zeros(3))]
    return {
        "same": torch.optim.SGD(weight, 0.1, momentum=0.9, weight_decay=0.1),
        "none": torch.optim.SGD(weight, 0.1),
        "other": torch.optim.SGD(weight, 0.1, momentum=0.5),
        "nesterov": torch.optim.SGD(weight, 0.1, momentum=0.9, nesterov=True),
        "dampening": torch.optim.SGD(weight, 0.1, momentum=0.9, dampening=0.1),
        "adam": torch.optim.AdamW(weight, 0.1),
        "rmsprop": torch.optim.RMSprop(weight, 0.1),
    }


def test_sgds_momentum_is_taken_over_once():
    optimizer, correction = optimizers()["same"], DGC().correction
    assert "multiply weight_decay by 10 to keep its strength" in correction.take_over(optimizer, ["a"])
    assert optimizer.param_groups[0]["momentum"] == 0
    assert correction.take_over(optimizer, ["a"]) is None
    assert correction.take_over(optimizers()["none"], ["a"]) is None
    nesterov = optimizers()["nesterov"]
    assert DGC(nesterov=True).correction.take_over(nesterov, ["a"])
    assert nesterov.param_groups[0]["nesterov"] is False


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other", "SGD(momentum=0.5): dgc applies momentum itself, with 0.9"),
        ("nesterov", "SGD(nesterov=True)"),
        ("dampening", "SGD(dampening=0.1)"),
        ("adam", "dgc cannot be combined with AdamW"),
        ("rmsprop", "dgc cannot be combined with RMSprop"),
    ],
)
def test_other_optimizers_are_refused(name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DGC().correction.take_over(optimizers()[name], ["weight"])


def test_the_papers_warm_up():
    assert [round(100 * (1 - density), 4) for density in WARMUP_DENSITIES] == [75, 93.75, 98.4375, 99.6, 99.9]


def _takes(exchange):
    try:
        RunState.of("dgc", exchange)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("exchange", [name for name in EXCHANGES.offered if _takes(name)])
def test_what_left_the_residual_was_applied(exchange, size):
    """So that momentum factor masking forgets nothing else, by every exchange that is not refused."""
    for before, after, mean, *_ in average(DGC(0.01).codec, exchange, size):
        sent = (after == 0) & (before != 0)
        assert sent.any()
        assert mean[sent].all()


@pytest.mark.parametrize("name", [name for name in EXCHANGES.offered if not _takes(name)])
def test_refused_exchanges(name):
    with pytest.raises(ValueError, match="exchange="):
        RunState.of("dgc", name)
    if EXCHANGES[name].moves_residual:
        RunState.of({"name": "dgc", "masking": False}, name)  # forgets nothing


def test_refused_exchanges_are_known():
    assert {name for name in EXCHANGES.offered if not _takes(name)} == {
        "all_reduce",
        "two_shot",
        "binomial",
        "chain",
        "hierarchical",
    }
