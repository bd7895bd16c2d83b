"""The contract of reducers: methods that need collectives between their stages.

A codec turns a vector into a message. A reducer turns a vector into the mean over the ranks, like an exchange, and
issues the collectives itself. It keeps the law of exchanges: ``out`` is bit-identical on all ranks, and ``vector``
holds afterwards what was not sent. With W ranks,
``W * mean + sum over ranks of vector_after == sum over ranks of vector_before``, unless ``conserves`` is False.

Dense parameters and the flag are *carried*: the reducer sums these floats over the ranks in its own first float32
all-reduce. So small parameters need no collective of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from lightning_compress.codecs.codec import Method
from lightning_compress.collectives import World
from lightning_compress.core.layout import Layout
from lightning_compress.core.state import States, StateSpec


class ReducerPlan(ABC):
    """A reducer prepared for one layout. It owns its buffers.

    Attributes:
        bytes_sent: bytes that ``mean`` sends from this rank, by formula, including the carried floats.
        rounds: number of messages that wait for one another; see ``Cost``.
    """

    bytes_sent: int
    rounds: int

    @abstractmethod
    def mean(self, vector: Tensor, out: Tensor, carried: Tensor, key: int) -> None:
        """Write the mean over the ranks to ``out``. Collective: every rank must call it.

        State is read from ``base()`` and written to ``pending``; the caller marks it as touched. In a second backward
        pass of one step, ``base()`` is ``pending`` itself.

        Args:
            vector: float32 ``[numel]``, finite. Afterwards it holds what was not sent.
            out: float32 ``[numel]``, never ``vector`` itself.
            carried: float32 ``[carried]``, may contain NaN. Replaced by its sum over the ranks.
            key: key of the step and the group, equal on all ranks.
        """


class Reducer(Method, ABC):
    """Base of reducers. A subclass is a frozen dataclass of its settings.

    Attributes:
        follows_optimizer: whether it keeps what the optimizer keeps, too, of whole parameters.
    """

    follows_optimizer: ClassVar[bool] = False

    def state(self, layout: Layout) -> Mapping[str, StateSpec]:
        """Declare the state that is kept from step to step, by name."""
        return {}

    @abstractmethod
    def plan(self, layout: Layout, carried: int, world: World, states: States) -> ReducerPlan:
        """Return a plan for vectors of this layout.

        Args:
            layout: layout of the vectors.
            carried: number of float32 values that are summed along the way.
            world: the ranks. Encoding and decoding are timed, by ``with world.meter.encode`` and ``.decode``.
            states: the states that ``state`` declared, by the same names.

        Raises:
            ValueError: there are too many ranks for the method.
        """
