"""One NaN on one rank does not become a NaN on all."""

import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from lightning_compress import GossipStrategy
from tests.helpers.training import parameters
from tests.strategies.test_gossip import METHODS
from tests.strategies.test_periodic import Validated, Watch, fit

BY_DEFAULT = {(2, "dpsgd"), (3, "moniqua"), (3, "choco"), (2, "d2"), (3, "states")}


class Spoilt(Validated):
    """An input of the last rank is NaN in the steps 2 and 5 to 6: so are its loss, its weights and its momenta."""

    spoilt = (2, 5, 6)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        if self.global_step in self.spoilt and dist.get_rank() == dist.get_world_size() - 1:
            images = images * torch.nan
        return super().training_step((images, labels), batch_idx)


class Optimizers(Callback):
    def on_train_end(self, trainer, module):
        kept = [each for state in trainer.optimizers[0].state.values() for each in state.values()]
        self.finite = all(bool(each.isfinite().all()) for each in kept)


def _spoilt(settings, make=Spoilt):
    watch, states = Watch(), Optimizers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer, model = fit(GossipStrategy(meet_every=4, **settings), make, callbacks=[watch, states], max_epochs=3)
    found = trainer.strategy.comm_stats()
    return watch.trained, parameters(model).numpy(), model.body[1].running_var.numpy(), states.finite, found


@pytest.mark.parametrize(
    ("size", "method"),
    [
        pytest.param(size, method, marks=() if (size, method) in BY_DEFAULT else pytest.mark.thorough)
        for size in (2, 3)
        for method in METHODS
    ],
)
def test_one_nan_on_one_rank_stays_there(pools, size, method):
    """It goes back to its last model, takes part in the mean, and learns on."""
    ranks = pools[size].run(_spoilt, METHODS[method])
    last = size - 1
    for rank, (trained, ended, counted, finite, stats) in enumerate(ranks):
        heals = METHODS[method].get("sync_every", 1) == 1
        assert np.isfinite(np.stack(trained)).all() or (rank == last and not heals)
        assert np.isfinite(ended).all()
        assert np.isfinite(counted).all()
        assert finite
        assert stats["nonfinite_rounds"] == 3
    trained = np.stack([np.stack(each[0]) for each in ranks])
    apart = np.linalg.norm(trained[last, -1] - trained[0, -1]) / np.linalg.norm(trained[0, -1])
    assert apart < 0.5
    assert apart > 0 or (size, method) == (2, "sgp")  # two halves are the same bits in either order
    assert not np.array_equal(trained[last, -1], trained[last, 6])


class AlwaysSpoilt(Spoilt):
    spoilt = range(99)


def test_a_rank_that_cannot_learn_follows_its_neighbours(pools):
    """Of two ranks one never has a finite step: it is the mean of itself and the other one."""
    first, second = pools[2].run(_spoilt, {}, AlwaysSpoilt)
    np.testing.assert_allclose(first[0][-1], second[0][-1], atol=1e-6)
    assert np.isfinite(second[1]).all()
    assert second[-1]["nonfinite_rounds"] == 12


class Everywhere(Validated):
    """All ranks at once."""

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return super().training_step((images * (torch.nan if self.global_step == 3 else 1), labels), batch_idx)


def _said():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = GossipStrategy(meet_every=4)
        fit_loud(strategy, Spoilt)
    return [str(each.message) for each in caught if "was not finite" in str(each.message)]


def fit_loud(strategy, make):
    from tests.helpers.training import digits, loader, quiet_trainer

    torch.manual_seed(1)
    quiet_trainer(strategy, max_epochs=2, limit_train_batches=4).fit(make("adamw"), loader(digits()))


def test_it_is_said_by_the_rank_and_by_the_first_one(pools):
    first, second, third = pools[3].run(_said)
    assert len(first) == 1
    assert first[0].startswith("rank 2, 1 of 4 rounds so far: its model was not finite")
    assert second == []
    assert len(third) == 1
    assert third[0].startswith("rank 2, step 3: its model was not finite")


def test_all_ranks_go_back_together(pools):
    for trained, ended, counted, _, stats in pools[2].run(_spoilt, {}, Everywhere):
        assert np.isfinite(ended).all()
        assert np.isfinite(counted).all()
        np.testing.assert_allclose(trained[3], trained[2], atol=1e-1)
        assert stats["nonfinite_rounds"] == 2
