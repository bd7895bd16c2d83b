"""What a training is said to have cost."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_compress import LocalSGDStrategy
from recipes.resnet.module import ResNetModule
from recipes.tables.record import Recorder
from tests.helpers.processes import Pools
from tests.helpers.training import quiet_trainer

STEPS = 4


def _cost() -> tuple[dict[str, float], dict[str, Any]]:
    strategy, recorder = LocalSGDStrategy(sync_every=2, fragments=2, compressor="rotated"), Recorder()
    trainer = quiet_trainer(strategy, max_steps=STEPS, callbacks=[recorder], use_distributed_sampler=False)
    pictures = [(torch.randn(3, 16, 16), row % 10) for row in range(4 * STEPS)]
    module = ResNetModule(8, warmup_epochs=0.0)
    trainer.fit(module, DataLoader(pictures, 4))
    return recorder.costs(trainer), strategy.comm_stats()


def test_bytes_of_all_fragments_over_the_steps_of_the_optimizer(pools: Pools) -> None:
    costs, stats = pools[2].run(_cost)[0]
    assert costs["steps"] == STEPS
    assert stats["steps"] < STEPS  # rounds
    assert costs["total_bytes_sent"] == stats["total_bytes_sent"] > 0
    assert costs["bytes_per_step"] == stats["total_bytes_sent"] / STEPS
    assert costs["ratio"] > 10  # 4 bits, and every second step
