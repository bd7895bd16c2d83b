"""Exchange what the ranks have of layers in one backward pass: rows, or gradients the ordinary way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_compress.backward.sufficient_factors.factored_layer import FactorPairs, Layer
from lightning_compress.collectives import Collective, consensus
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.hook import reduce_now

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""In which rows may travel. A message has the index."""


class RowExchange:
    """Gathers rows, layer by layer. All ranks bring the layers in the same order.

    Args:
        collective: the ranks, over a transport of its own.
        device: where rows are.
        rounded: rows travel as bfloat16.

    Attributes:
        sizes: bytes of a number of each layer's rows, by its name, once they are known.
    """

    def __init__(self, collective: Collective, device: torch.device, rounded: bool) -> None:
        self._collective, self._device, self._rounded = collective, device, rounded
        self.sizes: dict[str, int] = {}

    def run(self, layer: Layer, rows: FactorPairs) -> None:
        """Set ``layer.counts``, and ``layer.gathered`` if the layer goes by factors and a rank has rows.

        Raises:
            ValueError: ranks have rows of different dtypes; on every rank.
        """
        own = self._dtype(rows)
        said = [sum(len(inputs) for inputs, _ in rows), -1 if own is None else DTYPES.index(own)]
        mine = torch.tensor(said, dtype=torch.int64, device=self._device)
        layer.counts, numbers = consensus.gathered(mine, self._collective).t().tolist()
        kinds = sorted({number for number in numbers if number >= 0})
        if len(kinds) > 1:
            found = ", ".join(str(DTYPES[kind]) for kind in kinds)
            raise ValueError(f"the rows of {layer.name} are {found} on different ranks; give all the same precision")
        if kinds:
            dtype = DTYPES[kinds[0]]
            self.sizes[layer.name] = dtype.itemsize
            if layer.way == "factors":
                layer.gathered = self._gather(layer.counts, rows, dtype, layer.weight)

    def _dtype(self, rows: FactorPairs) -> torch.dtype | None:
        """Return the dtype that holds all rows; None: there are none."""
        dtype: torch.dtype | None = None
        for each in (tensor for pair in rows for tensor in pair):
            dtype = each.dtype if dtype is None else torch.promote_types(dtype, each.dtype)
        return torch.bfloat16 if self._rounded and dtype in (torch.float32, torch.float64) else dtype

    def _gather(
        self, counts: list[int], rows: FactorPairs, dtype: torch.dtype, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the rows of all ranks, in their order.

        A message has the inputs, then the output gradients, each padded with zeros to the most rows of a rank.
        """
        outer, inner = weight.shape
        border = max(counts) * inner
        sent = torch.empty(border + max(counts) * outer, dtype=dtype, device=self._device)
        for place, part in enumerate((sent[:border], sent[border:])):
            filled = 0
            for pair in rows:
                numbers = pair[place].numel()
                part[filled : filled + numbers].view(pair[place].shape).copy_(pair[place])
                filled += numbers
            part[filled:].zero_()
        messages = list(zip(consensus.gathered(sent, self._collective), counts, strict=True))
        inputs = [message[: count * inner].view(count, inner) for message, count in messages]
        gradients = [message[border : border + count * outer].view(count, outer) for message, count in messages]
        return torch.cat(inputs), torch.cat(gradients)


def flag_of(layer: Layer) -> Tensor:
    """Return a float32 scalar: 0.0, or NaN if a rank's rows are not finite."""
    assert layer.gathered is not None
    largest = [each.abs().amax().to(torch.float32) for each in layer.gathered]
    return torch.stack(largest).sum() * 0.0


def average_ordinary(
    layers: Sequence[Layer],
    ddp: DistributedDataParallel,
    compression: Compression | None,
    collective: Collective,
    device: torch.device,
) -> list[Layer]:
    """Average gradients of layers that do not travel as factors, at the end of backward.

    Args:
        layers: the same on all ranks.
        ddp: says whether some of them may be unused.
        compression: of the other parameters. It averages these too, each layer as a group. If it is None or off,
            float32 is summed here.
        collective: the ranks.
        device: where gradients are.

    Returns:
        the layers that were averaged here.
    """
    if layers and (ddp.find_unused_parameters or ddp.static_graph):
        local = [layer.local and any(each.grad is not None for each in layer.parameters) for layer in layers]
        used = consensus.anywhere(local, collective, device)
        layers = [layer for layer, each in zip(layers, used, strict=True) if each]
    waits: list[Callable[[], object]] = []
    for layer in layers:
        layer.local = False
        trained = [each for each in layer.parameters if each.requires_grad]
        for each in trained:
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad.contiguous()
        gradients = [each.grad for each in trained if each.grad is not None]
        if compression and compression.active:
            reduce_now(compression, trained, gradients)
            continue
        torch._foreach_div_(gradients, collective.size)
        waits += [collective.begin("all_reduce", each) for each in gradients]
    for wait in waits:
        wait()
    return list(layers) if waits else []
