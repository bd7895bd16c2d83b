"""The specification that every algorithm of gossip keeps.

An algorithm is a frozen dataclass of its settings; ``begin`` makes it ready for one vector of parameters on one rank.
``Mixing.mix`` is given what local steps made of the parameters since the last round, and changes it in place to what
the next local step starts from.

* The mean over the ranks of what comes out is the mean of what goes in; with DCD and ECD, on average.
* All ranks mix in the same rounds; nothing but ``Neighbours`` is talked to.
* What an algorithm keeps between rounds is in ``vectors`` and ``numbers``, and in nothing else: saved and loaded, a run
  goes on bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_compress.codecs import Codec
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.topology import Topology

GRID = 2.0**-24
"""Of which weights of messages are multiples: then float32 holds them, and their sums, without rounding."""
LARGEST = 1e30
"""Numbers that are not finite are sent as such: a model that diverges is no reason to stop in the middle of a round."""


class Mixing(ABC):
    """An algorithm at work on one rank.

    Attributes:
        vectors: float32 ``[numel]`` each, what is kept of this rank's own between rounds, by name.
        numbers: likewise, numbers; ``round`` counts the rounds so far.
        steps: how far to move towards the neighbours, by the setting's name, where the algorithm has one.
    """

    def __init__(self, neighbours: Neighbours) -> None:
        self.neighbours = neighbours
        self.vectors: dict[str, Tensor] = {}
        self.numbers: dict[str, float] = {"round": 0.0}
        self.steps: dict[str, float] = {}

    @property
    def round(self) -> int:
        """Rounds so far."""
        return int(self.numbers["round"])

    def mix(self, vector: Tensor, rate: float) -> None:
        """One round, in place.

        Args:
            vector: float32 ``[numel]``, contiguous: the parameters after this rank's own steps.
            rate: the learning rate, the same on all ranks; only for what depends on it.
        """
        self.run(vector, rate)
        self.numbers["round"] += 1.0

    @abstractmethod
    def run(self, vector: Tensor, rate: float) -> None:
        """The round itself."""

    def figures(self) -> dict[str, float]:
        """What else there is to tell, by name."""
        return dict(self.steps)

    def state_dict(self) -> dict[str, Any]:
        """Everything that is kept; refers to its memory."""
        return {"vectors": dict(self.vectors), "numbers": dict(self.numbers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what was saved.

        Raises:
            ValueError: it is of another algorithm, or of other parameters.
        """
        vectors, numbers = state["vectors"], state["numbers"]
        if vectors.keys() != self.vectors.keys() or numbers.keys() != self.numbers.keys():
            raise ValueError(
                f"the state has {sorted([*vectors, *numbers])}, and this algorithm keeps "
                f"{sorted([*self.vectors, *self.numbers])}: it was saved with other settings"
            )
        for name, own in self.vectors.items():
            if vectors[name].shape != own.shape:
                raise ValueError(f"{name} has {vectors[name].numel()} numbers, and there are {own.numel()} parameters")
        for name, own in self.vectors.items():
            own.copy_(vectors[name])
        self.numbers = {name: float(value) for name, value in numbers.items()}


class Algorithm(ABC):
    """A way to train without a global mean; a frozen dataclass of its settings.

    Attributes:
        codec: of its messages, where the user names none; None: it sends whole float32 vectors then.
        fixed: neighbours and weights must be the same in every round.
        memory: bytes a parameter that it keeps between rounds.
    """

    name: ClassVar[str]
    codec: ClassVar[Codec | None] = None
    fixed: ClassVar[bool] = False
    memory: ClassVar[int] = 0

    @abstractmethod
    def check_compressor(self, compressor: object) -> None:
        """Refuse, at construction, what would not converge.

        Raises:
            ValueError: the compressor is of a kind that this algorithm cannot take.
        """

    def fit_topology(self, topology: Topology, lazy: bool | None) -> Topology:
        """The topology to use.

        Args:
            topology: what was asked for.
            lazy: the user's word on halving the weights of others; None: where the algorithm needs it.

        Raises:
            ValueError: it breaks a condition of the algorithm.
        """
        if self.fixed and topology.varies:
            raise ValueError(
                f"algorithm {self.name} keeps sums over fixed neighbours, and topology {topology.name} has others in "
                "each round; take ring, complete, star, exponential or one matrix, or algorithm dpsgd or deepsqueeze"
            )
        return topology.lazy() if lazy else topology

    def check_noise(self, compressor: Any, layout: Layout, topology: Topology) -> None:  # noqa: B027  # most bear any
        """Refuse, before a fit, a compressor that would not converge on this graph with this model.

        Args:
            compressor: one that ``check_compressor`` accepts.
            layout: of the model's parameters.
            topology: one of ``fit_topology``.

        Raises:
            ValueError: it would diverge.
        """

    @abstractmethod
    def begin(self, start: Tensor, neighbours: Neighbours, compressor: Any, layout: Layout, seed: int) -> Mixing:
        """Make ready; a collective call.

        Args:
            start: float32 ``[numel]``: the parameters before the first step, the same on all ranks.
            neighbours: to talk to.
            compressor: one that ``check_compressor`` accepts.
            layout: what the vector is made of.
            seed: of all randomness, the same on all ranks.

        Raises:
            ValueError: with this codec and topology the algorithm would diverge; on all ranks.
        """


