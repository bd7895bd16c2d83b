"""The specification that every exchange keeps.

An exchange leaves the mean over the ranks in ``out``, bit-identical on all of them, and in ``vector`` what was not
sent, such that ``W * mean + sum over ranks of vector_after == sum over ranks of vector_before``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_compress.codecs import CODECS, Codec, Dense
from lightning_compress.codecs.codec import ALIGNMENT
from lightning_compress.collectives import Collective, World
from lightning_compress.collectives.counting import all_reduce_bytes, all_reduce_rounds
from lightning_compress.core.layout import Layout
from lightning_compress.core.registry import build
from lightning_compress.core.state import States, StateSpec
from lightning_compress.core.workspace import scratch
from lightning_compress.exchanges.message import LENGTH, MessagePlan, Out, Section
from lightning_compress.kernels import Summands

P = TypeVar("P", bound="ExchangePlan")
Mean = Callable[..., None]
META = torch.device("meta")
"""Where a plan has no memory: for its cost only, never run."""
Sums = Literal["refined", "same"] | Codec | str | Mapping[str, object]
"""How an exchange encodes sums: as the section says (``Section.codec_of_sums``), as it encodes what a rank sends, or by
this codec."""


def read_sums(exchange: str, sums: object) -> Literal["refined", "same"] | Codec:
    """What the user gave; a codec by name, by mapping, or as it is.

    Raises:
        ValueError: it is nothing of the kind, or a codec that drops most of a sum, or is ``correlated``.
    """
    if sums == "refined" or sums == "same":
        return sums
    if not isinstance(sums, str | Mapping | Codec) or (isinstance(sums, str) and not CODECS.find(sums)):
        raise ValueError(
            f"{exchange}(sums={sums!r}): it must be 'refined' (sums of unbiased methods take more bits, so that their "
            "noise averages out), 'same' (fewer bytes, and more noise), or a codec, such as {'name': 'rotated', "
            "'bits': 4}"
        )
    codec = build(f"{exchange}(sums=...)", sums, CODECS, (Codec,))
    assert isinstance(codec, Codec)
    if codec.sparse or codec.sent_share < 1 or not codec.repeatable:
        raise ValueError(f"{exchange}(sums={codec}): sums are encoded once more, in full; use rotated or qsgd")
    if codec.correlated:
        raise ValueError(
            f"{exchange}(sums={codec}): a sum is encoded by one rank, with whose errors no others cancel; leave "
            "correlated=True out there, and give it to the compressor"
        )
    return codec


def of_sums(sections: Sequence[Section], ranks: int, sums: object) -> list[Section]:
    """The sections by the codecs that encode sums of so many ranks; ``sums`` is what ``read_sums`` made.

    Raises:
        ValueError: a biased codec is to encode sums of a section that keeps nothing of what is not sent.
    """
    return [_of_sum(each, ranks, sums) for each in sections]


def _of_sum(section: Section, ranks: int, sums: object) -> Section:
    if ranks == 1 or sums == "refined" or isinstance(section.method, Dense):
        return replace(section, method=section.codec_of_sums(ranks))
    if not isinstance(sums, Codec):
        return section
    if sums.contractive and not sums.safe_with_adam and not section.fed_back:
        raise ValueError(
            f"sums={sums}: what it leaves of a sum would be lost, as {section.method} goes without error feedback; use "
            "rotated or qsgd for sums, or error_feedback=True"
        )
    return replace(section, method=sums)


@contextmanager
def as_one(out: Out, like: Tensor) -> Iterator[Tensor]:
    """One vector for a mean that goes to several tensors, to which it is copied in the end; or ``out`` itself."""
    if isinstance(out, Tensor):
        yield out
        return
    one = scratch("one mean", len(like), torch.float32, like.device)
    yield one
    torch._foreach_copy_(list(out), list(one.split([each.numel() for each in out])))


def of_vectors(mean: Callable[[P, Tensor, Tensor, int, Tensor], None]) -> Mean:
    """An ``ExchangePlan.mean`` by one that takes one vector, not summands, and leaves one, not pieces."""

    @wraps(mean)
    def made(self: P, vector: Tensor, out: Out, key: int, flag: Tensor, summands: Summands = None) -> None:
        if summands is not None:
            torch.add(*summands, out=vector)
        with as_one(out, vector) as one:
            mean(self, vector, one, key, flag)

    return made


class ExchangePlan(ABC):
    """An exchange made ready for the vectors of one group; holds the message buffers, from the first ``mean`` on.

    Attributes:
        cost: what ``mean`` takes.
        description: which exchange this is, for the log.
        sum_ranks: sums are encoded by ``Codec.refined`` of so many.
        dense_spans: slices of the vector that are sent as they are.
        in_pieces: ``mean`` needs no vector for means that go to several tensors.
        in_place: nothing is encoded, and ``mean`` may be given the gradients, a list, as ``vector`` and ``out``.
    """

    cost: Cost
    description: str
    sum_ranks: int = 1
    dense_spans: Sequence[slice] = ()
    in_place: bool = False
    in_pieces: bool = False

    @property
    def compared(self) -> Cost:
        """The cost by which ways are compared, the same on all ranks: that of the rank of which it takes most."""
        return self.cost

    def is_dense(self, span: slice) -> bool:
        """Whether this slice of the vector is sent as it is."""
        return any(dense.start <= span.start and span.stop <= dense.stop for dense in self.dense_spans)

    @abstractmethod
    def mean(self, vector: Tensor, out: Out, key: int, flag: Tensor, summands: Summands = None) -> None:
        """Average over the ranks.

        Args:
            vector: float32 ``[numel]``, finite; holds afterwards what was not sent. Where ``in_place``, it may be the
                list that ``out`` is, of float32 within the limits of what these are cast to.
            out: float32 ``[numel]``, or a tensor for each segment that is not empty, in order; gets the mean.
            key: the step's and the group's key, equal on all ranks.
            flag: float32 scalar, 0.0 or NaN; gets the sum over the ranks.
            summands: gradient and residual, whose sum the vector becomes first; ``out`` may be the gradient.
        """


class Keeper(ABC):
    """What an exchange keeps from step to step; written in every step, dense ones included.

    Attributes:
        optimizes: it does a part of the optimizer's work, and ``out`` is another thing than the mean.
        counts_steps: see ``Correction.counts_steps``.
    """

    optimizes: ClassVar[bool] = False
    counts_steps: ClassVar[bool] = False

    @abstractmethod
    def state(self, layout: Layout) -> Mapping[str, StateSpec]:
        """What is kept of vectors of this layout, by a name of it."""

    def plan_dense(self, exchange: Exchange, sections: Sequence[Section], world: World, states: States) -> ExchangePlan:
        """Make ready for steps in which everything is sent as it is, between the same owners."""
        dense = [replace(each, method=Dense(), unit=each.codec.block) for each in sections]
        plan = exchange.plan(dense, world, states)
        plan.dense_spans = [each.span for each in sections]
        return plan

    def adopted(self, sections: Sequence[Section], world: World, states: States) -> None:  # noqa: B027
        """State was taken over from groups that were laid out otherwise; called on all ranks."""

    def take_over(self, optimizer: Optimizer, names: Sequence[str]) -> str | None:
        """See that the optimizer does not do the same work again; see ``Correction.take_over``."""
        return None


class Pattern(ABC):  # noqa: B024  # two kinds of it have methods to fill in
    """What ``exchange=`` takes: an exchange, or a planner that chooses one; a frozen dataclass of its settings.

    Attributes:
        hands_over: what a rank sent may end in the residual of another one.
        talks: it asks for nodes, whose gradients it adds up: planning is a collective call, which is impossible on
            ``META``.
        keeper: of what is kept from step to step; None: nothing is.
    """

    hands_over: ClassVar[bool] = False
    talks: ClassVar[bool] = False

    @property
    def keeper(self) -> Keeper | None:
        """See above."""
        return None

    def check(self, codec: Codec) -> None:  # noqa: B027  # most take any method
        """Refuse a method whose messages cannot travel in this pattern.

        Raises:
            ValueError: they cannot; the message says in which they can.
        """


class Exchange(Pattern):
    """A pattern in which messages travel."""

    @abstractmethod
    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """Make ready for vectors that consist of these sections, whose codecs passed ``check``.

        Args:
            sections: what the vectors consist of.
            world: the ranks.
            states: what the ``keeper`` declared.
        """


class Planner(Pattern):
    """Chooses the exchange of each group."""

    @abstractmethod
    def choose(self, sections: Sequence[Section], world: World, deciding: Collective | None = None) -> Exchange:
        """The exchange for vectors that consist of these sections; a collective call.

        Args:
            sections: what the vectors consist of.
            world: the ranks that exchange them.
            deciding: all ranks that have to decide alike; None: those.
        """

    @abstractmethod
    def measured(self) -> dict[str, Any]:
        """What was measured, as primitives, with which a resumed run goes on."""

    @abstractmethod
    def given(self, measured: Mapping[str, Any]) -> Planner:
        """The same that has measured this already.

        Raises:
            ValueError: it is not what ``measured`` gave.
        """

    @abstractmethod
    def limited(self, fixed: bool, flat: bool) -> Planner:
        """The same that measures nothing, so that equal runs choose alike; or that never adds up within a node."""


def exchange_of(
    pattern: Pattern, sections: Sequence[Section], world: World, deciding: Collective | None = None
) -> Exchange:
    """The pattern itself, or what it chooses; see ``Planner.choose``."""
    if isinstance(pattern, Planner):
        return pattern.choose(sections, world, deciding)
    assert isinstance(pattern, Exchange)
    return pattern


def plan_of(pattern: Pattern, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
    """The plan of the pattern, or of what it chooses; see ``Exchange.plan``."""
    return exchange_of(pattern, sections, world).plan(sections, world, states)


def agree_length(plan: MessagePlan, used: int, collective: Collective, device: torch.device) -> int:
    """Bytes of a message to send: the most that any rank used; lengths travel first where they vary.

    Raises:
        ValueError: a rank says what no message takes; on every rank.
    """
    return longest(used, plan.size, collective, device) if plan.variable else plan.size


def longest(used: int, most: int, collective: Collective, device: torch.device) -> int:
    """The most bytes that any rank uses; a multiple of the alignment, at most ``most``.

    Raises:
        ValueError: a rank says what no message takes; on every rank.
    """
    found = torch.tensor([used], dtype=torch.int64, device=device)
    collective.all_reduce(found, "max")
    width = int(found)
    if width > most or width % ALIGNMENT:
        raise ValueError(f"a rank says that its message takes {width} bytes; {most} is the most there can be")
    return width


def length_bytes(plan: MessagePlan, ranks: int) -> int:
    """Bytes that one of ``ranks`` sends in ``agree_length``."""
    return all_reduce_bytes(LENGTH, ranks) if plan.variable else 0


def length_rounds(plan: MessagePlan, ranks: int) -> int:
    """Messages that wait for one another in ``agree_length``."""
    return all_reduce_rounds(ranks) if plan.variable else 0


def rows(buffer: Tensor, count: int, width: int) -> Tensor:
    """The first bytes of a contiguous buffer as ``[count, width]``."""
    return buffer.view(-1)[: count * width].view(count, width)


def gather(vector: Tensor, spans: Sequence[slice], row: Tensor) -> None:
    """Copy slices of ``vector`` side by side to the beginning of ``row``."""
    start = 0
    for span in spans:
        row[start : start + span.stop - span.start] = vector[span]
        start += span.stop - span.start


def scatter(row: Tensor, spans: Sequence[slice], out: Tensor) -> None:
    """Copy what stands side by side in ``row`` to slices of ``out``."""
    start = 0
    for span in spans:
        out[span] = row[start : start + span.stop - span.start]
        start += span.stop - span.start


@dataclass(frozen=True)
class Cost:
    """What one exchange of a vector takes of a rank; nothing by default, and ``+`` is one exchange after the other.

    Attributes:
        bytes_sent: what it hands to the transport, by the method's formula; what that is expected to be where messages
            vary in length.
        rounds: messages that wait for one another: how often a step pays the latency of the link.
        encodes: how many times over a rank encodes the vector.
        decodes: how many times over it decodes it.
        sum_encodes: of ``encodes``, those of sums.
        sum_decodes: of ``decodes``, those of sums.
        copies: how many times over it copies float32 or adds it up beside that.
        calls: how often it calls the codec to encode or to decode.
        inner_bytes: of ``bytes_sent``, those that stay within a node.
        inner_rounds: of ``rounds``, those within a node.
    """

    bytes_sent: int = 0
    rounds: int = 0
    encodes: float = 0.0
    decodes: float = 0.0
    sum_encodes: float = 0.0
    sum_decodes: float = 0.0
    copies: float = 0.0
    calls: int = 0
    inner_bytes: int = 0
    inner_rounds: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Cost)))

    def scaled(self, share: float) -> Cost:
        """The same of a part of the vector, by its share: what is times over the vector; bytes and counts stay."""
        times = ("encodes", "decodes", "sum_encodes", "sum_decodes", "copies")
        return replace(self, **{name: share * getattr(self, name) for name in times})
