"""make demo: its table, what it concludes, its played links, and the copy in docs/recipes.md."""

import re
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import demo
from benchmarks._demo import rank
from benchmarks._demo.entries import ENTRIES, RATES, Entry
from benchmarks._demo.pace import Wire, pace
from benchmarks._demo.rank import QUIET
from benchmarks._demo.table import Row, conclusion, table
from benchmarks.harness import lab
from lightning_compress import attach
from recipes.task import Task
from tests.benchmarks.test_network import namespaces
from tests.config.composing import composed
from tests.helpers.labs import able, only_lab

PAGE = (Path(__file__).parents[2] / "docs/recipes.md").read_text()
LOWER = ("WER", "CER")
"""Scores of which less is better."""


def row(method, value, ms, task="a", higher=True, sent=1000.0):
    return Row(task, method, "accuracy" if higher else "WER", value, " %", higher, sent, 1e3 / sent, ms)


def rows(*others):
    return [row("dense", 90.0, {"1 Gbit/s": 20, "100 Mbit/s": 100}), *others]


def read(text):
    """The rows of a printed table."""
    head, _, *lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()]
    rates = [re.fullmatch(r"step at (.*?)(?:, paced)?", cell)[1] for cell in head[5:]]
    found = []
    for task, method, quality, sent, ratio, *steps in lines:
        label, value, unit = re.fullmatch(r"([\w-]+) (-?[\d.]+)(.*)", quality).groups()
        ms = {rate: int(each.removesuffix(" ms").replace(",", "")) for rate, each in zip(rates, steps, strict=True)}
        figures = float(value), unit, label not in LOWER, float(sent.replace(",", "")), float(ratio.removesuffix(" x"))
        found.append(Row(task, method, label, *figures, ms))
    return found


def test_a_table_is_even_and_says_what_was_played():
    given = rows(row("topk 1 %", 89.5, {"1 Gbit/s": 10, "100 Mbit/s": 1234}, sent=25.0))
    lines = table(given, paced=False).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert " ".join(lines[3].split()) == "| a | topk 1 % | accuracy 89.5 % | 25 | 40.0 x | 10 ms | 1,234 ms |"
    assert "paced" not in lines[0]
    assert table(given, paced=True).splitlines()[0].count(", paced") == 2
    assert read(table(given, paced=False)) == read(table(given, paced=True)) == given


def test_conclusions_follow_from_the_rows():
    fast = row("x", 89.5, {"1 Gbit/s": 10, "100 Mbit/s": 20})
    assert conclusion(rows(fast)) == (
        "At 100 Mbit/s compression pays in every row: a step is 5.0 times as fast as dense. At 1 Gbit/s compression "
        "pays in every row: a step is 2.0 times as fast as dense. Quality is within a point of dense in every row."
    )
    slow = row("y", 80.0, {"1 Gbit/s": 40, "100 Mbit/s": 95})
    said = conclusion(rows(fast, slow))
    assert (
        "At 100 Mbit/s it pays in 1 of 2 rows (5.0 times as fast); by less than a tenth, or not at all: y on a." in said
    )
    assert said.endswith("within a point of dense, but for y on a (80.0 against 90.0).")
    assert "At 1 Gbit/s it pays in no row: a step is 0.5 times as fast" in conclusion(rows(slow))


def test_error_rates_are_better_when_lower():
    ms = {"1 Gbit/s": 20, "100 Mbit/s": 100}
    assert "in every row" in conclusion([row("dense", 20.0, ms, higher=False), row("x", 10.0, ms, higher=False)])
    assert "but for x on a (30.0" in conclusion(
        [row("dense", 20.0, ms, higher=False), row("x", 30.0, ms, higher=False)]
    )


@pytest.mark.parametrize("task", ENTRIES, ids=lambda task: task.name)
def test_every_method_composes_and_only_the_first_is_dense(task):
    assert next(iter(task.methods)) == "dense"
    for method, overrides in task.methods.items():
        cfg = composed(*task.overrides, *overrides, *QUIET)
        assert cfg.trainer.devices == demo.RANKS
        assert cfg.trainer.max_epochs > 0
        assert cfg.compressor._target_.endswith(".Dense") == (method == "dense")


