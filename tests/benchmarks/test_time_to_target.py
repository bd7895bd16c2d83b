"""Time to target: runs are kept and not repeated, and batches and milliseconds are composed as by hand."""

import dataclasses
import json
from contextlib import nullcontext

import pytest

from benchmarks._target import methods, parts, steps, store, tasks
from benchmarks._target import times as target_times
from benchmarks._target.compose import Cell, compose, entry, seconds
from benchmarks._target.drawn import draw, draw_front
from benchmarks._target.show import front_table, show, show_steps, write_csv
from benchmarks._target.steps import Steps, reached
from benchmarks._target.times import Place, Times, kappa
from lightning_compress.planning.summary import label
from lightning_compress.settings.automatic import Automatic
from tests.benchmarks.test_error import write_text

ONE_LINK = {"links": ("10mbit",), "round_trips": (0.0,)}
TASK = tasks.Task("t", "a test", ranks=2, budget=20, rates=(0.01, 0.02), seeds=(0, 1), every=4, **ONE_LINK)
TWO = {name: methods.runs(TASK)[name] for name in (methods.DDP, "accumulation 2, fp16")}
PLACE = Place("10mbit", 0.0)


@pytest.fixture
def known(tmp_path, monkeypatch):
    """Training runs of two methods that were made up: the second one misses with its last seed."""
    monkeypatch.setattr(steps, "runs", lambda task: TWO)
    found = Steps(TASK, store.Store(tmp_path))
    fill(found)
    return found


def fill(found):
    while (cell := next(found.missing(), None)) is not None:
        slow = 2.0 if cell.rate != 0.01 else 0.0 if cell.run == methods.DDP or cell.seed == 0 else 1.0
        losses = [[batch, 4 - batch / 10 + slow, 5 - batch / 10 + slow] for batch in range(4, 21, 4)]
        found.put(cell, {"curve": losses, "finite": True, "seconds": 1.0})


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_second_start_does_nothing(tmp_path, monkeypatch, capfd):
    write_text(tmp_path)
    monkeypatch.setattr(steps, "runs", lambda task: TWO)
    task = dataclasses.replace(TASK, budget=4, rates=(0.01,), every=2)
    found = Steps(task, store.Store(tmp_path / "cells"))
    short = parts.Clock(1e-9)
    assert parts.train(found, tmp_path, short) == 0
    assert not (tmp_path / "cells").exists()

    assert parts.train(found, tmp_path, parts.Clock(None)) == 0
    files = sorted((tmp_path / "cells").rglob("*.json"))
    assert [each.name.rpartition(".")[0].rpartition(".")[0] for each in files] == [
        "accumulation_2_fp16_rate_0.01_seed_0",  # it misses, so it has no other seed
        "ddp_rate_0.01_seed_0",
        "ddp_rate_0.01_seed_1",
    ]
    cells = [json.loads(each.read_text()) for each in files]
    assert all(cell["commit"] and cell["digest"] and cell["found"]["finite"] for cell in cells)
    dense = cells[1]["found"]["curve"]
    assert [row[0] for row in dense] == [2, 4, 6]
    assert 1 < dense[-1][steps.REPORTED] < dense[0][steps.REPORTED] < 5
    assert capfd.readouterr().out.count("batches, loss") == 3

    files[0].unlink()
    assert parts.train(found, tmp_path, parts.Clock(None)) == 0
    assert json.loads(files[0].read_text())["found"]["curve"] == cells[0]["found"]["curve"]

    monkeypatch.setattr(parts, "run_ranks", None)  # nothing is left to do
    again = Steps(task, store.Store(tmp_path / "cells"))
    assert parts.train(again, tmp_path, parts.Clock(None)) == 0


