"""signSGD and Signum: each rank sends a bit for each element and receives the majority's bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs.packing.bits import pack, packed_size, unpack
from lightning_compress.collectives import World
from lightning_compress.collectives.counting import (
    all_gather_rounds,
    all_reduce_bytes,
    all_reduce_rounds,
    all_to_all_rounds,
)
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import RandomBits, mix
from lightning_compress.core.state import State, States, StateSpec
from lightning_compress.core.workspace import chunk_size, pieces, scratch
from lightning_compress.reducers.reducer import Reducer, ReducerPlan

Vote = Literal["majority", "tally"]
MOMENTUM = "momentum"


@dataclass(frozen=True)
class SignSGD(Reducer):
    """Give the optimizer the sign of the sum of the ranks' signs: every element is ``scale`` or ``-scale``.

    A rank votes with the signs of ``m = momentum * m + (1 - momentum) * gradient`` (Signum), or of the gradient itself
    if momentum is 0 (signSGD). 0 and -0.0 count as positive. If exactly half of an even number of ranks vote for either
    sign, a random bit decides, the same for all ranks. With "tally", every element is ``scale`` times the mean of the
    signs, from -1 to 1, and there are no ties.

    Magnitudes are lost, so the learning rate is the step length of every element. With scale 1 it must be small as for
    Adam, 1e-4 or less, not 0.1 as for SGD. Use SGD with momentum 0 (the momentum is here), and weight decay if you
    like. 1-D and small parameters vote like all others. Parameters that stay dense by ``exclude`` are averaged, with
    the same small learning rate. Elements that are exactly 0 on all ranks in many steps drift, because their vote is
    positive. Rows of an ``nn.Embedding`` and whole parameters that are 0 on all ranks do not drift: they stay where
    they are, whatever their momentum.

    Every rank owns the same number of bytes of the packed signs. An all-to-all brings it the bits of the others; it
    counts them, and an all-gather sends the result to all. For n elements, a rank sends ``W - 1`` times
    ``s = ceil(ceil(n / 8) / W)`` bytes in each direction: 1 bit per element each. A tally returns as many bits as the
    number W has, ``s`` bytes each: 2 for 2 or 3 ranks, 3 for up to 7. ``carried`` is summed as float32.

    Nothing is conserved: the vector is set to 0, and error feedback is refused. Where the other ranks agree, fewer than
    half of the ranks cannot change the result. The method does not converge in general; it is made for symmetric noise.
    State: the momentum, float32, per-rank.

    Args:
        vote: "majority" or "tally".
        momentum: in [0, 1); 0.9 is the papers' Signum.
        scale: factor of every element, above 0. It only rescales the learning rate.

    Raises:
        ValueError: a setting is out of range.

    Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018,
    arXiv 1802.04434. Bernstein, Zhao, Azizzadenesheli, Anandkumar, "signSGD with Majority Vote is Communication
    Efficient and Fault Tolerant", ICLR 2019, arXiv 1810.05291.
    """

    name: ClassVar[str] = "signsgd"
    conserves: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    vote: Vote = "majority"
    momentum: float = 0.9
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.vote not in get_args(Vote):
            raise ValueError(f"SignSGD(vote={self.vote!r}): vote must be one of 'majority', 'tally'")
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ValueError(f"SignSGD(momentum={self.momentum!r}): momentum must be in [0, 1); try 0.9, or 0 for none")
        if not _is_number(self.scale) or not 0 < self.scale < math.inf:
            raise ValueError(f"SignSGD(scale={self.scale!r}): scale must be a number above 0; 1.0 returns the signs")

    @property
    def safe_with_adam(self) -> bool:
        """See ``Reducer``: no, Adam would normalise the signs again."""
        return False

    def state(self, layout: Layout) -> Mapping[str, StateSpec]:
        """See ``Reducer``: the momentum, unless it is 0."""
        return {MOMENTUM: StateSpec(layout)} if self.momentum else {}

    def plan(self, layout: Layout, carried: int, world: World, states: States) -> ReducerPlan:
        """See ``Reducer.plan``."""
        return _SignSGDPlan(layout.numel, carried, world, self, states.get(MOMENTUM))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class _SignSGDPlan(ReducerPlan):
    def __init__(self, numel: int, carried: int, world: World, method: SignSGD, momentum: State | None) -> None:
        collective, device, self._meter = world
        size = collective.size
        self._collective = collective
        self._method = method
        self._momentum = momentum
        self._pieces = list(pieces(numel, chunk_size(device)))
        most = min(chunk_size(device), numel)
        self._bits = scratch("sign bits", most, torch.bool, device)
        self._floats = scratch("sign floats", 8 * packed_size(most), torch.float32, device)
        width = -(-packed_size(numel) // size)
        self._send = torch.zeros(size, width, dtype=torch.uint8, device=device)
        self._receive = torch.zeros(size, width, dtype=torch.uint8, device=device)
        self._tally = Tally(size, width, device)
        self._random = RandomBits(width // 2 + 4, device)  # 16 bits are two bytes' worth
        majority = method.vote == "majority"
        self._outcome = torch.zeros(1 if majority else len(self._tally.planes), width, dtype=torch.uint8, device=device)
        self._outcomes = torch.zeros(size, *self._outcome.shape, dtype=torch.uint8, device=device)
        sent = self._send[0].numel() + self._outcome.numel()
        self.bytes_sent = (size - 1) * sent + all_reduce_bytes(4 * carried, size)
        self.rounds = all_to_all_rounds(size) + all_gather_rounds(size) + bool(carried) * all_reduce_rounds(size)

    def mean(self, vector: Tensor, out: Tensor, carried: Tensor, key: int) -> None:
        if carried.numel():
            self._collective.all_reduce(carried)
        with self._meter.encode:
            for piece in self._pieces:
                self._pack(self._advance(vector, piece), piece)
            vector.zero_()
        self._collective.all_to_all(self._send, self._receive)
        with self._meter.decode:
            self._tally.count(self._receive)
            if self._method.vote == "majority":
                ties = self._random.draw(mix(key, self._collective.rank), 0, self._send.shape[1] // 2 + 1)
                self._tally.majority(self._collective.size, ties.view(torch.uint8), self._outcome[0])
            else:
                self._outcome.copy_(self._tally.planes)
        self._collective.all_gather(self._outcome.view(-1), self._outcomes.view(self._collective.size, -1))
        with self._meter.decode:
            self._write(out)

    def _advance(self, vector: Tensor, piece: slice) -> Tensor:
        """Update the momentum, and return the values whose signs are this rank's votes."""
        part = vector[piece]
        if self._momentum is None:
            return part
        beta, moved = self._method.momentum, self._momentum.pending[piece]
        return torch.mul(self._momentum.base()[piece], beta, out=moved).add_(part, alpha=1 - beta)

    def _pack(self, part: Tensor, piece: slice) -> None:
        bits = self._bits[: len(part)]
        if part.device.type == "cpu":  # three times as fast as torch.ge
            np.greater_equal(part.numpy(), 0, out=bits.numpy())
        else:
            torch.ge(part, 0, out=bits)
        pack(bits, self._send.view(-1)[piece.start // 8 : packed_size(piece.stop)])

    def _write(self, out: Tensor) -> None:
        """Unpack the result into values from ``-scale`` to ``scale``."""
        most = 1 if self._method.vote == "majority" else self._collective.size
        planes = self._outcomes.transpose(0, 1).flatten(1)  # [bits of an outcome, all bytes]
        for piece in self._pieces:
            part = out[piece].fill_(-most)
            floats = self._floats[: 8 * packed_size(len(part))]
            for place, plane in enumerate(planes):
                unpack(plane[piece.start // 8 : packed_size(piece.stop)], floats)
                part.add_(floats[: len(part)], alpha=2 ** (place + 1))
            if self._method.scale != most:
                part.mul_(self._method.scale / most)


class Tally:
    """Counts votes that are packed eight to a byte: for every bit position, in how many rows the bit is 1.

    Plane p holds bit p of every count, packed like the rows. Adding a row takes one half-adder for each plane.

    Args:
        rows: largest number of rows.
        width: bytes of a row.
        device: of the rows.

    Attributes:
        planes: uint8 ``[bit length of rows, width]``: the counts.
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.planes = torch.zeros(rows.bit_length(), width, dtype=torch.uint8, device=device)
        self._carry, self._above, self._equal = torch.zeros(3, width, dtype=torch.uint8, device=device)

    def count(self, rows: Tensor) -> None:
        """Replace the counts by those of these rows, uint8 ``[n, width]``."""
        self.planes.zero_()
        for number, row in enumerate(rows, start=1):
            self._carry.copy_(row)
            for plane in self.planes[: number.bit_length()]:
                torch.bitwise_and(plane, self._carry, out=self._above)
                plane.bitwise_xor_(self._carry)
                self._carry, self._above = self._above, self._carry

    def majority(self, votes: int, ties: Tensor | None, out: Tensor) -> None:
        """Write 1 for every bit of which more than half of the votes are 1, else 0.

        Args:
            votes: number of rows that were counted.
            ties: uint8, at least ``[width]``: its bits decide if exactly half of the votes are 1. None: 0 in this case.
            out: uint8 ``[width]``, overwritten.
        """
        half = votes // 2
        above, equal, bits = self._above.zero_(), self._equal.fill_(255), self._carry
        for place in reversed(range(len(self.planes))):
            plane = self.planes[place]
            if half >> place & 1:
                equal.bitwise_and_(plane)
            else:
                above.bitwise_or_(torch.bitwise_and(equal, plane, out=bits))
                equal.bitwise_and_(torch.bitwise_not(plane, out=bits))
        if votes % 2 == 0 and ties is not None:
            above.bitwise_or_(equal.bitwise_and_(ties[: len(above)]))
        out.copy_(above)
