"""Replicas of sharded models that average without compression are PyTorch's own HSDP, bit for bit."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_compress import attach
from tests.helpers import sharded

HALF = torch.bfloat16
SETTINGS = {
    "float32": ({}, {}),
    "accumulation": ({}, {"accumulate": 4}),
    "bfloat16 reduced in float32, unsharded accumulation": (
        {"param": HALF, "reduce": torch.float32},
        {"accumulate": 2, "way": "unsharded"},
    ),
    "bfloat16 reduced in bfloat16": ({"param": HALF, "reduce": HALF}, {"clip": "norm"}),
    "tied weights, recomputed activations": ({"tied": True, "recompute": True}, {"clip": "value"}),
}
WIDE = {
    "unsharded accumulation": ({}, {"accumulate": 4, "way": "unsharded"}),
    "bfloat16 reduced in float32": ({"param": HALF, "reduce": torch.float32}, {}),
    "compiled": ({"compiled": True}, {}),
    "clip by norm": ({}, {"clip": "norm"}),
    "clip by value": ({}, {"clip": "value"}),
    "tied": ({"tied": True}, {"accumulate": 4}),
}
"""More combinations, for the thorough tests."""
SMALL = {"width": 32, "blocks": 1}


def _pairs(settings, steps, size):
    mesh, pairs = sharded.mesh_of(), []
    for model, training in settings:
        model = {**size, **model}
        native = sharded.native(mesh, steps, model, **training)
        pairs.append((native, sharded.ours(mesh, "none", steps, model, **training)[:2]))
    return pairs


@pytest.mark.parametrize(
    ("settings", "size"),
    [(SETTINGS, SMALL), pytest.param(SETTINGS | WIDE, {}, marks=pytest.mark.thorough)],
    ids=["few", "more"],
)
def test_none_is_native_hsdp(pools, settings, size):
    ranks = pools[4].run(_pairs, list(settings.values()), 2, size)
    for place, name in enumerate(settings):
        theirs, _ = ranks[0][place][0]
        assert {pair[place][way][0] for pair in ranks for way in (0, 1)} == {theirs}, name
        assert all(pair[place][0][1] == pair[place][1][1] for pair in ranks), name


def _uneven(steps):
    """The hashes of a model with 65 rows and with 2 on 3 shards: natively, and by us, which compares the ranks, too."""
    mesh, hashes, shapes = sharded.mesh_of(3), [], []
    for given in (mesh, sharded.shards(mesh)):
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(nn.Linear(40, 65), nn.ReLU(), nn.Linear(65, 2)), mesh=given)
        optimizer, compression = torch.optim.AdamW(model.parameters(), 1e-2), None
        if given is not mesh:
            every = {"check_drift_every": 2}
            compression = attach(model, "none", optimizer=optimizer, replicas=sharded.replicas(mesh), **every)
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        for _ in range(steps):
            model(torch.randn(16, 40, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        hashes.append(sharded.fingerprint(model, mesh))
        shapes = [tuple(each.to_local().shape) for each in model.parameters()]
    compression.close()
    return hashes, shapes


def test_uneven_shards_are_native_hsdp(pools):
    ranks = pools[6].run(_uneven, 5)
    assert {each for hashes, _ in ranks for each in hashes} == {ranks[0][0][0]}
    assert ranks[2][1] == [(21, 40), (21,), (0, 65), (0,)]  # the third shard of the last layer is empty
