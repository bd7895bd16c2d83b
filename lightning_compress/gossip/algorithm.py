"""The contract of gossip algorithms, and the parts that they are made of.

An algorithm is a frozen dataclass of its settings. ``begin`` returns a ``Mixing`` for one vector of parameters on one
rank. ``Mixing.mix`` receives the parameters after this rank's local steps, and changes them in place to the parameters
from which the next local step starts.

* Mixing does not change the mean over the ranks. With DCD and ECD this holds on average.
* All ranks mix in the same rounds, and communicate through ``Neighbours`` only.
* All state between rounds is in ``vectors`` and ``numbers``: a run that saves and loads them continues bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_compress.codecs import Codec
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix
from lightning_compress.core.workspace import chunk_size, pieces
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.topology import Topology

GRID = 2.0**-24
"""Weights of messages are multiples of this, so that float32 holds them and their sums exactly."""
LARGEST = 1e30
"""Replaces numbers that are not finite in messages, so that a model that diverges does not stop a round."""


class Mixing(ABC):
    """An algorithm at work on one rank.

    Attributes:
        vectors: this rank's state between rounds, float32 ``[numel]`` each, by name.
        numbers: this rank's numbers between rounds, by name; ``round`` counts the rounds so far.
        steps: how far to move towards the neighbours, by the name of the setting; empty if there is no such setting.
    """

    def __init__(self, neighbours: Neighbours) -> None:
        self.neighbours = neighbours
        self.vectors: dict[str, Tensor] = {}
        self.numbers: dict[str, float] = {"round": 0.0}
        self.steps: dict[str, float] = {}

    @property
    def round(self) -> int:
        """Number of rounds so far."""
        return int(self.numbers["round"])

    def mix(self, vector: Tensor, rate: float) -> None:
        """Run one round, in place. Collective: every rank must call it.

        Args:
            vector: float32 ``[numel]``, contiguous: the parameters after this rank's local steps.
            rate: the learning rate, the same on all ranks; for settings that are multiples of it.
        """
        self.run(vector, rate)
        self.numbers["round"] += 1.0

    @abstractmethod
    def run(self, vector: Tensor, rate: float) -> None:
        """Run one round; ``mix`` counts it."""

    def figures(self) -> dict[str, float]:
        """Return figures to log, by name."""
        return dict(self.steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state. It shares its memory with this object."""
        return {"vectors": dict(self.vectors), "numbers": dict(self.numbers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state.

        Raises:
            ValueError: the state belongs to another algorithm, or to other parameters.
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
        self.numbers.update((name, float(value)) for name, value in numbers.items())

    # for algorithms whose messages are used in a later round; others hold nothing besides the model

    def land(self) -> None:  # noqa: B027
        """Wait for the messages that travel, and keep them until their round. Collective: every rank must call it."""

    def abandon(self) -> None:  # noqa: B027
        """Do as ``land`` while the fit is aborted; what cannot arrive is dropped."""

    def surplus(self) -> tuple[Tensor, float] | None:
        """Return what this rank holds besides its model. Collective: every rank must call it.

        Returns:
            a new float32 vector ``[numel]``, and this rank's weight: the mean model is the sum over the ranks of model
            plus vector, divided by the sum of the weights. None: nothing, and all weights are 1.
        """
        return None

    def restart(self, model: Tensor) -> None:  # noqa: B027
        """Go on from one model that all ranks have now, their mean: float32 ``[numel]``."""


class Algorithm(ABC):
    """A way to train without a global mean; a frozen dataclass of its settings.

    Attributes:
        name: what logs and messages call it; the class's name in lower case by default.
        codec: default codec of its messages; None if it sends whole float32 vectors by default.
        fixed: neighbours and weights must be the same in every round.
        directed: takes directed graphs too; others need symmetric mixing matrices.
        memory: bytes for each parameter that it keeps between rounds.
    """

    name: ClassVar[str]
    codec: ClassVar[Codec | None] = None
    fixed: ClassVar[bool] = False
    directed: ClassVar[bool] = False
    memory: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            cls.name = cls.__name__.lower()

    @property
    def title(self) -> str:
        """What logs call it; a state is loaded only by an algorithm of the same title."""
        return self.name

    @abstractmethod
    def check_compressor(self, compressor: object) -> None:
        """Raise ValueError, at construction, if the algorithm would not converge with this kind of compressor."""

    def fit_topology(self, topology: Topology, lazy: bool | None) -> Topology:
        """Return the topology to use.

        Args:
            topology: the user's.
            lazy: whether the user wants to halve the weights of the neighbours; None: only if the algorithm needs it.

        Raises:
            ValueError: the topology breaks a condition of the algorithm.
        """
        if not self.directed:
            topology.check_symmetric(f"algorithm {self.name}")
        if self.fixed and topology.varies:
            raise ValueError(
                f"algorithm {self.name} keeps sums over fixed neighbours, and topology {topology.name} has others in "
                "each round. Use ring, complete, star, exponential or one matrix, or algorithm dpsgd or deepsqueeze"
            )
        return topology.lazy() if lazy else topology

    def check_noise(self, compressor: Any, layout: Layout, topology: Topology) -> None:  # noqa: B027  # most bear any
        """Raise ValueError, before a fit, if the compressor's noise makes this model diverge on this graph.

        Args:
            compressor: accepted by ``check_compressor``.
            layout: of the model's parameters.
            topology: returned by ``fit_topology``.
        """

    @abstractmethod
    def begin(self, start: Tensor, neighbours: Neighbours, compressor: Any, layout: Layout, seed: int) -> Mixing:
        """Return the algorithm at work on this rank. Collective: every rank must call it.

        Args:
            start: float32 ``[numel]``: the parameters before the first step, the same on all ranks.
            neighbours: the transport.
            compressor: accepted by ``check_compressor``.
            layout: of the parameters in the vector.
            seed: of all randomness, the same on all ranks.

        Raises:
            ValueError: the algorithm would diverge with this codec and topology; on all ranks.
        """


class Averaging(Mixing):
    """Weighted means with the neighbours: ``vector += sum_j W_ij (vector_j - vector)``."""

    def run(self, vector: Tensor, rate: float) -> None:
        """See ``Mixing``."""
        self.average(vector, rate)

    @abstractmethod
    def average(self, vector: Tensor, rate: float, moved: Tensor | None = None) -> None:
        """Run one round, in place.

        Args:
            vector: see ``Mixing.mix``.
            rate: see ``Mixing.mix``.
            moved: float32 ``[numel]``: what is added to the vector is also added here, without the vector's rounding.
        """


class ExactAveraging(Averaging):
    """Sends whole float32 vectors."""

    def average(self, vector: Tensor, rate: float, moved: Tensor | None = None) -> None:
        """See ``Averaging``."""
        weights = self.neighbours.weights(self.round)
        add_differences(vector, self.neighbours.exchange(vector, self.round), weights, moved)


def add_differences(
    vector: Tensor, received: dict[int, Tensor], weights: dict[int, float], moved: Tensor | None = None
) -> None:
    """Move a vector towards its neighbours' vectors; ``moved``: see ``Averaging.average``.

    It adds differences, not vectors, so that both ends of an edge move by opposite amounts, bit for bit.
    """
    for piece in pieces(len(vector), chunk_size(vector.device)):
        own = vector[piece]
        total = torch.zeros_like(own)
        for peer, weight in weights.items():
            total.add_(received[peer][piece] - own, alpha=weight)
        own.add_(total)
        if moved is not None:
            moved[piece].add_(total)


class Coded(Mixing):
    """Sends messages of a codec to all neighbours.

    Args:
        neighbours: the transport.
        codec: of the messages.
        layout: of the parameters in the vectors.
        device: of the vectors.
        seed: see ``Algorithm.begin``.
    """

    def __init__(self, neighbours: Neighbours, codec: Codec, layout: Layout, device: torch.device, seed: int) -> None:
        super().__init__(neighbours)
        self._plan = codec.plan(layout, device)
        self._message = torch.zeros(self._plan.message_size, dtype=torch.uint8, device=device)
        self._seed = seed

    def send(self, vector: Tensor, share: float = 1.0) -> list[tuple[float, Tensor]]:
        """Encode a vector and exchange messages; what the message lost stays in the vector.

        Returns:
            pairs of weight and message of ``share * sum_j W_ij (C_j - C_i)``: this rank's own first, then the
            neighbours' in the order of their ranks. Over all ranks, the weights of a message sum to exactly 0.
        """
        number, rank = self.round, self.neighbours.rank
        torch.nan_to_num(vector, nan=LARGEST, posinf=LARGEST, neginf=-LARGEST, out=vector)
        self._plan.share(mix(self._seed, number))
        self._plan.encode(vector, self._message, mix(self._seed, number, rank + 1))
        own, weights = self._message[: self._plan.used], self.neighbours.weights(number)
        exchange = self.neighbours.exchange_any if self._plan.variable else self.neighbours.exchange
        received = exchange(own, number)
        rounded = {peer: round(share * weight / GRID) * GRID for peer, weight in weights.items()}
        return [(-sum(rounded.values()), own), *((rounded[peer], received[peer]) for peer in weights)]

    def add(self, message: Tensor, out: Tensor, weight: float) -> None:
        """Add ``weight`` times the decoded message to ``out``."""
        self._plan.decode(message[None], out, weight, accumulate=True)


class Replicas(Coded):
    """Keeps this rank's model as its neighbours know it, and the distance of their weighted mean from it (``apart``).

    The distance is kept instead of the mean, because rounding is relative to the size of what is kept: rounding a mean
    of the model's size would shift the mean over the ranks in every round.

    Attributes:
        known: name of the first vector.
    """

    known: ClassVar[str] = "model"

    def __init__(self, start: Tensor, neighbours: Neighbours, codec: Codec, layout: Layout, seed: int) -> None:
        super().__init__(neighbours, codec, layout, start.device, seed)
        self.vectors |= {self.known: start.clone(), "apart": torch.zeros_like(start)}

    def update(self, change: Tensor) -> None:
        """Add the encoded ``change`` to all replicas of this rank's model; what the message lost stays in it."""
        messages = self.send(change)
        self.add(messages[0][1], self.vectors[self.known], 1.0)
        for weight, message in messages:
            self.add(message, self.vectors["apart"], weight)


def check_contractive(name: str, compressor: object) -> None:
    """Raise ValueError if a codec's error may be larger than the vector."""
    if not isinstance(compressor, Codec) or not (compressor.contractive or compressor.sum_dtype is not None):
        raise ValueError(
            f"algorithm {name} needs a contractive codec, and the error of {compressor} may be larger than the vector. "
            "Use efsign, onebit, topk, range_float, fft, fp16 or none; or algorithm dcd, which takes unbiased codecs"
        )


def check_share(name: str, value: object) -> None:
    """Raise ValueError if ``value`` is neither None nor in (0, 1]."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name}={value!r} must be in (0, 1], or null for the default of the compressor")
