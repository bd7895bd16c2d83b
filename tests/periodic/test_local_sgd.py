"""Rounds of local steps over threads, against a slow simulation in one process, and their laws."""

import copy
import threading

import numpy as np
import pytest
import torch
from torch import nn

from lightning_compress.codecs import SparseLoCo
from lightning_compress.collectives import World, run_threads
from lightning_compress.collectives.coalesced import mean_of
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.errors import ExchangeError
from lightning_compress.engine.group import Group
from lightning_compress.periodic.averaged_gradients import average_gradients
from lightning_compress.periodic.fragment import Outer
from lightning_compress.periodic.sync_schedule import Rounds, split
from lightning_compress.settings.run_state import RunState
from tests.periodic.helpers import after, begun
from tests.reference.codecs import topk
from tests.reference.local_steps import simulate
from tests.reference.sparse import sparseloco

CPU = torch.device("cpu")


torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(41, 53), nn.Tanh(), nn.Linear(53, 7))


def make():
    return copy.deepcopy(MODEL)


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 41, generator=generator), torch.randn(5, 7, generator=generator)


def loss(model, given):
    return nn.functional.mse_loss(model(given[0]), given[1])


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01)


def train(collective, rounds, outer, settings, steps, inner=sgd, each=lambda local: None, finish=False):
    """``steps`` local steps on this rank; the model, and the local steps."""
    model = make()
    optimizer = inner(model.parameters())
    local = begun(model, collective, rounds, outer, [optimizer], **settings)
    collective.all_reduce(torch.zeros(1))  # all listen before any steps
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss(model, batch(step, collective.rank)).backward()
        optimizer.step()
        local.after_step()
        with torch.no_grad():
            each(local)
    if finish:
        local.finish()
    return model, local


def dense(vectors, _):
    mean = {name: np.mean([each[name].astype(np.float64) for each in vectors], axis=0) for name in vectors[0]}
    return mean, [{name: np.zeros_like(each) for name, each in own.items()} for own in vectors]


def sparse(vectors, number, method=lambda vector: topk(vector, 0.1, [(0, vector.size)])):
    """The one matrix that is large enough; the others as they are."""
    mean, left = dense(vectors, number)
    name = "0.weight"
    both = [method(each[name].ravel()) for each in vectors]
    mean[name] = np.mean([sent.astype(np.float64) for sent, _ in both], axis=0).reshape(vectors[0][name].shape)
    for own, (_, stays) in zip(left, both, strict=True):
        own[name] = stays.reshape(own[name].shape)
    return mean, left


def binned(vectors, number):
    """SparseLoCo's largest and bins."""
    return sparse(vectors, number, lambda vector: sparseloco(vector, [(0, vector.size)], SparseLoCo(64, 1024)))


def rotated(vectors, number):
    """The package's own exchange of these vectors, in the keys of this round."""
    names = list(vectors[0])
    shaped = [(name, vectors[0][name].shape) for name in names]
    settings = RunState.of({"name": "rotated", "bits": 4})

    def average(collective):
        group = Group(shaped, settings, World(collective, CPU, Meter(CPU)), unused=False)
        gradients = [torch.from_numpy(vectors[collective.rank][name].copy()) for name in names]
        group.reduce(gradients, number, None)
        return [each.numpy() for each in gradients]

    mean = run_threads(len(vectors), average)[0]
    return dict(zip(names, mean, strict=True)), dense(vectors, number)[1]


