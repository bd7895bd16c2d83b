"""Bytes reported are bytes sent: the loopback interface's own counters say so."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_compress.collectives import CountingCollective, TorchCollective
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.gossip.dpsgd import DPSGD
from lightning_compress.gossip.moniqua import Moniqua
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.topology import ring
from lightning_compress.reducers import PowerSGD
from tests.cases import CASES
from tests.helpers.loopback import separate
from tests.helpers.processes import Pools
from tests.test_laws import PATTERNS, can_travel, group_plan

COUNTERS = Path("/proc/net/dev")
REPEATS = 2
# Every collective, in every dtype, of fixed and variable length; what a codec writes is counted elsewhere.
NAMES = ("none", "bf16", "topk", "onebit", "threshold", "randomk", "terngrad_shared", "signsgd", "powersgd", "sketch")
# Where a message of the case's own is so small that the transport's headers would count.
LARGER = {"powersgd": PowerSGD(rank=128)}


@contextmanager
def pools_alone():
    """Pools whose interface nobody else uses."""
    with separate() as network:
        if network is None and "PYTEST_XDIST_WORKER" in os.environ:
            pytest.skip("other tests use the loopback interface: run pytest tests/collectives/test_wire.py by itself")
        pools = Pools(network)
        yield pools
        pools.close()


@pytest.fixture(scope="module")
def alone():
    with pools_alone() as pools:
        yield pools


def _loopback_bytes():
    line = next(line for line in COUNTERS.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def _send(codec, exchange):
    """Bytes by the interface (all ranks together) and by this rank's meter."""
    device = torch.device("cpu")
    meter = Meter(device)
    dense, large = Layout.of([("bias", (1000,))]), Layout.of([("weight", (1 << 10, 1 << 10))])
    plan = group_plan(codec, exchange, CountingCollective(TorchCollective(), meter), meter, dense, large)
    gradient = torch.randn(dense.numel + large.numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    out = torch.empty_like(gradient)
    plan.mean(gradient.clone(), out, 0, torch.tensor(0.0))  # opens the connections
    dist.barrier()
    before, counted = _loopback_bytes(), meter.bytes_sent
    dist.barrier()
    for step in range(REPEATS):
        plan.mean(gradient.clone(), out, step, torch.tensor(0.0))
    dist.barrier()
    return _loopback_bytes() - before, meter.bytes_sent - counted


@pytest.mark.skipif(not COUNTERS.exists(), reason="needs Linux's interface counters")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("exchange", PATTERNS)
@pytest.mark.parametrize("case", [case for case in CASES if case.name in NAMES], ids=lambda case: case.name)
def test_interface_counters_agree(alone, case, exchange, size):
    if not can_travel(case, exchange, size):
        pytest.skip("these messages cannot be summed")
    for attempt in range(3):  # the interface is everybody's on this machine
        ranks = alone[size].run(_send, LARGER.get(case.name, case.codec), exchange)
        counted = sum(mine for _, mine in ranks)
        if attempt == 2 or abs(ranks[0][0] / counted - 1) < 0.05:
            break
    assert ranks[0][0] == pytest.approx(counted, rel=0.05)


def _gossips(bits):
    """Bytes by the interface, all ranks together; by this rank's formula; and as it counted itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    neighbours = Neighbours(TorchCollective(), ring(size))
    numel = (1 << 20) + 24
    vector, layout = torch.full((numel,), 0.1 * rank), Layout.of([("weight", (numel,))])
    mixing = DPSGD().begin(vector, neighbours, Moniqua(bits, theta=1.0), layout, 0)
    mixing.mix(vector, 0.1)  # opens the connections
    dist.barrier()
    before, counted = _loopback_bytes(), neighbours.bytes_sent
    dist.barrier()
    for _ in range(REPEATS):
        mixing.mix(vector, 0.1)
    dist.barrier()
    hashes = 9 * -(-numel // 4096)
    formula = REPEATS * 2 * (numel * bits // 8 + hashes)
    return _loopback_bytes() - before, formula, neighbours.bytes_sent - counted


def _check_gossip(pool, bits):
    for attempt in range(3):
        ranks = pool.run(_gossips, bits)
        formula = sum(mine for _, mine, _ in ranks)
        if attempt == 2 or abs(ranks[0][0] / formula - 1) < 0.05:
            break
    assert ranks[0][0] == pytest.approx(formula, rel=0.05)
    for _, mine, counted in ranks:
        assert 0 <= counted - mine <= REPEATS * 2 * 16  # and the message is rounded up


@pytest.mark.skipif(not COUNTERS.exists(), reason="needs Linux's interface counters")
@pytest.mark.parametrize("bits", [1, 8])
def test_gossip_sends_its_bits_to_two_neighbours(alone, bits):
    _check_gossip(alone[3], bits)


@pytest.mark.thorough
@pytest.mark.skipif(not COUNTERS.exists(), reason="needs Linux's interface counters")
@pytest.mark.parametrize("size", [4, 8])
def test_gossip_on_larger_rings(size):
    with pools_alone() as pools:
        for bits in (1, 2, 4, 8):
            _check_gossip(pools[size], bits)
