"""QSVRG converges linearly where QSGD stops, and its benchmark shows what it measured."""

from itertools import pairwise

import pytest
import torch

from benchmarks import qsvrg
from benchmarks._qsvrg import training
from benchmarks._qsvrg.problem import Problem
from lightning_compress.codecs import QSGD

TRAINING = training.Training(epochs=6, steps=90, batch=4)


@pytest.fixture(scope="module")
def problem():
    """Better conditioned than the benchmark's, so that epochs may be short."""
    return Problem.of_digits(2, penalty=1.0)


def test_gradient_and_optimum(problem):
    weights = torch.randn(problem.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    every = torch.arange(len(problem.rows))
    tracked = weights.clone().requires_grad_()
    (expected,) = torch.autograd.grad(problem.value(tracked), tracked)
    torch.testing.assert_close(problem.gradient(weights, every), expected)
    for _ in range(400):  # gradient descent ends at the optimum, and never below it
        weights -= problem.gradient(weights, every) / problem.smoothness
    assert -1e-14 < float(problem.value(weights)) - problem.optimum < 1e-12


SLOW = [pytest.param(name, marks=pytest.mark.thorough) for name in ("SVRG", "QSVRG 6 bits, l2")]


@pytest.mark.parametrize("name", [*SLOW, "QSVRG 4 bits"])
def test_corrected_methods_converge_linearly(problem, name):
    found, _ = training.distances(problem, qsvrg.METHODS[name], 2, TRAINING)
    assert found[-1] < 1e-10
    assert all(later < 0.2 * earlier for earlier, later in pairwise(found) if later > 1e-13)


def test_without_the_correction_it_stops(problem):
    found, bits = training.distances(problem, qsvrg.METHODS["QSGD 4 bits"], 2, TRAINING)
    dense, more = training.distances(problem, qsvrg.METHODS["SGD"], 2, TRAINING)
    for each in (found, dense):
        assert min(each) > 1e-4
        assert each[-1] > 0.2 * each[0]
    assert 4 < bits < 5  # one message of 4 bits, with its norms
    assert 32 <= more < 33


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["SVRG", "QSVRG 4 bits"])
def test_ranks_that_do_not_wait_converge_linearly_too(problem, name):
    found, bits = training.late_distances(problem, qsvrg.METHODS[name], 2, TRAINING, 2)
    assert all(later < 0.5 * earlier for earlier, later in pairwise(found) if later > 1e-9)
    assert found[-1] < 1e-7
    assert 4 < bits < 7 if name != "SVRG" else 32 < bits < 36
    stopped, _ = training.late_distances(problem, qsvrg.METHODS["QSGD 4 bits"], 2, TRAINING, 2)
    assert stopped[-1] > 1e-4


@pytest.mark.thorough
def test_a_coarser_codec_converges_slower(problem):
    """One level in one bucket by the L2 norm: the error may be 25 times the norm of what is sent."""
    coarse = training.Method(QSGD(2, bucket=1024, norm="l2"), corrects=True)
    (found, _), (fine, _) = (
        training.distances(problem, each, 2, TRAINING) for each in (coarse, qsvrg.METHODS["QSVRG 6 bits, l2"])
    )
    assert all(later < 0.2 * earlier for earlier, later in pairwise(found))
    assert found[2] > 100 * fine[2]


def test_command_line(monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["qsvrg", "--ranks", "2", "--epochs", "2", "--steps", "3", "--penalty", "1", "--methods", "SVRG"]
    )
    qsvrg.main()
    (row,) = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│ SVRG" in line]
    assert len(row) == 4
    assert all(float(value) > 0 for value in row[2:])
