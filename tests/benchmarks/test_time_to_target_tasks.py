"""The tasks of the map: each has its data, its lines and its rows, and whole trainings are what was composed."""

import dataclasses
import itertools
import json

import pytest
import torch

from benchmarks._target import methods, store, tasks, whole
from benchmarks._target.launch import run_ranks
from benchmarks._target.steps import Steps
from benchmarks._target.times import Times
from benchmarks._target.whole import Check, Whole
from benchmarks.harness.lab import Here
from benchmarks.harness.launch import run_ranks as run_told
from tests.benchmarks.test_error import write_text
from tests.helpers.data import public_data

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    public_data("cifar10", folder)
    return public_data("multi30k", folder)


@pytest.mark.parametrize("name", tasks.TASKS)
def test_every_line_has_a_run_and_rows(name):
    task = tasks.TASKS[name]
    lines = methods.methods(task)
    assert not task.lines or {each.name for each in lines} == set(task.lines)
    assert {each.run for each in lines} == methods.runs(task).keys()
    assert {row for each in lines for _, row in each.phases} <= methods.rows_of(task).keys()
    assert methods.FREE in methods.rows_of(task)


@pytest.mark.parametrize("name", [pytest.param("b", marks=pytest.mark.thorough), "c"])
def test_a_task_has_its_own_data(name, root):
    task = tasks.TASKS[name]
    data = task.data(root)
    first, again, other, seeded = (
        list(itertools.islice(data.batches(seed, rank), 2)) for seed, rank in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert all(map(torch.equal, first, again))
    assert not any(a.shape == b.shape and torch.equal(a, b) for a, b in itertools.product(first, other + seeded))

    torch.manual_seed(0)
    model = data.model()
    loss = model(first[0])
    loss.backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())
    alone, halves = data.losses(model, 0, 1), [data.losses(model, rank, 2) for rank in range(2)]
    torch.testing.assert_close(alone, sum(halves), rtol=1e-5, atol=0.0)
    assert (alone[:, 1] > 1000).all()


def test_the_translator_is_the_recipes(root):
    from recipes.nmt.data import Batch
    from recipes.nmt.module import TranslationModule

    data = tasks.TASKS["b"].data(root)
    pair = next(data.batches(0, 0))
    model, recipe = data.model(), TranslationModule(data._vocabulary, dropout=0.0)
    recipe.model.load_state_dict(model.inner.state_dict())
    batch = Batch(torch.arange(len(pair[0])), pair[0], pair[1], [])
    torch.testing.assert_close(model(pair), recipe._loss(batch, 0.1))
    torch.testing.assert_close(model.eval()(pair), recipe._loss(batch, 0.0))


@pytest.mark.thorough
def test_sufficient_factors_train_as_ddp_does(root):
    task = dataclasses.replace(tasks.TASKS["c"], ranks=2, every=2)
    torch.set_num_threads(1)
    dense, exact, rounded = (
        run_ranks(task, task.data(root), run, 0.01, 0, 4, None, 4)["curve"]
        for run in (methods.runs(task)[methods.DDP], *methods.FACTORS.values())
    )
    assert [row[0] for row in dense] == [2, 4]
    assert exact == [pytest.approx(row, rel=1e-4) for row in dense]
    assert rounded == [pytest.approx(row, rel=1e-2) for row in dense]


@pytest.mark.thorough
def test_a_whole_training_is_timed(tmp_path):
    write_text(tmp_path)
    name = "local SGD 8, rotated 4"
    told = {"task": "a", "root": str(tmp_path), "run": name, "rate": 0.01, "seed": 0, "batches": 30, "until": None}
    found = run_told(Here(2), told, "benchmarks._target.whole_rank")[0]
    assert [row[0] for row in found["curve"]] == [25, 30]
    assert 0 < found["seconds"][0] < found["seconds"][1]

    same = dataclasses.replace(tasks.TASKS["a"], ranks=2)
    again = run_ranks(same, same.data(tmp_path), methods.runs(same)[name], 0.01, 0, 30, None, 30)
    assert again["curve"] == found["curve"]


@pytest.mark.parametrize(("batches", "of"), [(None, (20, 2.0)), (8, (8, 0.8))])
def test_whole_trainings_stand_beside_the_map(tmp_path, monkeypatch, batches, of):
    lines = ("DDP 25 MB", "fp16 hook")
    task = tasks.Task("t", "", lines=lines, budget=20, rates=(0.01,), seeds=(0, 1), every=4, links=("10mbit",))
    monkeypatch.setitem(whole.CHECKS, "t", Check("10mbit", lines, batches))
    monkeypatch.setattr(whole, "wait_until_idle", lambda: None)
    told = []
    monkeypatch.setattr(whole, "Lab", lambda *given: Here(given[0]))
    monkeypatch.setattr(Here, "__enter__", lambda self: self, raising=False)
    monkeypatch.setattr(Here, "__exit__", lambda *_: None, raising=False)

    cells = store.Store(tmp_path)
    known, times = Steps(task, cells), Times(task, cells)
    found = Whole(known, times, cells)
    with pytest.raises(ValueError, match="training runs of DDP 25 MB are missing"):
        next(found.missing())
    curve = [[batch, 4 - batch / 10, 5 - batch / 10] for batch in range(4, 31, 4)]
    for _ in range(3):  # DDP with both seeds, and the hook with the first one, which says its rate
        known.put(next(known.missing()), {"curve": curve, "finite": True, "seconds": 1.0})
    assert [each.name for each in found.missing()] == list(lines)
    assert found.compared() == []

    def run_ranks(lab, given, module):
        told.append(given)
        return [{"curve": curve, "seconds": [row[0] * 0.11 for row in curve]}]

    monkeypatch.setattr(whole, "run_ranks", run_ranks)
    for line in list(found.missing()):
        found.measure(line, tmp_path)
    assert not list(found.missing())
    assert [each["batches"] for each in told] == [batches or task.most] * 2
    assert all(each["until"] == (None if batches else known.cell("fp16 hook", 0.01, 0).until) for each in told)
    times._store.put(*times._key(times.places[0]), {"ms": dict.fromkeys(methods.rows(), 100.0)})
    for each in found.compared():
        assert (each.batches, each.composed, each.beside) == (of[0], pytest.approx(of[1]), None)
        assert each.seconds == pytest.approx(1.1 * of[1])
    assert len(found.compared()) == 2

    monkeypatch.setattr(Times, "_timed", lambda self, *_: {"ms": dict.fromkeys(self.rows, 110.0)})
    found.measure_beside(tmp_path)
    assert [each.beside for each in found.compared()] == [pytest.approx(1.1 * of[1])] * 2
    assert [each.composed for each in found.compared()] == [pytest.approx(of[1])] * 2
    written = json.loads(next(tmp_path.rglob("whole/10mbit_ddp*.json")).read_text())
    assert written["settings"]["place"]["rate"] == "10mbit"
