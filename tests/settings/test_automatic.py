"""``compressor="auto"``: what it chooses, keeps and says; and the line that says what runs."""

import contextlib
import io
import logging
import re
import socket
import threading
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_module
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import CompressedDDPStrategy, attach
from lightning_compress.codecs import BF16, QSGD, Dense
from lightning_compress.collectives import LocalCollective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.planning import decide as decisions
from lightning_compress.planning import link as probe
from lightning_compress.planning.choose import Auto
from lightning_compress.planning.cost import COPIES, Link, Speeds
from lightning_compress.planning.decide import decide
from lightning_compress.planning.link import Measured
from lightning_compress.planning.summary import label, run_summary
from lightning_compress.settings.automatic import Automatic
from lightning_compress.settings.run_state import RunState
from tests.cases import CASES
from tests.helpers import link as pretended
from tests.helpers.training import Net, digits, fit, loader, parameters, quiet_trainer
from tests.test_laws import CPU, DENSE, LARGE, group_plan

ON_ONE_MACHINE = decisions.on_one_machine
FAST, SLOW = Link(1e-6, 1e12), Link(1e-6, 1e7)
BITS4, BITS8, CODED = QSGD(bits=4), QSGD(bits=8), QSGD(bits=4, coding="entropy")


@pytest.fixture(autouse=True)
def _apart(monkeypatch):
    """Ranks that are threads stand for ranks of several machines."""
    monkeypatch.setattr(decisions, "on_one_machine", lambda ranks, device: False)


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        ([1.0, 0.5, 0.25, 0.12], 3),
        ([1.0, 0.8, 0.8, 0.8], 0),  # to leave float32 takes a quarter
        ([1.0, 0.8, 0.7, 0.65], 2),  # a tenth less than 0.7 would be 0.63
        ([1.0, 0.5, 0.46, 0.44], 3),  # less than a tenth, then more
        ([1.0, 0.5, 0.7, 0.6], 1),
        ([1.0, 2.0, 2.0, 2.0], 0),
        ([1.0], 0),
        ([1.0, 0.5, 0.46, 0.44, 0.43], 4),  # equal numbers: a fiftieth is enough
        ([1.0, 0.5, 0.46, 0.44, 0.435], 3),
        ([1.0, 0.5, 0.46, 0.6, 0.455], 1),
    ],
)
def test_a_coarser_one_has_to_save_a_good_share(seconds, taken):
    assert Automatic().pick(seconds) == taken


def test_a_larger_share_may_be_asked_for():
    assert Automatic(gain=0.6).pick([1.0, 0.5, 0.25, 0.12]) == 2
    assert Automatic(gain=0.0).pick([1.0, 0.5, 0.49, 0.48]) == 3


def test_all_are_safe_with_any_optimizer_and_need_no_feedback():
    assert all(each.safe_with_adam and not each.contractive for each in Automatic.candidates)


