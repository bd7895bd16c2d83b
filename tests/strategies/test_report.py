"""What a fit says before it begins, at its end, and where it is likely to disappoint."""

import logging
import warnings
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.rank_zero import rank_zero_module

from lightning_compress import CommunicationMonitor, CompressedDDPStrategy, LocalSGDStrategy
from lightning_compress.planning import payoff
from lightning_compress.strategies import report
from lightning_compress.strategies.advice import FEW_STEPS
from lightning_compress.strategies.report import StepClock, size
from tests.helpers.training import Net, fit


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


class Words(Net):
    """Looks the pixels up."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.shades = torch.nn.Embedding(17, 64)
        self.head = torch.nn.Linear(64, 10)

    def forward(self, images):
        return self.head(self.shades((8 * images + 8).long()).mean((1, 2, 3)))


class Marks(Callback):
    """Writes down when training begins, as a progress bar does."""

    def __init__(self, lines):
        self.lines = lines

    def on_train_start(self, trainer, module):
        self.lines.said.append("the progress bar begins")


class Measures(Callback):
    """Measures every second step."""

    def on_train_start(self, trainer, module):
        trainer.strategy.measure_every(2)


@contextmanager
def listening():
    """The lines that are logged inside."""
    lines, loggers = Lines(), {"lightning.pytorch.utilities.rank_zero", rank_zero_module.log.name}
    for logger in map(logging.getLogger, loggers):
        logger.addHandler(lines)
        logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        for logger in map(logging.getLogger, loggers):
            logger.removeHandler(lines)


def _said(strategy, steps=6, make=Net, callbacks=()):
    """The lines and the warnings of a fit."""
    with listening() as lines, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(strategy, steps, make, callbacks=[*callbacks, Marks(lines)], quiet=False)
    said = list(dict.fromkeys(lines.said))
    return said, [str(each.message) for each in caught]


def _of(name):
    return _said(CompressedDDPStrategy(name))


def _measured():
    return _said(CompressedDDPStrategy("rotated"), callbacks=[Measures()])


def test_a_fit_says_what_runs_first_and_what_it_sent_last(pools):
    (said, _), (others, _) = pools[2].run(_of, "rotated")
    ours = [each for each in said if each.startswith("lightning_compress: ") or "progress bar" in each]
    assert ours[0].startswith("lightning_compress: rotated (bits 4) by all_gather, 5.1 x fewer bytes")
    assert ours[1] == "the progress bar begins"
    assert [each.split(": ")[1] for each in ours[2:]] == ["sent", "average", "step"]
    assert "all ranks are on this machine, where DDP was faster in our runs: write strategy='ddp'" in ours[4]
    assert "in 6 steps; float32 would send" in ours[2]
    assert "x as much" in ours[2]
    assert "were hidden behind the backward pass (in the first step, which also loads kernels)" in ours[3]
    assert not any(each.startswith("lightning_compress: sent") for each in others)


def test_a_later_step_says_nothing_of_kernels(pools):
    (said, _), _ = pools[2].run(_measured)
    *_, average, _ = [each for each in said if each.startswith("lightning_compress: ")]
    assert average.endswith("were hidden behind the backward pass")


def _probed(able):
    """A fit over something that counts as a network, whose link nobody has measured: is this rank able to?"""
    with mock.patch.object(payoff, "on_one_machine", return_value=False), mock.patch.object(report, "LONG", 0.0):
        late = able or dist.get_rank()
        with mock.patch.object(report.StepClock, "seconds", 1.0 if late else -1.0):
            return _said(CompressedDDPStrategy("qsgd", "all_gather"))[0][-1]


@pytest.mark.parametrize("able", [True, False])
def test_all_ranks_measure_an_unknown_link_or_none_does(pools, able):
    said, _ = pools[2].run(_probed, able)
    assert ("(predicted)" in said and "measured at the end" in said) == able
    assert ("; 'lightning-compress advise' predicts what DDP would take" in said) != able


def test_what_does_not_compress_has_no_figures(pools):
    (said, _), _ = pools[2].run(_of, "none")
    assert sum(each.startswith("lightning_compress: ") for each in said) == 1


def _monitored():
    return _said(CompressedDDPStrategy("rotated"), callbacks=[CommunicationMonitor(summary=True)])


def test_a_table_takes_the_place_of_the_lines(pools):
    (said, warned), _ = pools[2].run(_monitored)
    assert not any("lightning_compress: sent" in each for each in said)
    assert any("CommunicationMonitor logs nothing: the Trainer has no logger" in each for each in warned)


def _local(steps):
    return _said(LocalSGDStrategy(sync_every=2, compressor="rotated"), steps)


def test_local_steps_have_both_ratios(pools):
    (said, _), _ = pools[2].run(_local, 8)
    (ratio,) = [each for each in said if each.startswith("lightning_compress: ratio: ")]
    assert "x fewer bytes a step" in ratio
    assert "x a round" in ratio
    assert "; all ranks are on this machine. Over a network, 'lightning-compress advise'" in said[-1]


def test_a_last_round_that_was_shorter_says_nothing_of_the_others(pools):
    (said, _), _ = pools[2].run(_local, 5)
    assert any("in 3 rounds" in each for each in said)
    assert not any("x a round" in each for each in said if "ratio" in each)


def _warned(name, steps, optimizer):
    _, warned = _said(CompressedDDPStrategy(name), steps, lambda: Net(optimizer))
    return [each for each in warned if "may cost accuracy" in each or "in our runs" in each or "not measured" in each]


@pytest.mark.parametrize(
    ("name", "optimizer", "parts"),
    [
        ("topk", "sgd", ["topk (density 0.01) may cost accuracy in a run of 3 steps"]),
        ("rotated", "sgd", []),
        ({"name": "topk", "density": 0.5}, "adamw", []),
        ("bf16", "adamw", []),
        (
            "topk",
            "adamw",
            ["topk (density 0.01) with AdamW raised the loss by 21.5 % in our runs", "may cost accuracy"],
        ),
        ("rotated", "adamw", []),
        (
            "onebit",
            "adamw",
            ["onebit (block 1024) with AdamW raised the loss by 2.4 % in our runs", "may cost accuracy"],
        ),
        ({"name": "qsgd", "bits": 2}, "adamw", ["may raise the loss; we have not measured it"]),
    ],
    ids=str,
)
def test_coarse_methods_warn(pools, name, optimizer, parts):
    warned, others = pools[2].run(_warned, name, 3, optimizer)
    assert len(warned) == len(parts)
    assert all(
        part in each for part, each in zip(parts, sorted(warned, key=lambda each: "may cost" in each), strict=True)
    )
    assert all("qsgd" in each for each in warned)
    assert not others
    assert not any("topk" in each for each in warned if name != "topk")  # each has a figure of its own
    assert FEW_STEPS == 1000


class Unused(Net):
    """Has a layer that no loss depends on."""

    def __init__(self):
        super().__init__()
        self.spare = torch.nn.Linear(64, 64)


def _unused():
    with pytest.raises(RuntimeError) as raised:
        fit(CompressedDDPStrategy("rotated"), 3, Unused)
    return str(raised.value)


def test_advice_on_unused_parameters_names_our_strategy(pools):
    for said in pools[2].run(_unused):
        assert "strategy='compressed_ddp_find_unused_parameters_true'" in said
        assert "CompressedDDPStrategy(..., find_unused_parameters=True)" in said
        assert "'ddp_find" not in said


def test_what_it_is():
    assert repr(CompressedDDPStrategy()) == "CompressedDDPStrategy(compressor='auto')"
    given = CompressedDDPStrategy({"name": "topk", "density": 0.1}, "split_gather")
    assert repr(given) == (
        "CompressedDDPStrategy(compressor={'name': 'topk', 'density': 0.1}, exchange='split_gather')"
    )


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (1.23e9, "1.23 GB"), (5e15, "5e+03 TB")]
)
def test_sizes_are_readable(count, text):
    assert size(count) == text


def test_the_clock_knows_what_a_round_waits(monkeypatch):
    clock, now = StepClock(every=4), 0.0
    monkeypatch.setattr(report.time, "perf_counter", lambda: now)
    for step in range(13):
        clock.step()
        if step == 5:
            clock.pause()  # an evaluation
            now += 100.0
        now += 1.0 + 2.0 * (step % 4 == 3)
    assert clock.alone_s == 1.0
    assert clock.median_s == pytest.approx(1.5)
    assert StepClock(every=4).median_s is None


def _embedded(compressor, optimizer, rules):
    strategy = CompressedDDPStrategy(compressor, rules=rules, find_unused_parameters=True)
    _, warned = _said(strategy, 3, lambda: Words(optimizer))
    return [each for each in warned if "embedding" in each]


@pytest.mark.parametrize(
    ("compressor", "optimizer", "rules", "warns"),
    [
        ("rotated", "adamw", None, True),
        ({"name": "rotated", "bits": 8}, "adamw", None, False),
        ("qsgd", "adamw", None, False),
        ("rotated", "sgd", None, False),
        ("rotated", "adamw", [{"kind": "embedding", "compressor": "bf16"}], False),
    ],
    ids=str,
)
def test_a_rotated_embedding_beside_adam_warns(pools, compressor, optimizer, rules, warns):
    warned, others = pools[2].run(_embedded, compressor, optimizer, rules)
    assert len(warned) == warns
    assert all(
        "mixes rows of the embedding 'shades.weight'" in each and "'compressor': 'bf16'" in each for each in warned
    )
    assert not others


class Freezes(BaseFinetuning):
    """Freezes the body when the model is set up, or once it is wrapped."""

    def __init__(self, late):
        super().__init__()
        self.late = late

    def freeze_before_training(self, module):
        self.freeze(module.body)

    def finetune_function(self, module, epoch, optimizer):
        pass

    def setup(self, trainer, module, stage):
        if not self.late:
            super().setup(trainer, module, stage)

    def on_fit_start(self, trainer, module):
        if self.late:
            self.freeze_before_training(module)
        super().on_fit_start(trainer, module)


def _freezes(late):
    strategy = CompressedDDPStrategy("rotated", find_unused_parameters=late)
    return _said(strategy, callbacks=[Freezes(late)])[1]


@pytest.mark.parametrize("late", [False, True])
def test_parameters_that_can_never_be_averaged_are_said(pools, late):
    warned, _ = pools[2].run(_freezes, late)
    assert any("Freezes has frozen" in each and "such as body" in each for each in warned) == (not late)