@pytest.mark.parametrize(("more", "same"), [(0.0, True), (0.001, True), (0.01, False)])
def test_runs_of_earlier_code_are_kept_if_they_begin_alike(known, tmp_path, monkeypatch, more, same):
    write_text(tmp_path)
    files = {path: json.loads(path.read_text()) for path in tmp_path.rglob("*.json")}
    monkeypatch.setattr(steps, "digest", lambda *modules: "today's")
    started = []

    def run_ranks(task, data, run, rate, seed, batches, until, patience):
        started.append((run["by"], rate, seed, batches))
        slow = 2.0 if rate != 0.01 else 0.0 if run is TWO[methods.DDP] or seed == 0 else 1.0
        rows = [[batch, 4 - batch / 10 + slow, 5 - batch / 10 + slow + more] for batch in range(4, batches + 1, 4)]
        return {"curve": rows, "finite": True, "seconds": 2.0}

    monkeypatch.setattr(parts, "run_ranks", run_ranks)
    assert parts.train(known, tmp_path, parts.Clock(None)) == 0
    short = [each for each in started if each[-1] == 10]  # a tenth of the budget of 20, and two evaluations
    assert len(short) == (len(TWO) if same else 1)  # where dense is another, so are the targets
    assert len(started) == len(short) + (0 if same else len(files))
    for path, before in files.items():
        now = json.loads(path.read_text())
        other_targets = not same and now["settings"]["until"] is not None
        assert (now["found"] == before["found"]) == (same or other_targets)
        assert (now["digest"] == "today's") == (not other_targets)


def test_a_failed_run_is_skipped(tmp_path, monkeypatch, capsys):
    write_text(tmp_path)
    monkeypatch.setattr(steps, "runs", lambda task: TWO)
    found = Steps(dataclasses.replace(TASK, rates=(0.01,)), store.Store(tmp_path / "cells"))

    def fails(*_):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(parts, "run_ranks", fails)
    assert parts.train(found, tmp_path, parts.Clock(None)) == 1
    assert "ddp" in capsys.readouterr().err.lower()


def test_other_code_or_settings_make_a_cell_missing(known, monkeypatch):
    assert known.next_of(methods.DDP) is None
    other = dataclasses.replace(TASK, decay=0.5)
    assert Steps(other, known._store).next_of(methods.DDP).rate in TASK.rates
    monkeypatch.setattr(steps, "digest", lambda *modules: "other code")
    assert known.next_of(methods.DDP) is not None


def test_a_digest_knows_what_is_imported():
    shipped, ours = (store.digest(f"benchmarks._target.{each}") for each in ("shipped", "ours"))
    assert shipped != ours
    reached_from = set(store._imports(store.ast.parse("import a\nfrom b import c")))
    assert reached_from == {"a", "b", "b.c"}


def test_targets_and_rates_are_chosen(known):
    assert known.best_rate(methods.DDP) == 0.01
    assert sorted(known.grid(methods.DDP)) == [0.005, 0.01, 0.02]
    assert known.targets()[steps.REPORTED] == (3.4, 3.03)
    assert known.targets()[steps.CHOOSING] == (2.4, 2.02)
    assert [known.to_target(methods.DDP, place) for place in range(2)] == [[16, 16], [20, 20]]
    assert known.to_target("accumulation 2, fp16", 1) == [20, None]
    assert known.tried("accumulation 2, fp16")[0] == 0.01


def test_a_slower_rate_is_given_up(known):
    name = "accumulation 2, fp16"
    assert known.patience(known.cell(name, 0.005, 0)) == 20  # where 0.01 met the target
    assert known.patience(known.cell(name, 0.01, 1)) == TASK.most
    assert known.patience(known.cell(methods.DDP, 0.005, 0)) == TASK.most


def test_a_method_that_is_not_complete_shows_what_is_there(known, capsys):
    name = "accumulation 2, fp16"
    known._store._path("t/steps", *lost(known, name, 0.01, 1)).unlink()
    assert known.next_of(name) == known.cell(name, 0.01, 1)
    assert known.to_target(name, 1) == [20]
    show_steps(known)
    assert "seeds are missing" in capsys.readouterr().out
    known._store._path("t/steps", *lost(known, name, 0.02, 0)).unlink()
    assert known.to_target(name, 1) is None
    show_steps(known)
    assert "incomplete" in capsys.readouterr().out


