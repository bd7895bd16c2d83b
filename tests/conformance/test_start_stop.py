"""Processes that train and end leave nothing behind: no abort, no word of one on stderr."""

import pytest
import torch.distributed as dist

from lightning_compress import CompressedDDPStrategy
from tests.helpers.lives import live
from tests.helpers.training import fit


def _train(folder):
    strategy = CompressedDDPStrategy("onebit", bucket_cap_mb=0.02)
    fit(strategy, 3)
    with open(f"{folder}/sent{dist.get_rank()}", "w") as file:
        file.write(str(strategy.comm_stats()["total_bytes_sent"]))


@pytest.mark.parametrize("cycles", [2, pytest.param(50, marks=pytest.mark.thorough)])
def test_start_and_stop(tmp_path, cycles):
    for cycle in range(cycles):
        folder = tmp_path / str(cycle)
        codes, said = live(2, folder, _train, str(folder))
        assert codes == [0, 0], said
        assert not [each for each in said if "terminate called" in each or "Traceback" in each]
        assert all(float((folder / f"sent{rank}").read_text()) > 0 for rank in range(2))
