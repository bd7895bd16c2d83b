"""A Trainer's ``gradient_clip_val`` clips a mean of gradients, or is refused."""

import re
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist

from lightning_compress import CompressedDDPStrategy
from lightning_compress.settings.run_state import RunState
from tests.cases import CASES
from tests.helpers.training import Net, fit, parameters

STEPS = [
    ({"compressor": {"name": "dgc", "density": 0.05}}, "local_clip_norm=0.5"),
    ({"compressor": "onebit_adam", "warmup_steps": 2}, "local_clip_norm=0.5"),
    ({"compressor": "signsgd"}, "local_clip_norm=0.5"),
    ({"compressor": "bf16", "rules": [{"kind": "linear", "compressor": "signsgd"}]}, "local_clip_norm=0.5"),
    ({"compressor": "onebit", "exchange": {"name": "two_shot", "adagrad": 1e-8}}, "local_clip_norm=0.5"),
]


class Plain(Net):
    """SGD without momentum, which all of them take."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class ByHand(Plain):
    """Clips by itself, in manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()


class InItsHook(Plain):
    """Clips in the hook that Lightning has for it."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="value")


def _said(make, trainer, settings):
    """What every way of clipping says; a rank that went on alone would not come back."""
    strategy = CompressedDDPStrategy(**settings)
    try:
        fit(strategy, 2, make, **trainer)
    except ValueError as error:
        return str(error)
    return vars(strategy.precision_plugin).get("clip_gradients", "trained")


WAYS = {
    "norm": (Plain, {"gradient_clip_val": 0.5}),
    "value": (Plain, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}),
    "manual": (ByHand, {}),
    "hook": (InItsHook, {}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("settings", "fix"), STEPS, ids=lambda each: "")
def test_steps_are_not_clipped(pools, way, settings, fix):
    for said in pools[2].run(_said, *WAYS[way], settings):
        assert said.startswith("gradient_clip_val=0.5 cannot be combined with")
        assert re.search(fix, said)


@pytest.mark.parametrize("way", WAYS)
def test_means_of_gradients_are(pools, way):
    assert pools[2].run(_said, *WAYS[way], {"compressor": "topk"}) == ["trained"] * 2


@pytest.mark.parametrize("clip", [None, 0, 0.0])
def test_no_clipping_is_no_clipping(pools, clip):
    assert pools[1].run(_said, Plain, {"gradient_clip_val": clip}, STEPS[0][0]) == ["trained"]


def test_a_method_that_follows_is_looked_at_too(pools):
    class_of = {said.split(" with ")[1][:7] for said in pools[2].run(_retuned_steps)}
    assert class_of == {"SignSGD"}


def _retuned_steps():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            strategy = CompressedDDPStrategy("rotated")

            class Turns(InItsHook):
                def on_train_batch_start(self, batch, batch_idx):
                    if batch_idx == 2:
                        strategy.compression.retune("signsgd")

            fit(strategy, 5, Turns)
        except ValueError as error:
            return str(error)
    return "trained with nothing"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_method_says_what_it_gives(case):
    assert (RunState.of(case.codec).steps_by is not None) is (
        case.name.startswith("signsgd") or case.name == "adam_mask_moment"
    )


class Regression(Plain):
    """Gradients that are far longer than the clip."""

    def __init__(self, adam):
        super().__init__()
        self.adam, self.last = adam, 0.0
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Linear(64, 64), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(64, 64))
        self.task = 6 * torch.randn(64, 64) / 8

    def training_step(self, batch, batch_idx):
        generator = torch.Generator().manual_seed(8 * batch_idx + dist.get_rank())
        given = torch.randn(64, 64, generator=generator)
        loss = (self(given) - given @ self.task).square().mean()
        self.last = float(loss)
        return loss

    def configure_optimizers(self):
        return (torch.optim.AdamW if self.adam else torch.optim.SGD)(self.parameters(), 1e-2)


def _loss(compressor, adam, trainer, settings):
    _, model = fit(CompressedDDPStrategy(compressor, **settings), 250, partial(Regression, adam), **trainer)
    return model.last, parameters(model).numpy()


def test_onebit_adam_learns_with_the_way_out(pools):
    (theirs, _), _ = pools[2].run(_loss, "none", True, {"gradient_clip_val": 0.1}, {})
    settings = {"local_clip_norm": 0.1, "warmup_steps": 40}
    (ours, mine), (_, other) = pools[2].run(_loss, "onebit_adam", False, {}, settings)
    assert ours < 1.5 * theirs < 5
    assert (mine == other).all()
