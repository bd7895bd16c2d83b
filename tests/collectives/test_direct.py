"""Collectives that start without the checks of ``torch.distributed`` do the same."""

import torch
import torch.distributed as dist

from lightning_compress.collectives.torch import TorchCollective, prepare_directly


def _both():
    """Whether each collective leaves the same, begun in either way."""
    group, collective = dist.group.WORLD, TorchCollective()
    rank, size = collective.rank, collective.size
    numbers, found = torch.arange(4.0 * size) * (-1) ** rank + rank, []
    for name, *given in (
        ("all_reduce", numbers),
        ("all_reduce", numbers, "max"),
        ("all_gather", numbers, torch.zeros(size, 4 * size)),
        ("all_to_all", numbers.view(size, 4), torch.zeros(size, 4)),
    ):
        one, other = ([each.clone() if isinstance(each, torch.Tensor) else each for each in given] for _ in range(2))
        collective.begin(name, *one)()
        prepare_directly(group, name, *other)().wait()
        found.append(all(a.equal(b) for a, b in zip(one, other, strict=True) if isinstance(a, torch.Tensor)))
    return found


def test_the_same_as_by_the_checked_calls(pools):
    assert pools[2].run(_both) == [[True] * 4] * 2
