"""Kernels do what tensor operations do, bit by bit; and what was chosen is the same on all ranks."""

import numpy as np
import pytest
import torch

from lightning_compress import kernels
from lightning_compress.codecs import CODECS
from lightning_compress.collectives import World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.core.source import Memory, Source
from lightning_compress.core.vector import Vector, kernel_of
from lightning_compress.corrections.correction import zero_where_zero
from lightning_compress.engine.group import Group
from lightning_compress.exchanges.sparse import coding
from lightning_compress.settings.run_state import RunState
from tests.cases import kernel_settings

CPU = torch.device("cpu")
LAYOUT = Layout.of([("weight", (300, 1900)), ("bias", (37,))])  # more than a piece, and a rest
METHODS = [given for _, given in kernel_settings("numba")]


@pytest.fixture
def both():
    """Run something with kernels and without."""
    if kernels.compiler(CPU) is None:
        pytest.skip("numba is not installed")

    def run(program):
        fast = program()
        with kernels.using("torch"):
            return fast, program()

    return run


def _messages(given):
    settings = dict(given)
    plan = CODECS[settings.pop("name")](**settings).plan(LAYOUT, CPU)
    sent, left = [], []
    for rank in range(3):
        vector = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(rank)) ** 3
        vector[1000:3000] = -0.0 if rank else 1e-30
        vector[5000:9000] *= torch.logspace(-28, -38, 4000)
        message = torch.zeros(plan.message_size, dtype=torch.uint8)
        if given.get("correlated"):
            plan.correlate(7, rank, 3)
        plan.encode_from(Source(vector.clone()), None, message, 7 + rank)
        again = message.clone()
        plan.encode(vector, message, 7 + rank)
        assert message.equal(again)
        sent.append(message)
        left.append(vector)
    return plan, torch.stack(sent), left


@pytest.mark.parametrize("given", METHODS, ids=str)
def test_same_messages_and_same_rest(given, both):
    (_, fast, left), (_, slow, wanted) = both(lambda: _messages(given))
    assert fast.equal(slow)
    for one, other in zip(left, wanted, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("given", METHODS, ids=str)
def test_same_sums(given, accumulate, both):
    def program():
        plan, messages, _ = _messages(given)
        out = torch.ones(LAYOUT.numel)
        plan.decode(messages, out, 1 / 3, accumulate)
        return out

    fast, slow = both(program)
    assert fast.equal(slow)


@pytest.mark.parametrize("damaged", [False, True])
def test_sums_in_pieces(damaged, both):
    """Also of messages whose places are out of order."""

    def program():
        plan, messages, _ = _messages({"name": "topk", "density": 0.02})
        if damaged:
            messages = messages.roll(4, 1)
            messages.view(torch.int32)[:, 0] = 5
        whole, memory = torch.ones(2, LAYOUT.numel)
        pieces = [memory[span] for span in (slice(segment.offset, segment.end) for segment in LAYOUT.segments)]
        plan.decode(messages, whole, 1 / 4, accumulate=False)
        out = Memory(pieces, kernel_of(CPU)).place or memory
        plan.decode(messages, out, 1 / 4, accumulate=False)
        return whole, memory

    (whole, pieces), (wanted, same) = both(program)
    for each in (whole, pieces, same):
        assert torch.equal(each.nan_to_num(9.0), wanted.nan_to_num(9.0))


@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
def test_adding_gradients(bad, both):
    def program():
        generator = torch.Generator().manual_seed(1)
        committed, memory = torch.randn(2, LAYOUT.numel, generator=generator)
        gradients = memory.split([each.numel for each in LAYOUT.segments])
        if bad is not None:
            gradients[1][3] = bad
        vector, pending = Vector(Memory(list(gradients), kernel_of(CPU))), torch.empty(LAYOUT.numel)
        vector.send(pending, committed)
        return vector.source.into(pending), bool(vector.flag.isnan()), memory + committed

    (pending, spoilt, wanted), (slow, also, _) = both(program)
    assert spoilt == also == (bad is not None)
    if not spoilt:
        assert pending.equal(wanted)
        assert slow.equal(wanted)


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("nesterov", [False, True])
def test_velocities(nesterov, clip, both, monkeypatch):
    """Kernels copy no gradient, unless it is not finite."""
    take = Vector.take

    def checked(vector, name):
        assert vector.step == 2 or not kernels.compiler(CPU)
        return take(vector, name)

    monkeypatch.setattr(Vector, "take", checked)

    def rank(collective):
        method = {"name": "dgc", "density": 0.01, "nesterov": nesterov}
        settings = RunState.of(method, "all_gather", local_clip_norm=clip)
        shapes = [(each.name, each.shape) for each in LAYOUT.segments]
        group = Group(shapes, settings, World(collective, CPU, Meter(CPU)))
        generator, found = torch.Generator().manual_seed(collective.rank), []
        for step in range(4):
            memory = torch.randn(LAYOUT.numel, generator=generator)
            gradients = list(memory.split([each.numel for each in LAYOUT.segments]))
            gradients[0][17] = torch.inf if step == 2 else 1.0
            rejected = group.reduce(gradients, step, None).isnan()
            found += gradients
            for state in group.states.values():
                state.commit(rejected, group.names)
        return found + [state.committed for state in group.states.values()]

    fast, slow = both(lambda: [each for found in run_threads(2, rank) for each in found])
    for one, other in zip(fast, slow, strict=True):
        assert torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0))


