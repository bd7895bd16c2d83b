"""Other settings in the middle of a run: nothing is lost, nothing is sent otherwise than chosen."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from lightning_compress.codecs import TopK
from lightning_compress.corrections import Corrected
from lightning_compress.settings.run_state import RunState
from tests.helpers.processes import RankError


def steps(plan, count, compressor="topk", bucket_cap_mb=25, lr=0.1, **settings):
    """Train a small net on this rank; ``plan`` maps a step to what is done before its backward.

    Returns:
        per step ratio and residual norm; what was computed and neither applied nor kept, relative to all gradients.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 48, bias=False))
    model = DistributedDataParallel(net, bucket_cap_mb=bucket_cap_mb)
    compression = attach(model, compressor, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    owed = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in net.named_parameters()}
    scale, rows = 0.0, []
    for step in range(count):
        plan.get(step, lambda compression: None)(compression)
        optimizer.zero_grad()
        data = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        local = torch.autograd.grad(net(data).square().mean(), list(net.parameters()))
        model(data).square().mean().backward()
        for gradient, (name, parameter) in zip(local, net.named_parameters(), strict=True):
            dist.all_reduce(gradient)
            owed[name] += gradient.double() - dist.get_world_size() * parameter.grad.double()
            scale = max(scale, float(gradient.abs().max()))
        optimizer.step()
        stats = compression.stats()
        rows.append((stats["ratio"], stats["residual_norm"]))
    for group in compression.groups:
        for segment in group.layout.segments if group.residual else ():
            kept = group.residual.committed[segment.offset : segment.end].clone()
            dist.all_reduce(kept)
            owed[segment.name] -= kept.view(segment.shape).double()
    return rows, max(float(each.abs().max()) for each in owed.values()) / scale, compression.step


def _retuned(changes, bucket_cap_mb, compressor="topk", at=3, **settings):
    plan = {at: lambda compression: compression.retune(*changes[0], **changes[1])}
    return steps(plan, 6, compressor, bucket_cap_mb, **settings)


@pytest.mark.parametrize("bucket_cap_mb", [25, 0.02])
@pytest.mark.parametrize(
    ("changes", "ratio"),
    [
        (((), {"density": 0.1}), 4.8),
        (("onebit",), 20.0),
        ((({"name": "topk", "density": 0.3, "scope": "group"},), {}), 1.6),
        ((("rotated",), {"bits": 8}), 3.5),
    ],
)
def test_the_next_step_travels_otherwise_and_nothing_is_lost(pools, changes, ratio, bucket_cap_mb):
    changes = changes if len(changes) == 2 else (changes, {})
    for rows, lost, taken in pools[2].run(_retuned, changes, bucket_cap_mb):
        assert taken == 6
        ratios = [each for each, _ in rows]
        assert len(set(ratios[:3])) == len(set(ratios[3:])) == 1
        assert ratios[0] > 25
        assert ratios[3] == pytest.approx(ratio, rel=0.25)
        if changes[0] != ("rotated",):
            assert lost < 1e-5
            assert all(norm > 0 for _, norm in rows)


def test_a_method_that_needs_no_residual_sends_it_once(pools):
    for rows, lost, _ in pools[2].run(_retuned, (("bf16",), {}), 25):
        assert [norm > 0 for _, norm in rows] == [True, True, True, False, False, False]
        assert lost < 0.02  # 16 bits of what the residual had grown to
    for rows, lost, _ in pools[2].run(_retuned, (("topk",), {"density": 0.1}), 25, "bf16"):
        assert [norm > 0 for _, norm in rows] == [False, False, False, True, True, True]
        assert lost < 0.02


def _in_the_middle():
    """Called between backward and step: that step is still the old one's."""
    model = DistributedDataParallel(nn.Linear(64, 64, bias=False))
    compression = attach(model, "topk")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ratios = []
    for step in range(3):
        model(torch.randn(4, 64, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        if step == 1:
            compression.retune(density=0.2)
            compression.retune(scope="group")
        optimizer.step()
        optimizer.zero_grad()
        ratios.append(compression.stats()["ratio"])
    return ratios, compression.settings.method, len(compression.groups)


def test_a_step_under_way_is_not_touched(pools):
    for ratios, method, groups in pools[2].run(_in_the_middle):
        assert ratios[0] == ratios[1] > 25
        assert ratios[2] < 3
        assert method == TopK(density=0.2, scope="group")
        assert groups == 1


@pytest.mark.parametrize(
    ("compressor", "changes", "message"),
    [
        (None, {"ratio": 3}, "TopK has no setting 'ratio'; it has: density, scope, selection"),
        (None, {"density": 0.0}, "density must be in"),
        ("nosuch", {}, "unknown compressor 'nosuch'"),
        ("bf16", {"density": 0.5}, "BF16 has no setting 'density'; it has: none"),
    ],
)
def test_refused(compressor, changes, message):
    with pytest.raises(ValueError, match=message):
        RunState.of("topk").retuned(compressor, changes)


@dataclass(frozen=True)
class Halved(Corrected):
    """A correction whose codec follows from a setting of its own."""

    density: float = 0.2
    replaces_residual = False

    @property
    def codec(self):
        return TopK(density=self.density / 2)

    @property
    def correction(self):
        return self

    def with_dense_steps(self, dense_steps):
        return self


def test_a_corrected_method_is_retuned_by_its_own_settings():
    settings = RunState.of(Halved(), schedule={"density": {0: 0.2, 5: 0.02}})
    assert settings.method == TopK(density=0.1)
    assert settings.retuned(None, {"density": 0.02}).method == TopK(density=0.01)
    assert [method.density for method in settings.methods[1:]] == [0.1, 0.1, 0.01]
    with pytest.raises(ValueError, match="takes another part of the optimizer's work"):
        settings.retuned("topk", {})


def test_the_exchange_must_carry_it():
    with pytest.raises(ValueError, match="those of OneBit"):
        RunState.of("bf16", "all_reduce").retuned("onebit", {})


def test_error_feedback_is_as_the_user_chose():
    assert not RunState.of("bf16").feeds_back(RunState.of("bf16").method)
    assert RunState.of("bf16").retuned("topk", {}).error_feedback
    assert not RunState.of("bf16", error_feedback=False).retuned("topk", {}).error_feedback
    kept = RunState.of("topk").retuned("bf16", {})
    assert kept.error_feedback
    assert not kept.feeds_back(kept.method)


def _left_to_ddp():
    return steps({1: lambda compression: compression.retune("topk")}, 2, "none")


def test_a_run_without_a_hook_cannot_begin_to_compress(pools):
    with pytest.raises(RankError, match="leaves the average to DistributedDataParallel for good"):
        pools[2].run(_left_to_ddp)
    rows, _, taken = pools[1].run(_left_to_ddp)[0]
    assert taken == len(rows) == 2
