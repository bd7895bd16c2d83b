"""The specification of methods that must talk in the middle of their work.

A codec is given a vector and makes a message; a reducer is given a vector and leaves the mean over the ranks, like an
exchange, and issues the collectives itself. It keeps the exchange's law: ``out`` is bit-identical on all ranks, and
``vector`` holds afterwards what did not get through, such that
``W * mean + sum over ranks of vector_after == sum over ranks of vector_before`` (unless it declares otherwise).

What stays dense, and the flag, are carried: floats that the reducer adds up over the ranks along with its own first
float32 all-reduce, so that small parameters cost no collective of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from lightning_compress.codecs.codec import Method
from lightning_compress.collectives import World
from lightning_compress.core.layout import Layout
from lightning_compress.core.state import States, StateSpec


class ReducerPlan(ABC):
    """A reducer made ready for one layout; holds its buffers.

    Attributes:
        bytes_sent: what ``mean`` hands to the transport on this rank, what is carried included, by the formula.
        rounds: messages that wait for one another; see ``ExchangePlan``.
    """

    bytes_sent: int
    rounds: int

    @abstractmethod
    def mean(self, vector: Tensor, out: Tensor, carried: Tensor, key: int) -> None:
        """Average over the ranks.

        State is read from ``base()`` (which may be ``pending`` itself, in a second backward of one step) and written to
        ``pending``; the caller marks it as touched.

        Args:
            vector: float32 ``[numel]``, finite; holds afterwards what was not sent.
            out: float32 ``[numel]``; gets the mean. Never ``vector`` itself.
            carried: float32 ``[carried]``, possibly with NaN; gets its sum over the ranks.
            key: the step's and the group's key, equal on all ranks.
        """


class Reducer(Method, ABC):
    """A whole method, which issues collectives itself; it keeps the law above if it ``conserves``."""

    def state(self, layout: Layout) -> Mapping[str, StateSpec]:
        """What is kept from step to step, by a name of it."""
        return {}

    @abstractmethod
    def plan(self, layout: Layout, carried: int, world: World, states: States) -> ReducerPlan:
        """Make ready for vectors of this layout.

        Args:
            layout: what the vectors are made of.
            carried: float32 numbers to be added up along the way.
            world: the ranks; encoding and decoding are timed: ``with world.meter.encode``.
            states: what ``state`` declared, by the same names.

        Raises:
            ValueError: the world is too large for the method.
        """
