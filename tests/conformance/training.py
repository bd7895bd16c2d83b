"""Real fits in which Lightning does more than train."""

import warnings

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lightning_compress import CompressedDDPStrategy
from tests.helpers.training import Net, digits, loader, parameters, quiet_trainer

ALL = {"name": "topk", "density": 1.0}


def strategy_of(compressor, **settings):
    """Ours, several buckets; stock DDP for None."""
    settings = {"bucket_cap_mb": 0.02, **settings}
    return CompressedDDPStrategy(compressor, **settings) if compressor else pl.strategies.DDPStrategy(**settings)


def trainer_of(strategy, **options):
    """A quiet Trainer for two epochs of four steps."""
    return quiet_trainer(strategy, **{"max_epochs": 2, "limit_train_batches": 4, **options})


def train(compressor, make=Net, settings=(), resume=None, model=None, **options):
    """One fit on this rank; the trainer and the model."""
    torch.manual_seed(1)
    model = model or make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_of(strategy_of(compressor, **dict(settings)), **options)
        trainer.fit(model, loader(digits()), ckpt_path=resume)
    return trainer, model


def kept_of(trainer):
    """Everything that a compression keeps from step to step on this rank, in one vector."""
    state = trainer.strategy.compression.state_dict()
    numbers = [one["numbers"] for group in state["groups"] for _, one in sorted(group["states"].items())]
    return torch.cat([each.reshape(-1).clone().float() for each in numbers]).numpy() if numbers else np.zeros(0)


def outcome(trainer, model):
    """What every test looks at: parameters, traffic, and whether what is kept is finite."""
    answer = {"parameters": parameters(model).numpy(), "global_step": trainer.global_step}
    if isinstance(trainer.strategy, CompressedDDPStrategy):
        state = trainer.strategy.compression.state_dict()
        numbers = [one["numbers"] for group in state["groups"] for one in group["states"].values()]
        answer |= trainer.strategy.comm_stats()
        answer["finite"] = all(bool(each.isfinite().all()) for each in numbers)
        answer["kept"] = sum(float(each.abs().sum()) for each in numbers)
        answer["committed"] = trainer.strategy.compression.step
    return answer


class ByStep(Net):
    """Its data follows from the step alone, so that it does not matter where in an epoch a run goes on."""

    def __init__(self):
        super().__init__()
        self.images, self.labels = digits(seed=3).tensors

    def training_step(self, batch, batch_idx):
        turn = 16 * (self.trainer.global_step * dist.get_world_size() + dist.get_rank())
        places = torch.arange(turn, turn + 16) % len(self.labels)
        return nn.functional.cross_entropy(self(self.images[places]), self.labels[places])