METHODS = {
    "none": ({"compressor": "none"}, dense),
    "rotated": ({"compressor": {"name": "rotated", "bits": 4}}, rotated),
    "topk": ({"compressor": {"name": "topk", "density": 0.1, "selection": "exact"}}, sparse),
    "sparseloco": ({"compressor": {"name": "sparseloco", "k": 64, "block": 1024}}, binned),
}
PRESETS = {
    "local_sgd": ("average", 1.0),
    "diloco": ("nesterov", 1.0),
    "sparseloco": ({"lr": 0.7}, 0.95),
}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("preset", PRESETS)
def test_three_rounds_follow_the_simulation(preset, method, size):
    (outer, decay), (settings, average) = PRESETS[preset], METHODS[method]
    made, every = Outer.of(outer), 4
    batches = [[batch(step, rank) for rank in range(size)] for step in range(1, 3 * every + 1)]
    wanted = simulate(
        make(), batches, every, (made.lr, made.momentum, made.nesterov), average, adamw, loss, residual_decay=decay
    )

    def run(collective):
        chosen = {
            **settings,
            "error_feedback": {"decay": decay},
            "exchange": "all_gather" if method in ("topk", "sparseloco") else "auto",
        }
        return train(collective, Rounds(every), outer, chosen, 3 * every, adamw)[0]

    for model in run_threads(size, run):
        for name, parameter in model.named_parameters():
            assert np.abs(parameter.detach().numpy() - wanted[-1][name]).max() < 1e-6, name


@pytest.mark.parametrize("size", [2, 3])
def test_rounds_of_one_step_are_synchronous_sgd(size):
    def plain(parameters):
        return torch.optim.SGD(parameters, 0.1)

    both, steps = make(), 6
    optimizer = plain(both.parameters())
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        (sum(loss(both, batch(step, rank)) for rank in range(size)) / size).backward()
        optimizer.step()
    models = run_threads(size, lambda each: train(each, Rounds(1), "average", {"compressor": "none"}, steps, plain)[0])
    for model in models:
        for own, wanted in zip(model.parameters(), both.parameters(), strict=True):
            assert torch.allclose(own, wanted, atol=1e-6)


@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("compressor", ["onebit", {"name": "topk", "density": 0.05}, "efsign", "powersgd"], ids=str)
def test_what_is_sent_and_kept_is_what_was_learned(compressor, decay):
    """With decay d: W mean + sum(e) = sum(delta) + d sum(e before)."""
    size, seen = 3, {}

    def run(collective):
        model = make()
        local = begun(model, collective, Rounds(2), compressor=compressor, error_feedback={"decay": decay})
        fragment, rows = local.fragments.parts[0], []
        collective.all_reduce(torch.zeros(1))
        optimizer = adamw(model.parameters())
        for step in range(1, 7):
            optimizer.zero_grad()
            loss(model, batch(step, collective.rank)).backward()
            optimizer.step()
            with torch.no_grad():
                if step % 2:
                    local.after_step()
                    continue
                before = residual(fragment)
                learned = fragment.anchors["0.weight"].detach() - model[0].weight.detach()
                anchor = fragment.anchors["0.weight"].detach().clone()
                local.after_step()
                rows.append((before, learned, anchor - fragment.anchors["0.weight"].detach(), residual(fragment)))
        seen[collective.rank] = rows

    def residual(fragment):
        for group in fragment.compression.groups:
            for segment in group.layout.segments:
                if segment.name == "0.weight":
                    return group.residual.committed[segment.offset : segment.end].view(53, 41).clone()
        return torch.zeros(53, 41)

    run_threads(size, run)
    for rows in zip(*seen.values(), strict=True):
        before, learned, means, after = (torch.stack(each).double() for each in zip(*rows, strict=True))
        assert after.abs().max() > 0
        sent, had = size * means[0] + after.sum(0), learned.sum(0) + decay * before.sum(0)
        assert (sent - had).abs().max() < 1e-5 * max(1, float(had.abs().max()))


