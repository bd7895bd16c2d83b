"""Gossip's benchmark: equal beginnings, and rows that are not run again."""

import numpy as np
import torch

from benchmarks._gossip import accuracy, training
from benchmarks._gossip.methods import METHODS
from benchmarks._gossip.rank import METHODS as OVER_LINKS
from recipes.resnet.data import Split


class Noise:
    """Images of nothing."""

    def __init__(self, *_):
        generator = torch.Generator().manual_seed(0)
        self.test = Split(
            torch.randint(256, (20, 3, 32, 32), dtype=torch.uint8, generator=generator), torch.arange(20) % 10
        )
        self.share = lambda rank, ranks: Split(self.test.images[rank::ranks], self.test.labels[rank::ranks])


def test_rows_are_written_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(accuracy, "Task", Noise)
    methods = ["all-reduce", "D-PSGD", "Moniqua, 4 bits, every 2nd step", "SGP, used a round later"]
    path = tmp_path / "new" / "rows.csv"
    given = {"steps": 2, "images": 20, "batch": 6, "rate": 0.1, "tested": 20}
    for _ in range(2):
        accuracy.measure(path, tmp_path, methods, [3], [0], **given)
    rows = list(accuracy.known(path).values())
    assert [row["method"] for row in rows] == methods
    numel = 269_722
    sent = [float(row["bytes_a_step"]) for row in rows]
    np.testing.assert_allclose(sent, [4 / 3 * 4 * numel, 2 * 4 * numel, 4 * numel, 4 * numel], rtol=1e-3)
    first, gossip = (float(row["test_loss"]) for row in rows[:2])
    assert abs(first - gossip) < 0.1 * first  # a ring of 3 is the complete graph
    said = capsys.readouterr().out
    assert said.count("3 ranks, seed 0") == 4
    assert "steps of 6 images over all ranks" in " ".join(said.split())


def test_every_method_can_be_made():
    for method in METHODS:
        if method != training.ALL_REDUCE:
            algorithm = training.build_algorithm(METHODS[method]["algorithm"])
            training.build_gossip_compressor(METHODS[method].get("compressor"), algorithm)
    assert len(OVER_LINKS) == 16
