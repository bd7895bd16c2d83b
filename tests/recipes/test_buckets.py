"""Batches of about one length: what they hold, and that every rank has as many."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from recipes.loading import WIDTH, BucketSampler

LENGTHS = np.random.default_rng(0).integers(1, 90, 1000).tolist()
GRID = [{"budget": 500}, {"budget": 90}, {"size": 16}, {"size": 1}]


def shares(ranks: int, epoch: int = 0, lengths: list[int] = LENGTHS, **settings) -> list[list[list[int]]]:
    """All ranks' batches of one epoch."""
    out = []
    for rank in range(ranks):
        sampler = BucketSampler(lengths, num_replicas=ranks, rank=rank, **settings)
        sampler.set_epoch(epoch)
        out.append(list(sampler))
        assert len(out[-1]) == len(sampler)
    assert len({len(share) for share in out}) == 1
    return out


def padded(batch: list[int], lengths: list[int] = LENGTHS) -> int:
    return len(batch) * max(lengths[row] for row in batch)


@pytest.mark.parametrize("limit", GRID, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_training(ranks: int, limit: dict[str, int]) -> None:
    seen = set()
    for epoch in range(4):
        batches = [batch for share in shares(ranks, epoch, **limit) for batch in share]
        rows = [row for batch in batches for row in batch]
        assert len(rows) == len(set(rows))
        for batch in batches:
            assert len(batch) == limit["size"] if "size" in limit else 1 <= padded(batch) <= limit["budget"]
        most = limit.get("size") or max(map(len, batches))
        assert len(LENGTHS) - len(rows) < ranks * most  # less than a round is left out
        seen |= set(rows)
    assert len(seen) > 995  # not the same ones each time


@pytest.mark.parametrize("limit", GRID, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_evaluation_has_every_row_once(ranks: int, limit: dict[str, int]) -> None:
    parts = shares(ranks, shuffle=False, **limit)
    assert parts == shares(ranks, 5, shuffle=False, **limit)
    assert sorted(row for share in parts for batch in share for row in batch) == list(range(1000))
    assert sum(batch == [] for share in parts for batch in share) < ranks
    assert all(share[:-1] and all(share[:-1]) for share in parts)  # only the last may be empty


def test_more_ranks_than_rows() -> None:
    assert shares(3, lengths=[4, 2], size=2, shuffle=False) == [[[1, 0]], [[]], [[]]]
    assert shares(3, lengths=[4, 2], budget=8) == [[], [], []]
    assert shares(2, lengths=[], budget=8, shuffle=False) == [[], []]


def test_epochs_mix_rows_anew_and_ranks_agree() -> None:
    first, again, later = (shares(2, epoch, budget=500) for epoch in (0, 0, 1))
    assert first == again
    sets = [{frozenset(batch) for share in parts for batch in share} for parts in (first, later)]
    assert not sets[0] & sets[1]
    assert shares(2, budget=500, seed=1) != first


def test_batches_have_about_one_length_and_rounds_too() -> None:
    parts = shares(2, budget=500)
    real = sum(LENGTHS[row] for share in parts for batch in share for row in batch)
    assert real / sum(padded(batch) for share in parts for batch in share) > 0.9
    longest = [[max(LENGTHS[row] for row in batch) for batch in share] for share in parts]
    assert all(max(pair) <= WIDTH**2 * min(pair) + 3 for pair in zip(*longest, strict=True) if min(pair) > 9)
    assert longest[0] != sorted(longest[0])  # rounds come in a random order


def test_bad_settings() -> None:
    for wrong in ({}, {"budget": 9, "size": 1}, {"size": 0}):
        with pytest.raises(ValueError, match="give one of the two"):
            BucketSampler([1, 2], **wrong)
    with pytest.raises(ValueError, match="at most 9 cannot hold row 1 of 10"):
        BucketSampler([1, 10, 3], budget=9)


class Rows:
    """A data set that answers with the lengths of a batch."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, rows: list[int]) -> torch.Tensor:
        return torch.tensor([LENGTHS[row] for row in rows])


class Watcher(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.batches = nn.Linear(1, 1), []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.batches.append((self.trainer.train_dataloader.sampler.epoch, batch.tolist()))
        return self.layer(batch[:1, None].float()).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*isinstance.treespec, LeafSpec")
def test_lightning_leaves_it_and_tells_it_the_epoch() -> None:
    sampler, model = BucketSampler(LENGTHS, budget=5000), Watcher()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", max_epochs=2, **quiet)
    trainer.fit(model, DataLoader(Rows(), batch_size=None, sampler=sampler))
    assert [epoch for epoch, _ in model.batches] == [0] * len(sampler) + [1] * len(sampler)
    expected = [batch for epoch in range(2) for batch in shares(1, epoch, budget=5000)[0]]
    assert [batch for _, batch in model.batches] == [[LENGTHS[row] for row in rows] for rows in expected]