@pytest.mark.parametrize("numel", [31, 64, 9001])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.45, 1.0])
def test_numbers_of_which_many_are_zero(numel, share, both):
    def program():
        generator = torch.Generator().manual_seed(numel)
        values = torch.randn(numel, generator=generator) * (torch.rand(numel, generator=generator) < share)
        values[3:7] = torch.tensor([torch.nan, -0.0, torch.inf, 1e-45])
        message, out = torch.zeros(16 + 4 * numel, dtype=torch.uint8), torch.full((numel,), 7.0)
        used = coding.write(values, message)
        coding.read(message[:used], out)
        places, found = coding.read_entries(message[:used], numel)
        refused = []
        for count in (int(message[0]), int(message[0]) ^ 1):
            message[16:20] ^= 255
            message[0] = count
            try:
                coding.read(message[:used], torch.empty(numel))
            except ValueError:
                refused.append(count)
        return used, refused, message, out, found, coding.indices_of(values), values[:0] if places is None else places

    (*fast, last), (*slow, other) = both(program)
    assert fast[:2] == slow[:2]
    for one, wanted in zip([*fast[2:], last], [*slow[2:], other], strict=True):
        assert np.array_equal(one.numpy(), wanted.numpy(), equal_nan=True)
        assert one.dtype == wanted.dtype


@pytest.mark.parametrize("numel", [0, 31, 64, 9001])
def test_what_is_forgotten_where_nothing_was_left(numel, both):
    generator = torch.Generator().manual_seed(numel)
    special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, 1e-45, 1.0])
    target, source = special[torch.randint(6, (2, numel), generator=generator)]

    def program():
        zero_where_zero(out := target.clone(), source)
        return out

    for out in both(program):
        assert out.numpy().tobytes() == torch.where(source == 0, 0.0, target).numpy().tobytes()


@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
def test_copying_gradients(bad):
    if kernels.compiler(CPU) is None:
        pytest.skip("numba is not installed")
    gradients = [torch.randn(numel) for numel in (1000, 0, 37)]
    if bad is not None:
        gradients[0][3] = bad
    joined = torch.cat(gradients)
    for pieces in (gradients, joined.split([1000, 0, 37])):  # in memory of their own, and side by side
        vector, sent = (Vector(Memory([each for each in pieces if len(each)], kernel_of(CPU))) for _ in range(2))
        assert vector.whole().equal(joined.nan_to_num(0.0, 0.0, 0.0) * (bad is None))
        sent.send()
        assert sent.source.into(torch.full_like(joined, 7.0)).equal(vector.whole())
        for each in (vector, sent):
            assert each.flag.isnan() == (bad is not None)
            assert each.nonfinite == [0] * (bad is not None)


@pytest.mark.parametrize("limit", [torch.inf, 3.0, 2.0])
def test_gradients_are_read_in_parts(limit):
    if kernels.compiler(CPU) is None:
        pytest.skip("numba is not installed")
    memory, addend = torch.arange(-2.0, 98.0).clamp(max=3.0), torch.randn(100)
    pieces = [memory[60:], memory[:5], memory[5:60]]
    vector = Vector(Memory(pieces, kernel_of(CPU)), limit=limit)
    vector.send(torch.empty(100), addend)
    expected = torch.cat(pieces) + addend
    for span in (slice(0, 7), slice(7, 41), slice(41, 45), slice(45, 100)):
        got = vector.source.part(span).into(torch.empty(span.stop - span.start))
        within = pieces[0].abs().max() <= limit or (span.start > 40 and torch.cat(pieces)[span].abs().max() <= limit)
        assert got.equal(expected[span] * within)
    assert vector.flag.isnan() == (limit < 3)
    assert vector.nonfinite == ([0, 2] if limit < 3 else [])


def test_random_bits_of_a_tile_are_those_of_the_stream(both):
    """A key whose state wraps around, and a piece that does not begin at 0."""
    given = {"name": "rotated", "bits": 8}
    (_, fast, _), (_, slow, _) = both(lambda: _messages(given))
    assert np.array_equal(fast.numpy(), slow.numpy())


def test_a_numba_that_cannot_be_imported_is_as_none_and_said_once(monkeypatch):
    def refuse(name):
        raise ImportError("Numba needs NumPy 2.4 or less. Got NumPy 2.5.")

    kernels._installed.cache_clear()
    monkeypatch.setattr(kernels, "import_module", refuse)
    monkeypatch.setattr(kernels, "find_spec", lambda name: name)
    try:
        with pytest.warns(UserWarning, match="Got NumPy 2.5") as warned:
            assert [kernels.compiler(CPU) for _ in range(3)] == [None] * 3
        assert len(warned) == 1
    finally:
        kernels._installed.cache_clear()


def _doubled(numbers):
    return 2 * numbers


def test_where_no_folder_can_be_written_to_loops_are_compiled_in_every_process(monkeypatch):
    compilers = pytest.importorskip("lightning_compress.kernels.numba")
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    compilers._warn.cache_clear()
    with pytest.warns(UserWarning, match="set NUMBA_CACHE_DIR to a writable folder"):
        compiled = compilers.kernel(_doubled)
    assert compiled(np.ones(3)).tolist() == [2, 2, 2]