def test_a_rank_that_is_not_finite_leaves_the_round_out_on_all():
    def run(collective):
        model = make()
        model.register_buffer("seen", torch.zeros(3))
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        local = begun(model, collective, Rounds(1), "nesterov", [inner], "onebit")
        inner.state[model[0].weight] = {"momentum_buffer": torch.full((53, 41), torch.nan)}
        before = [each.detach().clone() for each in model.parameters()]
        collective.all_reduce(torch.zeros(1))
        with torch.no_grad():
            for each in model.parameters():
                each += 0.1
            if collective.rank == 1:
                model[0].weight[0, 0] = torch.nan
                model.seen[1] = torch.inf
            local.after_step()
            left_out = [] if inner.state else [collective.rank]
            back = all(own.equal(was) for own, was in zip(model.parameters(), before, strict=True))
            residuals = local.fragments.parts[0].compression.groups.residual_norm()
            for each in model.parameters():
                each += 0.1
            local.after_step()
        return back, residuals, left_out, local.fragments.parts[0].compression.step, model.seen.sum().item()

    for rank, (back, residuals, left_out, rounds, seen) in enumerate(run_threads(2, run)):
        assert back
        assert residuals == 0
        assert left_out == [rank]
        assert rounds == 1
        assert seen == 0


@pytest.mark.parametrize(("fragments", "delay", "alpha"), [(1, 0, 0), (3, 0, 0), (1, 2, 0.5), (3, 3, 0.25), (4, 1, 0)])
def test_a_fit_ends_on_one_model_and_all_was_sent(fragments, delay, alpha):
    def run(collective):
        rounds = Rounds(5, fragments, delay, alpha)
        settings = {"compressor": {"name": "rotated", "bits": 8}, "check_drift_every": 0}
        model, local = train(collective, rounds, "nesterov", settings, 13, finish=True)
        return [each.detach() for each in model.parameters()], local.fragments.anchors(), local.fragments.parts

    ranks = run_threads(3, run)
    for parameters, anchors, parts in ranks:
        assert all(own.equal(other) for own, other in zip(parameters, ranks[0][0], strict=True))
        assert all(
            own.equal(anchors[name]) for (name, _), own in zip(make().named_parameters(), parameters, strict=True)
        )
        assert len(parts) == fragments
    start = [each.detach() for each in make().parameters()]
    assert all(not own.equal(was) for own, was in zip(ranks[0][0], start, strict=True))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_fit_that_ends_after_a_round_ends_on_the_mean_of_the_models(fragments, size):
    """A whole outer step, which momentum makes, would go further than its one step has shown."""

    def run(collective):
        model, local = train(collective, Rounds(5, fragments), "nesterov", {"compressor": "none"}, 11)
        own = [each.detach().clone() for each in model.parameters()]
        momentum = [copy.deepcopy(each.state_dict()["common"]["outer"]) for each in local.fragments.parts]
        local.finish()
        same = [each.state_dict()["common"]["outer"] for each in local.fragments.parts]
        assert all(
            each["state"][0]["momentum_buffer"].equal(other["state"][0]["momentum_buffer"])
            and each["param_groups"] == other["param_groups"]
            for each, other in zip(same, momentum, strict=True)
        )
        return own, [each.detach() for each in model.parameters()]

    ranks = run_threads(size, run)
    for _, end in ranks:
        for place, each in enumerate(end):
            assert torch.allclose(each, torch.stack([own[place] for own, _ in ranks]).mean(0), atol=1e-6)


def streamed(rounds, steps, size, average):
    """Streaming in one process: what is sent at one step is used ``delay`` later."""
    replicas = [make() for _ in range(size)]
    optimizers = [sgd(each.parameters()) for each in replicas]
    names = [name for name, _ in make().named_parameters()]
    runs = split([each.numel() for each in make().parameters()], rounds.fragments)
    anchors = {name: each.detach().double() for name, each in make().named_parameters()}
    flying = {}
    for step in range(1, steps + 1):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            optimizer.zero_grad()
            loss(replica, batch(step, rank)).backward()
            optimizer.step()
        with torch.no_grad():
            for number in rounds.due(step):
                if number in flying:
                    for name, mean in flying.pop(number).items():
                        anchors[name] = anchors[name] - mean
                        for replica in replicas:
                            own = replica.get_parameter(name)
                            own.copy_(rounds.alpha * own.double() + (1 - rounds.alpha) * anchors[name])
            for number in rounds.sent(step):
                flying[number] = {
                    name: torch.stack([anchors[name] - each.get_parameter(name).double() for each in replicas]).mean(0)
                    for name in names[runs[number]]
                }
    return replicas


