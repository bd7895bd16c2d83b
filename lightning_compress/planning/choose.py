"""Choose the cheapest exchange by a model of the link and of the ranks' devices."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from lightning_compress.codecs import QSGD, Codec, Dense
from lightning_compress.collectives import Collective, World
from lightning_compress.core.registry import register
from lightning_compress.core.state import States
from lightning_compress.exchanges import AllGather, AllReduce, Exchange, ExchangePlan, Planner, SplitGather, TwoShot
from lightning_compress.exchanges.composite import CompositePlan
from lightning_compress.exchanges.exchange import META
from lightning_compress.exchanges.message import Section, codecs_of
from lightning_compress.exchanges.nodes import Between, check_node_size, nodes_of
from lightning_compress.planning import cost
from lightning_compress.planning.cost import CODES, COPIES, ENTROPY, LISTS, Link, Speeds
from lightning_compress.planning.link import Measured, kind_of
from lightning_compress.settings.automatic import TRUST

log = logging.getLogger(__name__)

TWO_SHOT_RANKS = 4
"""With fewer ranks, two-shot sends as many bytes as all-gather, and encodes twice."""

GAIN = 0.9
"""Another exchange must take less than this share of the time of the one that sends least: measurements vary."""

SPARSE: tuple[Exchange, ...] = (AllGather(), SplitGather())
"""Exchanges of sparse messages that lead to the same sum."""

THROUGH = 3.0
"""Additional copies of encoded data: gradient plus residual into a vector, the new residual, and the mean back."""

INSIDE = 10
"""How many times faster links within a node are at least, if that was not measured."""

Fallback = Literal["dense", "never"]


@dataclass(frozen=True)
class Auto(Planner):
    """All-reduce for summable messages. For others, the cost model chooses: all-gather, or two-shot from 4 ranks on.

    For sparse messages, it chooses between all-gather and split-gather from 4 ranks on. With several nodes, it also
    considers the same exchanges between nodes (``hierarchical``). It takes the exchange that sends least, unless
    another one is predicted to take 10 % less time. Sections of several methods share one message, or are exchanged
    separately if that saves time. Rank 0 logs the choice once per group.

    A compressor that you name always compresses. Only with ``fallback="dense"`` does a group travel as float32: if
    compression does not pay (a fast link, a slow codec), or if it would send more bytes than a float32 all-reduce (many
    ranks).

    The link and the codecs are measured when the first group is created, which takes less than a second. Rank 0's
    figures decide on all ranks. They are saved in the checkpoint, so that a resumed run chooses as before. On another
    number of ranks or other hosts they are measured again. Two runs of the same script may measure and choose
    differently, and then differ in rounding: set ``link`` to prevent that.

    Args:
        fallback: "never": always compress. "dense": send float32 where compression does not pay; noise of the
            measurement may decide this.
        link: a mapping of ``latency_s`` and ``bytes_per_s``; nothing is measured then, and codecs are assumed to be
            fast ones on a CPU. None: measure.
        node_size: ranks per node, consecutive in rank order; 1: ignore nodes. None: ranks with the same host name form
            a node; with ``link``, or in a ``deterministic`` run, None means 1.

    Raises:
        ValueError: a setting is none of these.
    """

    fallback: Fallback = "never"
    link: Link | Mapping[str, float] | None = None
    node_size: int | None = None
    _measured: Measured = field(default_factory=Measured, init=False, repr=False, compare=False)
    _warned: set[str] = field(default_factory=set, init=False, repr=False, compare=False)  # warnings are logged once

    def __post_init__(self) -> None:
        if self.fallback not in get_args(Fallback):
            raise ValueError(
                f"Auto(fallback={self.fallback!r}): use 'dense' (send float32 where compression does not pay) or "
                "'never'"
            )
        object.__setattr__(self, "link", None if self.link is None else cost.link_of(self.link))
        check_node_size("Auto", self.node_size)

    def limited(self, fixed: bool, without_nodes: bool) -> Auto:
        """See ``Planner.limited``."""
        if not fixed and not without_nodes:
            return self
        link = self.link or cost.UNKNOWN if fixed else self.link
        return replace(self, link=link, node_size=1 if without_nodes else self.node_size)

    @property
    def known_link(self) -> Link | None:
        """The link between two ranks, given or measured; None: neither."""
        return self.link if isinstance(self.link, Link) else self._measured.links.get("ranks")

    def measured(self) -> dict[str, Any]:
        """See ``Planner.measured``."""
        return self._measured.as_primitives()

    def with_measurements(self, measured: Mapping[str, Any]) -> Auto:
        """See ``Planner.with_measurements``."""
        planner = replace(self)
        if measured:
            object.__setattr__(planner, "_measured", Measured.of(measured))
        return planner

    @classmethod
    def knowing(cls, links: Mapping[str, Link], speeds: Mapping[str, Speeds], nodes: Sequence[list[int]] = ()) -> Auto:
        """Return a planner that measures nothing; the arguments are those of ``Measured``."""
        size = len(nodes[0]) if nodes else 1
        return cls().with_measurements(Measured(None, dict(links), dict(speeds), size, list(nodes)).as_primitives())

    def rounded(self) -> Auto:
        """Return the same planner with the links' figures rounded; see ``Measured.rounded``."""
        return self if self.link else self.with_measurements(self._measured.rounded().as_primitives())

    def measure(self, sections: Sequence[Section], world: World, deciding: Collective | None = None) -> None:
        """Measure what the choice depends on, unless it is known. Collective over ``deciding``."""
        (collective, device, _), codecs = world, codecs_of(sections)
        if self.link is None and collective.size > 1 and device != META:  # on META it was measured before
            self._measured.measure(codecs, collective, deciding or collective, device, self.node_size)
            counts = collective.size, collective.size // self._nodes(collective.size)
            sums = [codec.refined(count) for codec in codecs for count in counts]
            self._measured.measure(sums, collective, deciding or collective, device, self.node_size)

    def choose(self, sections: Sequence[Section], world: World, deciding: Collective | None = None) -> Exchange:
        """See ``Pattern.choose``.

        Raises:
            ValueError: the number of ranks is above ``node_size`` and not a multiple of it.
        """
        return self._choice(sections, world, deciding).exchange

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Pattern.plan``: the plan by which the choice was made."""
        return self._choice(sections, world).plan

    def _choice(self, sections: Sequence[Section], world: World, deciding: Collective | None = None) -> Offer:
        collective = world.collective
        if collective.size == 1:
            return Offer(Float32(), Float32().plan(sections, world), 0.0, 0.0)
        if self.node_size and collective.size > self.node_size and collective.size % self.node_size:
            raise ValueError(
                f"Auto(node_size={self.node_size}): it must divide the {collective.size} ranks; set it to the ranks "
                "per node, to 1 to ignore nodes, or to null"
            )
        self.measure(sections, world, deciding)
        choice = self._best(sections, world)
        if collective.rank == 0 and world.device != META:
            self._log_choice(choice, sections)
        return choice

    def offer(self, sections: Sequence[Section], world: World, way: Exchange | None = None) -> Offer:
        """Return the predicted exchange of such vectors, without allocating memory for it; ``measure`` comes first.

        Args:
            sections: what the vectors consist of.
            world: at least two ranks.
            way: the exchange; None: the best one.
        """
        real = world.device.type == "cpu" or (way is not None and way.plans_collectively)  # parts only exist on CPUs
        dry = world if real else world._replace(device=META)
        return self._best(sections, dry) if way is None else self._offer(way, sections, dry)

    def _best(self, sections: Sequence[Section], world: World) -> Offer:
        """Return the best offer: all sections in one message, or each kind separately if that saves time."""
        choice = self._in_one_message(sections, world)
        parts = _by_kind(sections, world.collective.size)
        if len(parts) > 1:
            offers = [self._in_one_message(each, world) for each in parts]
            way = Apart(tuple(offer.exchange for offer in offers))
            plan = way.of([offer.plan for offer in offers], parts)
            seconds, device_s = (sum(getattr(each, name) for each in offers) for name in ("seconds", "device_s"))
            apart = Offer(way, plan, seconds, device_s)
            apart.others = [other for offer in offers for other in offer.others]
            apart.fell_back = any(offer.fell_back for offer in offers)
            if apart.seconds < GAIN * choice.seconds and plan.compared.bytes_sent < choice.plan.compared.bytes_sent:
                choice = apart
        return choice

    def _in_one_message(self, sections: Sequence[Section], world: World) -> Offer:
        """Return the best offer for one message of all sections; dense if that costs less and is allowed."""
        codecs, ranks = [section.codec for section in sections], world.collective.size
        offers = [self._offer(way, sections, world) for way in _ways(codecs, ranks)]
        dense = self._offer(Float32(), [replace(each, method=Dense()) for each in sections], world)
        usual = min(offers, key=lambda offer: offer.outward)
        node = self._nodes(ranks)
        if node > 1:
            measured = self._measured.nodes if self.link is None else []
            nodes = measured if ranks == node * len(measured) else nodes_of(world.collective, node, world.device)
            offers += [self._offer(Between(way, nodes), sections, world) for way in _ways(codecs, ranks // node)]
        allowed = [offer for offer in offers if self.fallback == "never" or offer.outward <= dense.outward]
        dense.name, dense.others = "float32 all_reduce", [str(offer) for offer in offers]
        if not allowed:
            sent = f"{usual.plan.description} would send {usual.plan.cost.bytes_sent:,} bytes"
            return dense.replacing(sent, sections, world)
        best = min(allowed, key=lambda offer: offer.seconds)
        if usual in allowed and best.seconds >= GAIN * usual.seconds:
            best = usual
        best.others = [str(offer) for offer in (*offers, dense) if offer is not best]
        if self.fallback == "dense" and best.seconds > TRUST * dense.seconds:
            return dense.replacing(f"{best.plan.description} would save too little", sections, world)
        return best

    def _offer(self, way: Exchange, sections: Sequence[Section], world: World) -> Offer:
        """Predict the time as for the last bucket, whose exchange cannot overlap with backward."""
        plan, ranks = way.plan(sections, world), world.collective.size
        work = [(section.layout.numel, self._speeds(section.codec)) for section in sections]
        finer = [(each.layout.numel, self._speeds(each.codec_of_sums(plan.sum_ranks))) for each in sections]
        node, copy_s = self._nodes(ranks), self._speeds(Dense()).decode_s
        if isinstance(self.link, Link):  # the link of the network card, which a node's ranks share
            inside = Link(self.link.latency_s / INSIDE, self.link.bytes_per_s * INSIDE)
            wire = cost.wire_seconds(plan.compared, self.link, inside, node)
        else:
            links = self._measured.links
            link = links.get("between", links["ranks"]) if plan.compared.inner_rounds else links["ranks"]
            wire = cost.wire_seconds(plan.compared, link, links.get("inside"))
        through = 0.0 if plan.in_place else THROUGH * copy_s * sum(numel for numel, _ in work)
        device = cost.device_seconds(plan.compared, work, copy_s, finer)
        seconds = cost.overlapped_seconds(wire, device, plan.compared.parts) + through
        return Offer(way, plan, seconds, device + through)

    def _speeds(self, codec: Codec) -> Speeds:
        if self.link is not None:
            coded = isinstance(codec, QSGD) and codec.coding == "entropy"
            return COPIES if isinstance(codec, Dense) else LISTS if codec.sparse else ENTROPY if coded else CODES
        return self._measured.speeds[kind_of(codec)]

    def _nodes(self, ranks: int) -> int:
        """Return the ranks per node; 1 if nodes are ignored."""
        size = self._measured.node_size if self.link is None else self.node_size
        return size if size and ranks % size == 0 and ranks > size else 1

    def _log_choice(self, choice: Offer, sections: Sequence[Section]) -> None:
        numel = sum(section.layout.numel for section in sections)
        others = ", ".join(choice.others)
        text = f"{choice.plan.description}: {choice.plan.cost.bytes_sent:,} bytes a rank for {numel} elements"
        text += f", {1e3 * choice.seconds:.2f} ms by the cost model, {1e3 * choice.device_s:.2f} of them computing"
        text += f" ({others}) at {self.known_link}"
        if choice.fell_back and "fell back" not in self._warned:
            self._warned.add("fell back")
            log.warning("%s; to compress nevertheless, leave out fallback='dense' of exchange='auto'", text)
        else:
            log.info("%s", text)


@dataclass(eq=False)
class Offer:
    """An exchange, its plan, its predicted seconds and those of the device among them, and the rejected offers."""

    exchange: Exchange
    plan: ExchangePlan
    seconds: float
    device_s: float
    name: str = ""
    others: Sequence[str] = ()
    fell_back: bool = False
    """float32 replaced compression."""

    def __str__(self) -> str:
        return f"{self.name or self.plan.description} {1e3 * self.seconds:.2f} ms"

    @property
    def outward(self) -> int:
        """Bytes that leave the node."""
        return self.plan.compared.bytes_sent - self.plan.compared.inner_bytes

    def replacing(self, why: str, sections: Sequence[Section], world: World) -> Offer:
        """Return this float32 offer as a replacement for compression, for the reason ``why``."""
        self.exchange, self.fell_back = Float32(why), True
        self.plan = self.exchange.plan(sections, world)
        return self


@dataclass(frozen=True)
class Float32(Exchange):
    """Send everything as float32 in an all-reduce; ``why`` is the reason, for the log."""

    why: str = ""

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        plan = AllReduce().plan([replace(each, method=Dense()) for each in sections], world)
        if self.why:
            plan.description += f" of float32, since {self.why}"
        return plan


@dataclass(frozen=True)
class Apart(Exchange):
    """Exchange the sections of each kind separately, one kind after the other.

    Args:
        ways: one exchange per kind, in the order in which the kinds first occur in the sections.
    """

    ways: tuple[Exchange, ...]

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        parts = _by_kind(sections, world.collective.size)
        return self.of([way.plan(part, world) for way, part in zip(self.ways, parts, strict=True)], parts)

    @staticmethod
    def of(plans: Sequence[ExchangePlan], parts: Sequence[Sequence[Section]]) -> ExchangePlan:
        """Combine the kinds' plans into one plan."""
        numels = [sum(section.layout.numel for section in each) for each in parts]
        return CompositePlan(plans, [numel / max(1, sum(numels)) for numel in numels])


def _by_kind(sections: Sequence[Section], ranks: int) -> list[list[Section]]:
    kinds: dict[str, list[Section]] = {}
    for section in sections:
        kinds.setdefault(_kind(section.codec, ranks), []).append(section)
    return list(kinds.values())


def _kind(codec: Codec, ranks: int) -> str:
    """Return the kind of a codec. Codecs of one kind may share an exchange."""
    if codec.sum_dtype:
        return "summed"
    return "gathered" if ranks < TWO_SHOT_RANKS else "sparse" if codec.sparse else "encoded again"


def _ways(codecs: Sequence[Codec], ranks: int) -> tuple[Exchange, ...]:
    """Return the exchanges that can carry all codecs without an avoidable second loss."""
    if all(codec.sum_dtype for codec in codecs):
        return (AllReduce(),)
    if ranks < TWO_SHOT_RANKS:
        return (AllGather(),)
    if not any(codec.sparse for codec in codecs):
        return (AllGather(), TwoShot()) if all(codec.reencodable for codec in codecs) else (AllGather(),)
    selective = all(codec.sparse or isinstance(codec, Dense) for codec in codecs)
    return SPARSE if selective else (AllGather(),)


register("auto", Auto)
