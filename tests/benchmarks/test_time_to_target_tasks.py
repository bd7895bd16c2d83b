"""The tasks of the map: each has its data, its lines and its rows."""

import dataclasses
import itertools

import pytest
import torch

from benchmarks._target import methods, tasks
from benchmarks._target.parts import run_ranks
from tests.helpers.data import public_data

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")


@pytest.fixture(scope="module")
def captions(tmp_path_factory):
    return public_data("multi30k", tmp_path_factory.mktemp("data"))


@pytest.fixture
def pictures(cifar10):
    return cifar10.parent


@pytest.mark.parametrize("name", tasks.TASKS)
def test_every_line_has_a_run_and_rows(name):
    task = tasks.TASKS[name]
    lines = methods.methods(task)
    assert not task.lines or {each.name for each in lines} == set(task.lines)
    assert {each.run for each in lines} == methods.runs(task).keys()
    assert {row for each in lines for _, row in each.phases} <= methods.rows_of(task).keys()
    assert methods.FREE in methods.rows_of(task)


@pytest.mark.parametrize(
    ("name", "root"), [pytest.param("b", "captions", marks=pytest.mark.thorough), ("c", "pictures")]
)
def test_a_task_has_its_own_data(name, root, request):
    task = tasks.TASKS[name]
    data = task.data(request.getfixturevalue(root))
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


def test_the_translator_is_the_recipes(captions):
    from recipes.nmt.data import Batch
    from recipes.nmt.module import TranslationModule

    data = tasks.TASKS["b"].data(captions)
    pair = next(data.batches(0, 0))
    model, recipe = data.model(), TranslationModule(data._vocabulary, dropout=0.0)
    recipe.model.load_state_dict(model.inner.state_dict())
    batch = Batch(torch.arange(len(pair[0])), pair[0], pair[1], [])
    torch.testing.assert_close(model(pair), recipe._loss(batch, 0.1))
    torch.testing.assert_close(model.eval()(pair), recipe._loss(batch, 0.0))


@pytest.mark.thorough
def test_sufficient_factors_train_as_ddp_does(pictures):
    task = dataclasses.replace(tasks.TASKS["c"], ranks=2, every=2)
    torch.set_num_threads(1)
    dense, exact, rounded = (
        run_ranks(task, task.data(pictures), run, 0.01, 0, 4, None, 4)["curve"]
        for run in (methods.runs(task)[methods.DDP], *methods.FACTORS.values())
    )
    assert [row[0] for row in dense] == [2, 4]
    assert exact == [pytest.approx(row, rel=1e-4) for row in dense]
    assert rounded == [pytest.approx(row, rel=1e-2) for row in dense]