@pytest.mark.parametrize(("fragments", "delay"), [(1, 2), (2, 3), (3, 4)])
def test_streaming_follows_a_simulation(fragments, delay):
    rounds = Rounds(6, fragments, delay, 0.5)
    wanted = streamed(rounds, 20, 3, None)
    settings = {"compressor": "none", "check_drift_every": 0}
    models = run_threads(3, lambda each: train(each, rounds, "average", settings, 20)[0])
    for model, reference in zip(models, wanted, strict=True):
        for own, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(own, other, atol=1e-6)


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize(
    "rounds", [Rounds(4), Rounds(4, 2), Rounds(4, 1, 2, 0.5), Rounds(5, 3, 4, 0.5)], ids=lambda each: str(each)[6:]
)
def test_a_state_at_any_step_goes_on_exactly(rounds, poisoned):
    """Also one that is taken while a fragment travels, finite or not, which changes nothing of the run that goes on."""
    settings = {"compressor": {"name": "topk", "density": 0.1}, "check_drift_every": 0, "on_nonfinite": "skip"}

    def run(collective):
        torch.set_num_threads(1)  # of this rank: in several, sums are not the same each time
        saved = []

        def step(model, optimizer, local, number):
            optimizer.zero_grad()
            loss(model, batch(number, collective.rank)).backward()
            optimizer.step()
            with torch.no_grad():
                if poisoned and number == 6 and collective.rank == 1:
                    model[0].weight[0, 0] = torch.nan
                local.after_step()

        def fresh():
            model = make()
            optimizer = adamw(model.parameters())
            local = begun(model, collective, rounds, "nesterov", [optimizer], **settings)
            collective.all_reduce(torch.zeros(1))
            return model, optimizer, local

        model, optimizer, local = fresh()
        for number in range(1, 15):
            step(model, optimizer, local, number)
            if number >= 5:
                parts = (model.state_dict(), optimizer.state_dict(), local.state_dict())
                saved.append((number, copy.deepcopy(parts)))
        quiet, other, alone = fresh()
        for number in range(1, 15):
            step(quiet, other, alone, number)
        local.fragments.arrive()
        alone.fragments.arrive()
        outcomes = [all(a.equal(b) for a, b in zip(model.parameters(), quiet.parameters(), strict=True))]
        for number, (weights, inner, own) in saved[:-1]:
            again, optimizer, local = fresh()
            again.load_state_dict(weights)
            optimizer.load_state_dict(inner)
            local.load_state_dict(own)
            for later in range(number + 1, 15):
                step(again, optimizer, local, later)
            local.fragments.arrive()
            outcomes.append(all(a.equal(b) for a, b in zip(model.parameters(), again.parameters(), strict=True)))
        return outcomes

    for outcomes in run_threads(2, run):
        assert all(outcomes), outcomes


@pytest.mark.parametrize("rounds", [Rounds(4), Rounds(4, 1, 2, 0.5)], ids=lambda each: str(each)[6:])
def test_what_is_unfrozen_later_follows_as_if_it_had_only_stood_still(rounds):
    def run(collective, joins):
        model, settings = make(), {"compressor": "none", "check_drift_every": 1}
        model[0].requires_grad_(not joins)
        local = begun(model, collective, rounds, "nesterov", **settings)
        optimizer = sgd(model.parameters())
        for step in range(1, 18):
            model[0].requires_grad_(not joins or step > 6)
            optimizer.zero_grad()
            loss(model, batch(step, collective.rank)).backward()
            if step <= 6:
                model[0].weight.grad = model[0].bias.grad = None
            with torch.no_grad():
                assert local.fragments.join(local.step) == (["0.weight", "0.bias"] if joins and step == 7 else [])
                optimizer.step()
            local.after_step()
        local.fragments.arrive()
        return [each.detach() for each in model.parameters()], local.stats()["total_bytes_dense"]

    later, always = run_threads(2, lambda ranks: run(ranks, True)), run_threads(2, lambda ranks: run(ranks, False))
    for (own, dense), (wanted, whole) in zip(later, always, strict=True):
        assert all(a.equal(b) for a, b in zip(own, wanted, strict=True))
        frozen = 4 * sum(each.numel() for each in own[:2]) * 6  # bytes that DDP would not have sent in these steps
        assert dense == whole - frozen


