"""SGP: push-sum over directed graphs, whose messages may travel beside the next local steps."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_compress.collectives.collective import Wait
from lightning_compress.core.layout import Layout
from lightning_compress.core.workspace import chunk_size, pieces
from lightning_compress.gossip.algorithm import GRID, Algorithm, Mixing
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.topology import Matrix, Topology


@dataclass(frozen=True)
class SGP(Algorithm):
    """``x_i <- sum_j P_ij (x_j - step_j); w_i <- sum_j P_ij w_j; z_i = x_i / w_i`` is the model that a rank trains.

    A rank divides ``x`` and its weight ``w`` (1 at first) among itself and those that it sends to, so only the columns
    of ``P`` must sum to 1: links may go one way. Ranks that receive more than others have a larger ``x``, and dividing
    by ``w`` corrects it. ``w`` is a float64, which travels with ``x``. The sums of ``x`` and of ``w`` over the ranks
    and over what travels change by the steps only, so ``sum(x) / sum(w)`` is the mean model.

    It keeps ``x``: 4 bytes for each parameter. With a delay, what travels takes 8 bytes more for each round of it (12
    with two senders to a rank, and so on).

    Args:
        delay: rounds after which a message is used, 0 or more. 0: at once. 1: messages travel beside the next local
            steps. More: for links that take longer than that.

    Raises:
        ValueError: delay is out of range.

    Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019, arXiv
    1811.10792; the delay is the paper's overlap tau. As in the paper, the optimizer steps before the push.
    """

    name: ClassVar[str] = "sgp"
    directed: ClassVar[bool] = True
    memory: ClassVar[int] = 4
    delay: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.delay, bool) or not isinstance(self.delay, int) or self.delay < 0:
            raise ValueError(
                f"sgp: delay={self.delay!r} must be an integer, 0 or more: rounds after which messages are used. Take "
                "1 to have them travel beside the next steps, 0 to use them at once"
            )
        object.__setattr__(self, "memory", type(self).memory + 8 * self.delay)

    @property
    def title(self) -> str:
        """See ``Algorithm``."""
        return f"{self.name} of delay {self.delay}" if self.delay else self.name

    def check_compressor(self, compressor: object) -> None:
        """See ``Algorithm``; none."""
        if compressor is not None:
            raise ValueError(
                f"algorithm sgp pushes models and weights in one proportion, and {compressor} loses a part of one. "
                "Use compressor='none'; for fewer bytes, algorithm dpsgd with moniqua, or choco, on a symmetric graph"
            )

    def fit_topology(self, topology: Topology, lazy: bool | None) -> Topology:
        """See ``Algorithm``. Ranks must keep a part of their model; else half, unless the user forbids it.

        Weights become multiples of ``GRID``, so that float32 divides a model into parts that sum to it.
        """
        topology = super().fit_topology(topology, lazy)
        kept = np.min([np.diagonal(_on_grid(matrix)) for matrix in topology.matrices], axis=0)
        if kept.min() <= 0:
            if lazy is None:
                return self.fit_topology(topology.lazy(), False)
            raise ValueError(
                f"topology {topology.name}: rank {int(kept.argmin())} gives away all of its model in a round, and "
                "algorithm sgp divides by the weight that is left. Keep half: topology={'name': ..., 'lazy': True}"
            )
        return Topology(topology.name, tuple(map(_on_grid, topology.matrices)))

    def begin(self, start: Tensor, neighbours: Neighbours, compressor: None, layout: Layout, seed: int) -> Mixing:
        """See ``Algorithm``."""
        return _Mixing(start, neighbours, self.delay)


def _on_grid(matrix: Matrix) -> Matrix:
    given = np.round(matrix / GRID) * GRID
    np.fill_diagonal(given, 0.0)
    return given + np.diag(1 - given.sum(0))


class _Packet:
    """What travels in one message: a vector, and a push-sum weight behind it.

    Args:
        like: float32 ``[numel]``.

    Attributes:
        message: float32 ``[numel + 2]``, or one more so that the float64 is aligned.
        values: float32 ``[numel]``, the first part of the message.
    """

    def __init__(self, like: Tensor) -> None:
        numel = len(like)
        self.message = torch.zeros(numel + numel % 2 + 2, dtype=torch.float32, device=like.device)
        self.values = self.message[:numel]
        self._weight = self.message[-2:].view(torch.float64)

    @property
    def weight(self) -> float:
        """The push-sum weight."""
        return float(self._weight)

    @weight.setter
    def weight(self, value: float) -> None:
        self._weight.fill_(value)


class _Mixing(Mixing):
    """Push-sum on one rank.

    State in ``vectors``: ``numerator`` is x. With a delay, ``arriving_<slot>`` is the weighted sum of what this rank
    receives of a round, which is used when the slot's next round comes. In ``numbers``: their weights.

    A slot's three packets take turns: what was sent is free again when its round is over, and becomes the next x.
    """

    def __init__(self, start: Tensor, neighbours: Neighbours, delay: int) -> None:
        super().__init__(neighbours)
        self._delay, self._own = delay, _Packet(start)
        self._sent = [_Packet(start) for _ in range(delay)]
        self._received = [[_Packet(start)] for _ in range(max(delay, 1))]  # by slot, one for each sender
        self._travels: dict[int, tuple[Wait, list[float]]] = {}  # by slot, with the senders' shares
        self.vectors |= {f"arriving_{slot}": self._received[slot][0].values for slot in range(delay)}
        self.restart(start)

    def restart(self, model: Tensor) -> None:
        self.land()
        self._own.values.copy_(model)
        self.vectors["numerator"] = self._own.values
        self.numbers["weight"] = 1.0
        for slot in range(len(self._received)):
            self._drop(slot)

    def _drop(self, slot: int) -> None:
        self._received[slot][0].values.zero_()
        self.numbers[f"arriving_weight_{slot}"] = 0.0

    def run(self, vector: Tensor, rate: float) -> None:
        number, weight, half = self.round, self.numbers["weight"], self._own
        slot, kept = number % len(self._received), self.neighbours.kept(number)
        for piece in pieces(len(vector), chunk_size(vector.device)):
            own = half.values[piece]
            own.add_(vector[piece] - own / weight)  # the optimizer's step, exactly: own / weight is what it began with
        half.weight = weight
        if not self._delay:
            self._send(half, slot, number)
        self._land(slot)
        mixed, arrived = self._sent[slot] if self._delay else half, self._received[slot][0].values
        weight = self.numbers["weight"] = kept * weight + self.numbers[f"arriving_weight_{slot}"]
        for piece in pieces(len(vector), chunk_size(vector.device)):
            own = torch.mul(half.values[piece], kept, out=mixed.values[piece]).add_(arrived[piece])
            torch.div(own, weight, out=vector[piece])
        self.numbers[f"arriving_weight_{slot}"] = 0.0
        if self._delay:
            self._own, self._sent[slot] = mixed, half
            self.vectors["numerator"] = mixed.values
            self._send(half, slot, number)

    def _send(self, packet: _Packet, slot: int, number: int) -> None:
        """Start a round's messages. The packet must stay as it is until they have landed."""
        shares, received = self.neighbours.weights(number), self._received[slot]
        received += [_Packet(packet.values) for _ in range(len(received), len(shares))]
        sends = dict.fromkeys(self.neighbours.targets(number), packet.message)
        receives = {peer: each.message for peer, each in zip(shares, received, strict=False)}
        self._travels[slot] = self.neighbours.begin(sends, receives), list(shares.values())

    def _land(self, slot: int) -> None:
        """Wait for what travels in a slot, and sum it: at once, so that a sum that was saved has the same bits."""
        if slot not in self._travels:
            return
        wait, shares = self._travels.pop(slot)
        try:
            wait()
        except Exception:  # lost, and its weight with it, so that quotients stay models; another wait would hang
            self._drop(slot)
            raise
        if not shares:
            self._drop(slot)
            return
        first, *others = self._received[slot][: len(shares)]
        for piece in pieces(len(first.values), chunk_size(first.values.device)):
            total = first.values[piece].mul_(shares[0])
            for share, each in zip(shares[1:], others, strict=True):
                total.add_(each.values[piece], alpha=share)
        weights = [share * each.weight for share, each in zip(shares, [first, *others], strict=True)]
        self.numbers[f"arriving_weight_{slot}"] = sum(weights)

    def land(self) -> None:
        for slot in sorted(self._travels):
            self._land(slot)

    def abandon(self) -> None:
        for slot in sorted(self._travels):
            with suppress(Exception):
                self._land(slot)

    def surplus(self) -> tuple[Tensor, float]:
        self.land()
        own, weight = self._own.values, self.numbers["weight"]
        vector = own - own / weight
        for slot in range(self._delay):
            vector.add_(self.vectors[f"arriving_{slot}"])
            weight += self.numbers[f"arriving_weight_{slot}"]
        return vector, weight

    def figures(self) -> dict[str, float]:
        return {"weight": self.numbers["weight"]}

    def state_dict(self) -> dict[str, object]:
        self.land()
        return super().state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.land()
        super().load_state_dict(state)
