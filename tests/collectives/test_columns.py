"""Collectives of the columns of a mesh, which make groups of their own at the same time."""

import random
import time

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lightning_compress.collectives import TorchCollective


def _sums(size, columns, rounds):
    """What the ranks of this column sum to over new groups, and the ranks of a pair of them, round by round."""
    mesh = init_device_mesh("cpu", (size // columns, columns), mesh_dim_names=("replicate", "shard"))
    column, sums = TorchCollective(mesh.get_group("replicate")), []
    late = random.Random(mesh.get_local_rank("shard"))  # one column is behind another, now this one, now that one
    for _ in range(rounds):
        time.sleep(0.02 * late.random())
        apart = column.apart()
        pair = apart.part([[*range(apart.size - 1)], [apart.size - 1]])
        for ranks in (apart, pair):
            value = torch.full((3,), float(mesh.get_rank()))
            ranks.all_reduce(value)
            sums.append(value[0].item())
        apart.close()
    return sums


@pytest.mark.parametrize(("size", "columns"), [(4, 2), (6, 3), (6, 2)])
def test_columns_do_not_meet(pools, size, columns):
    rounds = 20
    for rank, sums in enumerate(pools[size].run(_sums, size, columns, rounds)):
        column = range(rank % columns, size, columns)
        pair = [rank] if rank == column[-1] else column[:-1]
        assert sums == [sum(column), sum(pair)] * rounds