def test_what_is_added_later_joins_and_what_takes_a_parameters_place_is_refused():
    def run(collective):
        model = make()
        local = begun(model, collective, Rounds(2))
        with torch.no_grad():
            model.append(nn.Linear(7, 3))
            for each in model[3].parameters():
                each.fill_(1)
            assert local.fragments.join(0) == ["3.weight", "3.bias"]
            assert local.fragments.join(0) == []
            for each in model.parameters():
                each += collective.rank
            after(local, 2)
        nn.utils.parametrizations.weight_norm(model[0])
        with pytest.raises(ValueError, match=r"no parameter 0\.weight any more, and 0\.parametrizations"):
            local.fragments.join(2)
        other = make()
        local = begun(other, collective, Rounds(2))
        other[0].weight = nn.Parameter(torch.ones(2, 3))  # of the same name, as of a layer that lost neurons
        with pytest.raises(ValueError, match=r"no parameter 0\.weight any more, and another one in its place"):
            local.fragments.join(2)
        return model[3].weight

    assert all(own.eq(1.5).all() for own in run_threads(2, run))


def test_what_joins_while_a_fragment_travels_depends_on_steps_alone():
    """Schedules and random bits count rounds, and an evaluation has one come back before it is used."""

    def run(collective, evaluates):
        model = make()
        model[0].requires_grad_(False)
        schedule = {"bits": {0: 8, 2: 2}}
        settings = {"compressor": "rotated", "schedule": schedule, "min_numel": 0, "check_drift_every": 0}
        optimizer = sgd(model.parameters())
        local = begun(model, collective, Rounds(4, 1, 2, 0.5), "nesterov", [optimizer], **settings)
        for step in range(1, 11):
            model[0].requires_grad_(step > 4)
            optimizer.zero_grad()
            loss(model, batch(step, collective.rank)).backward()
            with torch.no_grad():
                if evaluates:
                    local.averaged_model()
                local.before_step(optimizer)
                optimizer.step()
                local.after_step()
        local.fragments.arrive()
        return [each.detach() for each in model.parameters()]

    seen, plain = (run_threads(2, lambda ranks, each=each: run(ranks, each)) for each in (True, False))
    for own, other in zip(seen, plain, strict=True):
        assert all(a.equal(b) for a, b in zip(own, other, strict=True))


def test_what_comes_back_in_an_evaluation_in_inference_mode_can_be_trained_on():
    """On Gloo Lightning only has gradients off; on NCCL, and so on GPUs, its evaluation is in inference mode."""
    rounds = Rounds(4, 2, 3, 0.5)
    settings = {"compressor": {"name": "topk", "density": 0.1}}

    def run(collective, mode):
        def evaluate(local):
            with mode():
                local.averaged_model()
                local.state_dict()

        return train(collective, rounds, "nesterov", settings, 12, each=evaluate, finish=True)[0]

    seen = run_threads(2, lambda ranks: run(ranks, torch.inference_mode))
    plain = run_threads(2, lambda ranks: run(ranks, torch.no_grad))
    for own, other in zip(seen[0].parameters(), plain[0].parameters(), strict=True):
        assert own.equal(other)


def test_bytes_of_averaging_in_every_step_are_told():
    def run(collective):
        return train(collective, Rounds(4), "average", {"compressor": "none"}, 8)[1].stats()

    stats = run_threads(2, run)[0]
    assert stats["ratio"] == pytest.approx(4)
    assert stats["total_bytes_dense"] == pytest.approx(8 * 4 * sum(each.numel() for each in make().parameters()))


