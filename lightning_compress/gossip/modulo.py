"""Means with neighbours by Moniqua: rounds of codes, checked by hashes; see ``moniqua.py`` and ``lattice.py``.

A round: every rank sends its codes and, for each block of parameters, a hash of the cells that they stand for.
Neighbours hash what they recovered, and tell each other which blocks were right before either mixes. A block that one
of the two could not recover goes as float32, both ways, and this edge mixes it exactly: if only one did, the mean of
the models would move. The theta of a block grows for all ranks when they next compare what they saw, and shrinks where
nothing failed: so it follows the differences of models, up and down.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix
from lightning_compress.gossip.averaging import Averaging, Exact, add_differences
from lightning_compress.gossip.messages import Messages, largest
from lightning_compress.gossip.moniqua import Moniqua
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.theta import Estimated

SHRINK = 0.9
"""What is left of a block's theta, or of its growth, when ranks compare and none of them saw it fail."""
EARLY = 3.0
"""The least margin of the first rounds."""
LEAST = 1e-6
"""Of the largest theta: no block's is below, or parameters that do not differ would leave the lattice."""
TINY = 1e-12
"""Nor is any theta below this."""


def averaging(
    compressor: Moniqua | None, neighbours: Neighbours, layout: Layout, device: torch.device, seed: int
) -> Averaging:
    """Exact means, or those of Moniqua."""
    return Exact(neighbours) if compressor is None else Modulo(compressor, neighbours, layout, device, seed)


def check_averaging(name: str, compressor: object) -> None:
    """Refuse compressors of whole models that keep no memory of what was lost, but for Moniqua."""
    if not (compressor is None or isinstance(compressor, Moniqua)):
        raise ValueError(
            f"algorithm {name} averages models, and with {compressor} its error would not vanish with their difference;"
            " take none or moniqua, or algorithm choco or deepsqueeze (contractive codecs), dcd or ecd (unbiased ones)"
        )


