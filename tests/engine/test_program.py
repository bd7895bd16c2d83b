"""A step that is made again from what an earlier one recorded does what the ordinary path does, bit for bit."""

import math
import threading
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import nn

from benchmarks.harness.launches import calls, launches
from lightning_compress import kernels
from lightning_compress.collectives import CountingCollective, World, run_threads
from lightning_compress.collectives.collective import Collective
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.random import RandomBits, mix, permutation
from lightning_compress.engine import programs
from lightning_compress.engine.checks import trained
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.group import Group
from lightning_compress.engine.hook import bucket_of
from lightning_compress.kernels.program import Program, Tape, here, recording
from lightning_compress.settings.compensation import kind_of
from lightning_compress.settings.rules import kinds_of
from lightning_compress.settings.run_state import RunState

pytest.importorskip("triton")

CPU = torch.device("cpu")
PARAMETERS = [("weight", (8, 16)), ("bias", (7,)), ("other", (5, 8))]
LOCO = {"error_feedback": "loco"}
STEPS = 6
"""Two memories of a state take turns: each is seen, recorded, and made again."""


@pytest.fixture(autouse=True)
def replays(monkeypatch):
    """How often a program ran. Triton's interpreter is for one thread."""
    from triton.runtime.interpreter import GridExecutor

    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted where there is a GPU")
    done, lock, call, replay = [], threading.Lock(), GridExecutor.__call__, Program.replay

    def locked(*given, **options):
        with lock:
            return call(*given, **options)

    def counted(*given):
        done.append(given)
        replay(*given)

    monkeypatch.setattr(GridExecutor, "__call__", locked)
    monkeypatch.setattr(Program, "replay", counted)
    with kernels.using("triton"):
        yield done


def same(one, other):
    return one.shape == other.shape and one.reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8))


def steps(collective, method, exchange, more):
    """Gradients and flags of some steps, the states then, and the bytes of each step."""
    meter = Meter(CPU)
    meter.sample_every = 0
    settings = RunState.of(method, exchange, schedule="none", **more)
    group = Group(PARAMETERS, settings, World(CountingCollective(collective, meter), CPU, meter), unused=False)
    sizes = [math.prod(shape) for _, shape in PARAMETERS]
    bucket, found = torch.zeros(sum(sizes)), []
    parts = [part.view(shape) for part, (_, shape) in zip(bucket.split(sizes), PARAMETERS, strict=True)]
    for step in range(STEPS):
        torch.randn(len(bucket), generator=torch.Generator().manual_seed(10 * step + collective.rank), out=bucket)
        flag = group.reduce(parts, step, None)
        found += [bucket.clone(), flag.clone(), torch.tensor(meter.bytes_sent)]
        for state in group.states.values():
            state.commit(flag.isnan(), group.names)
    return found + [state.committed.clone() for state in group.states.values()]


OFTEN = [("qsgd", "all_gather", {}), ("onebit", "two_shot", LOCO), ("topk", "all_gather", {})]
RARELY = [
    *((name, "all_gather", {}) for name in ("rotated", "efsign", "dgc", "fft", "bf16")),
    ("onebit", "all_gather", LOCO),
    ("onebit", "all_gather", {"error_feedback": {"dtype": "bfloat16"}}),
    *((name, "two_shot", {}) for name in ("qsgd", "rotated", "efsign", "bf16")),
]


@pytest.mark.parametrize(
    ("method", "exchange", "more"), [*OFTEN, *(pytest.param(*case, marks=pytest.mark.thorough) for case in RARELY)]
)
def test_as_the_ordinary_path(method, exchange, more, replays, monkeypatch):
    ranks = 2 if exchange == "all_gather" else 3
    again = run_threads(ranks, lambda collective: steps(collective, method, exchange, more))
    assert len(replays) >= 2 * ranks
    monkeypatch.setattr(programs, "MOST", 0)
    ordinary = run_threads(ranks, lambda collective: steps(collective, method, exchange, more))
    for one, other in zip(again, ordinary, strict=True):
        assert all(map(same, one, other))


