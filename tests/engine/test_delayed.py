"""Averages that are applied one step later: delayed SGD, with every codec."""

import threading
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from lightning_compress.backward import sufficient_factors
from lightning_compress.codecs import Codec
from lightning_compress.engine import checks
from lightning_compress.settings.run_state import RunState
from tests.cases import CASES
from tests.helpers.training import digits
from tests.turns import by_turns

ALL = {"name": "topk", "density": 1.0}
STEPS, RATE, MOMENTUM, BATCH = 30, 0.05, 0.9, 16


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 10))


def batches(rank, count):
    """Images and labels of a rank's batches."""
    images, labels = digits().tensors
    drawn = torch.Generator().manual_seed(rank)
    places = [torch.randint(len(images), (BATCH,), generator=drawn) for _ in range(count)]
    return [(images[each], labels[each]) for each in places]


def flat(model):
    return torch.cat([each.detach().flatten().clone() for each in model.parameters()])


def delayed_sgd(size, accumulate=1, steps=STEPS, delay=1, clip=None):
    """Parameters after each step of an optimizer that is given the mean gradient of the step before; one process."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)
    data = [batches(rank, steps * accumulate) for rank in range(size)]
    before, path = None, []
    for step in range(steps):
        gradients = []
        for own in data:
            optimizer.zero_grad()
            for images, labels in own[step * accumulate : (step + 1) * accumulate]:
                (nn.functional.cross_entropy(model(images), labels) / accumulate).backward()
            gradients.append([each.grad.clone() for each in model.parameters()])
        mean = [sum(each) / size for each in zip(*gradients, strict=True)]
        if (applied := before if delay else mean) is not None:
            for parameter, gradient in zip(model.parameters(), applied, strict=True):
                parameter.grad = gradient.clone()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        before = mean
        path.append(flat(model))
    return path


def train(
    compressor, delay=1, accumulate=1, steps=STEPS, scaler=None, rate=RATE, momentum=MOMENTUM, begin=None, **settings
):
    """Parameters after each step on this rank, and the handle's last state."""
    first, module, state = begin or (0, network(), None)
    model = DistributedDataParallel(module, bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=momentum)
    scale = lambda: getattr(scaler, "_scale", None)  # noqa: E731
    given = {"min_numel": 1, "delay": delay, "optimizer": optimizer, "scale": scale, **settings}
    compression = attach(model, compressor, **given)
    if state is not None:
        compression.load_state_dict(state)
    own, path = batches(dist.get_rank(), steps * accumulate), []
    for step in range(first, steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            images, labels = own[step * accumulate + part]
            with model.no_sync() if part + 1 < accumulate else nullcontext():
                loss = nn.functional.cross_entropy(model(images), labels) / accumulate
                (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        path.append(flat(model.module))
    stats = compression.stats()
    compression.close()
    return path, stats, compression.state_dict()


def path_of(*arguments, **named):
    return [each.numpy() for each in train(*arguments, **named)[0]]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("compressor", ["none", ALL], ids=["none", "topk"])
def test_lossless_is_delayed_sgd_bit_for_bit(pools, compressor, accumulate):
    expected = [each.numpy() for each in delayed_sgd(2, accumulate)]
    for path in pools[2].run(path_of, compressor, 1, accumulate):
        assert all((ours == theirs).all() for ours, theirs in zip(path, expected, strict=True))
    undelayed = delayed_sgd(2, accumulate, delay=0)
    assert not (undelayed[-1].numpy() == expected[-1]).all()


CODECS = [case for case in CASES if isinstance(case.codec, Codec)]
CORRECTED = {
    "dgc": ({"name": "dgc", "density": 0.05}, 0.02, {}),
    "ef21": ("ef21", 0.02, {}),
    "onebit_adam": ("onebit_adam", 0.001, {"warmup_steps": 20, "momentum": 0.0}),
    "adagrad": ("onebit", 0.02, {"exchange": {"name": "two_shot", "adagrad": 1e-8}, "momentum": 0.0}),
    "clipped": ("onebit", 0.02, {"local_clip_norm": 0.5}),
    "rules": ("onebit", 0.02, {"rules": [{"match": "1.*", "compressor": "bf16"}]}),
    "warmup": ("onebit", 0.02, {"warmup_steps": 10}),
    "schedule": ("topk", 0.02, {"schedule": {"density": {"kind": "lr", "factor": 5}}}),
    "epochs": ("topk", 0.02, {"schedule": {"preset": "dgc", "epochs": 2}}),
}
"""What does a part of the optimizer's work, or changes during the run."""


def losses(compressor, rate, settings):
    """At the end with a delay of 0 and of 1, and at the beginning; and whether all ranks have the same parameters."""
    images, labels = digits().tensors
    found, alike = [], True
    for delay in (0, 1):
        path, _, _ = train(compressor, delay, steps=40, rate=rate, **settings)
        ranks = [torch.empty_like(path[-1]) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, path[-1])
        alike = alike and all(each.equal(ranks[0]) for each in ranks)
        found.append(loss_of(path[-1], images, labels))
    return *found, loss_of(flat(network()), images, labels), alike


def loss_of(values, images, labels):
    model = network()
    nn.utils.vector_to_parameters(values, model.parameters())
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(images), labels))