def named(numel=1 << 20, dtype=torch.float32):
    weight = nn.Parameter(torch.empty(numel // 256, 256, dtype=dtype, device="meta"))
    return [("weight", weight), ("bias", nn.Parameter(torch.empty(256, dtype=dtype, device="meta")))]


def decided(ranks, exchange="auto", parameters=None, **settings):
    """What all of so many ranks choose."""
    given = RunState.of("auto", exchange, **settings)
    found = run_threads(
        ranks, lambda collective: decide(given, parameters or named(), World(collective, CPU, Meter(CPU)))
    )
    assert len({str(each.compressor) for each in found}) == 1
    assert all(each.chosen.codec == each.compressor == each.method for each in found)
    return found[0].compressor


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(("link", "codec"), [(SLOW, CODED), (FAST, Dense())], ids=["slow", "fast"])
def test_the_link_decides(ranks, link, codec):
    assert decided(ranks, Auto(link=link)) == codec


def test_the_codec_decides(monkeypatch):
    monkeypatch.setattr(probe, "time_link", lambda collective, device: SLOW)
    slow = {"QSGD": Speeds(1e-6, 1e-6)}
    monkeypatch.setattr(probe, "time_codec", lambda codec, device, crowd: slow.get(type(codec).__name__, COPIES))
    assert decided(4) == BF16()


def test_rank_0_decides(monkeypatch):
    monkeypatch.setattr(probe, "time_link", lambda ranks, device: [SLOW, FAST, FAST][ranks.rank])
    assert decided(3) == CODED
    monkeypatch.setattr(probe, "time_link", lambda ranks, device: [FAST, SLOW, SLOW][ranks.rank])
    assert decided(3) == Dense()


@pytest.mark.parametrize(("latency", "codec"), [(1e-4, Dense()), (5e-3, BITS8)], ids=["near", "far"])
def test_a_tiny_model_is_left_alone_unless_round_trips_are_long(latency, codec):
    assert decided(4, Auto(link=Link(latency, 1e9)), named(1 << 12)) == codec


@pytest.mark.parametrize("link", [SLOW, FAST])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_saves_nothing_where_gradients_have_16_bits(dtype, link):
    assert decided(4, Auto(link=link), named(dtype=dtype)) == (Dense() if link is FAST else CODED)


@pytest.mark.parametrize(
    ("exchange", "codec"),
    [("all_reduce", BF16()), ("two_shot", CODED), ({"name": "hierarchical", "node_size": 2}, BITS4)],
    ids=str,
)
def test_of_those_that_the_exchange_carries(exchange, codec):
    assert decided(4, exchange) == codec


def test_the_link_is_measured_once_for_all_of_them(monkeypatch):
    measured = []
    monkeypatch.setattr(probe, "time_link", lambda ranks, device: measured.append(ranks.rank) or SLOW)
    decided(4, "two_shot")
    assert sorted(measured) == [0, 1, 2, 3]


def test_nothing_is_measured_where_that_was_forbidden(monkeypatch):
    monkeypatch.setattr(probe, "time_link", None)
    assert decided(4, deterministic=True) == BITS4


def test_on_one_machine_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(decisions, "on_one_machine", ON_ONE_MACHINE)
    monkeypatch.setattr(probe, "time_link", None)
    assert decided(4) == Dense()
    assert decided(4, Auto(link=SLOW)) == CODED  # the user knows better


def test_ranks_with_networks_of_their_own_are_apart(monkeypatch):
    networks = iter(["net:[1]", "net:[1]", "net:[1]", "net:[2]"])
    lock = threading.Lock()

    def readlink(path):
        with lock:
            return next(networks)

    monkeypatch.setattr(decisions.os, "readlink", readlink)
    assert run_threads(2, lambda ranks: ON_ONE_MACHINE(ranks, CPU)) == [True, True]
    assert run_threads(2, lambda ranks: ON_ONE_MACHINE(ranks, CPU)) == [False, False]


@pytest.mark.parametrize("noise", [0.85, 1.0, 1.15])
def test_equal_links_are_rounded_to_the_same(noise):
    measured = Measured(None, {"ranks": Link(9e-5 * noise, 1.17e8 * noise)}, {}, 1)
    link = measured.rounded().links["ranks"]
    assert (link.latency_s, 8 * link.bytes_per_s) == (pytest.approx(1e-4), pytest.approx(1e9))


# ---- what is said


@pytest.mark.parametrize(
    ("compressor", "ranks", "summary"),
    [
        ({"name": "topk", "density": 0.01}, 8, "topk (density 0.01) by split_gather, "),
        ({"name": "topk", "density": 0.01}, 2, "topk (density 0.01) by all_gather, "),
        ("bf16", 4, "bf16 by all_reduce, 2 x fewer bytes"),
        ("onebit", 4, "onebit (block 1024) by two_shot, "),
        ("none", 4, "compression is off: compressor='none' sends gradients as they are"),
        ("topk", 1, "compression is off: there is one rank"),
        ("dgc", 1, "compression is off: there is one rank; what clips or corrects gradients still works"),
        ("powersgd", 2, "powersgd (rank 2) by exchanges of its own, "),
        ("dgc", 2, "dgc (density 0.001) by all_gather, "),
        ({"name": "topk", "density": 0.9}, 2, "topk (density 0.9) by all_gather, 1.8 x as many bytes as float32"),
    ],
    ids=str,
)
def test_summary(compressor, ranks, summary):
    settings = RunState.of(compressor, Auto(link=SLOW))
    one = lambda collective: run_summary(settings, named(), World(collective, CPU, Meter(CPU)))  # noqa: E731
    found = run_threads(ranks, one) if ranks > 1 else [one(LocalCollective())]
    assert all(each.summary == found[0].summary for each in found)
    assert found[0].summary.startswith(summary)
    assert found[0].line == f"lightning_compress: {found[0].summary}"
    assert bool(found[0].warning) == ("as many bytes" in summary)


def test_one_rank_says_that_it_looks_at_nothing():
    settings = RunState.of("rotated", on_nonfinite="raise")
    said = run_summary(settings, named(), World(LocalCollective(), CPU, Meter(CPU))).warning
    assert said == "on_nonfinite=raise has no effect on one rank"


@pytest.mark.parametrize("more", [{}, {"on_nonfinite": "skip"}, {"deterministic": True}], ids=str)
def test_auto_says_that_it_chose_float32(more):
    """Also where a hook averages it, and not DistributedDataParallel."""
    given = RunState.of("auto", Auto(link=FAST), **more)

    def rank(ranks):
        world = World(ranks, CPU, Meter(CPU))
        return run_summary(decide(given, named(), world), named(), world).summary

    said = "compression is off: auto chose float32, because this link is as fast as the compressor"
    assert run_threads(2, rank) == [said] * 2


def test_why_it_is_off():
    def said(**settings):
        given = RunState.of(**settings)
        return run_threads(2, lambda ranks: run_summary(given, named(), World(ranks, CPU, Meter(CPU))).summary)[0]

    assert "falls back to all_reduce of float32, since all_gather would save too little" in said(
        compressor="topk", exchange=Auto("dense", FAST)
    )
    assert "no parameter has 8388608 elements" in said(compressor="topk", min_numel=1 << 23)
    assert ", after 7 dense steps" in said(compressor="topk", warmup_steps=7)
    assert said(compressor="topk", schedule="dgc").endswith(", density by schedule")
    ruled = said(compressor="topk", rules=[{"match": "no*", "compressor": "onebit"}])
    assert ruled.startswith("topk (density 0.01) and 1 rule by all_gather, ")


IDLE = {
    "exchange": "two_shot",
    "warmup_steps": 5,
    "error_feedback": {"decay": 0.5, "follows_lr": True, "dtype": "bfloat16"},
    "min_numel": 7,
    "rules": [{"match": "b", "compressor": "none"}],
    "on_drift": "resync",
    "check_drift_every": 7,
}


def test_what_comes_to_nothing_without_a_compressor_is_said():
    def warned(**settings):
        given = RunState.of(**settings)

        def rank(ranks):
            world = World(ranks, CPU, Meter(CPU))
            return run_summary(decide(given, named(), world), named(), world).warning

        return run_threads(2, rank)[0]

    said = warned(compressor="none", **IDLE)
    assert "sends gradients as they are, and exchange=TwoShot" in said
    assert all(f" {name}=" in said for name in IDLE)
    assert warned(compressor="none", error_feedback=False, seed=3) == ""
    for more in ({"deterministic": True}, {"on_nonfinite": "skip"}):  # then the hook is there
        assert "no effect" not in warned(compressor="none", **IDLE, **more)
    rules = [{"match": "a.*", "compressor": "none"}]
    assert warned(compressor="auto", exchange=Auto(link=FAST), rules=rules) == ""  # which chose none
    said = warned(compressor="auto", exchange=Auto(link=FAST), on_drift="resync", check_drift_every=7)
    assert "on_drift=resync, check_drift_every=7 has no effect" in said


def test_settings_of_a_residual_that_is_not_kept_are_said():
    def warned(**settings):
        given = RunState.of(**settings)
        return run_threads(2, lambda ranks: run_summary(given, named(), World(ranks, CPU, Meter(CPU))).warning)[0]

    said = warned(compressor="rotated", error_feedback={"decay": 0.5, "dtype": "bfloat16"})
    assert "error_feedback={'decay': 0.5, 'dtype': torch.bfloat16} has no effect; leave it out" in said
    assert warned(compressor="onebit", error_feedback={"decay": 0.5}) == ""


def test_a_rule_for_what_stays_float32_is_said():
    def warned(match):
        given = RunState.of("topk", rules=[{"match": match, "compressor": "efsign"}])
        return run_threads(2, lambda ranks: run_summary(given, named(), World(ranks, CPU, Meter(CPU))).warning)[0]

    assert "The rule {'match': ['bias']} has no effect" in warned("bias")
    assert warned("weight") == ""


@pytest.mark.parametrize("case", [case for case in CASES if case.name != "none"], ids=lambda case: case.name)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ratio_is_that_of_the_plans(case, ranks):
    held = [(segment.name, nn.Parameter(torch.empty(segment.shape, device="meta")))
            for layout in (DENSE, LARGE) for segment in layout.segments]  # fmt: skip
    settings = RunState.of(case.codec, Auto(), rules=[{"match": ["bias", "norm"], "compressor": "none"}], min_numel=1)

    def rank(collective):
        made = run_summary(settings, held, World(collective, CPU, Meter(CPU)))
        return made.ratio, group_plan(case.codec, Auto(), collective, Meter(CPU)).cost.bytes_sent

    for ratio, sent in run_threads(ranks, rank):
        dense = 2 * (ranks - 1) / ranks * 4 * (DENSE.numel + LARGE.numel)
        assert ratio == pytest.approx(dense / sent, rel=0.02)  # a section more or less, of 16 bytes


def test_labels():
    assert label(RunState.of({"name": "topk", "density": 0.2, "indices": "rice"}).compressor) == (
        "topk (density 0.2, indices rice)"
    )
    assert label(BITS8) == "qsgd (bits 8)"
    assert label(BF16()) == "bf16"


# ---- in real processes


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(512, 256)

    def forward(self, x):
        return self.linear(x)


def _measuring(link):
    """Have this rank measure that link, as if the others were elsewhere."""
    decisions.on_one_machine = lambda ranks, device: False
    probe.time_link = lambda collective, device: link


def steps(compression, model, first, last, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for step in range(first, last):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 512)).square().mean().backward()
        optimizer.step()


def made(link, compressor="auto", **settings):
    _measuring(link)
    torch.manual_seed(0)
    model = DistributedDataParallel(Flat())
    return model, attach(model, compressor, **settings)


def _attached():
    found = {}
    for name, link in (("slow", SLOW), ("fast", FAST)):
        model, compression = made(link)
        steps(compression, model, 0, 3)
        try:
            compression.retune("topk")
            refused = ""
        except ValueError as error:
            refused = str(error)
        stats = compression.stats()
        found[name] = (compression.active, len(model._comm_hooks), stats["ratio"], refused, compression.summary)
        compression.close()
    _measuring(pretended.SLOW)
    return found


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_float32_is_left_to_ddp(pools, size):
    for found in pools[size].run(_attached):
        active, hooks, ratio, refused, summary = found["slow"]
        assert (active, hooks, refused) == (True, 1, "")
        assert ratio > 5
        assert summary.startswith("qsgd (bits 4, coding entropy) by all_gather, ")
        active, hooks, ratio, refused, summary = found["fast"]
        assert (active, hooks, ratio) == (False, 0, 1.0)
        assert "compressor='auto', which chose float32 here and leaves" in refused
        assert summary == "compression is off: auto chose float32, because this link is as fast as the compressor"


def _resumed(first, second, host=None):
    """Parameters of a whole run and of one that was resumed where another link is measured, and what these ran."""
    model, compression = made(first)
    steps(compression, model, 0, 6)
    whole = parameters(model).numpy()
    compression.close()
    model, compression = made(first)
    steps(compression, model, 0, 3)
    state, ran = compression.state_dict(), str(compression.settings.compressor)
    weights = {name: each.clone() for name, each in model.module.state_dict().items()}
    real = socket.gethostname
    socket.gethostname = (lambda: host) if host else real
    try:
        again, resumed = made(second)
        alone = str(resumed.settings.compressor)
        again.module.load_state_dict(weights)
        resumed.load_state_dict(state)
        steps(resumed, again, 3, 6)
    finally:
        socket.gethostname = real
        _measuring(pretended.SLOW)
    runs = resumed.stats()["ratio"] if resumed.active else 1.0
    compression.close()
    resumed.close()
    return np.array_equal(whole, parameters(again).numpy()), ran, alone, str(resumed.settings.compressor), runs


def test_what_was_chosen_goes_on(pools):
    for same, ran, alone, now, ratio in pools[2].run(_resumed, SLOW, FAST):
        assert (ran, alone, now) == (str(CODED), str(Dense()), str(CODED))  # it would be left to DDP now
        assert same
        assert ratio > 5
    for _, ran, alone, now, ratio in pools[2].run(_resumed, FAST, SLOW):
        assert (ran, alone, now) == (str(Dense()), str(CODED), str(Dense()))
        assert ratio == pytest.approx(1.0, rel=0.01)


def test_elsewhere_it_is_chosen_anew(pools):
    for _, ran, _, now, ratio in pools[2].run(_resumed, SLOW, FAST, "another"):
        assert (ran, now, ratio) == (str(CODED), str(Dense()), 1.0)
    for _, ran, _, now, ratio in pools[2].run(_resumed, FAST, SLOW, "another"):
        assert (ran, now) == (str(Dense()), str(CODED))
        assert ratio > 5


def lightning(folder, compressor, link, resume=None, host=None, epochs=2, **settings):
    """A fit of epochs of three steps with checkpoints."""
    _measuring(link)
    torch.manual_seed(1)
    model = Net()
    strategy = CompressedDDPStrategy(compressor, **settings)
    real = socket.gethostname
    socket.gethostname = (lambda: host) if host else real
    said = Lines()
    loggers = ["lightning_compress", rank_zero_module.log.name]  # that of the Lightning which was imported last
    for name in loggers:
        logging.getLogger(name).addHandler(said)
    logger = CSVLogger(folder, "log", "")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        options = {"logger": logger, "callbacks": [save], "enable_checkpointing": True, "max_epochs": epochs}
        trainer = quiet_trainer(strategy, limit_train_batches=3, **options)
        trainer.fit(model, loader(digits()), ckpt_path=resume)
    socket.gethostname = real
    _measuring(pretended.SLOW)
    for name in loggers:
        logging.getLogger(name).removeHandler(said)
    about = re.compile(r"lightning_compress: (?!beside )|the checkpoint was trained")
    lines = [each for each in said.lines if about.match(each)]
    warned = [str(each.message) for each in caught if "begins again" in str(each.message)]
    stats = strategy.comm_stats()
    runs = strategy.compression.settings.compressor
    hparams = dict(logger.experiment.hparams) if trainer.is_global_zero else {}
    return parameters(model).numpy(), runs, lines, warned, stats, hparams


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


FIGURES = ["sent", "average", "step"]
"""What the lines at the end of a fit are about."""


def subjects(lines):
    return [line.split(": ")[1] for line in lines]


def _kept(folder, host):
    whole, ran, *_ = lightning(folder, "auto", SLOW)
    again, now, lines, warned, _, hparams = lightning(
        f"{folder}/again", "auto", FAST, f"{folder}/epoch=0.ckpt", host=host
    )
    return np.array_equal(whole, again), str(ran), str(now), lines, warned, hparams


def test_a_resumed_fit_goes_on_with_it(pools, tmp_path):
    ranks = pools[2].run(_kept, str(tmp_path), None)
    for rank, (same, ran, now, lines, warned, hparams) in enumerate(ranks):
        assert (ran, now) == (str(CODED), str(CODED))
        assert same
        assert not warned
        if rank == 0:
            assert lines[0].startswith("lightning_compress: qsgd (bits 4, coding entropy) by all_gather, ")
            assert subjects(lines[1:]) == FIGURES
            assert hparams["lightning_compress/compressor"] == "qsgd (bits 4, coding entropy)"


def test_a_resumed_fit_elsewhere_chooses_anew(pools, tmp_path):
    for _, ran, now, _, warned, _ in pools[2].run(_kept, str(tmp_path), "another"):
        assert (ran, now) == (str(CODED), str(Dense()))
        assert not warned


def _crossed(folder, first, second):
    lightning(folder, first, SLOW, epochs=1)
    _, now, lines, warned, *_ = lightning(f"{folder}/again", second, SLOW, f"{folder}/epoch=0.ckpt")
    return str(now), lines, warned


@pytest.mark.parametrize(
    ("first", "second", "runs"), [("bf16", "auto", CODED), ("auto", "bf16", BF16()), ("auto", "none", Dense())]
)
def test_from_a_named_one_to_auto_and_back(pools, tmp_path, first, second, runs):
    for rank, (now, lines, warned) in enumerate(pools[2].run(_crossed, str(tmp_path), first, second)):
        assert now == str(runs)  # what is named runs, what is to be chosen is chosen
        if second == "none":  # which keeps no state
            assert rank or "this run does not compress" in warned[0]
            continue
        assert not warned
        assert subjects(lines[2:]) == ([] if rank else FIGURES)
        assert bool(lines) == (rank == 0)
        assert rank or "continues with {'name': " in lines[0]


def _named(link):
    """The ratio of a named compressor, by what a noisy timing says of the link."""
    _measuring(link)
    strategy = CompressedDDPStrategy({"name": "topk", "density": 0.02})
    fit(strategy, 2, partial(Net, "sgd"))
    _measuring(pretended.SLOW)
    return strategy.comm_stats()["ratio"], strategy.comm_stats()["summary"]


def test_what_is_named_runs_whatever_a_timing_says(pools):
    found = [pools[2].run(_named, link)[0] for link in (SLOW, FAST, Link(1e-9, 1e15))]
    assert len({ratio for ratio, _ in found}) == 1
    assert found[0][0] > 8
    assert all(summary.startswith("topk (density 0.02) by all_gather, ") for _, summary in found)


def _said(folder, compressor):
    _, _, lines, _, stats, hparams = lightning(folder, compressor, SLOW, epochs=1)
    return lines, stats["summary"], stats["ratio"], hparams


@pytest.mark.parametrize("compressor", ["topk", "none", "auto"])
def test_the_line_the_figures_and_the_loggers_say_the_same(pools, tmp_path, compressor):
    first, second = pools[2].run(_said, str(tmp_path), compressor)
    lines, summary, ratio, hparams = first
    assert not second[0]
    assert lines[0].startswith(f"lightning_compress: {summary}")
    assert subjects(lines[1:]) == ([] if compressor == "none" else FIGURES)
    assert hparams["lightning_compress/summary"] == summary
    assert hparams["lightning_compress/ratio"] == pytest.approx(ratio, rel=0.1 if compressor == "auto" else 0.02)
    assert "lightning_compress/summary: " in (tmp_path / "log" / "hparams.yaml").read_text()


def _bare():
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        _, compression = made(SLOW, {"name": "topk", "density": 0.9})
        compression.close()
    return shown.getvalue()


def test_a_bare_model_says_it_too(pools):
    first, second = pools[2].run(_bare)
    assert first.startswith("lightning_compress: topk (density 0.9) by all_gather, 1.8 x as many bytes as float32\n")
    assert not second