def lost(known, *of):
    cell = known.cell(*of)
    return cell.name, known.key(cell)


def test_a_target_is_reached_at_the_first_evaluation_below_it():
    curve = [[5, 3.0, 4.0], [10, 2.0, 3.0], [15, 2.5, 3.5]]
    assert reached(curve, steps.CHOOSING, 2.0) == 10
    assert reached(curve, steps.REPORTED, 3.9) == 10
    assert reached(curve, steps.REPORTED, 2.9) is None


def test_seconds_are_the_sum_over_phases():
    ms = {"dense": 100.0, "coarse": 10.0}
    phases = ((0, "dense"), (4, "coarse"))
    assert seconds(phases, 10, ms) == pytest.approx(0.4 + 0.06)
    assert seconds(phases, 3, ms) == pytest.approx(0.3)
    assert seconds(phases[:1], 10, ms) == pytest.approx(1.0)


def test_a_miss_counts_to_the_end_and_never_wins():
    method = methods.Method("fast", "ours", "fast", ((0, "row"),))
    other = methods.Method("slow", "theirs", "slow", ((0, "dense"),))
    ms = {"row": 1.0, "dense": 100.0}
    missed = entry(TASK, method, [10, None], ms, alone=1.0)
    assert missed.seconds == pytest.approx((0.01, 0.03))
    assert missed.missed == 1
    assert missed.over == pytest.approx(0.02)
    slow = entry(TASK, other, [20, 20], ms, alone=1.0)
    cell = Cell(PLACE, 1.0, (missed, slow), ())
    assert cell.best("ours") is None
    assert cell.best("theirs") is slow
    assert cell.factor() is None

    met = entry(TASK, method, [10, 20], ms, alone=1.0)
    cell = Cell(PLACE, 1.0, (met, slow), ())
    assert cell.factor() == pytest.approx(2.0 / 0.015)
    assert cell.is_clear()


def test_auto_is_held_against_what_could_be_named():
    ms = {"DDP 25 MB": 100.0, "qsgd 4": 30.0, methods.AUTO: 33.0}
    named = [methods.Method(name, "ours", run, ((0, name),)) for name, run in (("qsgd 4", "qsgd 4"),)]
    dense = methods.Method("DDP 25 MB", "theirs", methods.DDP, ((0, "DDP 25 MB"),))
    for chosen, hand in (("qsgd (bits 4)", 1.0), ("qsgd (bits 8)", 1.1)):
        auto = methods.auto_method(chosen)
        entries = tuple(entry(TASK, each, [10], ms, 1.0) for each in (*named, dense, auto))
        assert Cell(PLACE, 1.0, entries, ()).of_auto() == pytest.approx({"hand": hand, "ddp": 0.33})
    with pytest.raises(ValueError, match="none of"):
        methods.auto_method("fft")


def test_every_phase_has_a_row_and_every_line_a_run():
    rows, runs = methods.rows(), methods.runs(tasks.TASKS["a"])
    for method in methods.methods(tasks.TASKS["a"]):
        assert method.run in runs
        assert {row for _, row in method.phases} <= rows.keys()
        assert [first for first, _ in method.phases] == sorted({first for first, _ in method.phases})
        assert method.phases[0][0] == 0
    assert set(methods.OF_AUTO.values()) <= runs.keys()
    assert set(methods.OF_AUTO) == {label(codec) for codec in Automatic.candidates}


def test_step_times_need_an_idle_machine(tmp_path, monkeypatch):
    times = Times(TASK, store.Store(tmp_path))
    monkeypatch.setattr(target_times, "Lab", lambda *_: None)
    monkeypatch.setattr(target_times, "busy", lambda: 0.9)
    with pytest.raises(RuntimeError, match="take 90% of this machine"):
        times.measure(PLACE, tmp_path)