def check(ranks):
    for loss, late, first, alike in ranks:
        assert alike
        assert late < first
        assert late - loss < 0.15 * (first - loss), (loss, late, first)


@pytest.mark.parametrize(("case", "size"), by_turns(CODECS, (2, 3, 4), 1))
def test_every_codec_trains_nearly_as_well(pools, case, size):
    check(pools[size].run(losses, case.codec, 0.02, {}))


@pytest.mark.parametrize(("name", "size"), by_turns(CORRECTED, (2, 3), 1))
def test_what_does_more_than_compress_trains_nearly_as_well(pools, name, size):
    check(pools[size].run(losses, *CORRECTED[name]))


class Scaler(torch.amp.GradScaler):
    """Writes its scales down."""

    def __init__(self, *arguments, **named):
        super().__init__("cpu", *arguments, **named)
        self.scales = []

    def update(self, new_scale=None):
        super().update(new_scale)
        self.scales.append(float(self._scale))


def scaled():
    """A scale that grows in every fourth step changes no bit of the path: it is a power of 2."""
    scaler = Scaler(init_scale=1024.0, growth_interval=4)
    path, _, _ = train(ALL, scaler=scaler)
    plain, _, _ = train(ALL)
    return len(set(scaler.scales)), all(ours.equal(theirs) for ours, theirs in zip(path, plain, strict=True))


def test_averages_are_in_the_scale_of_the_step_that_applies_them(pools):
    assert pools[2].run(scaled) == [(8, True)] * 2


def overflowing():
    """A scale at which gradients are infinite at first: the scaler skips their steps, one step later."""
    scaler = Scaler(init_scale=2.0**106, growth_interval=1000)
    path, stats, state = train("onebit", scaler=scaler, error_feedback=True)
    finite = [group["states"]["residual"]["numbers"].isfinite().all() for group in state["groups"]]
    still = [bool(path[step].equal(path[0])) for step in range(STEPS)]
    return (
        stats["nonfinite_steps"],
        sum(still),
        scaler.scales[-1] < 2.0**106,
        all(finite),
        loss_of(path[-1], *digits().tensors),
    )


def test_a_scaler_skips_the_steps_whose_averages_are_not_finite(pools):
    for nonfinite, still, smaller, finite, loss in pools[2].run(overflowing):
        assert nonfinite == still - 1 > 0  # the first step applies nothing
        assert smaller
        assert finite
        assert loss < 1.5


