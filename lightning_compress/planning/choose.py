"""Choose the exchange that costs least, by a model of the link and of the ranks' devices."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from lightning_compress.codecs import Codec, Dense
from lightning_compress.collectives import Collective, World
from lightning_compress.collectives.counting import all_reduce_rounds
from lightning_compress.core.registry import register
from lightning_compress.core.state import States
from lightning_compress.exchanges import AllGather, AllReduce, Exchange, ExchangePlan, Planner, SplitGather, TwoShot
from lightning_compress.exchanges.composite import CompositePlan
from lightning_compress.exchanges.exchange import META
from lightning_compress.exchanges.message import Section, codecs_of
from lightning_compress.exchanges.nodes import Between, nodes_of
from lightning_compress.planning import cost
from lightning_compress.planning.cost import CODES, COPIES, LISTS, Link, Speeds
from lightning_compress.planning.link import Measured, kind_of
from lightning_compress.settings.automatic import TRUST

log = logging.getLogger(__name__)

TWO_SHOT_RANKS = 4
"""Below this, two-shot sends as much as all-gather and encodes twice."""

GAIN = 0.9
"""Another exchange must take less than this share of the time of the one that sends least: measurements vary."""

SPARSE: tuple[Exchange, ...] = (AllGather(), SplitGather())
"""Ways of sparse messages that add up to the same."""

THROUGH = 2.0
"""Additional copies of encoded data: gradient plus residual into a vector, and the mean back."""

INSIDE = 10
"""How many times as fast links within a node are, at least, where that is not measured."""

Fallback = Literal["dense", "never"]


@dataclass(frozen=True)
class Auto(Planner):
    """All-reduce for messages that may be summed; else what the cost model says: all-gather, from 4 ranks on two-shot.

    For sparse messages it is all-gather or split-gather from 4 ranks on. Where there are several nodes, the same
    between nodes is looked at as well (``hierarchical``). The way that sends least is taken, unless another one is
    predicted to take a tenth less time (``costs``). Sections of several methods share one message, or go each the way
    that suits it where that saves time. The choice is logged once a group on rank 0.

    Who names a compressor has it. With ``fallback="dense"`` alone a group travels as float32 where nothing pays (a fast
    link, a slow codec), or where all of it would send more bytes than a float32 all-reduce (many ranks).

    The link and the codecs are measured when the first group is made, which takes below a second; the figures of rank 0
    decide on all ranks, and go with the checkpoint, so that a resumed run chooses as before; with other ranks or on
    other hosts they are measured again. Two runs of the same script may measure, and choose, otherwise, and then differ
    in rounding: set ``link`` where they must not.

    Args:
        fallback: "never": compress, whatever it costs; "dense": send float32 where compressing does not pay, which
            the noise of a measurement may decide.
        link: what it is, as a mapping of ``latency_s`` and ``bytes_per_s``; then nothing is measured, and codecs are
            taken for good ones on a CPU. None: measured.
        node_size: ranks of a node, which are neighbours in the order of ranks; 1: nodes do not matter; None: those with
            the same host name, or with ``link``, or in a run that is ``deterministic``, 1: name it there.

    Raises:
        ValueError: a setting is none of these.
    """

    fallback: Fallback = "never"
    link: Link | Mapping[str, float] | None = None
    node_size: int | None = None

    def __post_init__(self) -> None:
        if self.fallback not in get_args(Fallback):
            raise ValueError(
                f"Auto(fallback={self.fallback!r}): it must be 'dense' (send float32 where compression does not pay) "
                "or 'never'"
            )
        object.__setattr__(self, "link", None if self.link is None else cost.link_of(self.link))
        size = self.node_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"Auto(node_size={size!r}): it must be a number of ranks, or null")

    @cached_property
    def _measured(self) -> Measured:
        return Measured()

    @cached_property
    def _told(self) -> set[str]:
        """What was said once."""
        return set()

    def limited(self, fixed: bool, without_nodes: bool) -> Auto:
        """See ``Planner.limited``."""
        if not fixed and not without_nodes:
            return self
        link = self.link or cost.UNKNOWN if fixed else self.link
        return replace(self, link=link, node_size=1 if without_nodes else self.node_size)

    def measured(self) -> dict[str, Any]:
        """See ``Planner.measured``."""
        return self._measured.as_primitives()

    def with_measurements(self, measured: Mapping[str, Any]) -> Auto:
        """See ``Planner.with_measurements``."""
        planner = replace(self)
        planner.__dict__["_measured"] = Measured.of(measured) if measured else Measured()
        return planner

    def measure(self, sections: Sequence[Section], world: World, deciding: Collective | None = None) -> None:
        """Measure what the choice depends on, unless that was done; a collective call over ``deciding``."""
        (collective, device, _), codecs = world, codecs_of(sections)
        if self.link is None and collective.size > 1 and device != META:  # where it was measured before
            self._measured.look(codecs, collective, deciding or collective, device, self.node_size)
            counts = collective.size, collective.size // self._nodes(collective.size)
            sums = [codec.refined(count) for codec in codecs for count in counts]
            self._measured.look(sums, collective, deciding or collective, device, self.node_size)

    def choose(self, sections: Sequence[Section], world: World, deciding: Collective | None = None) -> Exchange:
        """See ``Planner.choose``.

        Raises:
            ValueError: the ranks are more than ``node_size``, and no multiple of it.
        """
        return self._choice(sections, world, deciding).exchange

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Pattern.plan``: the plan by which the choice was made."""
        return self._choice(sections, world).plan

    def _choice(self, sections: Sequence[Section], world: World, deciding: Collective | None = None) -> _Offer:
        collective = world.collective
        if collective.size == 1:
            return _Offer(Float32(), Float32().plan(sections, world), 0.0)
        if self.node_size and collective.size > self.node_size and collective.size % self.node_size:
            raise ValueError(
                f"Auto(node_size={self.node_size}): it must divide the {collective.size} ranks; set it to the ranks of "
                "each node, to 1 where nodes do not matter, or to null"
            )
        self.measure(sections, world, deciding)
        choice = self._best(sections, world)
        if collective.rank == 0 and world.device != META:
            self._say(choice, sections)
        return choice

    def seconds(self, sections: Sequence[Section], world: World, way: Exchange | None = None) -> float:
        """What one exchange of such vectors is predicted to take, without the memory for it; a collective call.

        No way is taken to have fewer rounds than an all-reduce: a transport sums little in fewer, too.

        Args:
            sections: what the vectors consist of.
            world: the ranks, two or more.
            way: the pattern; None: the best.
        """
        self.measure(sections, world)
        dry = world if way is not None and way.plans_collectively else world._replace(device=META)
        offer = self._best(sections, dry) if way is None else self._offer(way, sections, dry)
        spared = all_reduce_rounds(world.collective.size) - offer.plan.compared.rounds
        link = self.link if isinstance(self.link, Link) else self._measured.links["ranks"]
        return offer.seconds + max(0, spared) * link.latency_s

    def _best(self, sections: Sequence[Section], world: World) -> _Offer:
        """All in one message, or each its own way where that saves time."""
        choice = self._together(sections, world)
        parts = _by_kind(sections, world.collective.size)
        if len(parts) > 1:
            offers = [self._together(each, world) for each in parts]
            way = Apart(tuple(offer.exchange for offer in offers))
            plan = way.of([offer.plan for offer in offers], parts)
            apart = _Offer(way, plan, sum(offer.seconds for offer in offers))
            apart.others = [other for offer in offers for other in offer.others]
            apart.fell_back = any(offer.fell_back for offer in offers)
            if apart.seconds < GAIN * choice.seconds and plan.compared.bytes_sent < choice.plan.compared.bytes_sent:
                choice = apart
        return choice

    def _together(self, sections: Sequence[Section], world: World) -> _Offer:
        """One message for all of them, the best way; dense where that is less."""
        codecs, ranks = [section.codec for section in sections], world.collective.size
        offers = [self._offer(way, sections, world) for way in _ways(codecs, ranks)]
        dense = self._offer(Float32(), [replace(each, method=Dense()) for each in sections], world)
        usual = min(offers, key=lambda offer: offer.outward)
        node = self._nodes(ranks)
        if node > 1:
            measured = self._measured.nodes if self.link is None else []
            nodes = measured if ranks == node * len(measured) else nodes_of(world.collective, node, world.device)
            offers += [self._offer(Between(way, nodes), sections, world) for way in _ways(codecs, ranks // node)]
        allowed = [each for each in offers if self.fallback == "never" or each.outward <= dense.outward]
        dense.name, dense.others = "float32 all_reduce", [str(offer) for offer in offers]
        if not allowed:
            sent = f"{usual.plan.description} would send {usual.plan.cost.bytes_sent:,} bytes"
            return dense.because(sent, sections, world)
        best = min(allowed, key=lambda offer: offer.seconds)
        if usual in allowed and best.seconds >= GAIN * usual.seconds:
            best = usual
        best.others = [str(each) for each in (*offers, dense) if each is not best]
        if self.fallback == "dense" and best.seconds > TRUST * dense.seconds:
            return dense.because(f"{best.plan.description} would save too little", sections, world)
        return best

    def _offer(self, way: Exchange, sections: Sequence[Section], world: World) -> _Offer:
        """What it costs alone, as of the last bucket, whose message has no backward left to hide behind."""
        plan, ranks = way.plan(sections, world), world.collective.size
        work = [(section.layout.numel, self._speeds(section.codec)) for section in sections]
        finer = [(each.layout.numel, self._speeds(each.codec_of_sums(plan.sum_ranks))) for each in sections]
        node, copy_s = self._nodes(ranks), self._speeds(Dense()).decode_s
        if isinstance(self.link, Link):  # of the network card, for all of a node's ranks
            inside = Link(self.link.latency_s / INSIDE, self.link.bytes_per_s * INSIDE)
            wire = cost.wire_seconds(plan.compared, self.link, inside, node)
        else:
            links = self._measured.links
            link = links.get("between", links["ranks"]) if plan.compared.inner_rounds else links["ranks"]
            wire = cost.wire_seconds(plan.compared, link, links.get("inside"))
        through = 0.0 if plan.in_place else THROUGH * copy_s * sum(numel for numel, _ in work)
        return _Offer(way, plan, wire + cost.device_seconds(plan.compared, work, copy_s, finer) + through)

    def _speeds(self, codec: Codec) -> Speeds:
        if self.link is not None:
            return COPIES if isinstance(codec, Dense) else LISTS if codec.sparse else CODES
        return self._measured.speeds[kind_of(codec)]

    def _nodes(self, ranks: int) -> int:
        """Ranks of a node; 1 where nodes do not matter."""
        size = self._measured.node_size if self.link is None else self.node_size
        return size if size and ranks % size == 0 and ranks > size else 1

    def _say(self, choice: _Offer, sections: Sequence[Section]) -> None:
        numel = sum(section.layout.numel for section in sections)
        others = ", ".join(choice.others)
        link = self.link or self._measured.links["ranks"]
        said = f"{choice.plan.description}: {choice.plan.cost.bytes_sent:,} bytes a rank for {numel} elements"
        said += f", {1e3 * choice.seconds:.2f} ms by the cost model ({others}) at {link}"
        if choice.fell_back and "fell back" not in self._told:
            self._told.add("fell back")
            log.warning("%s; exchange='auto' without fallback='dense' compresses all the same", said)
        else:
            log.info("%s", said)


@dataclass(eq=False)
class _Offer:
    """A way, its plan, what it is predicted to take, and which others there were, in words."""

    exchange: Exchange
    plan: ExchangePlan
    seconds: float
    name: str = ""
    others: Sequence[str] = ()
    fell_back: bool = False
    """Compression was dropped."""

    def __str__(self) -> str:
        return f"{self.name or self.plan.description} {1e3 * self.seconds:.2f} ms"

    @property
    def outward(self) -> int:
        """Bytes that leave the node."""
        return self.plan.compared.bytes_sent - self.plan.compared.inner_bytes

    def because(self, why: str, sections: Sequence[Section], world: World) -> _Offer:
        """This one, of float32, in place of compression."""
        self.exchange, self.fell_back = Float32(why), True
        self.plan = self.exchange.plan(sections, world)
        return self


@dataclass(frozen=True)
class Float32(Exchange):
    """All of it as it is, in an all-reduce."""

    why: str = ""

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        plan = AllReduce().plan([replace(each, method=Dense()) for each in sections], world)
        if self.why:
            plan.description += f" of float32, since {self.why}"
        return plan


@dataclass(frozen=True)
class Apart(Exchange):
    """Sections of each kind go their own way, one after the other.

    Args:
        ways: of each kind, in the order in which the sections have them.
    """

    ways: tuple[Exchange, ...]

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        parts = _by_kind(sections, world.collective.size)
        return self.of([way.plan(part, world) for way, part in zip(self.ways, parts, strict=True)], parts)

    @staticmethod
    def of(plans: Sequence[ExchangePlan], parts: Sequence[Sequence[Section]]) -> ExchangePlan:
        """One plan of several, for these sections."""
        numels = [sum(section.layout.numel for section in each) for each in parts]
        return CompositePlan(plans, [numel / max(1, sum(numels)) for numel in numels])


def _by_kind(sections: Sequence[Section], ranks: int) -> list[list[Section]]:
    kinds: dict[str, list[Section]] = {}
    for section in sections:
        kinds.setdefault(_kind(section.codec, ranks), []).append(section)
    return list(kinds.values())


def _kind(codec: Codec, ranks: int) -> str:
    """Those of one kind may go the same way."""
    if codec.sum_dtype:
        return "summed"
    return "gathered" if ranks < TWO_SHOT_RANKS else "sparse" if codec.sparse else "encoded again"


def _ways(codecs: Sequence[Codec], ranks: int) -> tuple[Exchange, ...]:
    """Those that carry all of them, and lose nothing twice that need not be."""
    if all(codec.sum_dtype for codec in codecs):
        return (AllReduce(),)
    if ranks < TWO_SHOT_RANKS:
        return (AllGather(),)
    if not any(codec.sparse for codec in codecs):
        return (AllGather(), TwoShot()) if all(codec.repeatable for codec in codecs) else (AllGather(),)
    selective = all(codec.sparse or isinstance(codec, Dense) for codec in codecs)
    return SPARSE if selective else (AllGather(),)


register("auto", Auto)
