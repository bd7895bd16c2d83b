"""The interface of every exchange.

An exchange leaves the mean over the ranks in ``out``, bit-identical on all of them. In ``vector`` it leaves what this
rank did not send, such that ``W * mean + sum over ranks of vector_after == sum over ranks of vector_before``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_compress.codecs import CODECS, Codec, Dense
from lightning_compress.codecs.codec import ALIGNMENT
from lightning_compress.collectives import Collective, World
from lightning_compress.core.layout import Layout
from lightning_compress.core.registry import build
from lightning_compress.core.source import Source
from lightning_compress.core.state import States, StateSpec
from lightning_compress.core.told import Opening, Told
from lightning_compress.exchanges.message import Out, Section, room_for

META = torch.device("meta")
"""The device of plans without memory. They are made to read their cost and never run."""
Sums = Literal["refined", "same"] | Codec | str | Mapping[str, object]
"""How an exchange encodes sums: "refined" by ``Section.codec_of_sums``, "same" as it encodes a rank's own values, or by
the given codec."""


def read_sums(exchange: str, sums: object) -> Literal["refined", "same"] | Codec:
    """Return the argument ``sums`` of an exchange, with a codec's name or mapping replaced by the codec.

    Args:
        exchange: the class's name, for messages.
        sums: the user's value.

    Raises:
        ValueError: it is none of these, or a codec that drops most of a sum, cannot encode twice, or is ``correlated``.
    """
    if sums == "refined" or sums == "same":
        return sums
    if not isinstance(sums, str | Mapping | Codec) or (isinstance(sums, str) and not CODECS.find(sums)):
        raise ValueError(
            f"{exchange}(sums={sums!r}): use 'refined' (sums of unbiased methods get more bits, so that their noise "
            "averages out), 'same' (fewer bytes, more noise), or a codec such as {'name': 'rotated', 'bits': 4}"
        )
    codec = build(f"{exchange}(sums=...)", sums, CODECS, (Codec,))
    assert isinstance(codec, Codec)
    if codec.sparse or codec.sent_share < 1 or not codec.reencodable:
        raise ValueError(f"{exchange}(sums={codec}): this codec cannot encode whole sums; use rotated or qsgd")
    if codec.correlated:
        raise ValueError(
            f"{exchange}(sums={codec}): one rank encodes each sum, so errors of others cannot cancel its own; set "
            "correlated=True on the compressor instead"
        )
    return codec


def sections_of_sums(sections: Sequence[Section], ranks: int, sums: object) -> list[Section]:
    """Return the sections with the codecs that encode sums of ``ranks`` ranks.

    Args:
        sections: what a rank sends.
        ranks: how many ranks a sum is over.
        sums: as ``read_sums`` returned it.

    Raises:
        ValueError: a biased codec would encode sums of a section without error feedback.
    """
    return [_section_of_sums(section, ranks, sums) for section in sections]


def _section_of_sums(section: Section, ranks: int, sums: object) -> Section:
    if ranks == 1 or sums == "refined" or isinstance(section.method, Dense):
        return replace(section, method=section.codec_of_sums(ranks))
    if not isinstance(sums, Codec):
        return section
    if sums.contractive and not sums.safe_with_adam and not section.fed_back:
        raise ValueError(
            f"sums={sums}: its errors would be lost, because {section.method} runs without error feedback; use rotated "
            "or qsgd for sums, or error_feedback=True"
        )
    return replace(section, method=sums)


class AveragesInPlace(Protocol):
    """Averages gradients in their own memory."""

    def mean(self, gradients: Sequence[Tensor], flag: Tensor) -> None:
        """Replace gradients by their mean over the ranks.

        Args:
            gradients: float32, one-dimensional; together the whole vector, in its order, within the range of the dtype
                they are cast to. On an accelerator any numbers, which this checks.
            flag: float32 scalar, 0.0 or NaN. It receives the sum over the ranks.
        """


class ExchangePlan:
    """An exchange prepared for the vectors of one group. It allocates its message buffers in the first ``mean``.

    Attributes:
        cost: what one ``mean`` costs this rank.
        description: the name of the exchange in the log.
        sum_ranks: the number of ranks of the sums it encodes, for ``Codec.refined``.
        dense_spans: slices of the vector that travel as float32.
        in_place: averages gradients in their own memory, if nothing is encoded.
        marked: the sections' marks travel with the messages.
        tells: let the caller read the heads of what arrived, where that is possible.
        opened: the caller has written the heads of ``opening``.
        told: what the caller of the last ``mean`` has to read, or None.
    """

    cost: Cost
    description: str
    sum_ranks: int = 1
    dense_spans: Sequence[slice] = ()
    in_place: AveragesInPlace | None = None
    marked: bool = False
    tells: bool = False
    opened: bool = False
    told: Told | None = None

    @property
    def opening(self) -> Opening | None:
        """The heads of the messages that ``mean`` sends first, if kernels may write them before; or None."""
        return None

    @property
    def compared(self) -> Cost:
        """The cost by which exchanges are compared: the most expensive rank's, so that it is equal on all ranks."""
        return self.cost

    def is_dense(self, span: slice) -> bool:
        """Return whether this slice of the vector travels as float32."""
        return any(dense.start <= span.start and span.stop <= dense.stop for dense in self.dense_spans)

    def mean(self, vector: Tensor, out: Out, key: int, flag: Tensor, source: Source | None = None) -> None:
        """Average over the ranks.

        Args:
            vector: float32 ``[numel]``, finite. Afterwards it holds what was not sent.
            out: float32 ``[numel]``, or pieces of memory. It receives the mean.
            key: the random key of the step and the group, equal on all ranks.
            flag: float32 scalar, 0.0 or NaN. It receives the sum over the ranks.
            source: what is averaged, if it is not in ``vector`` yet; ``out`` may be the memory of its values.
        """
        if source is not None:
            source.into(vector)
        mean = room_for(out)
        self.average(vector, mean, key, flag)
        if mean is not out:
            out.copy_(mean)

    def average(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        """Do the work of ``mean`` for one vector and one tensor ``out``; a plan that fuses more overrides ``mean``."""
        raise NotImplementedError


class Keeper(ABC):
    """The state that an exchange keeps between steps. Every step writes it, dense steps too.

    Attributes:
        replaces_optimizer: it does a part of the optimizer's work, so that ``out`` is not the mean.
        counts_steps: see ``Correction.counts_steps``.
    """

    replaces_optimizer: ClassVar[bool] = False
    counts_steps: ClassVar[bool] = False

    @abstractmethod
    def state(self, layout: Layout) -> Mapping[str, StateSpec]:
        """Return the states kept for vectors of this layout, by name."""

    def plan_dense(self, exchange: Exchange, sections: Sequence[Section], world: World, states: States) -> ExchangePlan:
        """Return a plan for steps in which everything travels as float32, with the same owners of shards."""
        dense = [replace(each, method=Dense(), unit=each.codec.block) for each in sections]
        plan = exchange.plan(dense, world, states)
        plan.dense_spans = [each.span for each in sections]
        return plan

    def adopted(self, sections: Sequence[Section], world: World, states: States) -> None:  # noqa: B027
        """Adjust states that were copied from groups with another layout. Called on all ranks."""

    def take_over(self, optimizer: Optimizer, names: Sequence[str]) -> str | None:
        """Check that the optimizer does not do the same work again; see ``Correction.take_over``."""
        return None


class Pattern(ABC):
    """What ``exchange=`` accepts: an exchange, or a planner that chooses one per group. A frozen dataclass.

    Attributes:
        moves_residual: a part of what one rank sent may end up in another rank's residual.
        plans_collectively: it looks for nodes and sums within them. Planning is then a collective call, and impossible
            on ``META``.
        keeper: describes the state kept between steps; None if there is none.
    """

    moves_residual: ClassVar[bool] = False
    plans_collectively: ClassVar[bool] = False

    @property
    def keeper(self) -> Keeper | None:
        """See the class."""
        return None

    def check(self, codec: Codec) -> None:  # noqa: B027  # most accept every codec
        """Raise ValueError if the codec's messages cannot travel in this pattern; the message names one that can."""

    @abstractmethod
    def choose(self, sections: Sequence[Section], world: World, deciding: Collective | None = None) -> Exchange:
        """Return the exchange for vectors that consist of these sections. Collective for a planner.

        Args:
            sections: what the vectors consist of.
            world: the ranks that exchange them.
            deciding: the ranks that must choose alike; None: those of ``world``.
        """

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """Return a plan for vectors that consist of these sections, whose codecs passed ``check``.

        Args:
            sections: what the vectors consist of.
            world: the ranks.
            states: the states that ``keeper`` declared.
        """
        return self.choose(sections, world).plan(sections, world, states)


class Exchange(Pattern):
    """A pattern in which messages travel; it implements ``plan``."""

    @abstractmethod
    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Pattern.plan``."""

    def choose(self, sections: Sequence[Section], world: World, deciding: Collective | None = None) -> Exchange:
        """Return itself."""
        return self


class Planner(Pattern):
    """Chooses the exchange of each group; it implements ``choose``."""

    @abstractmethod
    def measured(self) -> dict[str, Any]:
        """Return the measurements as primitives, from which a resumed run continues."""

    @abstractmethod
    def with_measurements(self, measured: Mapping[str, Any]) -> Planner:
        """Return the same planner with these measurements.

        Raises:
            ValueError: they are not what ``measured`` returned.
        """

    @abstractmethod
    def limited(self, fixed: bool, without_nodes: bool) -> Planner:
        """Return the same planner with less freedom.

        Args:
            fixed: measure nothing, so that equal runs choose alike.
            without_nodes: never sum within a node.
        """


def longest(used: int, most: int, collective: Collective, device: torch.device) -> int:
    """Return the most bytes that any rank uses, a multiple of the alignment. Collective.

    Args:
        used: bytes of this rank's message.
        most: the largest valid length, in bytes.
        collective: the ranks.
        device: where the length is reduced.

    Raises:
        ValueError: a rank reports an impossible length; raised on every rank.
    """
    length = torch.tensor([used], dtype=torch.int64, device=device)
    collective.all_reduce(length, "max")
    width = int(length)
    if width > most or width % ALIGNMENT:
        raise impossible(width, most)
    return width


def impossible(length: int, most: int) -> ValueError:
    """Return the error for a message whose length a rank cannot mean; ``most``: the largest valid one, in bytes."""
    return ValueError(f"a rank reports a message of {length} bytes; the maximum is {most}, in multiples of {ALIGNMENT}")


def gather(vector: Tensor, spans: Sequence[slice], row: Tensor) -> None:
    """Copy slices of ``vector`` side by side to the beginning of ``row``."""
    start = 0
    for span in spans:
        row[start : start + span.stop - span.start] = vector[span]
        start += span.stop - span.start


def scatter(row: Tensor, spans: Sequence[slice], out: Tensor) -> None:
    """Copy consecutive values of ``row`` to slices of ``out``; undoes ``gather``."""
    start = 0
    for span in spans:
        out[span] = row[start : start + span.stop - span.start]
        start += span.stop - span.start


@dataclass(frozen=True)
class Cost:
    """What one exchange of a vector costs a rank. The default is no cost; ``a + b`` is one exchange after the other.

    Attributes:
        bytes_sent: bytes that it hands to the transport, by the method's formula; the expected number if lengths vary.
        rounds: messages that wait for each other, so how often a step pays the link's latency.
        encodes: encoded elements, in multiples of the vector.
        decodes: decoded elements, in multiples of the vector.
        sum_encodes: the part of ``encodes`` that encodes sums.
        sum_decodes: the part of ``decodes`` that decodes sums.
        copies: float32 elements copied or added besides, in multiples of the vector.
        calls: calls of the codec, to encode or to decode.
        inner_bytes: the part of ``bytes_sent`` that stays within a node.
        inner_rounds: the part of ``rounds`` within a node.
        parts: parts of the vector, of which some travel while others are encoded or decoded; 0 or 1: none do.
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
    parts: int = 0

    def __add__(self, other: Cost) -> Cost:
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(Cost)}
        return Cost(**sums | {"parts": max(self.parts, other.parts)})

    def scaled(self, share: float) -> Cost:
        """Return the cost for a share of the vector: multiples of the vector are scaled; bytes and counts are not."""
        times = ("encodes", "decodes", "sum_encodes", "sum_decodes", "copies")
        return replace(self, **{name: share * getattr(self, name) for name in times})