def test_the_page_shows_a_table_of_the_demo():
    """Its figures are of one run; what is said below it follows from them."""
    text = re.search(r"^\| task .*?(?=\n\n)", PAGE, flags=re.MULTILINE | re.DOTALL)[0]
    shown = read(text)
    assert text == table(shown, paced=False)
    assert [(each.task, each.method) for each in shown] == [
        (each.name, name) for each in ENTRIES for name in each.methods
    ]
    assert list(shown[0].ms) == list(RATES)
    assert conclusion(shown) in " ".join(PAGE.split())
    dense = {each.task: each.bytes_per_step for each in shown if each.method == "dense"}
    for each in shown:
        assert each.ratio == pytest.approx(dense[each.task] / each.bytes_per_step, abs=0.06)


def test_links_are_played_where_namespaces_are_refused(monkeypatch, capsys):
    def refuse(*_):
        raise RuntimeError("only root may do that")

    monkeypatch.setattr(demo, "Lab", refuse)
    seen = []
    monkeypatch.setattr(demo, "run", lambda tasks, *, paced: seen.append(paced) or rows(rows()[0]._replace(method="x")))
    monkeypatch.setattr("sys.argv", ["demo"])
    demo.main()
    said = capsys.readouterr().out
    assert seen == [True]
    assert "links are played, not measured: only root may do that" in said
    assert "step at 1 Gbit/s, paced" in said


SENT = 4 * 512 * 512
"""Bytes of the mean of a layer's gradients, by one of two ranks."""


def _paced_steps(compressor):
    """Seconds of a step, and bytes that a rank sends in it, on a played link of one speed and of a fourth of it."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(512, 512, bias=False))
    compression, wire = attach(model, compressor), Wire()
    pace(model, compression, wire)
    data, optimizer, seconds, sent = torch.randn(4, 512), torch.optim.SGD(model.parameters(), 1e-3), [], 0
    speed = SENT / compression.run_summary.ratio / 0.05
    for rate in (None, None, speed, speed, speed, speed / 4, speed / 4, speed / 4):
        dist.barrier()
        wire.bytes_per_s, already, start = rate, compression.meter.bytes_sent, time.perf_counter()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        sent = compression.meter.bytes_sent - already
    compression.close()
    return min(seconds[2:5]), min(seconds[5:]), sent / speed


@pytest.mark.parametrize("compressor", ["none", "bf16", "topk"])
def test_played_links_are_as_slow_as_asked(pools, compressor):
    for fast, slow, least in pools[2].run(_paced_steps, compressor):
        assert fast >= least
        assert slow >= 4 * least
        assert 2 < slow / fast < 6


class Seen(BoringModel):
    """Remembers its batches, and tells the sampler each epoch, as recipes do."""

    on_train_epoch_start = Task.on_train_epoch_start

    def training_step(self, batch, index):
        self.batches = [*getattr(self, "batches", []), batch.sum().item()]
        return super().training_step(batch, index)


@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_both_rates_have_the_same_batches_and_none_has_them_first(monkeypatch):
    monkeypatch.setattr(rank.dist, "barrier", lambda: None)
    data, set_to = torch.arange(64.0).view(64, 1).expand(64, 32), []
    loader = DataLoader(data, 1, sampler=DistributedSampler(data, 1, 0))
    timer, model = rank.Timer(5, lambda rate: set_to.append((rate, len(getattr(model, "batches", []))))), Seen()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", callbacks=[timer], logger=False, max_epochs=-1, **timer.limits, **quiet)
    trainer.fit(model, loader)
    (_, first), (_, second), _ = set_to
    assert model.batches[:first] == model.batches[first:second] == model.batches[second:]
    assert len(set(model.batches[second:])) == 6
    assert [len(each) for each in timer.seconds.values()] == [6, 6]


TINY = Entry(
    "tiny",
    ["recipe=resnet", "recipe.depth=8", "data.train_size=64", "trainer.max_epochs=1"],
    {"dense": ["compressor=none"], "onebit": ["compressor=onebit"]},
)


@pytest.mark.thorough
@pytest.mark.parametrize("paced", [True, pytest.param(False, marks=able)])
def test_the_whole_of_it(paced, capfd):
    with nullcontext() if paced else only_lab():
        dense, onebit = demo.run([TINY], paced=paced)
    said = capfd.readouterr().out
    assert said.count("python -m recipes.train recipe=resnet") == 2  # rank 0 speaks for all
    assert dense.ratio == 1 < 10 < onebit.ratio
    assert 0 <= dense.value <= 100
    for each in (dense, onebit):
        least = {name: 8e3 * each.bytes_per_step / lab.bits_per_second(rate) for name, rate in RATES.items()}
        assert all(each.ms[name] >= round(0.5 * least[name]) for name in RATES)  # a bucket holds a part of the bytes
    assert dense.ms["100 Mbit/s"] > dense.ms["1 Gbit/s"]
    assert not namespaces()
