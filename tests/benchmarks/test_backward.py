"""The benchmark of sparse backward passes times both kinds, and trains both."""

import torch

from benchmarks._backward import accuracy, recipes, speed


def test_dense_and_sparse_take_turns():
    cells = speed.measure(speed.linear(32, 8, 0.25), rounds=3, seconds=60, device=torch.device("cpu"))
    assert cells[0] == "Linear 32, batch 8, k 25 %"
    assert all(float(each) >= 0 for each in cells[1:])
    assert len(cells) == 9
    assert [name for name, ms in speed.bounds(32, 8, 4, rounds=1) if ms > 0]


def test_the_papers_mlp_learns_digits():
    data = accuracy.digits(None)
    assert len(data.y) + len(data.test_y) == 1797
    assert accuracy.train(data, 2, seed=0, k=80) > 50


def test_steps_of_a_recipe_take_turns():
    name, share, *figures = recipes.measure("ResNet-20, digits", 0.5, steps=4)
    assert (name, share) == ("ResNet-20, digits", "50 %")
    assert len(figures) == 6
    assert all(float(each) > 0 for each in figures)
