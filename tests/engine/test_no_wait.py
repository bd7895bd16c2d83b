"""On an accelerator nothing waits for the device: tensors of the device "meta" have no numbers to look at."""

import pytest
import torch

from lightning_compress.codecs import Codec
from lightning_compress.collectives import World
from lightning_compress.collectives.collective import Collective
from lightning_compress.collectives.counting import Meter
from lightning_compress.engine.group import Group
from lightning_compress.reducers import Reducer
from lightning_compress.settings.run_state import RunState
from tests.cases import CASES

META = torch.device("meta")
PARAMETERS = [("weight", (60, 101)), ("bias", (37,)), ("other", (67, 83))]
WAITS = {"topk_2bit", "topk_1bit", "topk_rice", "threshold", "threshold_words", "adaptive", "adaptive_int16", "wangni"}
WAITS |= {"qsgd_elias", "atomo", "rows"}
WAITS |= {"adam_mask", "adam_mask_moment"}  # in the first steps alone, until there is a moment
"""Methods whose messages are made on the host, as their docstrings say."""


class Echo(Collective):
    """A world whose other ranks send what this one does."""

    rank, size = 1, 4

    def all_reduce(self, tensor, operation="sum"):
        if operation == "sum":
            tensor.mul_(4)

    def all_gather(self, tensor, out):
        out.copy_(tensor.expand_as(out))

    def all_to_all(self, send, receive):
        receive.copy_(send)

    def swap(self, sends, receives):
        for tensor in receives.values():
            tensor.zero_()

    def part(self, ranks):
        return self


@pytest.fixture
def no_numbers_from_the_host(monkeypatch):
    """``torch.tensor(3, device="cuda")`` copies from memory that the device cannot read by itself, and waits."""

    def watch():
        for name in ("tensor", "as_tensor"):
            real = getattr(torch, name)

            def watched(*given, real=real, device=None, **options):
                there = isinstance(given[0], torch.Tensor) and not given[0].is_cpu
                assert device is None or torch.device(device).type == "cpu" or there, f"{real.__name__}({given})"
                return real(*given, device=device, **options)

            monkeypatch.setattr(torch, name, watched)

    return watch


def steps(settings, watch, scale=None):
    meter = Meter(META)
    group = Group(PARAMETERS, settings, World(Echo(), META, meter), unused=False)
    for step in range(3):
        if step == 1:
            watch()
        rejected = group.reduce([torch.empty(shape, device=META) for _, shape in PARAMETERS], step, scale).isnan()
        for state in group.states.values():
            state.commit(rejected, group.names)


LONG = [("dct", "all_gather"), ("fft", "two_shot")]
"""Of the transforms, which take seconds, one exchange each is enough in most runs."""


@pytest.mark.parametrize(
    ("case", "exchange"),
    [
        pytest.param(case, exchange, id=f"{case.name}-{exchange}", marks=marks)
        for case in CASES
        for exchange in ("all_gather", "two_shot", "all_reduce")
        for marks in [pytest.mark.thorough if (case.name, exchange) in LONG else ()]
    ],
)
def test_a_step(case, exchange, no_numbers_from_the_host):
    if isinstance(case.codec, Codec) and not case.codec.runs_on(torch.device("cuda")):
        pytest.skip("it runs on CPUs only")
    try:
        settings = RunState.of(case.codec, "auto" if isinstance(case.codec, Reducer) else exchange)
    except ValueError as error:
        pytest.skip(str(error))
    if case.name in WAITS:
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            steps(settings, no_numbers_from_the_host)
    else:
        steps(settings, no_numbers_from_the_host)


@pytest.mark.parametrize(
    ("corrected", "more"),
    [("dgc", {}), ({"name": "dgc", "nesterov": True}, {"local_clip_norm": 0.5}), ("onebit_adam", {})],
)
@pytest.mark.parametrize("exchange", ["all_gather", "two_shot"])
def test_a_step_of_a_correction(corrected, more, exchange, no_numbers_from_the_host):
    if exchange == "two_shot" and corrected != "onebit_adam":
        pytest.skip("two_shot is another algorithm for sparsifiers")
    steps(RunState.of(corrected, exchange, **more), no_numbers_from_the_host)


@pytest.mark.parametrize(
    "changes",
    [
        {"error_feedback": {"dtype": "bfloat16"}},
        {"local_clip_norm": 1.0},
        {"error_feedback": {"decay": 0.9}},
        {"warmup_steps": 9},
        {"error_feedback": False},
        {"deterministic": True},
        {"error_feedback": "loco"},
    ],
    ids=str,
)
def test_a_step_of_other_settings(changes, no_numbers_from_the_host):
    scale = torch.ones((), device=META)
    steps(RunState.of("onebit", "all_gather", **changes), no_numbers_from_the_host, scale)
