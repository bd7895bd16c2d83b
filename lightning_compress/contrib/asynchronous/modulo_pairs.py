"""Averages of two models by Moniqua: the question is the lowest bits of cells, the answer their differences.

The asked rank recovers the cells that the codes stand for from its own model, which is close, and compares a hash of
them. If it is right, both ranks move by ``share * step`` times the differences of their cells, clamped to what the
answer can hold; if not, the asker asks again in float32. Each edge has a theta of its own: what the last answer said of
the largest difference, times a margin.

Lu, De Sa, "Moniqua: Modulo Quantized Communication in Decentralized SGD", ICML 2020, arXiv 2002.11787, section 6.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_compress.contrib.asynchronous.links import Links, Message, Reply
from lightning_compress.contrib.asynchronous.pairwise import AGAIN, BUSY, CELLS, CODES, PairwiseAverage
from lightning_compress.contrib.asynchronous.shared_model import CHUNK, SharedModel
from lightning_compress.gossip.lattice import Blocks, Lattice
from lightning_compress.gossip.moniqua import Moniqua

BITS = (4, 8)
"""Of a code, and of a difference of cells."""
EVERY = 64
"""One question in so many is in float32, which measures theta anew and brings together what was clamped."""
MARGIN, SHRINK, LEAST = 2.0, 0.95, 1e-12
"""Theta is the margin times the largest difference, and at least ``LEAST``. By codes, whose differences are as wrong as
theta is large, it is at least ``SHRINK`` times what it was."""


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
        room, packed = torch.empty(CHUNK, dtype=torch.float32), torch.empty(self._bytes, dtype=torch.uint8)
        found = torch.zeros(1, dtype=torch.int64)
        for part, place in self._chunks():
            x = self._model.read(part, room)
            found += self._lattice.encode(x, Blocks.single(len(x), step, x.device), None, part.start, packed[place])
        reply = links.ask(peer, CODES, len(self._open), step, [found, packed])
        if reply.kind == BUSY:
            return False
        if reply.kind == AGAIN:
            self.failures += 1
            return super()._ask(links, peer)
        self._move(reply.body, -self._share(reply.clock) * step)
        self._learn(peer, max(reply.number, SHRINK * theta / MARGIN))
        return True

    def state_dict(self) -> dict[str, Any]:
        """See ``PairwiseAverage``: the theta of each edge, and the number of questions."""
        return {"theta": _by_text(self._theta), "count": _by_text(self._count)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``PairwiseAverage``."""
        self._theta = {int(peer): float(theta) for peer, theta in state["theta"].items()}
        self._count = Counter({int(peer): int(count) for peer, count in state["count"].items()})

    def _learn(self, peer: int, apart: float) -> None:
        self._theta[peer] = max(MARGIN * apart, LEAST)

    def _answer(self, rank: int, message: Message, others: int) -> Reply:
        if message.kind != CODES:
            return super()._answer(rank, message, others)
        step, wanted = message.number, 8 + self._bytes
        if len(message.body) != wanted or not 0 < step < math.inf:
            raise ValueError(
                f"rank {rank} sent {len(message.body):,} bytes of codes, of cells {step} wide, and a model of this "
                f"rank's has {wanted:,}; all ranks must train the same model with the same settings"
            )
        theirs, codes = message.body[:8].view(torch.int64), message.body[8:]
        answer, found, largest = torch.empty(self._bytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64), 0
        for part, place in self._chunks():
            x = self._model.read(part, self._own)
            word, apart = self._lattice.differences(x, step, codes[place], part.start, answer[place])
            found += word
            largest = max(largest, apart)
        if not found.equal(theirs):
            return Reply(AGAIN)
        self._move(answer, self._share(others) * step)
        return Reply(CELLS, others, largest * step, [answer])

    def _move(self, differences: Tensor, factor: float) -> None:
        """Move this model by an answer. Both ranks do so by the same products of the same numbers."""
        for part, place in self._chunks():
            with self._model.moving(part) as moved:
                self._lattice.add_differences(differences[place], factor, moved)

    def _chunks(self) -> Iterator[tuple[slice, slice]]:
        """Yield elements of the model, and the bytes of their codes."""
        for part in self._model.chunks():
            yield part, slice(part.start * self._bits // 8, -(-part.stop * self._bits // 8))


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
