"""What ``close`` gives back, and what stays readable."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import CompressedDDPStrategy, attach, kernels
from lightning_compress.collectives import TorchCollective
from lightning_compress.core import blocks
from lightning_compress.engine import checks
from lightning_compress.settings.run_state import RunState
from tests.helpers.training import fit


def _groups(exchange):
    """Process groups of this process after each of three runs."""
    counts = []
    for _ in range(3):
        ddp = DistributedDataParallel(nn.Linear(64, 64))
        compression = attach(ddp, "onebit", exchange)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for _ in range(2):
            ddp(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        during = len(dist.distributed_c10d._world.pg_map)
        compression.close()
        counts.append((during, len(dist.distributed_c10d._world.pg_map)))
    return counts


@pytest.mark.parametrize("exchange", ["all_gather", {"name": "hierarchical", "node_size": 2}])
def test_process_groups_are_given_back(pools, exchange):
    for counts in pools[4].run(_groups, exchange):
        assert len(set(counts)) == 1
        during, after = counts[0]
        assert during > after


def _after_the_fit(compressor, feedback=None):
    strategy = CompressedDDPStrategy(compressor, error_feedback=feedback)
    fit(strategy, 5)
    states = [group["states"] for group in strategy.compression.state_dict()["groups"]]
    kept = [each["residual"]["numbers"] for each in states if "residual" in each]
    coded = [part for each in states if "loco" in each for part in _split(each["loco"])]
    kept += [blocks.decode(part) for part in coded]
    return strategy.comm_stats(), float(torch.cat(kept).norm()) if kept else 0.0


def _split(state):
    return state["numbers"].split(state["numels"])


@pytest.mark.parametrize("given", [["topk"], ["onebit"], ["onebit", "loco"], ["bf16"]])
def test_figures_stay_readable_after_the_fit(pools, given):
    for stats, norm in pools[2].run(_after_the_fit, *given):
        assert stats["steps"] == 5
        assert stats["residual_norm"] == pytest.approx(norm, rel=1e-4)
        assert (norm > 0) == (given != ["bf16"])


def _other_kernels(differ):
    """Rank 1 as if on an accelerator it had no Triton."""
    theirs = kernels.compiler
    kernels.compiler = lambda device: None if differ and dist.get_rank() == 1 else "triton"
    try:
        checks.check_ranks_agree(RunState.of("topk"), nn.Linear(9, 9), None, TorchCollective(), torch.device("cpu"))
    except ValueError as error:
        return str(error)
    finally:
        kernels.compiler = theirs
    return "agreed"


def test_kernels_of_an_accelerator_are_compared(pools):
    assert pools[3].run(_other_kernels, False) == ["agreed"] * 3
    for said in pools[3].run(_other_kernels, True):
        assert "Triton" in said
        assert "LIGHTNING_COMPRESS_KERNELS" in said
        assert "of rank 1 differ from those of rank 0" in said


def _refused(monkey):
    """Rank 1 asks for kernels that there are not."""
    with kernels.using(monkey if dist.get_rank() == 1 else "auto"):
        try:
            attach(DistributedDataParallel(nn.Linear(64, 64)), "topk")
        except ValueError as error:
            return str(error)
    return "attached"


def test_what_the_environment_asks_for_is_refused_on_every_rank(pools):
    first, second = pools[2].run(_refused, "fast")
    assert "must be one of" in second
    assert first == f"rank 1: {second}"
