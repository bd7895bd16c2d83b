"""A model per rank and several optimizers in manual optimization: all steps are averaged, and none is lost."""

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_compress import AsyncGossipStrategy, GossipStrategy, LocalSGDStrategy
from tests.helpers.training import Net, digits, loader, parameters, quiet_trainer

BATCHES = 8


class Several(Net):
    """One optimizer for the body and one for the head, which step in turn or in phases.

    Args:
        steps: returns which of the two step, by epoch and batch.
    """

    def __init__(self, steps):
        super().__init__()
        self.automatic_optimization, self.steps = False, steps

    def training_step(self, batch, batch_idx):
        for number in self.steps(self.current_epoch, batch_idx):
            optimizer = self.optimizers()[number]
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
        self.trained = parameters(self).clone()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.05) for part in (self.body, self.head)]


STEPS = {
    "both in each batch": lambda epoch, batch: (0, 1),
    "in phases": lambda epoch, batch: (epoch % 2,),
    "the second one rarely": lambda epoch, batch: (0, 1) if batch % 4 == 3 else (0,),
    "the first one rarely": lambda epoch, batch: (1, 0) if batch % 4 == 3 else (1,),
}
STRATEGIES = {
    "local": lambda: LocalSGDStrategy(sync_every=4, compressor="none"),
    "streaming": lambda: LocalSGDStrategy(sync_every=4, compressor="none", fragments=2),
    "gossip": lambda: GossipStrategy(),
}


def _fit(strategy, steps, resume=None, epochs=2, callbacks=()):
    """All ranks have the same batches, so that averaging changes nothing."""
    torch.manual_seed(1)
    model = Several(STEPS[steps])
    options = {"max_epochs": epochs, "limit_train_batches": BATCHES, "use_distributed_sampler": False}
    options |= {"callbacks": list(callbacks), "enable_checkpointing": bool(callbacks)}
    trainer = quiet_trainer(strategy, **options)
    trainer.fit(model, loader(digits()), ckpt_path=resume)
    return trainer, model


def _ends(strategy, steps):
    trainer, model = _fit(STRATEGIES[strategy](), steps)
    return trainer.strategy.attempts, parameters(model).numpy(), model.trained.numpy()


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_that_was_trained_is_kept(pools, strategy, steps):
    for attempts, ended, trained in pools[2].run(_ends, strategy, steps):
        np.testing.assert_allclose(ended, trained, atol=1e-6)
        assert 2 * BATCHES - 1 <= attempts <= 2 * BATCHES + 1


def _resumes(folder, steps):
    save = ModelCheckpoint(folder, "last", save_top_k=1)
    first, _ = _fit(AsyncGossipStrategy(share_work=False), steps, epochs=1, callbacks=[save])
    again, _ = _fit(AsyncGossipStrategy(share_work=False), steps, f"{folder}/last.ckpt", epochs=2)
    return first.strategy.attempts, again.strategy.attempts


@pytest.mark.parametrize("steps", ["both in each batch", "the second one rarely", "the first one rarely"])
def test_asynchronous_gossip_goes_on_as_often_after_a_resume(pools, tmp_path, steps):
    assert pools[2].run(_resumes, str(tmp_path), steps) == [(BATCHES, 2 * BATCHES)] * 2
