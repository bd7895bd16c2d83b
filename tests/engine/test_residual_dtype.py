"""``error_feedback={"dtype": "bfloat16"}``: half the memory, and everything else as before."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import CompressedDDPStrategy, attach
from lightning_compress.codecs import OneBit, TopK
from tests.engine.test_attach import TwoHeads
from tests.helpers.training import fit, parameters
from tests.strategies.test_resume import fit_only, interrupted, resumed_sums

HALVED = {"error_feedback": {"dtype": "bfloat16"}}


def _conserves():
    """What arrives and what stays is what there was, but for the rounding of what stays."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(128, 96, bias=False))
    compression = attach(model, "topk", **HALVED)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    sent = given = torch.zeros(96 * 128, dtype=torch.float64)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        gradient = torch.randn(96, 128, generator=generator)
        (model(torch.eye(128)) * gradient.T).sum().backward()
        optimizer.step()
        sent = sent + dist.get_world_size() * model.module.weight.grad.double().flatten()
        dist.all_reduce(gradient)
        given = given + gradient.double().flatten()
    state = next(iter(compression.groups)).residual
    kept = state.committed.double()
    dist.all_reduce(kept)
    compression.close()
    return state.committed.dtype, state.pending.dtype, float((sent + kept - given).norm() / given.norm())


@pytest.mark.parametrize("size", [2, 3])
def test_what_stays_behind_is_rounded_and_nothing_else(pools, size):
    for committed, pending, error in pools[size].run(_conserves):
        assert committed == pending == torch.bfloat16
        assert 0 < error < 2**-7


def _unused():
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    compression = attach(model, "topk", **HALVED)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for head in ("left", "right"):
        optimizer.zero_grad()
        model(torch.randn(8, 64), head).square().mean().backward()
        optimizer.step()
        residuals = (
            group.residual.committed[each.offset : each.end].float().numpy().copy()
            for group in compression.groups
            for each in group.layout.segments
            if each.name == "left.weight"
        )
        seen.extend(residuals)
    compression.close()
    return seen


def test_what_is_not_used_stays_as_it_is(pools):
    for before, after in pools[2].run(_unused):
        assert before.any()
        assert np.array_equal(before, after)


RUNS = {
    "topk": {"compressor": TopK(0.05)},
    "onebit": {"compressor": OneBit()},
    "dgc": {"compressor": {"name": "dgc", "density": 0.05}},
    "powersgd": {"compressor": "powersgd"},
}


def _resumes(folder, name):
    return interrupted(folder, **RUNS[name], **HALVED)


@pytest.mark.parametrize(("name", "size"), list(zip(RUNS, (2, 3, 3, 2), strict=True)))
def test_bit_for_bit(pools, tmp_path, name, size):
    assert all(same and not said for same, said in pools[size].run(_resumes, str(tmp_path), name))
    shard = torch.load(next(tmp_path.glob("epoch=0.ckpt.lc/*.rank0.pt")), weights_only=True)
    kept = [group["states"]["residual"]["numbers"] for group in shard["tree"]["groups"]]
    assert {each.dtype for each in kept} == {torch.bfloat16}
    assert any(each.any() for each in kept)


def _with_a_scaler(folder):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    return interrupted(folder, TopK(0.05), plugins=[MixedPrecision("16-mixed", "cpu", scaler)], **HALVED)


def test_bit_for_bit_with_a_scaler(pools, tmp_path):
    assert all(same and not said for same, said in pools[2].run(_with_a_scaler, str(tmp_path)))


@pytest.mark.parametrize(("before", "after", "size"), [("float32", "bfloat16", 2), ("bfloat16", "float32", 3)])
def test_a_checkpoint_of_the_other_dtype(pools, tmp_path, before, after, size):
    pools[2].run(partial(fit_only, error_feedback={"name": "residual", "dtype": before}), str(tmp_path))
    resume = partial(resumed_sums, error_feedback={"name": "residual", "dtype": after})
    for (_, norm), said in pools[size].run(resume, f"{tmp_path}/again", f"{tmp_path}/epoch=0.ckpt"):
        assert norm > 0
        assert not said


def _accuracy(dtype):
    """Parameters after a run, and the loss of three, as one alone says little."""
    models = [
        fit(CompressedDDPStrategy({"name": "topk", "density": 0.01}, error_feedback={"dtype": dtype}), 60, seed=seed)[1]
        for seed in (1, 2, 3)
    ]
    return parameters(models[0]).numpy(), sum(float(fit_loss(model)) for model in models)


def fit_loss(model):
    from tests.helpers.training import digits

    images, labels = digits().tensors
    with torch.no_grad():
        return nn.functional.cross_entropy(model.eval()(images), labels)


@pytest.mark.thorough
def test_it_trains_as_well(pools):
    (whole, loss), _ = pools[2].run(_accuracy, "float32")
    (halved, other), (same, _) = pools[2].run(_accuracy, "bfloat16")
    assert np.array_equal(halved, same)
    assert not np.array_equal(whole, halved)
    assert other < 1.1 * loss