class Modulo(Averaging):
    """Chooses theta, and runs the rounds.

    What it keeps: ``base`` is the given bound, as it is now or was by the last learning rate above 0. For an estimated
    theta it is 0 until all edges were ``measured``, and then 1. By block, ``growth`` is theta over base, and ``worst``
    the largest difference over base that failed on this rank since ranks last compared. ``given`` tells which theta was
    asked for: a run that goes on with another one forgets what it learnt. ``checked`` and ``failures`` count blocks.

    Args:
        settings: of the method.
        neighbours: to talk to.
        layout: of the parameters.
        device: where they are.
        seed: of the dither.
    """

    def __init__(
        self, settings: Moniqua, neighbours: Neighbours, layout: Layout, device: torch.device, seed: int
    ) -> None:
        self._settings, self._neighbours, self._seed = settings, neighbours, seed
        self._bound = settings.bound()
        self._estimated = self._bound if isinstance(self._bound, Estimated) else None
        told, self._cycle = self._estimated or Estimated(), len(neighbours.topology.matrices)
        self._margin, self._told, self._every = told.margin, told.margin, max(told.every, self._cycle)
        self._fresh = {"base": 0.0, "measured": 0.0, "given": float(zlib.crc32(repr(self._bound).encode()))}
        self.numbers = {**self._fresh, "failures": 0.0, "checked": 0.0}
        self._messages = Messages(settings, layout, device)
        by_block = torch.zeros(len(self._messages.blocks), device=device)
        self.vectors = {"growth": by_block, "worst": by_block.clone()}
        self._begin()
        self._now = {"theta": 0.0, "hash_failures": 0.0, "hash_bytes": 0.0, "resent_bytes": 0.0}

    def _begin(self) -> None:
        self.vectors["growth"].fill_(0.0 if self._estimated else 1.0)
        self.vectors["worst"].zero_()

    def figures(self) -> dict[str, float]:
        """The largest theta; blocks that neighbours did not recover; bytes of hashes and answers, and of resends."""
        return dict(self._now)

    def average(self, vector: Tensor, numbers: dict[str, float], rate: float, moved: Tensor | None = None) -> None:
        """See ``Averaging``."""
        if numbers["given"] != self._fresh["given"]:
            numbers |= self._fresh
            self._begin()
        number = int(numbers["round"])
        weights = self._neighbours.weights(number)
        base = self._bound.at(number, rate) or numbers["base"]  # a schedule may end at 0: then by the last rate above
        begins = number < 2 * self._every  # models part in the first rounds
        self._margin = max(self._told, EARLY) if begins else self._told
        if self._settings.verify and (begins or number % self._every == 0):
            self._agree(base)
        if not base:  # one that begins at 0 has none, nor has one that is to be measured
            self._measure(vector, numbers, weights, moved)
            return
        numbers["base"] = base
        theta = base * self.vectors["growth"].double()
        messages = self._messages
        messages.key, messages.steps = mix(self._seed, number), self._settings.step(theta)
        self._mix(vector, weights, numbers, moved)
        self._now |= {"theta": float(theta.max()), "hash_failures": numbers["failures"]}

    def _measure(
        self, vector: Tensor, numbers: dict[str, float], weights: dict[int, float], moved: Tensor | None
    ) -> None:
        """A round of whole vectors, at full weight; it tells an estimated theta how far neighbours are apart."""
        theirs = {peer: torch.empty_like(vector) for peer in weights}  # given back: these rounds are few
        self._neighbours.swap(dict.fromkeys(weights, vector), theirs)
        if self._estimated:
            found = self.vectors["growth"].double()
            for each in theirs.values():
                found = torch.maximum(found, self._margin * self._messages.apart(each, vector))
            self.vectors["growth"].copy_(_above_zero(self._neighbours.greatest(found)))
            numbers["measured"] += 1.0
            numbers["base"] = float(numbers["measured"] >= self._cycle)  # other rounds of a cycle have other edges
        add_differences(vector, theirs, weights, moved)

    def _agree(self, base: float) -> None:
        """Theta grows for all by what any rank saw, and shrinks while nobody saw any: one that was given, to that."""
        growth, worst = self.vectors["growth"], self.vectors["worst"]
        said = torch.cat([worst.double(), worst.new_tensor([base, -base], dtype=torch.float64)])
        said = self._neighbours.greatest(said)
        most, least = said[-2:].tolist()
        if most != -least:
            raise ValueError(
                f"moniqua: theta is {-least:g} on one rank and {most:g} on another: their learning rates differ; use "
                "a constant theta, or 'estimated'"
            )
        seen = said[:-2]
        grown = torch.where(seen > 0, torch.maximum(growth.double(), self._margin * seen), SHRINK * growth.double())
        growth.copy_(_above_zero(grown) if self._estimated else grown.clamp_min_(1.0))
        worst.zero_()

    def _mix(self, vector: Tensor, weights: dict[int, float], numbers: dict[str, float], moved: Tensor | None) -> None:
        own = self._messages.write(vector)
        theirs = self._neighbours.tell(own, int(numbers["round"]))
        exact: dict[tuple[int, int], Tensor] = {}
        if self._settings.verify:
            failed = self._failed(vector, theirs)
            numbers["checked"] += len(theirs) * len(self._messages.blocks)
            numbers["failures"] += sum(map(len, failed.values()))
            exact = self._resend(vector, failed, numbers["base"])
        self._messages.move(vector, theirs, weights, self._settings.share, exact, moved)

    def _failed(self, vector: Tensor, theirs: dict[int, Tensor]) -> dict[int, list[int]]:
        """Blocks that either side of an edge did not recover; neighbours tell each other before they mix."""
        wrong = self._messages.wrong(vector, theirs)
        answers = {peer: torch.empty_like(each) for peer, each in wrong.items()}
        self._neighbours.swap(wrong, answers)
        self._now["hash_bytes"] += len(theirs) * (8 + 1) * len(self._messages.blocks)
        return {peer: torch.nonzero(wrong[peer] | answers[peer]).view(-1).tolist() for peer in theirs}

    def _resend(self, vector: Tensor, failed: dict[int, list[int]], base: float) -> dict[tuple[int, int], Tensor]:
        """Failed blocks, whole and in both directions, by neighbour and number; what differs most is remembered."""
        blocks, worst = self._messages.blocks, self.vectors["worst"]
        sends = {
            peer: torch.cat([vector[blocks[each]] for each in numbers]) for peer, numbers in failed.items() if numbers
        }
        receives = {peer: torch.empty_like(each) for peer, each in sends.items()}
        self._neighbours.swap(sends, receives)
        found: dict[tuple[int, int], Tensor] = {}
        for peer, received in receives.items():
            self._now["resent_bytes"] += 4 * len(received)
            numbers = failed[peer]
            sizes = self._messages.sizes[numbers]
            worst[numbers] = torch.maximum(worst[numbers], (largest(received, sends[peer], sizes) / base).float())
            parts = received.split(sizes.tolist())
            found |= {(peer, number): part for number, part in zip(numbers, parts, strict=True)}
        return found


def _above_zero(theta: Tensor) -> Tensor:
    return theta.clamp_min(max(TINY, LEAST * float(theta.max())))