def test_sparseloco_sends_what_its_paper_says():
    """0.0073 bits a parameter and step to each other rank, in rounds of 30; biases, the bins' means and flags apart."""
    size, rows, columns = 3, 64, 1024
    made = nn.Linear(columns, rows)

    def run(collective):
        model = copy.deepcopy(made)
        settings = {
            "compressor": "sparseloco",
            "exchange": "all_gather",
            "min_numel": 0,
            "error_feedback": {"decay": 0.95},
        }
        settings |= {"check_drift_every": 0}
        local = begun(model, collective, Rounds(30), **settings)
        with torch.no_grad():
            for step in range(1, 61):
                for each in model.parameters():
                    each += torch.randn(each.shape, generator=torch.Generator().manual_seed(step + collective.rank))
                local.after_step()
        return local.fragments.parts[0].compression.meter.bytes_sent / 2

    apart = 4 * rows + 16 + 16  # biases in float32, four means, a flag
    for sent in run_threads(size, run):
        bits = 8 * (sent / (size - 1) - apart) / (rows * columns) / 30
        assert bits == pytest.approx(0.00729, rel=0.02)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sync_every": 0}, "sync_every=0"),
        ({"sync_every": True}, "sync_every=True"),
        ({"sync_every": 4, "delay": 4}, "delay=4 must be less than sync_every=4"),
        ({"sync_every": 4, "delay": -1}, "delay=-1"),
        ({"sync_every": 4, "fragments": 5}, "fragments=5"),
        ({"sync_every": 4, "delay": 1, "alpha": 1.0}, "alpha=1.0"),
        ({"sync_every": 4, "alpha": 0.5}, "set alpha=0"),
    ],
)
def test_rounds_that_cannot_be_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Rounds(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("mean", "'average', 'nesterov'"),
        ({"lr": 0}, "outer.lr=0"),
        ({"rate": 1}, "lr, momentum, nesterov"),
        ({"momentum": 1.0}, "outer.momentum"),
        ({"nesterov": True}, "with momentum only"),
    ],
)
def test_outer_optimizers_that_cannot_be_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Outer.of(given)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_parts_are_of_about_equal_size_and_none_is_empty(parts):
    sizes = [100, 1, 1, 50, 49]
    runs = split(sizes, parts)
    assert [place for run in runs for place in range(len(sizes))[run]] == list(range(5))
    assert all(sizes[run] for run in runs)
    with pytest.raises(ValueError, match="fragments=6"):
        split(sizes, 6)


@pytest.mark.parametrize(("every", "parts"), [(1, 1), (5, 1), (5, 3), (30, 4)])
def test_each_fragment_is_sent_once_a_round_and_the_last_at_its_end(every, parts):
    rounds = Rounds(every, parts)
    for first in (1, every + 1):
        sent = [number for step in range(first, first + every) for number in rounds.sent(step)]
        assert sorted(sent) == list(range(parts))
    assert rounds.sent(every)[-1] == parts - 1
    assert rounds.sent(0) == []


def test_parameters_in_another_memory_format_are_averaged():
    """As of convolutions in channels_last."""

    made = nn.Conv2d(4, 8, 3)

    def run(collective):
        model = copy.deepcopy(made).to(memory_format=torch.channels_last)
        local = begun(model, collective, Rounds(2))
        before = model.weight.detach().clone()
        with torch.no_grad():
            for each in model.parameters():
                each += collective.rank + 1.0
            after(local, 2)
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
        return model.weight.detach() - before

    assert all(moved.allclose(torch.tensor(1.5)) for moved in run_threads(2, run))


