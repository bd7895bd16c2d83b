"""Averages of two models by Moniqua: the question is the lowest bits of cells, the answer their differences.

The asked rank recovers the cells that the codes stand for from its own model, which is close, and compares a hash of
them. If it is right, both ranks move by ``share * step`` times the differences of their cells, clamped to what the
answer can hold; if not, the asker asks again in float32. Each edge has a theta of its own: what the last answer said of
the largest difference, times a margin.

Lu, De Sa, "Moniqua: Modulo Quantized Communication in Decentralized SGD", ICML 2020, arXiv 2002.11787, section 6.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_compress.asynchronous.pairwise import AGAIN, BUSY, CELLS, CODES, PairwiseAverage
from lightning_compress.asynchronous.shared_model import SharedModel
from lightning_compress.codecs.packing.planes import pack_plane, unpack_plane
from lightning_compress.collectives.links import Links, Message, Reply
from lightning_compress.gossip.lattice import Blocks, Lattice
from lightning_compress.gossip.moniqua import Moniqua

BITS = (4, 8)
"""Of a code, and of a difference of cells."""
EVERY = 64
"""One question in so many is in float32, which measures theta anew and brings together what was clamped."""
MARGIN, SHRINK, LEAST = 2.0, 0.95, 1e-12
"""Theta is the margin times the largest difference, at least ``SHRINK`` times what it was, and at least ``LEAST``."""


class ModuloAverage(PairwiseAverage):
    """Averages by codes of a few bits, see ``PairwiseAverage``.

    Args:
        model: of this rank.
        settings: the number of bits, 4 or 8, and ``slack``, the share; codes are rounded to nearest, because ranks at
            different steps have no random numbers in common.

    Attributes:
        failures: questions of this rank that were asked again in float32.

    Raises:
        ValueError: the settings ask for fewer bits, another rounding, a given theta, or no hashes.
    """

    def __init__(self, model: SharedModel, settings: Moniqua) -> None:
        check_settings(settings)
        super().__init__(model, settings.share)
        self._settings = Moniqua(settings.bits, "nearest", settings.slack)
        self._bits = settings.bits
        self._lattice = Lattice(settings.bits, "nearest", torch.device("cpu"))
        self._theta: dict[int, float] = {}
        self._count: Counter[int] = Counter()
        self.failures = 0

    @property
    def kinds(self) -> Mapping[int, int]:
        """See ``PairwiseAverage.kinds``."""
        return {**super().kinds, CODES: 8 + self._bytes, CELLS: self._bytes, AGAIN: 0}

    @property
    def _bytes(self) -> int:
        return -(-self._model.numel * self._bits // 8)

    def _ask(self, links: Links, peer: int) -> bool:
        number, theta = self._count[peer], self._theta.get(peer)
        self._count[peer] += 1
        if theta is None or number % EVERY == 0:
            return super()._ask(links, peer)
        step = float(self._settings.step(torch.tensor(theta, dtype=torch.float64)))
        room, packed = self._read(peer), torch.empty(self._bytes, dtype=torch.uint8)
        found = self._lattice.encode(room, Blocks.single(len(room), step, room.device), None, 0, packed)
        reply = links.ask(peer, CODES, len(self._open), step, [found, packed])
        if reply.kind == BUSY:
            return False
        if reply.kind == AGAIN:
            self.failures += 1
            return super()._ask(links, peer)
        self._model.move(self._change(self._unpacked(reply.body), step, reply.clock), -1.0)
        self._learn(peer, reply.number)
        return True

    def state_dict(self) -> dict[str, Any]:
        """See ``PairwiseAverage``: the theta of each edge, and the number of questions."""
        return {"theta": _by_text(self._theta), "count": _by_text(self._count)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``PairwiseAverage``."""
        self._theta = {int(peer): float(theta) for peer, theta in state["theta"].items()}
        self._count = Counter({int(peer): int(count) for peer, count in state["count"].items()})

    def _learn(self, peer: int, apart: float) -> None:
        self._theta[peer] = max(MARGIN * apart, SHRINK * self._theta.get(peer, 0.0), LEAST)

    def _answer(self, rank: int, message: Message, others: int) -> Reply:
        if message.kind != CODES:
            return super()._answer(rank, message, others)
        step, wanted = message.number, 8 + self._bytes
        if len(message.body) != wanted or not 0 < step < math.inf:
            raise ValueError(
                f"rank {rank} sent {len(message.body):,} bytes of codes, of cells {step} wide, and a model of this "
                f"rank's has {wanted:,}; all ranks must train the same model with the same settings"
            )
        (theirs,) = struct.unpack("=q", bytes(message.body[:8].tolist()))
        self._model.read(self._own)
        most = 2 ** (self._bits - 1) - 1
        found, largest, cells = self._lattice.differences(self._own, step, message.body[8:], most)
        if found != theirs:
            return Reply(AGAIN)
        self._model.move(self._change(cells, step, others))
        return Reply(CELLS, others, largest * step, [self._packed(cells)])

    def _change(self, cells: Tensor, step: float, others: int) -> Tensor:
        """Return what both ranks move by: the same product of the same numbers."""
        change: Tensor = cells.float().mul_(self._share(others) * step)
        return change

    def _packed(self, cells: Tensor) -> Tensor:
        codes = torch.zeros(-(-len(cells) // 8) * 8, dtype=torch.uint8)
        torch.add(cells.to(torch.int16), 2 ** (self._bits - 1), out=codes[: len(cells)])
        packed = torch.empty(self._bytes, dtype=torch.uint8)
        pack_plane(codes, 0, self._bits, packed)
        return packed

    def _unpacked(self, packed: Tensor) -> Tensor:
        codes = torch.zeros(-(-self._model.numel // 8) * 8, dtype=torch.uint8)
        unpack_plane(packed, 0, self._bits, codes)
        cells: Tensor = codes[: self._model.numel].to(torch.int16) - 2 ** (self._bits - 1)
        return cells


def check_settings(settings: Moniqua) -> None:
    """Raise ValueError for settings that ranks cannot have that do not wait for each other."""
    if settings.bits not in BITS:
        raise ValueError(
            f"moniqua: bits={settings.bits}: models that are averaged at different times by codes so coarse drift "
            "apart; use 4 or 8 bits, or an algorithm whose ranks wait for each other, such as 'dpsgd'"
        )
    if settings.rounding not in (None, "nearest"):
        raise ValueError(
            f"moniqua: rounding={settings.rounding!r} needs random numbers that are equal on all ranks, and ranks "
            "that do not wait have none; use rounding='nearest' or leave it out"
        )
    if settings.theta != "estimated" or not settings.verify:
        raise ValueError(
            f"moniqua: theta={settings.theta!r} and verify={settings.verify}: ranks that do not wait learn theta "
            "from their answers, and need the hashes; leave both out"
        )


def _by_text(numbers: Mapping[int, Any]) -> dict[str, Any]:
    return {str(peer): number for peer, number in numbers.items()}
