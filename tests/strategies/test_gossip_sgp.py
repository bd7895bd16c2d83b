"""Push-sum by Lightning: what is evaluated and saved while a part of the models is under way."""

import re
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

from lightning_compress import GossipStrategy
from tests.helpers.lives import live
from tests.helpers.training import digits, loader, parameters, saving_on_exception
from tests.strategies.test_periodic import ByStep, Validated, Watch, fit, fit_again

UNEVEN = [[0.5, 0, 1 / 3], [0.5, 0.5, 1 / 3], [0, 0.5, 1 / 3]]
"""A directed graph on which weights differ: rank 2 sends to all."""


def sgp(delay, topology="one_peer_exponential", **more):
    return GossipStrategy({"name": "sgp", "delay": delay}, topology, **more)


class Held(Callback):
    """Notes after each step what this rank holds, by the papers' letters: ``x`` and ``w``, what arrives included."""

    def __init__(self):
        self.x, self.w, self.logged = [], [], []

    def on_train_batch_end(self, trainer, module, *_):
        surplus, weight = trainer.strategy.synchroniser._mixing.surplus()
        self.x.append((parameters(module).double() + surplus.double()).numpy())
        self.w.append(weight)
        self.logged.append(trainer.strategy.comm_stats()["weight"])


def _evaluates(delay, evaluate, folder):
    watch, held = Watch(), Held()
    save = ModelCheckpoint(folder, "last-{step}", every_n_train_steps=5, save_top_k=-1)
    _, model = fit(sgp(delay, UNEVEN, evaluate=evaluate), Validated, callbacks=[held, watch, save])
    saved = torch.load(f"{folder}/last-step=5.ckpt", weights_only=True)["state_dict"]
    saved = torch.cat([saved[name].reshape(-1) for name, _ in model.named_parameters()]).numpy()
    return held.x, held.w, watch.trained, watch.evaluated, saved, parameters(model).numpy(), held.logged


@pytest.mark.parametrize("evaluate", ["mean", "local"])
@pytest.mark.parametrize("delay", [0, 2])
def test_the_mean_is_that_of_numerators_by_weights(pools, tmp_path, delay, evaluate):
    """It is validated and saved, or each rank's own model; the fit ends on it."""
    ranks = pools[3].run(_evaluates, delay, evaluate, str(tmp_path))
    numerators, weights = (np.stack([np.stack(rank[part]) for rank in ranks]) for part in (0, 1))
    np.testing.assert_allclose(weights.sum(0), 3.0, atol=1e-12)
    means, trained = numerators.sum(0) / weights.sum(0)[:, None], np.stack([rank[2] for rank in ranks])
    for number, step in ((2, 3), (-1, 7)):
        shown = np.stack([rank[3][number] for rank in ranks])
        wanted = np.stack([means[step]] * 3) if evaluate == "mean" else trained[:, step]
        np.testing.assert_allclose(shown, wanted, atol=1e-6)
    np.testing.assert_allclose(ranks[0][4], means[4] if evaluate == "mean" else trained[0, 4], atol=1e-6)
    assert np.abs(means[4] - trained[:, 4].mean(0)).max() > 1e-5  # which is not the mean of the models
    for rank in ranks:
        np.testing.assert_allclose(rank[5], means[7], atol=1e-6)
        assert np.array_equal(rank[5], ranks[0][5])
    assert len({rank[6][-1] for rank in ranks}) > 1


def _bytes():
    trainer, model = fit(sgp(1))
    return len(parameters(model)), trainer.strategy.comm_stats(), dist.get_rank()


def test_bytes_are_of_one_model_and_8_more(pools):
    for numel, stats, rank in pools[3].run(_bytes):
        sent = {peer: stats.get(f"bytes_to_{peer}", 0) for peer in range(3)}
        each = 4 * (numel + numel % 2) + 8
        assert sent == {rank: 0, (rank + 1) % 3: 4 * each, (rank + 2) % 3: 4 * each}  # by turns
        assert "gossip by sgp of delay 1 with none on one_peer_exponential, keeps 12 bytes" in stats["summary"]


def test_a_run_that_had_ended_ends_again_on_its_model(pools, tmp_path):
    for ended, again in pools[3].run(fit_again, partial(sgp, 2, UNEVEN), str(tmp_path)):
        assert np.array_equal(ended, again)


def _other_delay(folder):
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_top_k=-1)
    fit(sgp(1), ByStep, callbacks=[save])
    with pytest.raises(ValueError, match="sgp of delay 1") as caught:
        fit(sgp(2, strict_state=True), ByStep, resume=f"{folder}/step=5.ckpt")
    _, model = fit(sgp(2), ByStep, resume=f"{folder}/step=5.ckpt")  # from the mean
    return str(caught.value), bool(parameters(model).isfinite().all())


def test_what_travels_is_not_resumed_with_another_delay(pools, tmp_path):
    for said, finite in pools[2].run(_other_delay, str(tmp_path)):
        assert re.search("trained with gossip by sgp of delay 1 .* compresses with gossip by sgp of delay 2", said)
        assert finite


def _loss(strategy):
    """Of the model that the fit ends on, on all images."""
    _, model = fit(strategy(), max_epochs=8, limit_train_batches=1.0, data=loader(digits()))
    images, labels = digits().tensors
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model.eval()(images), labels))


def _losses(delay):
    return _loss(GossipStrategy), _loss(partial(sgp, delay))


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_it_learns_as_dpsgd_does(pools, delay):
    dpsgd, ours = pools[4].run(_losses, delay)[0]
    assert dpsgd < 0.3
    assert ours < 1.3 * dpsgd


class Fails(ByStep):
    """Rank 1 raises in the fifth step."""

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 4 and dist.get_rank() == 1:
            raise KeyError("a user's bug")
        return super().training_step(batch, batch_idx)


def _fails(folder):
    save = saving_on_exception(folder)
    fit(sgp(2), Fails, callbacks=[save])


def test_a_rank_that_fails_ends_the_run_with_messages_under_way(tmp_path):
    codes, said = live(3, tmp_path / "ranks", _fails, str(tmp_path), seconds=20)
    assert codes == [1, 1, 1]
    assert "a user's bug" in said[1]
    for rank in (0, 2):
        assert "ExchangeError" in said[rank]