def test_steps_too_small_for_half_precision_are_kept_in_the_anchors():
    """One of four ranks learns the least that bfloat16 can say, in each of eight rounds."""

    def run(collective):
        model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
        with torch.no_grad():
            model.weight.fill_(1.0)
            local = begun(model, collective, Rounds(1))
            for _ in range(8):
                if collective.rank == 0:
                    model.weight += 2.0**-7
                local.after_step()
        return local.fragments.parts[0].anchors["weight"].item(), model.weight.item()

    assert run_threads(4, run) == [(1 + 8 * 2.0**-7 / 4,) * 2] * 4


def test_an_outer_optimizer_that_is_named_at_a_resume_is_what_runs():
    def run(collective, given):
        _, before = train(collective, Rounds(2), "nesterov", {"compressor": "none"}, 4)
        model = make()
        local = begun(model, collective, Rounds(2), given)
        local.load_state_dict(before.state_dict())
        outer = local.fragments.parts[0]._outer
        buffers = [each.get("momentum_buffer") for each in outer.state.values()]
        theirs = [each["momentum_buffer"] for each in before.fragments.parts[0]._outer.state.values()]
        assert all(own.equal(other) for own, other in zip(buffers, theirs, strict=True))
        return [outer.param_groups[0][name] for name in ("lr", "momentum", "nesterov")]

    assert run_threads(2, lambda ranks: run(ranks, {"lr": 0.1})) == [[0.1, 0.0, False]] * 2
    assert run_threads(2, lambda ranks: run(ranks, "nesterov")) == [[0.7, 0.9, True]] * 2


def test_what_is_sent_late_has_the_epoch_of_its_own_step():
    """On rank 1 something else still travels when the next epoch begins."""

    made = nn.Linear(64, 64, bias=False)

    def run(collective):
        model, go = copy.deepcopy(made), threading.Event()
        topk = {"name": "topk", "density": 0.001}
        settings = {"compressor": topk, "min_numel": 0, "schedule": "dgc", "exchange": "all_gather"}
        local = begun(model, collective, Rounds(4, 1, 2), **settings)
        if collective.rank == 1:
            local.fragments._carry(go.wait)
        with torch.no_grad():
            after(local, 4)
            local.epoch = 4
            go.set()
            after(local, 2)
            first = local.fragments.parts[0].compression.settings.compressor.density
            after(local, 4)
        return first, local.fragments.parts[0].compression.settings.compressor.density

    assert run_threads(2, run, timeout=10) == [(0.25, 0.001)] * 2


def test_gradients_in_half_precision_are_summed_in_float32():
    def run(collective):
        parameter = nn.Parameter(torch.ones(1, dtype=torch.float16))
        parameter.grad = torch.full((1,), 40000.0, dtype=torch.float16)
        dense = average_gradients([parameter], collective)
        return parameter.grad.dtype, parameter.grad.item(), dense

    assert run_threads(2, run) == [(torch.float16, 40000.0, 2)] * 2


def test_means_of_models_take_one_message_a_dtype():
    def run(collective):
        sent = []
        reduce, collective.all_reduce = collective.all_reduce, lambda each: (sent.append(each.numel()), reduce(each))
        own = float(collective.rank)
        named = {"a": torch.full((2, 3), own), "b": torch.full((4,), own, dtype=torch.bfloat16), "c": torch.tensor(own)}
        means = mean_of(named, collective)
        assert all(each.eq(own).all() for each in named.values())
        return sent, [(each.dtype, each.shape, each.unique().tolist()) for each in means.values()]

    shapes = [torch.Size(shape) for shape in ((2, 3), (4,), ())]
    assert run_threads(2, run) == [([11], [(torch.float32, shape, [0.5]) for shape in shapes])] * 2


def test_a_rank_that_is_gone_is_an_error_that_says_so():
    def run(collective, average):
        def lost(*_):
            raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")

        collective.all_reduce = lost
        parameter = nn.Parameter(torch.ones(1))
        with pytest.raises(ExchangeError, match="a rank died"):
            average(parameter)

    run_threads(2, lambda ranks: run(ranks, lambda each: average_gradients([each], ranks)))
    run_threads(2, lambda ranks: run(ranks, lambda each: mean_of({"a": each}, ranks)))