def spoilt(policy):
    """One gradient of rank 1 is NaN; the step that skips, and what the last state is."""
    model = DistributedDataParallel(network(), bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    compression = attach(
        model, "onebit", min_numel=1, delay=1, optimizer=optimizer, on_nonfinite=policy, error_feedback=True
    )
    path, said = [], ""
    for step, (images, labels) in enumerate(batches(dist.get_rank(), 6)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        (loss * float("nan") if step == 2 and dist.get_rank() == 1 else loss).backward()
        try:
            optimizer.step()
        except FloatingPointError as error:
            said = f"{step}: {error}"
            break
        path.append(flat(model.module))
    still = [step for step in range(1, len(path)) if path[step].equal(path[step - 1])]
    numbers = [group["states"]["residual"]["numbers"] for group in compression.state_dict()["groups"]]
    steps = compression.stats()["nonfinite_steps"]
    compression.close()
    return said, still, all(bool(each.isfinite().all()) for each in numbers), steps


def test_nonfinite_averages_are_skipped_one_step_later(pools):
    assert pools[2].run(spoilt, "skip") == [("", [3], True, 1.0)] * 2


def test_nonfinite_averages_raise_one_step_later_and_name_their_step(pools):
    other, own = pools[2].run(spoilt, "raise")
    assert own[0].startswith("3: step 2: gradients are not finite on rank 1, of")
    assert other[0].startswith("3: step 2: gradients are not finite on another rank")
    assert own[1:] == other[1:] == ([], True, 1.0)


def overlapping():
    """Every average waits until the main thread is in the next step's forward."""
    forwards, seen = [threading.Event() for _ in range(6)], []
    model, optimizer, compression = begun("onebit", check_drift_every=0)
    left = iter(forwards)
    model.module[0].register_forward_pre_hook(lambda *_: next(left).set())
    average = compression.average

    def late(*given):
        seen.append(forwards[len(seen) + 1].wait(20))
        average(*given)

    compression.average = late
    for _ in range(5):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    forwards[5].set()
    compression.close()
    return seen


def test_an_average_travels_while_the_next_step_computes(pools):
    for seen in pools[2].run(overlapping):
        assert seen == [True] * 5


def resumed(compressor, settings):
    """A run whose second half begins in a new model, from the state in its middle; the paths are to be the same."""
    whole, _, _ = train(compressor, steps=12, momentum=0.0, **settings)
    model = network()
    nn.utils.vector_to_parameters(whole[5], model.parameters())
    _, _, middle = train(compressor, steps=6, momentum=0.0, **settings)
    again, _, _ = train(compressor, steps=12, momentum=0.0, begin=(6, model, middle), **settings)
    return [ours.equal(theirs) for ours, theirs in zip(whole[6:], again, strict=True)]


@pytest.mark.parametrize("compressor", ["none", "onebit", "rotated", {"name": "dgc", "density": 0.05}], ids=str)
def test_what_is_in_flight_is_in_the_state(pools, compressor):
    assert pools[2].run(resumed, compressor, {}) == [[True] * 6] * 2


def begun(compressor="topk", make=torch.optim.SGD, **settings):
    """A model, its optimizer, and what compresses."""
    model = DistributedDataParallel(network(), **settings.pop("ddp", {}))
    optimizer = make(model.parameters(), RATE)
    settings = {"min_numel": 1, "delay": 1, "optimizer": optimizer, **settings}
    return model, optimizer, attach(model, compressor, **settings)


def backward(model, rank=None):
    images, labels = batches(dist.get_rank() if rank is None else rank, 1)[0]
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    return loss


def refusal(work):
    """What is raised, as a text; the compression is closed."""
    try:
        compression = work()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    compression.close()
    return ""


def several():
    model = DistributedDataParallel(network())
    parts = [torch.optim.SGD(part.parameters(), 0.1) for part in (model.module[1], model.module[3])]
    return attach(model, "topk", delay=1, optimizer=parts)


def factors():
    module = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 10))
    handle = sufficient_factors.enable(module, sufficient_factors.FactorSettings(force=True))
    try:
        return attach(DistributedDataParallel(module), "topk", delay=1)
    finally:
        handle.close()


def twice():
    model, _, compression = begun()
    backward(model)
    backward(model)
    model.zero_grad()
    backward(model)
    backward(model)  # into the average of the second
    return compression


def closures():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            closure()
            return super().step(closure)

    model, optimizer, compression = begun(make=Twice)

    def closure():
        optimizer.zero_grad()
        return backward(model)

    optimizer.step(closure)
    return compression


def discarded():
    model, _, compression = begun()
    backward(model)
    compression.roll_back()


def retuned():
    model, _, compression = begun()
    backward(model)
    compression.retune("powersgd")


