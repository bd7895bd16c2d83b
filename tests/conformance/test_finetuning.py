"""Parameters that are frozen and unfrozen while a run goes on."""

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from tests.conformance.training import ALL, outcome, train
from tests.helpers.training import Net


class Tuned(Net):
    """Its optimizer gets what is trained at first."""

    def configure_optimizers(self):
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], 0.05, momentum=0.9)


class Unfreezes(BaseFinetuning):
    """The body is trained from the second epoch on."""

    def freeze_before_training(self, module):
        self.freeze(module.body)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.body, optimizer, 0.05)


class FreezesLater(Unfreezes):
    """The same, but DistributedDataParallel is built before anything is frozen."""

    def setup(self, trainer, module, stage):
        pass

    def on_fit_start(self, trainer, module):
        self.freeze_before_training(module)
        super().on_fit_start(trainer, module)


def _tune(compressor, callback, settings):
    try:
        trainer, model = train(compressor, Tuned, settings, callbacks=[callback()])
    except ValueError as error:
        return str(error)
    return outcome(trainer, model) | {"body": model.body[3].weight.detach().numpy()}


def test_stock_ddp_trains_each_rank_on_its_own(pools):
    """Which is why ours refuses it; should this ever fail, DistributedDataParallel has learnt it."""
    first, second = pools[2].run(_tune, None, Unfreezes, {})
    assert not np.array_equal(first["body"], second["body"])


@pytest.mark.parametrize("compressor", ["onebit", "none"])
def test_what_is_unfrozen_and_not_averaged_is_an_error(pools, compressor):
    for said in pools[2].run(_tune, compressor, Unfreezes, {}):
        assert said.startswith("body.0.weight, body.0.bias, body.3.weight")
        assert "every rank would train its own" in said
        assert "find_unused_parameters=True" in said


def test_what_is_frozen_after_ddp_was_built_can_be_unfrozen(pools):
    settings = {"find_unused_parameters": True}
    stock = pools[2].run(_tune, None, FreezesLater, settings)[0]
    ours = pools[2].run(_tune, ALL, FreezesLater, settings)[0]
    assert np.abs(stock["parameters"] - ours["parameters"]).max() < 1e-5
    first, second = pools[2].run(_tune, "onebit", FreezesLater, settings)
    assert np.array_equal(first["parameters"], second["parameters"])
    assert first["finite"]
    assert first["kept"] > 0
    assert not np.array_equal(first["body"], stock["body"])


def _next_fit():
    """The body is trained in a second fit."""
    torch.manual_seed(1)
    model = Tuned()
    BaseFinetuning.freeze(model.body)
    before = model.body[3].weight.detach().clone()
    first, _ = train("onebit", model=model)
    same = model.body[3].weight.equal(before)
    BaseFinetuning.make_trainable(model.body)
    answer = outcome(*train("onebit", model=model))
    return same, model.body[3].weight.equal(before), answer["parameters"], len(first.strategy.compression.state_dict())


def test_what_is_unfrozen_between_fits(pools):
    first, second = pools[2].run(_next_fit)
    assert first[:2] == (True, False)
    assert np.array_equal(first[2], second[2])


def _bare():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    compression = attach(ddp, "topk")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        for step in range(3):
            model[0].requires_grad_(step == 1)
            ddp(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
    except ValueError as error:
        return step, str(error)
    finally:
        compression.close()


def test_a_bare_model_says_so_too(pools):
    for step, said in pools[2].run(_bare):
        assert step == 1
        assert said.startswith("0.weight, 0.bias")