class Coded(Mixing):
    """Messages of a codec to all neighbours.

    Args:
        neighbours: to talk to.
        codec: of the messages.
        layout: what the vectors are made of.
        device: where they are.
        seed: see ``Algorithm.begin``.
    """

    def __init__(self, neighbours: Neighbours, codec: Codec, layout: Layout, device: torch.device, seed: int) -> None:
        super().__init__(neighbours)
        self._plan = codec.plan(layout, device)
        self._message = torch.zeros(self._plan.message_size, dtype=torch.uint8, device=device)
        self._seed = seed

    def tell(self, vector: Tensor, share: float = 1.0) -> list[tuple[float, Tensor]]:
        """Encode and exchange; the vector holds afterwards what the message does not.

        Returns:
            messages with their weights in ``share * sum_j W_ij (C_j - C_i)``: this rank's own first, then its
            neighbours' in the order of the ranks. As float32 too, over all ranks a message's weights sum to 0.
        """
        number, rank = self.round, self.neighbours.rank
        torch.nan_to_num(vector, nan=LARGEST, posinf=LARGEST, neginf=-LARGEST, out=vector)
        self._plan.share(mix(self._seed, number))
        self._plan.encode(vector, self._message, mix(self._seed, number, rank + 1))
        own, weights = self._message[: self._plan.used], self.neighbours.weights(number)
        tell = self.neighbours.tell_any if self._plan.variable else self.neighbours.tell
        theirs = tell(own, number)
        even = {peer: round(share * weight / GRID) * GRID for peer, weight in weights.items()}
        return [(-sum(even.values()), own), *((even[peer], theirs[peer]) for peer in weights)]

    def add(self, message: Tensor, out: Tensor, weight: float) -> None:
        """Add what a message stands for, times a weight."""
        self._plan.decode(message[None], out, weight, accumulate=True)


class Replicas(Coded):
    """Keeps what neighbours know of this rank's model, and how far their weighted mean of it is ``apart`` from that.

    A distance is kept, and not the mean itself: rounding is then relative to it. What is lost of a mean as large as
    the model would move the mean of the models in every round from then on.

    Attributes:
        known: what the first of them is called.
    """

    known: ClassVar[str] = "model"

    def __init__(self, start: Tensor, neighbours: Neighbours, codec: Codec, layout: Layout, seed: int) -> None:
        super().__init__(neighbours, codec, layout, start.device, seed)
        self.vectors |= {self.known: start.clone(), "apart": torch.zeros_like(start)}

    def exchange(self, change: Tensor) -> None:
        """Have all replicas changed by what a message has of ``change``, which holds the rest afterwards."""
        told = self.tell(change)
        self.add(told[0][1], self.vectors[self.known], 1.0)
        for weight, message in told:
            self.add(message, self.vectors["apart"], weight)


def check_contractive(name: str, compressor: object) -> None:
    """Refuse what may leave more than there was."""
    if not isinstance(compressor, Codec) or not (compressor.contractive or compressor.sum_dtype is not None):
        raise ValueError(
            f"algorithm {name} needs a contractive codec, and {compressor} is none: its error may be larger than what "
            "it is given. Take efsign, onebit, topk, range_float, fft, fp16 or none; or algorithm dcd, which takes "
            "unbiased ones"
        )


def check_share(name: str, value: object) -> None:
    """Refuse what is no step size of a mean, nor None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(
            f"{name}={value!r} must be above 0, and at most 1, or null for what suits the codec: how far to move"
        )