REFUSED = {
    "unused": (lambda: begun(ddp={"find_unused_parameters": True}), "Set find_unused_parameters=False"),
    "static": (lambda: begun(ddp={"static_graph": True}), "Set static_graph=False"),
    "reducer": (lambda: begun("powersgd"), "compressor='powersgd', which needs several rounds"),
    "rule": (lambda: begun(rules=[{"kind": "linear", "compressor": "powersgd"}]), "delay=1 does not work with"),
    "rate": (lambda: begun(error_feedback={"follows_lr": True}), "Leave follows_lr out"),
    "two": (lambda: begun(delay=2), "delay=2 must be one of 0, 1"),
    "true": (lambda: begun(delay=True), "delay=True must be one of 0, 1"),
    "lbfgs": (lambda: begun(make=torch.optim.LBFGS), "delay=1 does not work with LBFGS"),
    "several": (several, "delay=1 works with one optimizer, and there are 2"),
    "factors": (factors, "delay=1 does not work with sufficient factors"),
    "twice": (twice, "a second backward began before zero_grad()"),
    "closures": (closures, "the optimizer computes gradients several times in a step"),
    "discarded": (discarded, "with delay=1 a step cannot be discarded"),
    "retuned": (retuned, "delay=1 does not work with compressor='powersgd'"),
}
"""What cannot work, and what is said on every rank."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_on_every_rank(pools, name):
    assert all(REFUSED[name][1] in said for said in pools[2].run(refused, name))


def refused(name):
    return refusal(REFUSED[name][0])


def test_an_accelerator_is_refused():
    module = network().to("meta")
    with pytest.raises(ValueError, match="delay=1 works on CPUs over Gloo as yet, and the model is on meta"):
        checks.check_module(module, RunState.of("rotated", delay=1))
    checks.check_module(module, RunState.of("rotated"))


def retuning():
    """Another density from the fourth step on: bytes of each step, and whether ranks are alike."""
    model, optimizer, compression = begun(ALL, check_drift_every=2)
    sent = []
    for step in range(8):
        if step == 4:
            compression.retune(density=0.1)
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        sent.append(compression.stats()["bytes_sent"])
    compression.close()
    return sent, flat(model.module).numpy()


def test_settings_change_between_two_steps(pools):
    (sent, ours), (_, theirs) = pools[2].run(retuning)
    assert len(set(sent[:4])) == len(set(sent[4:])) == 1
    assert sent[4] < 0.3 * sent[3]
    assert (ours == theirs).all()


def drifting(how):
    """Rank 1's parameters are changed after the fifth step, and compared after every second."""
    model, optimizer, compression = begun(check_drift_every=2, on_drift=how)
    try:
        for step in range(8):
            if step == 5 and dist.get_rank():
                with torch.no_grad():
                    model.module[1].weight[0, 0] += 1.0
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    compression.close()
    return flat(model.module).numpy()


def test_drift_is_found(pools):
    for said in pools[2].run(drifting, "error"):
        assert "drift: after step 6, 1.weight of rank 1 differ from rank 0's" in said
    ours, theirs = pools[2].run(drifting, "resync")
    assert (ours == theirs).all()


def failing():
    """Every rank's exchange fails in the third step: when that is said, and what is saved then."""
    model, optimizer, compression = begun()
    average, steps = compression._average, []

    def fails(*given):
        if compression.step == 2:
            raise OSError("no memory")
        average(*given)

    compression._average = fails
    try:
        for step in range(6):
            steps.append(step)
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
    except OSError as error:
        state = compression.state_dict()
        compression.close()
        return str(error), len(steps) - 1, state["step"], sorted(state)
    return None


def test_an_error_is_raised_in_the_step_that_would_apply_the_average(pools):
    for said, step, committed, keys in pools[2].run(failing):
        assert "no memory" in said
        assert step == 3
        assert committed == 2
        assert "in_flight" not in keys  # all that was averaged is applied


def test_one_rank_has_no_delay_and_is_told(pools):
    ((said, same),) = pools[1].run(alone)
    assert "delay=1 has no effect on one rank" in said
    assert same


def alone():
    model, optimizer, compression = begun()
    before = flat(model.module)
    backward(model)
    optimizer.step()
    said = compression.run_summary.warning
    compression.close()
    return said, not before.equal(flat(model.module))