class Echo(Collective):
    """A world whose other rank sends what this one does."""

    rank, size = 0, 2

    def all_reduce(self, tensor, operation="sum"):
        if operation == "sum":
            tensor.mul_(2)

    def all_gather(self, tensor, out):
        out.copy_(tensor.expand_as(out))

    def all_to_all(self, send, receive):
        receive.copy_(send[1].expand_as(receive))

    def swap(self, sends, receives):
        for peer, tensor in receives.items():
            tensor.copy_(sends[peer])

    def part(self, ranks):
        return self


class Side:
    """A model of two optimizers, with programs or without."""

    def __init__(self, most):
        self.most, self.scale = most, None
        self.model = nn.ParameterList(torch.zeros(shape) for _, shape in PARAMETERS)
        self.parameters = list(self.model.parameters())
        self.optimizers = [torch.optim.SGD(self.parameters[:2], 0.1), torch.optim.SGD(self.parameters[2:], 0.1)]
        chosen = RunState.of("qsgd", "all_gather", schedule="none", check_drift_every=0).bound(kinds_of(self.model))
        chosen = chosen.stepped_by(kind_of(self.optimizers))
        self.compression = Compression(trained(self.model), chosen, Echo(), lambda: self.scale, unused=True)
        self.compression.meter.sample_every, self.compression.active = 0, True
        self.move()

    def move(self):
        """Let gradients lie elsewhere, in a new bucket; both are used by turns."""
        sizes = [each.numel() for each in self.parameters]
        self.bucket = torch.zeros(sum(sizes))
        parts = zip(self.bucket.split(sizes), self.parameters, strict=True)
        self.gradients = [part.view(parameter.shape) for part, parameter in parts]

    def average(self, numbers, unused):
        self.bucket.copy_(numbers)
        for place in unused:
            self.gradients[place].zero_()
        with mock.patch.object(programs, "MOST", self.most):
            self.compression.before_backward()
            self.compression.reduce(bucket_of(self.compression, self.parameters), self.gradients)
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient

    def step(self, optimizers):
        for optimizer in optimizers:
            self.compression.after_step(self.optimizers[optimizer])
        for parameter in self.parameters:
            parameter.grad = None

    def found(self):
        states = self.compression.groups.states()
        counts = torch.tensor([self.compression.meter.bytes_sent, self.compression.step])
        flags = [flag for flag, _ in self.compression.finite.flags]
        return [self.bucket, counts, *flags, *(each for state in states for each in (state.committed, state.base()))]


METHOD = st.sampled_from(["qsgd", "onebit", "efsign"])


class Training(RuleBasedStateMachine):
    """Any training, with programs and without."""

    def __init__(self):
        super().__init__()
        self.sides = [Side(4), Side(0)]
        self.seed = 0

    def _average(self, unused, spoilt=False):
        self.seed += 1
        numbers = torch.randn(len(self.sides[0].bucket), generator=torch.Generator().manual_seed(self.seed))
        if spoilt:
            numbers[3] = math.inf
        for side in self.sides:
            side.average(numbers, unused)
        self._compare()

    def _compare(self):
        one, other = (side.found() for side in self.sides)
        assert len(one) == len(other)
        assert all(map(same, one, other))

    @initialize(method=METHOD)
    def begin(self, method):
        self.retune(method)
        self.train(4)

    @rule(count=st.integers(3, 6))
    def train(self, count):
        """As most of a training is."""
        for _ in range(count):
            self._average(())
            for side in self.sides:
                side.step((0, 1))
        self._compare()

    @rule(unused=st.sets(st.integers(0, 2)), passes=st.integers(1, 2), steps=st.sets(st.integers(0, 1)))
    def train_in_parts(self, unused, passes, steps):
        """Some parameters without a gradient, several passes, and no or one optimizer that steps."""
        for _ in range(passes):
            self._average(unused)
        for side in self.sides:
            side.step(sorted(steps))
        self._compare()

    @rule()
    def overflow(self):
        self._average((), spoilt=True)
        for side in self.sides:
            side.step((0, 1))
        self._compare()

    @rule(scale=st.sampled_from([None, 2.0, 1024.0]))
    def scale(self, scale):
        for side in self.sides:
            if scale is None or side.scale is None:
                side.scale = None if scale is None else torch.tensor(scale)
            else:
                side.scale.fill_(scale)

    @rule(method=METHOD)
    def retune(self, method):
        for side in self.sides:
            side.compression.retune(method)

    @rule()
    def move(self):
        for side in self.sides:
            side.move()


