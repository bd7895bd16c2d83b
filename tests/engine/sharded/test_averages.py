"""What compressed replicas of sharded models send, keep and end with."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_compress import attach
from lightning_compress.engine.sharded.hook import accumulating
from lightning_compress.engine.sharded.units import units_of
from tests.helpers import sharded

ROTATED, QSGD = {"name": "rotated", "bits": 4}, {"name": "qsgd", "bits": 4}
DENSE = 222_208
"""Bytes that a rank sends in a dense step: 2 (R - 1) / R times the 4 bytes of 111,104 / 2 elements."""
FEWER = {"none": (1, 1), "bf16": (1.99, 2), "onebit": (17, 32), "powersgd": (11, 30)}
"""How many times fewer bytes, at least and at most."""


SMALL = {"width": 32, "blocks": 1}


def _attached(mesh, compressor, optimizer=torch.optim.AdamW, rate=3e-3, model=None, **settings):
    made = sharded.build(sharded.shards(mesh), **(model or {}))
    steps = optimizer(made.parameters(), rate)
    return made, steps, attach(made, compressor, optimizer=steps, replicas=sharded.replicas(mesh), **settings)


def _sent(compressors):
    """Of each: the model's hash, bytes sent and dense, what the plans say, and calls by each way of accumulating."""
    mesh, found = sharded.mesh_of(), []
    for compressor in compressors:
        model, optimizer, compression = _attached(mesh, compressor)
        calls = []
        for accumulate in (1, 2):
            with mock.patch.object(compression, "reduce", side_effect=compression.reduce) as reduce:
                sharded.train(model, optimizer, 1, accumulate, first=accumulate)
            calls.append((reduce.call_count, compression.stats()["bytes_sent"]))
        planned = sum(group.plan(9).cost.bytes_sent for group in compression.groups)
        dense = compression.stats()["bytes_dense"]
        compression.close()
        found.append((sharded.fingerprint(model, mesh), planned, dense, calls))
    return found


def test_bytes_are_the_formulas_and_replicas_equal(pools):
    methods = {"none": "none", "bf16": "bf16", "rotated": ROTATED, "qsgd": QSGD, "onebit": "onebit"}
    methods["powersgd"] = "powersgd"
    ranks = pools[4].run(_sent, list(methods.values()))
    fewer = FEWER | {"rotated": (6.5, 8), "qsgd": (6.6, 8)}
    for place, name in enumerate(methods):
        assert len({found[place][0] for found in ranks}) == 1, name
        for _, planned, dense, calls in (found[place] for found in ranks):
            assert dense == DENSE
            sent = DENSE if name == "none" else planned  # which sends no flags
            assert [number for number, _ in calls] == [3, 3], name  # one for each FSDP module, by any number of batches
            exact = 0 if name != "powersgd" else 0.004  # whose sum with dense parameters is estimated
            assert [each for _, each in calls] == pytest.approx([sent, sent], rel=exact, abs=0), name
            least, most = fewer[name]
            assert least <= dense / sent <= most, name


def _dense(**model):
    mesh = sharded.mesh_of()
    model, optimizer, compression = _attached(mesh, ROTATED, model=model)
    sharded.train(model, optimizer, 1)
    return compression.stats()["bytes_sent"], compression.stats()["bytes_dense"]


def test_rules_judge_the_whole_parameter_and_bytes_the_reduced_dtype(pools):
    sent, _ = pools[4].run(_dense_of, [{"width": 32}, {"param": torch.bfloat16, "reduce": torch.bfloat16}])[0]
    assert sent[0][0] == 10_528  # 14,110 if min_numel judged shards
    assert sent[1][1] == DENSE // 2


def _dense_of(models):
    return [_dense(**model) for model in models], None


def _passes(compressor, settings, ways):
    """A gradient of several backward passes without a step, and what is kept then; summed over the replicas."""
    mesh = sharded.mesh_of()
    model, optimizer, compression = _attached(mesh, compressor, torch.optim.SGD, 0.0, SMALL, **settings)
    sharded.train(model, optimizer, 1)  # so that there is a residual
    before = _kept(compression, model)
    found = units_of(model)
    for number, way in enumerate(ways):
        with nullcontext() if way == "averaged" else accumulating(found, way):
            sharded.loss_of(model, 100 + number).backward()
    gradient = torch.cat([each.grad.to_local().flatten() for each in model.parameters()])
    optimizer.step()
    after = _kept(compression, model)
    for each in (before, after):
        dist.all_reduce(each, group=mesh.get_group(0))
    compression.close()
    return 2 * gradient + after - before


def _kept(compression, model):
    parts = {}
    for group in compression.groups:
        if group.residual:
            for each in group.residual.layout.segments:
                parts[each.name] = group.residual.committed[each.offset : each.end].clone()
    shapes = [(name, each.to_local()) for name, each in model.named_parameters()]
    return torch.cat([parts.get(name, torch.zeros(each.numel())) for name, each in shapes])


def _conserved(cases):
    found = []
    for ways in cases:
        wanted = _passes("none", {}, ways)
        got = _passes("onebit", {"error_feedback": True}, ways)
        found.append(float((got - wanted).norm() / wanted.norm()))
    return found


def test_several_passes_of_a_step_lose_nothing(pools):
    cases = ["averaged averaged", "averaged sharded averaged", "unsharded averaged averaged"]
    for found in pools[4].run(_conserved, [case.split() for case in cases]):
        assert max(found) < 1e-5


