"""Tuners, compiled models, and several trainers in one process."""

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from lightning_compress.engine.optimizers import _listeners
from tests.conformance.training import ALL, ByStep, outcome, strategy_of, train, trainer_of
from tests.helpers.training import LATER, FindsInBetween, Net, digits, loader


class Rate(ByStep):
    """With a learning rate that a finder may set."""

    def __init__(self):
        super().__init__()
        self.lr = 0.05

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


def kept(trainer, _):
    """Everything that is kept from step to step, in one vector, and how many steps there were."""
    state = trainer.strategy.compression.state_dict()
    numbers = [one["numbers"] for group in state["groups"] for _, one in sorted(group["states"].items())]
    return torch.cat([each.reshape(-1).clone() for each in numbers]).numpy() if numbers else np.zeros(0), state["step"]


def _find_in_between(compressor, folder):
    finder = FindsInBetween(kept)
    trainer, model = train(compressor, Rate, callbacks=[finder], default_root_dir=folder, max_epochs=4)
    plain = outcome(*train(compressor, Rate, max_epochs=4))
    return finder.seen, outcome(trainer, model), plain, len(finder.optimal_lr.results["lr"])


@pytest.mark.parametrize("compressor", ["onebit", "powersgd", {"name": "dgc", "density": 0.05}], ids=str)
def test_a_learning_rate_finder_in_between_leaves_no_trace(pools, tmp_path, compressor):
    ranks = pools[2].run(_find_in_between, compressor, str(tmp_path))
    for ((before, steps), (after, again)), found, plain, tried in ranks:
        assert tried >= 6
        assert steps == again == 4
        assert np.abs(before).sum() > 0
        assert np.array_equal(before, after)
        assert np.array_equal(found["parameters"], plain["parameters"])
    assert not list(tmp_path.glob("**/.lr_find*"))


def _find_at_first(folder):
    finder = LearningRateFinder(1e-5, 1e-1, 20, early_stop_threshold=None)
    trainer, model = train("onebit", Rate, callbacks=[finder], default_root_dir=folder, max_epochs=8)
    return model.lr, outcome(trainer, model)


@LATER  # the finder of 2.5 takes an epoch from the fit, with any strategy
def test_a_learning_rate_finder_at_first(pools, tmp_path):
    first, second = pools[2].run(_find_at_first, str(tmp_path))
    assert first[0] == second[0] != 0.05
    assert np.array_equal(first[1]["parameters"], second[1]["parameters"])
    assert first[1]["committed"] == 32


def _find_batch_size():
    said = []
    for compressor in (None, "onebit"):
        try:
            train(compressor, callbacks=[BatchSizeFinder()])
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_batch_size_finder_is_refused_as_with_stock_ddp(pools):
    for stock, ours in pools[2].run(_find_batch_size):
        assert stock == ours
        assert "not supported with distributed strategies" in ours


def _sync_batch_norm():
    said = []
    for compressor in (None, "onebit"):
        try:
            trainer, model = train(compressor, sync_batchnorm=True)
            said.append(outcome(trainer, model))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_synchronised_batch_norm_on_cpu_is_what_it_is_with_stock_ddp(pools):
    for stock, ours in pools[2].run(_sync_batch_norm):
        assert isinstance(stock, str)
        assert stock == ours


def _several(order):
    """Parameters after each of several runs in one process, and who still watches the optimizers."""
    answers = {}
    for name in order:
        answers[name] = outcome(*train(name))["parameters"]
    watching = [each for each in _listeners if each.active and each._last is not None]
    return answers, len(watching)


def test_several_trainers_in_one_process_do_not_meddle(pools):
    names = ["onebit", "powersgd", "dgc", "none"]
    there, back = (pools[2].run(_several, order) for order in (names, names[::-1]))
    for (forth, _), (other, _) in zip(there, back, strict=True):
        for name in names:
            assert np.array_equal(forth[name], other[name]), name
    assert np.array_equal(there[0][0]["onebit"], there[1][0]["onebit"])


def _again():
    """One Trainer fits three times, one epoch more each time."""
    torch.manual_seed(1)
    model = Net()
    trainer = trainer_of(strategy_of("onebit"), max_epochs=1)
    seen = []
    for epochs in (1, 2, 3):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model, loader(digits()))
        seen.append(outcome(trainer, model))
    return seen


def test_one_trainer_fits_several_times(pools):
    first, second = pools[2].run(_again)
    assert [each["global_step"] for each in first] == [4, 8, 12]
    assert all(each["committed"] == 4 for each in first)  # each fit without a checkpoint begins error feedback anew
    assert all(np.array_equal(a["parameters"], b["parameters"]) for a, b in zip(first, second, strict=True))
    assert first[2]["kept"] > 0


WHOLE = {"bucket_cap_mb": 25}  # torch.compile wants 1 at least


def _compiled(backend):
    answers = {"stock": outcome(*train(None, settings=WHOLE)), "eager": outcome(*train("onebit", settings=WHOLE))}
    for what, compressor in (("all", ALL), ("some", "onebit")):
        answers[what] = outcome(*train(compressor, lambda: torch.compile(Net(), backend=backend), WHOLE))
    torch._dynamo.reset()
    return answers


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_a_compiled_model(pools, backend):
    first, second = pools[2].run(_compiled, backend)
    assert np.abs(first["stock"]["parameters"] - first["all"]["parameters"]).max() < 1e-5
    assert np.array_equal(first["some"]["parameters"], second["some"]["parameters"])
    assert first["some"]["kept"] > 0
    assert first["some"]["committed"] == 8
    assert first["some"]["total_bytes_sent"] == first["eager"]["total_bytes_sent"]
