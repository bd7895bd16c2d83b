"""1-bit SGD's two residuals, and AdaGrad between its two encodings."""

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from lightning_compress.codecs import OneBit
from lightning_compress.collectives import World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.engine.group import Group
from lightning_compress.settings.parsing import build_exchange
from lightning_compress.settings.run_state import RunState
from tests.corrections.helpers import (
    COMPRESSED,
    CPU,
    LENGTHS,
    NAMES,
    PARAMETERS,
    SOUND,
    gradient,
    named,
    on_ranks,
    walk,
)
from tests.corrections.test_training import RATE, batches, net
from tests.reference.onebit_sgd import onebit_sgd

BLOCK, STEPS = 64, 10
ADAGRAD = {"name": "two_shot", "adagrad": 1e-8}


def compressed(vector):
    """The stretch that the codec takes care of."""
    return torch.cat([named(vector)[name] for name in COMPRESSED]).numpy()


def reference(size, adagrad):
    """The slow one, with stripes that hold as many blocks each."""
    gradients = [[compressed(gradient(rank, step)) for rank in range(size)] for step in range(STEPS)]
    numel = len(gradients[0][0])
    blocks = -(-numel // BLOCK)
    ends = [min(blocks * rank // size * BLOCK, numel) for rank in range(size + 1)]
    return gradients, onebit_sgd(gradients, list(pairwise(ends)), BLOCK, adagrad)


@pytest.mark.parametrize("adagrad", [None, 1e-8, 0.1])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_it_is_the_papers_with_two_residuals(size, adagrad):
    exchange = {"name": "two_shot", "adagrad": adagrad}
    out, walkers = walk(size, OneBit(BLOCK), STEPS, exchange=exchange)
    gradients, (means, own, owner, summed, made) = reference(size, adagrad)
    for mine, theirs in zip(out, means, strict=True):
        assert np.abs(compressed(mine) - theirs).max() <= 1e-5
    residuals = [torch.cat([walker.state("residual")[name] for name in COMPRESSED]).numpy() for walker in walkers]
    total = sum(np.sum(step, axis=0, dtype=np.float64) for step in gradients)
    if adagrad is None:  # one residual is enough: the owner's is what stays in its own shard
        assert np.abs(sum(residuals) - sum(own) - owner).max() <= 1e-4
        assert (
            np.abs(size * sum(compressed(mine).astype(np.float64) for mine in out) + sum(residuals) - total).max()
            <= 1e-4
        )
        return
    owners = sum(torch.cat([each.state("exchange.residual")[name] for name in COMPRESSED]).numpy() for each in walkers)
    for mine, theirs in zip(residuals, own, strict=True):
        assert np.abs(mine - theirs).max() <= 1e-4
    assert np.abs(owners - owner).max() <= 1e-4
    # the mean is not conserved; what the owners were given is, and what they made of it
    sent = sum(compressed(mine).astype(np.float64) for mine in out)
    assert np.abs(summed + sum(residuals) - total).max() <= 1e-4
    assert np.abs(sent + owners - made).max() <= 1e-4
    assert np.abs(size * sent + sum(residuals) - total).max() > 1


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_without_loss_it_is_adagrad_on_the_mean(size, warmup):
    method = {"name": "topk", "density": 1.0}
    out, walkers = walk(size, method, STEPS, exchange=ADAGRAD, warmup_steps=warmup)
    history = 0.0
    for step, update in enumerate(out):
        mean = sum(gradient(rank, step).double() for rank in range(size)) / size
        history = history + mean.square()
        assert (update - mean / (history.sqrt() + 1e-8)).abs().max() <= 1e-5
    kept = [torch.cat(list(walker.state("exchange.history").values())) for walker in walkers]
    assert (torch.stack([each != 0 for each in kept]).sum(dim=0) == 1).all()  # every element has one owner


def test_dense_steps_go_on_from_the_same_history():
    out, walkers = walk(2, OneBit(BLOCK), 6, exchange=ADAGRAD, warmup_steps=5)
    mean = [sum(gradient(rank, step).double() for rank in range(2)) / 2 for step in range(6)]
    history = sum(each.square() for each in mean)
    assert (out[4] - mean[4] / sum(each.square() for each in mean[:5]).sqrt()).abs().max() <= 1e-5
    for name in ("bias", "tiny"):  # which travel as they are, always
        expected = named(mean[5] / history.sqrt())[name]
        assert (named(out[5])[name] - expected).abs().max() <= 1e-5
    relative = (out[5] - mean[5] / history.sqrt()).norm() / out[5].norm()
    assert 0.1 < relative < 1
    assert all(walker.group.plan(0).is_dense(place) for walker in walkers for place in walker.group._plan.compressed)


def test_history_and_residual_follow_the_shards():
    """The same parameters in two buckets, in another order, as DistributedDataParallel rebuilds them."""
    settings = RunState.of(OneBit(BLOCK), ADAGRAD)

    def program(collective):
        def made(parameters):
            return Group(parameters, settings, World(collective, CPU, Meter(CPU)))

        old = made(PARAMETERS)
        for step in range(3):
            old.reduce(list(gradient(collective.rank, step).split(LENGTHS)), step, None)
            for state in old.states.values():
                state.commit(SOUND, NAMES)
        new = [made(PARAMETERS[2:]), made(PARAMETERS[1::-1])]
        for group in new:
            for kind in group.states:
                group.states[kind].adopt(old.states[kind], NAMES)
            group.adopted()
        kinds = ("exchange.history", "exchange.residual")
        before = [named_state(old.states[kind]) for kind in kinds]
        after = [
            {name: part for group in new for name, part in named_state(group.states[kind]).items()} for kind in kinds
        ]
        pending = new[0].states[kinds[0]].pending.equal(new[0].states[kinds[0]].committed)
        return before, after, pending

    ranks = on_ranks(3, program)
    for kind in (0, 1):
        for name in COMPRESSED:
            before = torch.stack([before[kind][name] for before, _, _ in ranks])
            after = torch.stack([after[kind][name] for _, after, _ in ranks])
            assert after.sum(dim=0).equal(before.sum(dim=0))
            assert not after.equal(before)
            assert (after != 0).sum(dim=0).max() == 1
            assert after.any()
    assert all(pending for _, _, pending in ranks)


def named_state(state):
    return {each.name: state.committed[each.offset : each.end].clone() for each in state.layout.segments}


def _train(ours):
    model = DistributedDataParallel(net(), bucket_cap_mb=0.02)
    if ours:
        compression = attach(model, ours, ADAGRAD)
        optimizer = torch.optim.SGD(model.parameters(), RATE)
    else:
        optimizer = torch.optim.Adagrad(model.parameters(), RATE, eps=1e-8)
    for batch in batches(dist.get_world_size()):
        images, labels = batch[dist.get_rank()]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert not ours or len(compression.groups) > 1 or dist.get_world_size() == 1
    return {name: parameter.detach().numpy() for name, parameter in model.module.named_parameters()}


@pytest.mark.parametrize(("size", "compressor"), [(1, "none"), (2, "none"), (3, {"name": "topk", "density": 1.0})])
def test_training_is_torchs_adagrad_while_buckets_are_rebuilt(pools, size, compressor):
    plain = pools[size].run(_train, None)
    start = dict(net().named_parameters())
    ours = pools[size].run(_train, compressor)
    for name, value in plain[0].items():
        assert all(np.array_equal(ours[0][name], other[name]) for other in ours)
        if name == "body.0.bias":  # batch norm takes it off again: its gradient is rounding, which AdaGrad makes large
            continue
        assert np.abs(ours[0][name] - value).max() <= 1e-3
        assert np.abs(value - start[name].detach().numpy()).max() > 1e-2


def _adagrad_twice():
    model = DistributedDataParallel(nn.Linear(64, 64))
    attach(model, "onebit", ADAGRAD)
    model(torch.ones(1, 64)).sum().backward()
    try:
        torch.optim.Adagrad(model.parameters()).step()
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("size", [1, 2])
def test_adagrad_is_not_done_twice(pools, size):
    for answer in pools[size].run(_adagrad_twice):
        assert "two_shot(adagrad=1e-08) cannot be combined with Adagrad" in answer


@pytest.mark.parametrize("value", [0, -1.0, True, "1e-8"])
def test_wrong_settings(value):
    with pytest.raises(ValueError, match=re.escape(f"TwoShot(adagrad={value!r})")):
        build_exchange({"name": "two_shot", "adagrad": value})


def test_two_methods_that_optimize_are_refused():
    with pytest.raises(ValueError, match="would both do the optimizer's work"):
        RunState.of("dgc", ADAGRAD)


def test_a_spike_does_not_hold_an_element_still():
    layout = [("weight", (64, 64))]
    spike = torch.ones(64 * 64)
    spike[5] = 2e19  # whose square is beyond float32

    def walk(collective):
        group = Group(layout, RunState.of("bf16", ADAGRAD), World(collective, CPU, Meter(CPU)))
        for step, numbers in enumerate((spike, torch.full_like(spike, 1e19))):
            given = [numbers.clone()]
            assert float(group.reduce(given, step, None)) == 0
            for state in group.states.values():
                state.commit(SOUND, {"weight"})
        return given[0]

    for applied in run_threads(2, walk):
        assert applied[5] > 0