@pytest.mark.parametrize(("ms", "same"), [(110.0, True), (120.0, False)])
def test_step_times_of_earlier_code_are_kept_if_a_few_are_as_before(tmp_path, monkeypatch, ms, same):
    times = Times(TASK, store.Store(tmp_path))
    monkeypatch.setattr(target_times, "wait_until_idle", lambda: None)
    monkeypatch.setattr(target_times, "Lab", lambda *_: nullcontext())
    assert not times.kept(PLACE, tmp_path)
    earlier = {"ms": dict.fromkeys(times.rows, 100.0), "parameters": 1000}
    times._store.put(*times._key(PLACE), earlier)
    monkeypatch.setattr(target_times, "digest", lambda *modules: "today's")
    assert list(times.missing()) == [PLACE]
    told = []

    def run_ranks(lab, given, module):
        told.extend(given["rows"])
        return [{"ms": dict.fromkeys(given["rows"], 100.0) | {"rotated 4": ms}}]

    monkeypatch.setattr(target_times, "run_ranks", run_ranks)
    assert times.kept(PLACE, tmp_path) == same
    assert told == list(target_times.AGAIN)
    assert times.get(PLACE) == (earlier if same else None)


def test_the_table_and_the_picture_show_what_is_there(known, tmp_path, monkeypatch, capsys):
    times = Times(TASK, known._store)
    assert list(times.missing()) == [PLACE]
    ms = dict.fromkeys(methods.rows(), 100.0) | {methods.FREE: 10.0, "accumulation 2, fp16": 20.0}
    measured = {"ms": ms, "parameters": 1000, "chosen": "none", "seconds": 1.0}
    known._store.put(*times._key(PLACE), measured)
    assert not list(times.missing())
    assert kappa(PLACE, measured, 2) == pytest.approx(4000 * 8 / 1e7 / 0.010)

    two = [each for each in methods.methods(TASK) if each.run in TWO]
    monkeypatch.setattr("benchmarks._target.compose.methods", lambda task: two)
    maps = [compose(known, times, place) for place in range(2)]
    by_name = {each.method.name: each for each in maps[1][0].entries}
    assert by_name["DDP 25 MB"].seconds == pytest.approx((2.0, 2.0))
    assert by_name["DDP 25 MB"].over == pytest.approx(10.0)
    assert by_name["accumulation 2, fp16"].seconds == pytest.approx((0.4, 0.6))
    assert by_name["accumulation 2, fp16"].missed == 1
    show_steps(known)
    show(maps[1], 1)
    said = " ".join(capsys.readouterr().out.split())
    assert "20 miss" in said
    assert "1 of 2 missed" in said
    assert "missed the target, so counted to the end of the run, and never the best: accumulation 2, fp16" in said

    write_csv({"a test": maps}, tmp_path / "map.csv")
    assert "accumulation 2, fp16,theirs,0.4 0.6,1,2.500" in (tmp_path / "map.csv").read_text().replace('"', "")
    draw({"a test": maps}, "a title", tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="nothing to draw"):
        draw({"a test": [[], []]}, "a title", tmp_path / "map.png")
    draw_front([each for each in maps[1] if each], tmp_path / "front.png")
    assert (tmp_path / "front.png").stat().st_size > 1000


def test_the_readme_shows_what_was_measured():
    cells = store.Store(any_code=True)
    maps = {task.title: [compose(Steps(task, cells), Times(task, cells), 1)] for task in tasks.TASKS.values()}
    readme = (store.ROOT / "README.md").read_text()
    assert front_table(maps) in readme
    for page in ("README.md", "docs/index.md"):
        said = " ".join((store.ROOT / page).read_text().split())
        for rate, words in (
            ("100mbit", "loss {2:.1f} to {3:.1f} times as fast as with DDP, and {0:.1f} to {1:.1f} times as fast"),
            ("1gbit", "at 1 Gbit/s, {0:.1f} to {1:.1f} times"),
        ):
            cells = [each for (cells,) in maps.values() for each in cells if each.place.rate == rate]
            over = [each.factor() for each in cells]
            of_ddp = [next(e for e in each.entries if e.method.name == methods.DENSE).mean for each in cells]
            faster = [ddp / each.best("ours").mean for ddp, each in zip(of_ddp, cells, strict=True)]
            assert words.format(min(over), max(over), min(faster), max(faster)) in said