def _poisoned(policy):
    """Steps, skipped steps and the error of each rank; one shard of one replica has a NaN in the second step."""
    mesh = sharded.mesh_of()
    model, optimizer, compression = _attached(mesh, "onebit", torch.optim.SGD, 0.1, SMALL, on_nonfinite=policy)
    reduce, calls, error = compression.reduce, [], None

    def poison(names, gradients):
        calls.append(names)
        if dist.get_rank() == 1 and len(calls) == 3:
            gradients[0][3] = torch.nan
        reduce(names, gradients)

    with mock.patch.object(compression, "reduce", side_effect=poison):
        try:
            sharded.train(model, optimizer, 4)
        except FloatingPointError as raised:
            error = str(raised)
    finite = bool(sharded.whole(model, mesh).isfinite().all())
    return compression.step, compression.stats()["nonfinite_steps"], error, finite


def test_a_nan_in_one_shard_is_every_ranks(pools):
    assert pools[4].run(_poisoned, "skip") == [(3, 1.0, None, True)] * 4
    for rank, (step, count, error, finite) in enumerate(pools[4].run(_poisoned, "raise")):
        assert (step, count, finite) == (1, 1.0, True)
        assert f"not finite on {'rank 1, of' if rank == 1 else 'another rank'}" in error
    counts = [count for _, count, _, _ in pools[4].run(_poisoned, "pass")]
    assert counts[0] >= 1
    assert len(set(counts)) == 1


def _drifted(policy):
    """What ranks raise after a wrong bit on one rank, and whether they agree at last."""
    mesh = sharded.mesh_of()
    settings = {"check_drift_every": 2, "on_drift": policy}
    model, optimizer, _ = _attached(mesh, "onebit", model=SMALL, **settings)
    sharded.train(model, optimizer, 1)
    if dist.get_rank() == 3:
        with torch.no_grad():
            model.head.weight.to_local()[0, 0] += 1
    try:
        sharded.train(model, optimizer, 2, first=1)
    except RuntimeError as error:
        return str(error)
    return sharded.fingerprint(model, mesh)


def test_drift_of_one_shard_stops_or_mends_all(pools):
    ranks = pools[4].run(_drifted, "error")
    assert all("drift: after step 2" in each for each in ranks)
    assert ["head.weight" in each for each in ranks] == [False, True, False, True]
    assert len(set(pools[4].run(_drifted, "resync"))) == 1


def _unused():
    mesh = sharded.mesh_of()
    model, optimizer, compression = _attached(mesh, "onebit", model=SMALL | {"spare": True})
    sharded.train(model, optimizer, 2)
    names = [name for group in compression.groups for name in group.names]
    compression.close()
    try:
        sharded.loss_of(model, 9).backward()
    except RuntimeError as error:
        return "spare.weight" in names, str(error)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP reduces unused parameters from torch 2.13 on")
def test_an_unused_parameter_is_averaged_and_a_closed_compression_says_so(pools):
    for known, error in pools[4].run(_unused):
        assert known
        assert "attach again" in error


def _resumed(compressor, settings):
    """The hash after 4 steps, and after 2, a state that was saved and loaded, and 2 more."""
    mesh, hashes = sharded.mesh_of(), []
    for stop in (False, True):
        model, optimizer, compression = _attached(mesh, compressor, model=SMALL, **settings)
        sharded.train(model, optimizer, 2)
        if stop:
            state = compression.state_dict()
            shards, kept = [each.detach().to_local() for each in model.parameters()], optimizer.state_dict()
            compression.close()
            model, optimizer, compression = _attached(mesh, compressor, model=SMALL, **settings)
            with torch.no_grad():
                for each, shard in zip(model.parameters(), shards, strict=True):
                    each.to_local().copy_(shard)
            optimizer.load_state_dict(kept)
            compression.load_state_dict(state)
        sharded.train(model, optimizer, 2, first=2)
        hashes.append(sharded.fingerprint(model, mesh))
        compression.close()
    return hashes


@pytest.mark.parametrize(
    ("compressor", "settings"),
    [
        ("onebit", {"error_feedback": True}),
        pytest.param("powersgd", {}, marks=pytest.mark.thorough),
        pytest.param("topk", {}, marks=pytest.mark.thorough),
        pytest.param("onebit", {"error_feedback": "loco"}, marks=pytest.mark.thorough),
    ],
)
def test_a_saved_state_goes_on_exactly(pools, compressor, settings):
    ranks = pools[4].run(_resumed, compressor, settings)
    assert len({each for hashes in ranks for each in hashes}) == 1


def _losses(compressors, steps):
    mesh, found = sharded.mesh_of(), {}
    for name, compressor in compressors.items():
        mark, losses, _ = sharded.ours(mesh, compressor, steps, {"width": 32})
        mean = torch.tensor(losses[-10:]).mean()
        dist.all_reduce(mean)
        found[name] = mark, float(mean) / 4
    return found


@pytest.mark.thorough
def test_losses_are_close_to_dense(pools):
    most = {"none": 0.0, "rotated": 0.01, "qsgd": 0.015, "onebit": 0.07, "powersgd": 0.07}
    ranks = pools[4].run(
        _losses, {"none": "none", "rotated": ROTATED, "qsgd": QSGD} | {n: n for n in list(most)[3:]}, 60
    )
    for name, most_of_it in most.items():
        assert len({found[name][0] for found in ranks}) == 1
        assert ranks[0][name][1] <= ranks[0]["none"][1] * (1 + most_of_it), ranks[0]
