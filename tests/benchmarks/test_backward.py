"""The benchmark of sparse backward passes times both kinds."""

import torch

from benchmarks._backward import speed


def test_dense_and_sparse_take_turns():
    cells = speed.measure(speed.linear(32, 8, 0.25), rounds=3, seconds=60, device=torch.device("cpu"))
    assert cells[0] == "Linear 32, batch 8, k 25 %"
    assert all(float(each) >= 0 for each in cells[1:])
    assert len(cells) == 9