def train_in_any_way(examples):
    chosen = settings(
        max_examples=examples,
        stateful_step_count=6,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Training, settings=chosen)


def test_any_training(replays):
    train_in_any_way(4)
    assert replays


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_many_trainings(replays):
    train_in_any_way(60)
    assert replays


EXCHANGES = [("all_gather", 2), ("two_shot", 8)]


@pytest.mark.parametrize(("exchange", "ranks"), EXCHANGES)
@pytest.mark.parametrize("method", ["qsgd", "rotated", "onebit"])
def test_a_repeated_step_starts_the_same_by_few_calls(method, exchange, ranks):
    with kernels.using("auto"):
        started = launches(method, exchange, ranks, views=True).average  # without views, and nothing is allocated
        assert started == launches(method, exchange, ranks, recorded=False).average
        counted = calls(method, exchange, ranks)
    assert counted.python <= 60
    assert counted.c <= 60


def test_what_follows_from_the_step_is_computed_anew():
    tape, given = Tape(5), []
    with recording(tape):
        key = mix(7, tape.step)
        tape.add(given.append, [mix(3, key=key) % 2**63 - 1])
        tape.add(given.append, [2**40 + (key >> 32)])
    program = Program(tape, CPU)
    for step in (5, 6):
        given.clear()
        program.replay(step, torch.zeros(()))
        assert given == [mix(7, step, 3) % 2**63 - 1, 2**40 + (mix(7, step) >> 32)]
    assert not tape.void


@pytest.mark.parametrize(
    "use",
    [
        lambda key: RandomBits(8, CPU).draw(key, 0, 8),
        lambda key: permutation(key, 3),
        lambda key: key < 4,
        lambda key: bool(key),
        lambda key: torch.zeros(3) + 1,
        lambda key: torch.zeros(3).sum().item(),
    ],
)
def test_what_cannot_be_made_again(use):
    tape = Tape(5)
    with recording(tape):
        use(mix(7, tape.step))
    assert tape.void


def test_operations_that_write(replays):
    one, flag, tape = torch.ones(4), torch.zeros(()), Tape(0)
    with recording(tape):
        tape.give(flag)
        one[:2].add_(1)
        torch.mul(one, 2.0, out=one)
        one.add_(flag)
        torch._foreach_copy_([one[3:]], [one[:1]])
    assert not tape.void
    one.fill_(1)
    Program(tape, CPU).replay(1, torch.tensor(0.5))
    assert one.tolist() == [4.5, 4.5, 2.5, 4.5]


@pytest.mark.parametrize(("moves", "made"), [(False, 4), (True, 0)])
def test_a_group_keeps_few_programs(moves, made):
    tried = programs.Programs([], [], World(Echo(), CPU, Meter(CPU)), known=True)
    flag = torch.zeros(())

    def ordinary(step):
        if tape := here.tape:
            tape.give(flag)
        return flag

    for step in range(60):
        mode = (step // 2,) if moves else (step % 4,)
        tried.run(mode, step, ordinary)
    assert len(tried._seen) <= 16
    assert len(tried._programs) <= programs.MOST
    assert tried.able is not moves
