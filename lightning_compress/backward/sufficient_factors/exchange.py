"""What the ranks tell each other about one layer in one backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_compress.backward.sufficient_factors import rows as messages
from lightning_compress.backward.sufficient_factors.layers import Layer
from lightning_compress.backward.sufficient_factors.linear import Rows
from lightning_compress.collectives import Collective


class Exchange:
    """Gathers rows, layer by layer; all ranks bring the layers in the same order.

    Args:
        collective: the ranks, over a transport of its own.
        device: where rows are.
        rounded: rows travel as bfloat16.

    Attributes:
        sizes: bytes of a number of each layer's rows, by its name, once that is known.
    """

    def __init__(self, collective: Collective, device: torch.device, rounded: bool) -> None:
        self._collective, self._device, self._rounded = collective, device, rounded
        self.sizes: dict[str, int] = {}

    def announce(self, layer: Layer, rows: Rows) -> torch.dtype | None:
        """Tell how many rows there are, and find out how many others have.

        Returns:
            in what they travel; None where no rank has any.

        Raises:
            ValueError: ranks have rows of different dtypes; on every rank.
        """
        own = messages.dtype_of(rows, self._rounded)
        said = [messages.count(rows), -1 if own is None else messages.DTYPES.index(own)]
        mine = torch.tensor(said, dtype=torch.int64, device=self._device)
        everyone = mine.new_empty(self._collective.size, 2)
        self._collective.all_gather(mine, everyone)
        counts, numbers = everyone.t().tolist()
        layer.counts = counts
        kinds = sorted({number for number in numbers if number >= 0})
        if len(kinds) > 1:
            found = ", ".join(str(messages.DTYPES[kind]) for kind in kinds)
            raise ValueError(f"the rows of {layer.name} are {found} on different ranks; give all the same precision")
        if not kinds:
            return None
        dtype = messages.DTYPES[kinds[0]]
        self.sizes[layer.name] = dtype.itemsize
        return dtype

    def gather(self, layer: Layer, rows: Rows, dtype: torch.dtype) -> None:
        """Collect the rows of all ranks, in their order, in ``layer.gathered``."""
        outer, inner = layer.weight.shape
        assert layer.counts is not None
        sent = messages.pack(rows, max(layer.counts), inner, outer, dtype, self._device)
        received = sent.new_empty(self._collective.size, sent.numel())
        self._collective.all_gather(sent, received)
        layer.gathered = messages.unpack(received, layer.counts, inner, outer)


def flag_of(layer: Layer) -> Tensor:
    """float32 scalar: 0.0, or NaN if a rank's rows are not finite."""
    assert layer.gathered is not None
    largest = [each.abs().amax().to(torch.float32) for each in layer.gathered]
    return torch.stack(largest).sum() * 0.0
