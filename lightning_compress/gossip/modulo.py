"""Means with neighbours by Moniqua: rounds of codes, checked by hashes; see ``moniqua.py`` and ``lattice.py``.

A round: every rank sends its codes and, for each chunk of 65,536 parameters, a hash of the cells that they stand for.
Neighbours hash what they recovered, and tell each other which chunks were right before either mixes. A chunk that one
of the two could not recover goes as float32, both ways, and this edge mixes it exactly: if only one did, the mean of
the models would move. Theta grows for all ranks when they next compare what they saw.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_compress.codecs.base import aligned
from lightning_compress.core.buffers import pieces
from lightning_compress.core.random import RandomBits, mix
from lightning_compress.gossip.averaging import Averaging, Exact, add_differences
from lightning_compress.gossip.lattice import Lattice
from lightning_compress.gossip.moniqua import Moniqua
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.theta import Estimated

CHUNK = 1 << 16
"""Parameters that share a hash, and are sent whole if it is wrong."""
AGREE = 8
"""Rounds from one word of all ranks about theta to the next."""
SHRINK = 0.9
"""What is left of growth after as many rounds in which nothing failed: one outlier must not coarsen a run for good."""


def averaging(compressor: Moniqua | None, neighbours: Neighbours, seed: int) -> Averaging:
    """Exact means, or those of Moniqua."""
    return Exact(neighbours) if compressor is None else Modulo(compressor, neighbours, seed)


def check_averaging(name: str, compressor: object) -> None:
    """Refuse compressors of whole models that keep no memory of what was lost, but for Moniqua."""
    if not (compressor is None or isinstance(compressor, Moniqua)):
        raise ValueError(
            f"algorithm {name} averages models, and with {compressor} its error would not vanish with their difference;"
            " take none or moniqua, or algorithm choco or deepsqueeze (contractive codecs), dcd or ecd (unbiased ones)"
        )


class Modulo(Averaging):
    """Chooses theta, and runs the rounds.

    Kept: ``theta``, as measured, or by the last learning rate above 0; ``growth``, its factor since; ``worst``, the
    largest difference over theta that this rank saw since the ranks last compared; ``given``, which theta was asked
    for: if a run goes on with another one, what was learnt of the old one does not count; ``checked`` and ``failures``,
    chunks so far.

    Args:
        settings: of the method.
        neighbours: to talk to.
        seed: of the dither.
    """

    def __init__(self, settings: Moniqua, neighbours: Neighbours, seed: int) -> None:
        self._settings, self._neighbours, self._seed = settings, neighbours, seed
        self._bound = settings.bound()
        self._fresh = {
            "theta": 0.0,
            "growth": 1.0,
            "worst": 0.0,
            "given": float(zlib.crc32(repr(self._bound).encode())),
        }
        self.numbers = {**self._fresh, "failures": 0.0, "checked": 0.0}
        self._margin = self._bound.margin if isinstance(self._bound, Estimated) else Estimated.margin
        self._messages: Messages | None = None
        self._now = {"theta": 0.0, "hash_failures": 0.0, "hash_bytes": 0.0, "resent_bytes": 0.0}

    def figures(self) -> dict[str, float]:
        """Theta now; chunks that neighbours did not recover; bytes of hashes and answers, and of what went again."""
        return dict(self._now)

    def average(self, vector: Tensor, numbers: dict[str, float], rate: float, moved: Tensor | None = None) -> None:
        """See ``Averaging``."""
        if numbers["given"] != self._fresh["given"]:
            numbers |= self._fresh
        number, share = int(numbers["round"]), self._settings.share
        weights = {peer: share * weight for peer, weight in self._neighbours.weights(number).items()}
        if isinstance(self._bound, Estimated) and (self._bound.measures(number) or not numbers["theta"]):
            self._measure(vector, numbers, weights, moved)
            return
        base = self._bound.at(number, rate) or numbers["theta"]  # a schedule may end at 0: then by the last rate above
        if self._settings.verify and number % AGREE == 0:
            self._agree(numbers, base, vector.device)
        if not base:  # and one that begins at 0 has none
            self._measure(vector, numbers, weights, moved)
            return
        numbers["theta"] = base
        theta = base * numbers["growth"]
        if self._messages is None:
            self._messages = Messages(self._settings, len(vector), vector.device)
        self._messages.key, self._messages.step = mix(self._seed, number), self._settings.step(theta)
        self._mix(self._messages, vector, weights, numbers, theta, moved)
        self._now |= {"theta": theta, "hash_failures": numbers["failures"]}

    def _measure(
        self, vector: Tensor, numbers: dict[str, float], weights: dict[int, float], moved: Tensor | None
    ) -> None:
        """A round of whole vectors, which tells how far neighbours are apart."""
        theirs = {peer: torch.empty_like(vector) for peer in weights}  # given back: these rounds are few
        self._neighbours.swap(dict.fromkeys(weights, vector), theirs)
        found = torch.zeros(1, dtype=torch.float64, device=vector.device)
        for each in theirs.values():
            torch.maximum(found, _largest(each, vector), out=found)
        largest = float(self._neighbours.greatest(found))
        add_differences(vector, theirs, weights, moved)
        numbers |= {"theta": self._margin * largest, "growth": 1.0, "worst": 0.0}

    def _agree(self, numbers: dict[str, float], base: float, device: torch.device) -> None:
        """Theta grows for all by what any rank saw, and shrinks slowly to what was asked for while nobody saw any."""
        said = torch.tensor([numbers["worst"], base, -base], dtype=torch.float64, device=device)
        worst, most, least = self._neighbours.greatest(said).tolist()
        if most != -least:
            raise ValueError(
                f"moniqua: theta is {-least:g} on one rank and {most:g} on another: their learning rates differ; use "
                "a constant theta, or 'estimated'"
            )
        grown = max(numbers["growth"], self._margin * worst) if worst else max(1.0, SHRINK * numbers["growth"])
        numbers |= {"growth": grown, "worst": 0.0}

    def _mix(
        self,
        messages: Messages,
        vector: Tensor,
        weights: dict[int, float],
        numbers: dict[str, float],
        theta: float,
        moved: Tensor | None,
    ) -> None:
        own = messages.write(vector)
        theirs = self._neighbours.tell(own, int(numbers["round"]))
        exact: dict[tuple[int, int], Tensor] = {}
        if self._settings.verify:
            failed = self._failed(messages, vector, theirs)
            numbers["checked"] += len(theirs) * len(messages.chunks)
            numbers["failures"] += sum(map(len, failed.values()))
            exact = self._resend(messages, vector, failed)
            base = theta / numbers["growth"]
            for (_, number), each in exact.items():
                apart = float(_largest(each, vector[messages.chunks[number]])) / base
                numbers["worst"] = max(numbers["worst"], apart)
        messages.move(vector, theirs, weights, exact, moved)

    def _failed(self, messages: Messages, vector: Tensor, theirs: dict[int, Tensor]) -> dict[int, list[int]]:
        """Chunks that either side of an edge did not recover; neighbours tell each other before they mix."""
        wrong = messages.wrong(vector, theirs)
        answers = {peer: torch.empty_like(each) for peer, each in wrong.items()}
        self._neighbours.swap(wrong, answers)
        self._now["hash_bytes"] += len(theirs) * (8 + 1) * len(messages.chunks)
        return {peer: torch.nonzero(wrong[peer] | answers[peer]).view(-1).tolist() for peer in theirs}

    def _resend(
        self, messages: Messages, vector: Tensor, failed: dict[int, list[int]]
    ) -> dict[tuple[int, int], Tensor]:
        """Failed chunks, whole and in both directions, by neighbour and number."""
        sends = {
            peer: torch.cat([vector[messages.chunks[each]] for each in numbers])
            for peer, numbers in failed.items()
            if numbers
        }
        receives = {peer: torch.empty_like(each) for peer, each in sends.items()}
        self._neighbours.swap(sends, receives)
        found: dict[tuple[int, int], Tensor] = {}
        for peer, received in receives.items():
            self._now["resent_bytes"] += 4 * len(received)
            lengths = [len(vector[messages.chunks[each]]) for each in failed[peer]]
            parts = zip(failed[peer], received.split(lengths), strict=True)
            found |= {(peer, number): part for number, part in parts}
        return found


class Messages:
    """Codes of a vector, and hashes of them: written, checked and mixed, a chunk at a time.

    A message is the codes, the first one lowest in each byte, zeros up to a multiple of 16 bytes, and the hashes as
    int64; without hashes the codes alone.

    Args:
        settings: of the method.
        numel: parameters.
        device: where they are.

    Attributes:
        chunks: of the vector.
        step: width of a cell, the same on all ranks in a round.
        key: of the random bits of a round, likewise.
    """

    def __init__(self, settings: Moniqua, numel: int, device: torch.device) -> None:
        self.chunks = list(pieces(numel, CHUNK))
        self.step, self.key = 1.0, 0
        self._bits, self._verify = settings.bits, settings.verify
        self._lattice = Lattice(settings.bits, settings.rounding, device)
        self._random = None if settings.rounding == "nearest" else RandomBits(CHUNK, device)
        body = -(-numel * settings.bits // 8)
        self._hashes = aligned(body)
        size = self._hashes + 8 * len(self.chunks) if settings.verify else body
        self._own = torch.zeros(size, dtype=torch.uint8, device=device)

    def write(self, vector: Tensor) -> Tensor:
        """This rank's message; the next one overwrites it."""
        for number, chunk, draws in self._all():
            packed = self._codes(self._own, chunk)
            found = self._lattice.encode(vector[chunk], self.step, draws, chunk.start, packed)
            if self._verify:
                self._hashes_of(self._own)[number] = found
        return self._own

    def wrong(self, vector: Tensor, theirs: dict[int, Tensor]) -> dict[int, Tensor]:
        """By neighbour, uint8 ``[chunks]``: 1 where its hash is not that of what was recovered here."""
        found = {peer: torch.zeros(len(self.chunks), dtype=torch.uint8, device=vector.device) for peer in theirs}
        for number, chunk, draws in self._all():
            for peer, message in theirs.items():
                packed = self._codes(message, chunk)
                recovered = self._lattice.hash(vector[chunk], self.step, draws, chunk.start, packed)
                found[peer][number] = self._hashes_of(message)[number] != recovered
        return found

    def move(
        self,
        vector: Tensor,
        theirs: dict[int, Tensor],
        weights: dict[int, float],
        exact: dict[tuple[int, int], Tensor],
        moved: Tensor | None = None,
    ) -> None:
        """Move the vector towards neighbours, in place; by what was sent whole, where something was.

        ``moved``: see ``Averaging.average``.
        """
        for number, chunk, draws in self._all():
            own, extra = vector[chunk], None
            whole = [peer for peer in weights if (peer, number) in exact]
            for peer in whole:
                difference = weights[peer] * (exact[peer, number].double() - own.double())
                extra = difference if extra is None else extra + difference
            coded = [peer for peer in weights if peer not in whole]
            packed = [self._codes(theirs[peer], chunk) for peer in coded]
            sums = None if moved is None else moved[chunk]
            self._lattice.move(own, self.step, draws, packed, [weights[peer] for peer in coded], extra, sums)

    def _all(self) -> Iterator[tuple[int, slice, Tensor | None]]:
        for number, chunk in enumerate(self.chunks):
            count = chunk.stop - chunk.start
            yield number, chunk, None if self._random is None else self._random.draw(self.key, chunk.start, count)

    def _codes(self, message: Tensor, chunk: slice) -> Tensor:
        return message[chunk.start * self._bits // 8 : -(-chunk.stop * self._bits // 8)]

    def _hashes_of(self, message: Tensor) -> Tensor:
        return message[self._hashes :].view(torch.int64)


def _largest(theirs: Tensor, own: Tensor) -> Tensor:
    """The largest difference, as float64 ``[1]``; of what is no number, 0."""
    if not len(own):
        return torch.zeros(1, dtype=torch.float64, device=own.device)
    return torch.nan_to_num(theirs.double() - own.double(), nan=0.0, posinf=0.0, neginf=0.0).abs().max()[None]
