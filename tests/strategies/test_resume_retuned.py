"""A resumed run goes on with what was retuned, also where the checkpoint was saved before the next step."""

from functools import partial

import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_compress import ThetaRecovery
from tests.helpers.training import Net, digits, loader
from tests.strategies.test_resume import fit, interrupted
from tests.turns import by_turns


class Retunes(Net):
    """Goes over to another method in the first epoch."""

    def on_train_batch_end(self, *_):
        if self.trainer.global_step == 1:
            self.trainer.strategy.compression.retune("topk", density=0.05)


def retuned(folder):
    return interrupted(folder, "bf16", make=Retunes)


def test_what_was_retuned_goes_on(pools, tmp_path):
    assert pools[2].run(retuned, str(tmp_path)) == [(True, [])] * 2


class RetunesAtTheEnd(Net):
    """Goes over to other settings or another method when an epoch has ended, before it is saved."""

    def __init__(self, compressor=None, **changes):
        super().__init__()
        self.given = compressor, changes

    def on_train_epoch_end(self):
        if self.current_epoch == 0:
            compressor, changes = self.given
            self.trainer.strategy.compression.retune(compressor, **changes)


LATE = {  # what runs first, and what is retuned to
    "powersgd": ("powersgd", None, {"rank": 4}),
    "powersgd to topk": ("powersgd", "topk", {"density": 0.1}),
    "topk to powersgd": ("topk", "powersgd", {"rank": 2}),
    "dgc": ("dgc", None, {"density": 0.3}),
}


def retuned_late(folder, name):
    before, compressor, changes = LATE[name]
    return interrupted(folder, before, make=partial(RetunesAtTheEnd, compressor, **changes))


@pytest.mark.parametrize(("name", "size"), by_turns(list(LATE), (2, 3), 1))
def test_what_was_retuned_before_the_save_begins_with_the_next_step(pools, tmp_path, name, size):
    assert pools[size].run(retuned_late, str(tmp_path), name) == [(True, [])] * size


class Still(Net):
    """Has a metric that never gets better, by which a validation loosens and then saves."""

    def validation_step(self, batch, batch_idx):
        self.log("still", 1.0)

    def val_dataloader(self):
        return loader(digits(count=32))


def recovered(folder):
    """Three epochs; the second one's validation ends in a larger rank; then the third one again."""

    def epochs(where, resume=None):
        recovery = ThetaRecovery("rank", monitor="still", patience=1)
        callbacks = [recovery, ModelCheckpoint(where, "{epoch}", save_top_k=-1)]
        trained, strategy, said = fit(where, "powersgd", resume, 3, callbacks, make=Still)
        return trained, recovery.history, strategy.compression.settings.method.rank, said

    whole, history, rank, _ = epochs(folder)
    again, same, resumed, said = epochs(f"{folder}/again", f"{folder}/epoch=1.ckpt")
    return np.array_equal(whole, again), history[0], history == same, rank, resumed, said


def test_what_theta_recovery_loosened_when_validation_saved(pools, tmp_path):
    assert pools[2].run(recovered, str(tmp_path)) == [(True, (6, 4), True, 4, 4, [])] * 2
