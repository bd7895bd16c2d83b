"""What may be done to a residual between two steps: forgetting, and following the learning rate."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from lightning_compress.settings.run_state import RunState


def _model(**settings):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 48, bias=False)))
    return model, attach(model, "topk", **settings)


def _data(step):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def _summed(tensor):
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total.double()


def _residual(compression, name):
    for group in compression.groups:
        for segment in group.layout.segments:
            if segment.name == name:
                return _summed(group.residual.committed[segment.offset : segment.end])
    return torch.zeros(1, dtype=torch.float64)


def _telescopes(rates, follows):
    """How far the parameters are from where they would be had every gradient, and what is still kept, arrived in time.

    Two parameter groups, the second with a tenth of the rate.
    """
    model, compression = _model(error_feedback={"follows_lr": follows})
    weights = {"0.weight": model.module[0].weight, "2.weight": model.module[2].weight}
    optimizer = torch.optim.SGD([{"params": [weight]} for weight in weights.values()], 0.1)
    start = {name: weight.detach().double().clone() for name, weight in weights.items()}
    owed = {name: torch.zeros_like(value) for name, value in start.items()}
    for step, rate in enumerate(rates):
        for group, factor in zip(optimizer.param_groups, (1.0, 0.1), strict=True):
            group["lr"] = rate * factor
        optimizer.zero_grad()
        local = torch.autograd.grad(model.module(_data(step)).square().mean(), list(weights.values()))
        model(_data(step)).square().mean().backward()
        optimizer.step()
        for name, gradient, factor in zip(owed, local, (1.0, 0.1), strict=True):
            owed[name] += rate * factor * _summed(gradient)
    errors = []
    for (name, weight), factor in zip(weights.items(), (1.0, 0.1), strict=True):
        moved = dist.get_world_size() * (start[name] - weight.detach().double())
        kept = rates[-1] * factor * _residual(compression, name).view(weight.shape)
        errors.append(float((owed[name] - moved - kept).norm() / owed[name].norm()))
    return max(errors)


@pytest.mark.parametrize("rates", [[0.1, 0.1, 0.02, 0.02, 0.3, 0.1], [0.0, 0.1, 0.0, 0.0, 0.5, 0.05]])
def test_updates_telescope_when_the_residual_follows_the_learning_rate(pools, rates):
    assert max(pools[2].run(_telescopes, rates, True)) < 1e-4  # weights are float32
    assert min(pools[2].run(_telescopes, rates, False)) > 1e-2


def test_at_one_rate_nothing_changes(pools):
    assert max(pools[2].run(_telescopes, [0.1] * 4, False)) < 1e-4


def _follows_on(cut):
    """The weights after four steps, of which the third is at another rate: of a run that goes on from its state."""
    model, optimizer, compression = None, None, None
    for step, rate in enumerate([0.1, 0.1, 0.01, 0.01]):
        if step == 0 or (cut and step == 2):
            kept = (copy.deepcopy(compression.state_dict()), parameters_of(model)) if compression else None
            torch.manual_seed(0)
            model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 48, bias=False)))
            optimizer = torch.optim.SGD(model.parameters(), rate)
            compression = attach(model, "topk", error_feedback={"follows_lr": True}, optimizer=optimizer)
            if kept:
                compression.load_state_dict(kept[0])
                nn.utils.vector_to_parameters(kept[1], model.parameters())
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        model(_data(step)).square().mean().backward()
        optimizer.step()
    return parameters_of(model)


def parameters_of(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_an_optimizer_that_is_given_is_known_before_its_first_step(pools):
    whole, cut = (pools[2].run(_follows_on, each) for each in (False, True))
    for one, other in zip(whole, cut, strict=True):
        assert one.equal(other)


def _wrong_optimizer():
    model = DistributedDataParallel(nn.Linear(64, 64))
    with pytest.raises(ValueError, match="would apply momentum twice"):
        attach(model, "onebit_adam", optimizer=torch.optim.AdamW(model.parameters()))


def test_an_optimizer_that_cannot_go_with_the_method_is_refused_at_once(pools):
    pools[2].run(_wrong_optimizer)


def _decayed(decay, backwards):
    """What is neither applied nor kept of gradients plus decayed residual, at most over the steps."""
    model, compression = _model(error_feedback={"decay": decay})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    weight, worst = model.module[0].weight, 0.0
    for step in range(4):
        owed = decay * _residual(compression, "0.weight")
        optimizer.zero_grad()
        made = 0.0  # by the passes before, of this step
        for turn in range(backwards):
            data = _data(10 * step + turn)
            owed = owed + _summed(torch.autograd.grad(model.module(data).square().mean(), weight)[0]).flatten()
            model(data).square().mean().backward()
            owed = owed - dist.get_world_size() * (weight.grad.double().flatten() - made)
            made = weight.grad.double().flatten()
        optimizer.step()
        owed = owed - _residual(compression, "0.weight")
        worst = max(worst, float(owed.norm() / _residual(compression, "0.weight").norm()))
    return worst


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("decay", [0.5, 0.0, 1.0])
def test_the_residual_is_decayed_once_a_step(pools, decay, backwards):
    assert max(pools[2].run(_decayed, decay, backwards)) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"error_feedback": {"decay": 1.5}}, "decay=1.5 must be in [0, 1]"),
        ({"error_feedback": {"decay": "half"}}, "decay='half' must be in [0, 1]"),
        ({"error_feedback": {"follows_lr": "yes"}}, "follows_lr='yes' must be true or false"),
    ],
)
def test_refused_at_construction(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RunState.of("topk", **arguments)
