"""Moniqua's rounds: means with the neighbours from codes, verified by hashes; see ``moniqua.py`` and ``lattice.py``.

In a round, every rank sends its codes and, for each block of parameters, a hash of the cells that the codes stand for.
Neighbours hash the cells that they recovered, and tell each other which blocks were right before either mixes. A block
that one of the two could not recover is sent as float32 in both directions, and this edge mixes it exactly: if only one
of them did, the mean of the models would change. Ranks compare failures at intervals. The theta of a block then grows
on all ranks if it failed on any, and shrinks if it failed on none, so that it follows the differences of the models. It
does not follow a spike, a difference many times theta that does not last: noise of its size would stay for long.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import pairwise, product

import torch
from torch import Tensor

from lightning_compress.codecs.codec import aligned
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import RandomBits, mix
from lightning_compress.core.workspace import pieces
from lightning_compress.gossip.algorithm import Averaging, ExactAveraging, add_differences
from lightning_compress.gossip.lattice import Blocks, Lattice
from lightning_compress.gossip.moniqua import Estimated, Moniqua
from lightning_compress.gossip.neighbours import Neighbours

GIVEN = Estimated(every=16)
"""How a theta that the user gave grows where it was too small: seldom, so ranks compare less often."""
BLOCK = 1 << 12
"""Most parameters of a block, which has one theta and one hash, and is sent as float32 if it was not recovered."""
CHUNK = 1 << 16
"""Parameters that are handled at a time: a multiple of a block."""
SHRINK = 0.9
"""Factor of a block's theta when ranks compare and it failed on none of them."""
JUMP = 8.0
"""A difference above so many times theta, and what was last seen, is a spike. Theta grows by no larger factor."""
EARLY = 3.0
"""Smallest margin in the first rounds, in which models drift apart."""
LEAST = 1e-6
"""Smallest theta of a block relative to the largest: equal parameters would otherwise leave the lattice."""
TINY = 1e-12
"""Smallest theta of all."""


def averaging(
    compressor: Moniqua | None, neighbours: Neighbours, layout: Layout, device: torch.device, seed: int
) -> Averaging:
    """Return exact averaging, or Moniqua's."""
    return ExactAveraging(neighbours) if compressor is None else Modulo(compressor, neighbours, layout, device, seed)


def check_averaging(name: str, compressor: object) -> None:
    """Raise ValueError unless the compressor is None or Moniqua: other errors would not vanish as models agree."""
    if not (compressor is None or isinstance(compressor, Moniqua)):
        raise ValueError(
            f"algorithm {name} averages models, and with {compressor} the error would stay when the models agree. Use "
            "none or moniqua, or algorithm choco or deepsqueeze (contractive codecs), dcd or ecd (unbiased ones)"
        )


