"""Gossip's benchmarks: equal beginnings, and rows that are not run again."""

import sys

import numpy as np
import pytest
import torch

from benchmarks import gossip
from benchmarks._gossip.data import Pictures
from benchmarks._gossip.memory import kept
from benchmarks._gossip.methods import ALL_REDUCE, METHODS
from benchmarks._gossip.network import METHODS as OVER_LINKS
from benchmarks._gossip.training import AllReduce, build
from recipes.resnet.data import Split
from recipes.tables.rows import read_rows


class Noise(Pictures):
    """Images of nothing."""

    def __init__(self, *_):
        generator = torch.Generator().manual_seed(0)
        self._test = self._train = Split(
            torch.randint(256, (20, 3, 32, 32), dtype=torch.uint8, generator=generator), torch.arange(20) % 10
        )
        self._size = 6


def test_rows_are_written_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gossip, "Pictures", Noise)
    methods = ["all-reduce", "D-PSGD", "Moniqua, 4 bits, every 2nd step", "SGP, used a round later"]
    path = tmp_path / "new" / "rows.csv"
    words = ["accuracy", "--root", "x", "--csv", str(path), "--ranks", "3", "--seeds", "0", "--steps", "2"]
    words += ["--images", "20", "--batch", "6", "--tested", "20", "--methods", *methods]
    monkeypatch.setattr(sys, "argv", ["gossip", *words])
    for _ in range(2):
        gossip.main()
    rows = read_rows(path)
    assert [row["method"] for row in rows] == methods
    numel = 269_722
    sent = [float(row["bytes_a_step"]) for row in rows]
    np.testing.assert_allclose(sent, [4 / 3 * 4 * numel, 2 * 4 * numel, 4 * numel, 4 * numel], rtol=1e-3)
    assert [round(float(row["memory"])) for row in rows] == [0, 0, 0, 8]
    first, mixed = (float(row["test_loss"]) for row in rows[:2])
    assert abs(first - mixed) < 0.1 * first  # a ring of 3 is the complete graph
    said = capsys.readouterr().out
    assert said.count("3 ranks, seed 0") == 4
    assert "steps of 6 images over all ranks" in " ".join(said.split())


def test_every_method_can_be_made():
    for method in METHODS:
        assert isinstance(build(method, 0), AllReduce) == (method == ALL_REDUCE)
    assert len(OVER_LINKS) == 19


def test_ranks_draw_batches_of_their_own():
    own = [Noise().batch(1, 2, rank, 2)[1] for rank in range(2)]
    assert len(own[0]) == 3
    assert not torch.equal(*own)


@pytest.mark.parametrize(
    ("method", "state"), [("D-PSGD", 0), ("D2", 4), ("DeepSqueeze, 1 bit", 4), ("CHOCO, 1 bit", 8)]
)
def test_what_a_method_keeps_is_measured(method, state):
    found, with_buffers = kept(method, ranks=3, numel=1 << 18)
    assert found == state
    assert with_buffers > state - 0.1  # what other tests left may be freed meanwhile


def test_moniqua_keeps_less_than_a_float_for_each_parameter():
    state, with_buffers = kept("Moniqua, 1 bit", ranks=3, numel=1 << 18)
    assert state < 0.1
    assert state < with_buffers < kept("D-PSGD", ranks=3, numel=1 << 18)[1]