class Modulo(Averaging):
    """Chooses theta and runs the rounds.

    State in ``numbers``: ``base`` is the given bound of the current round (with a learning rate of 0, of the last round
    above 0); for an estimated theta it is 0 until all edges were measured, and then 1. ``measured`` counts measuring
    rounds. ``given`` is a checksum of the setting: a run that is resumed with another theta starts to learn it again.
    ``checked`` and ``failures`` count blocks. State in ``vectors``, by block: ``growth`` is theta divided by base, and
    ``worst`` the largest difference, divided by base, that failed on this rank since ranks last compared. ``seen`` is
    the largest ``worst`` of all ranks when they last compared.

    Args:
        settings: of the method.
        neighbours: the transport.
        layout: of the parameters.
        device: of the parameters.
        seed: of the dither.
    """

    def __init__(
        self, settings: Moniqua, neighbours: Neighbours, layout: Layout, device: torch.device, seed: int
    ) -> None:
        super().__init__(neighbours)
        self._settings, self._seed = settings, seed
        self._bound = settings.bound()
        self._estimated, self._cycle = isinstance(self._bound, Estimated), len(neighbours.topology.matrices)
        rule = self._bound if isinstance(self._bound, Estimated) else GIVEN
        self._margin, self._every = rule.margin, max(rule.every, self._cycle)
        self._shrink = SHRINK if self._estimated else SHRINK ** (GIVEN.every // Estimated.every)  # as fast by rounds
        self._first = 2 * max(self._cycle, min(rule.every, Estimated.every))  # rounds in which models drift apart
        self._fresh = {"base": 0.0, "measured": 0.0, "given": float(zlib.crc32(repr(self._bound).encode()))}
        self.numbers |= {**self._fresh, "failures": 0.0, "checked": 0.0}
        self._messages = ModuloMessages(settings, layout, device)
        self.vectors |= {
            name: torch.zeros(len(self._messages.blocks), dtype=torch.float32, device=device)
            for name in ("growth", "worst", "seen")
        }
        self._forget()
        self._figures = {"theta": 0.0, "hash_failures": 0.0, "hash_bytes": 0.0, "resent_bytes": 0.0}

    def _forget(self) -> None:
        self.numbers |= self._fresh
        self.vectors["growth"].fill_(0.0 if self._estimated else 1.0)
        self.vectors["worst"].zero_()
        self.vectors["seen"].zero_()

    def figures(self) -> dict[str, float]:
        """Return the largest theta, the number of failed blocks, and bytes of hashes with answers and of resends."""
        return dict(self._figures)

    def average(self, vector: Tensor, rate: float, moved: Tensor | None = None) -> None:
        """See ``Averaging``."""
        if self.numbers["given"] != self._fresh["given"]:
            self._forget()
        number = self.round
        base = self._bound.at(number, rate) or self.numbers["base"]  # the learning rate of a schedule may end at 0
        begins = number < self._first
        margin = max(self._margin, EARLY) if begins else self._margin
        if self._settings.verify and (begins or number % self._every == 0):
            self._compare(base, margin, begins)
        if not base:  # theta is not measured yet, or the learning rate has been 0 so far
            self._measure(vector, margin, moved)
            return
        self.numbers["base"] = base
        theta = base * self.vectors["growth"].double()
        self._messages.key, self._messages.steps = mix(self._seed, number), self._settings.step(theta)
        self._mix(vector, moved)
        self._figures |= {"theta": float(theta.max()), "hash_failures": self.numbers["failures"]}

    def _measure(self, vector: Tensor, margin: float, moved: Tensor | None) -> None:
        """Average whole vectors with full weight; if theta is estimated, measure the differences of neighbours."""
        weights = self.neighbours.weights(self.round)
        received = {peer: torch.empty_like(vector) for peer in weights}  # freed again: such rounds are rare
        self.neighbours.swap(dict.fromkeys(weights, vector), received)
        if self._estimated:
            growth = self.vectors["growth"].double()
            for theirs in received.values():
                growth = torch.maximum(growth, margin * self._messages.largest_difference(theirs, vector))
            growth = self.neighbours.greatest(growth)
            self.vectors["growth"].copy_(growth.clamp_min(_least(growth)))
            self.numbers["measured"] += 1.0
            self.numbers["base"] = float(self.numbers["measured"] >= self._cycle)  # each round of a cycle has its edges
        add_differences(vector, received, weights, moved)

    def _compare(self, base: float, margin: float, begins: bool) -> None:
        """Let each theta grow on all ranks to what any rank saw, or shrink: a theta that was given, to its value.

        A spike is not followed, nor what falls faster than theta could shrink: while the block fails, float32 brings
        its models together, and then the theta from before the spike fits again.
        """
        growth, worst, seen = (self.vectors[name] for name in ("growth", "worst", "seen"))
        largest = torch.cat([worst.double(), worst.new_tensor([base, -base], dtype=torch.float64)])
        largest = self.neighbours.greatest(largest)
        most, least = largest[-2:].tolist()
        if most != -least:
            raise ValueError(
                f"moniqua: theta is {-least:g} on one rank and {most:g} on another, because their learning rates "
                "differ; use a constant theta, or 'estimated'"
            )
        now, last, new = growth.double(), seen.double(), largest[:-2]
        grown = torch.maximum(now, margin * new)
        if not begins:
            spike = (new > JUMP * torch.maximum(now, last)) | (new < self._shrink * last)
            followed = torch.where(spike, now, grown.minimum(JUMP * now))
            grown = torch.where(now > 2 * _least(now), followed, grown)  # the least theta knows no usual difference
        grown = torch.where(new > 0, grown, self._shrink * now)
        growth.copy_(grown.clamp_min(_least(grown)) if self._estimated else grown.clamp_min_(1.0))
        seen.copy_(new)
        worst.zero_()

    def _mix(self, vector: Tensor, moved: Tensor | None) -> None:
        messages, numbers = self._messages, self.numbers
        received = self.neighbours.exchange(messages.write(vector), self.round)
        exact: dict[tuple[int, int], Tensor] = {}
        if self._settings.verify:
            failed = self._failed(vector, received)
            numbers["checked"] += len(received) * len(messages.blocks)
            numbers["failures"] += sum(map(len, failed.values()))
            exact = self._resend(vector, failed)
        messages.move(vector, received, self.neighbours.weights(self.round), self._settings.share, exact, moved)

    def _failed(self, vector: Tensor, received: dict[int, Tensor]) -> dict[int, list[int]]:
        """Return the blocks that either end of an edge did not recover, by neighbour."""
        wrong = self._messages.wrong(vector, received)
        answers = {peer: torch.empty_like(flags) for peer, flags in wrong.items()}
        self.neighbours.swap(wrong, answers)
        self._figures["hash_bytes"] += len(received) * (8 + 1) * len(self._messages.blocks)
        return {peer: torch.nonzero(wrong[peer] | answers[peer]).view(-1).tolist() for peer in received}

    def _resend(self, vector: Tensor, failed: dict[int, list[int]]) -> dict[tuple[int, int], Tensor]:
        """Exchange failed blocks as float32 and note their largest differences; return them by neighbour and block."""
        blocks, worst = self._messages.blocks, self.vectors["worst"]
        sends = {peer: torch.cat([vector[blocks[number]] for number in rows]) for peer, rows in failed.items() if rows}
        receives = {peer: torch.empty_like(values) for peer, values in sends.items()}
        self.neighbours.swap(sends, receives)
        exact: dict[tuple[int, int], Tensor] = {}
        for peer, received in receives.items():
            self._figures["resent_bytes"] += 4 * len(received)
            rows = failed[peer]
            sizes = self._messages.sizes[rows]
            difference = _largest_difference(received, sends[peer], sizes) / self.numbers["base"]
            worst[rows] = torch.maximum(worst[rows], difference.float())
            exact |= {(peer, row): part for row, part in zip(rows, received.split(sizes.tolist()), strict=True)}
        return exact


def _least(theta: Tensor) -> float:
    return max(TINY, LEAST * float(theta.max()))


def cut(layout: Layout) -> list[slice]:
    """Return the blocks: parameter tensors, cut at each multiple of ``BLOCK`` in the vector."""
    ends = {*range(0, layout.numel, BLOCK), *(each.offset for each in layout.segments), layout.numel}
    return [slice(start, stop) for start, stop in pairwise(sorted(ends))]


def _largest_difference(theirs: Tensor, own: Tensor, sizes: Tensor) -> Tensor:
    """Return the largest difference in each block, float64 ``[blocks]``; non-finite differences count as 0."""
    difference = torch.nan_to_num(theirs.double() - own.double(), nan=0.0, posinf=0.0, neginf=0.0).abs_()
    largest = difference.new_zeros(len(sizes))
    return largest.scatter_reduce_(0, torch.repeat_interleave(sizes), difference, "amax")


class ModuloMessages:
    """Writes, verifies and applies messages, a chunk at a time.

    A message is the codes, the first one in the lowest bits of each byte. With hashes, zeros up to a multiple of 16
    bytes and the hashes follow, as int64.

    Args:
        settings: of the method.
        layout: of the parameters.
        device: of the parameters.

    Attributes:
        blocks: of the vector.
        sizes: int64 ``[blocks]``: elements of each block.
        steps: float64 ``[blocks]``: width of a cell, the same on all ranks in a round.
        key: of the round's random bits, the same on all ranks.
    """

    def __init__(self, settings: Moniqua, layout: Layout, device: torch.device) -> None:
        self.blocks = cut(layout)
        self.sizes = torch.tensor([each.stop - each.start for each in self.blocks], dtype=torch.int64, device=device)
        self.steps, self.key = torch.ones(len(self.blocks), dtype=torch.float64, device=device), 0
        self._chunks = list(_chunks(self.blocks, layout.numel))
        self._bits, self._verify, rounding = settings.bits, settings.verify, settings.way
        self._lattice = Lattice(settings.bits, rounding, device)
        self._random = None if rounding == "nearest" else RandomBits(CHUNK, device)
        body = -(-layout.numel * settings.bits // 8)
        self._hashes = aligned(body)
        size = self._hashes + 8 * len(self.blocks) if settings.verify else body
        self._own = torch.zeros(size, dtype=torch.uint8, device=device)

    def largest_difference(self, theirs: Tensor, own: Tensor) -> Tensor:
        """Return the largest difference of two vectors in each block, float64 ``[blocks]``."""
        return torch.cat(
            [_largest_difference(theirs[chunk], own[chunk], self.sizes[inside]) for chunk, inside in self._chunks]
        )

    def write(self, vector: Tensor) -> Tensor:
        """Return this rank's message; the next call overwrites it."""
        for chunk, inside, blocks, draws in self._all():
            packed = self._codes(self._own, chunk)
            hashes = self._lattice.encode(vector[chunk], blocks, draws, chunk.start, packed)
            if self._verify:
                self._hashes_of(self._own)[inside] = hashes
        return self._own

    def wrong(self, vector: Tensor, received: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return uint8 ``[blocks]`` by neighbour: 1 if its hash differs from the hash of what was recovered here."""
        wrong = {peer: torch.zeros(len(self.blocks), dtype=torch.uint8, device=vector.device) for peer in received}
        for chunk, inside, blocks, draws in self._all():
            for peer, message in received.items():
                packed = self._codes(message, chunk)
                recovered = self._lattice.hash(vector[chunk], blocks, draws, chunk.start, packed)
                wrong[peer][inside] = (self._hashes_of(message)[inside] != recovered).to(torch.uint8)
        return wrong

    def move(
        self,
        vector: Tensor,
        received: dict[int, Tensor],
        weights: dict[int, float],
        share: float,
        exact: dict[tuple[int, int], Tensor],
        moved: Tensor | None = None,
    ) -> None:
        """Move the vector towards the neighbours, in place.

        Args:
            vector: this rank's, float32 ``[numel]``.
            received: messages, by neighbour.
            weights: of the neighbours.
            share: how far to move by codes. Blocks in ``exact`` have no noise, and move in full.
            exact: float32 blocks that were sent whole, by neighbour and block.
            moved: see ``Averaging.average``.
        """
        scales = share * torch.tensor([weights[peer] for peer in received], dtype=torch.float64, device=vector.device)
        by_block = scales[:, None].repeat(1, len(self.blocks))
        for row, peer in enumerate(received):
            by_block[row, [block for whose, block in exact if whose == peer]] = 0.0
        for chunk, inside, blocks, draws in self._all():
            own, extra = vector[chunk], None
            for block, peer in product(range(inside.start, inside.stop), received):
                if (peer, block) in exact:
                    extra = torch.zeros(len(own), dtype=torch.float64, device=own.device) if extra is None else extra
                    place = self.blocks[block]
                    difference = exact[peer, block].double() - vector[place].double()
                    extra[place.start - chunk.start : place.stop - chunk.start] += weights[peer] * difference
            packed = [self._codes(message, chunk) for message in received.values()]
            sums = None if moved is None else moved[chunk]
            self._lattice.move(own, blocks, draws, packed, by_block[:, inside], extra, sums)

    def _all(self) -> Iterator[tuple[slice, slice, Blocks, Tensor | None]]:
        """Yield each chunk with the indices of its blocks, the blocks, and its random bits."""
        for chunk, inside in self._chunks:
            count = chunk.stop - chunk.start
            draws = None if self._random is None else self._random.draw(self.key, chunk.start, count)
            yield chunk, inside, Blocks(self.sizes[inside], self.steps[inside]), draws

    def _codes(self, message: Tensor, chunk: slice) -> Tensor:
        return message[chunk.start * self._bits // 8 : -(-chunk.stop * self._bits // 8)]

    def _hashes_of(self, message: Tensor) -> Tensor:
        return message[self._hashes :].view(torch.int64)


def _chunks(blocks: list[slice], numel: int) -> Iterator[tuple[slice, slice]]:
    """Yield chunks, each with the indices of its blocks."""
    first = 0
    for chunk in pieces(numel, CHUNK):
        last = first
        while last < len(blocks) and blocks[last].start < chunk.stop:
            last += 1
        yield chunk, slice(first, last)
        first = last
