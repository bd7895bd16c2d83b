"""How fast the link and the codecs are, measured once at setup; all ranks use the figures of rank 0."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import torch

from lightning_compress.codecs import Codec, Dense
from lightning_compress.collectives import Collective, consensus
from lightning_compress.collectives.counting import Meter, all_reduce_bytes, all_reduce_rounds, all_to_all_rounds
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges.message import MessagePlan, Section
from lightning_compress.exchanges.nodes import Cluster, nodes_of
from lightning_compress.planning.cost import Link, Speeds

SMALL, LARGE = 1 << 14, 1 << 20
"""Elements on which a codec is timed: what a call costs, and what an element."""
LEAST, MOST = 1 << 16, 1 << 24
"""Bytes with which the link is probed."""
LONG = 0.02
"""Seconds that a probe of the link takes at least, if so many bytes are allowed: on a slow link few will do."""
OVER = 4
"""How many times as long as small messages it takes, at least: ranks that share cores always wait for each other."""
REPEATS = 3
TOO_LONG = 0.1
"""Seconds after which a codec is not timed again."""


def time_link(collective: Collective, device: torch.device) -> Link:
    """Probe the link; a collective call. On 1 Gbit/s it takes a quarter of a second, and less on anything else."""
    size = collective.size

    def seconds(count: int) -> float:  # of an all-reduce and an all-to-all of so many bytes each
        numbers = torch.ones(max(1, count // 4), device=device)  # memory that was touched
        rows = torch.ones(size, max(1, count // 4 // size), device=device)
        received = torch.ones_like(rows)
        start = _now(device)
        collective.all_reduce(numbers)
        collective.all_to_all(rows, received)
        return _now(device) - start

    def least(count: int) -> float:
        return min(agreed([seconds(count) for _ in range(REPEATS)], collective, device))

    seconds(4 * size)  # connections are made
    start, count = least(4 * size), LEAST
    while (took := least(count)) < max(LONG, OVER * start) and count < MOST:
        count *= 2
    rounds = all_reduce_rounds(size) + all_to_all_rounds(size)
    sent = all_reduce_bytes(count, size) + all_reduce_bytes(count, size) / 2
    return Link(max(1e-7, start / rounds), sent / max(1e-7, took - start))


def time_codec(codec: Codec, device: torch.device) -> Speeds:
    """Time encoding and decoding of one message; not at best, but as it is while other ranks want the same cores."""
    _time_codec(codec, SMALL, device)  # kernels are compiled, or loaded
    (small_in, small_out), (large_in, large_out) = (_time_codec(codec, count, device) for count in (SMALL, LARGE))
    encode_s, decode_s = (
        (large - small) / (LARGE - SMALL) for small, large in ((small_in, large_in), (small_out, large_out))
    )
    encode_s, decode_s = max(1e-11, encode_s), max(1e-11, decode_s)
    return Speeds(encode_s, decode_s, max(0.0, small_in + small_out - SMALL * (encode_s + decode_s)) / 2)


def _time_codec(codec: Codec, numel: int, device: torch.device) -> tuple[float, float]:
    """Seconds to encode and to decode so many elements of a matrix."""
    section = Section(codec, Layout.of([("probe", (numel // 1024, 1024))]), 0)
    plan = MessagePlan([section], device, Meter(device))
    data = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
    vector, out, flag = torch.empty_like(data), torch.zeros_like(data), torch.zeros((), device=device)
    message = torch.zeros(plan.size, dtype=torch.uint8, device=device)
    encoding, decoding = [], []
    plan.share(0)
    for key in range(REPEATS + 1):
        vector.copy_(data)
        start = _now(device)
        used = plan.encode(vector, message, key, flag)
        encoded = _now(device)
        plan.decode(message[None, :used], out, 1.0, accumulate=True)  # as each message but the first
        encoding.append(encoded - start)
        decoding.append(_now(device) - encoded)
        if sum(encoding) + sum(decoding) > TOO_LONG:
            break
    return statistics.median(encoding[1:] or encoding), statistics.median(decoding[1:] or decoding)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def agreed(figures: list[float], collective: Collective, device: torch.device) -> list[float]:
    """Those of rank 0, on every rank."""
    own = torch.tensor(figures, dtype=torch.float64, device=device)
    collective.all_reduce(own if collective.rank == 0 else own.zero_())
    return own.tolist()


_LINKS = ({"ranks"}, {"ranks", "inside", "between"})
"""Those of one node, and of several."""


def kind_of(codec: Codec) -> str:
    """Which codecs share a speed: those of a class whose settings in words are the same.

    Words choose other code (indices as ``rice`` or ``int32``). Numbers change its speed little, and a schedule that
    changes them shall not bring new figures into a run.
    """
    names: list[str] = [field.name for field in fields(codec)] if is_dataclass(codec) else []
    settings = {name: getattr(codec, name) for name in names}
    words = [f"{name}={value}" for name, value in settings.items() if isinstance(value, str)]
    return " ".join([type(codec).__name__, *words])


class Measured:
    """What was measured so far, the same on all ranks; on another cluster all of it is measured again.

    Attributes:
        cluster: where; None if nothing was measured.
        links: "ranks": between any two; "inside" and "between": of one node, and of the same index in each node, where
            there are several nodes of several ranks.
        speeds: of codecs, by ``kind_of``.
        node_size: ranks of a node; 1 if there is only one, or nodes are of several sizes.
        nodes: the ranks of each, which need not be neighbours; none where ``node_size`` is 1, or not known.
    """

    def __init__(self) -> None:
        self.cluster: Cluster | None = None
        self._here = False
        self.links: dict[str, Link] = {}
        self.speeds: dict[str, Speeds] = {}
        self.node_size = 0
        self.nodes: list[list[int]] = []

    def look(
        self,
        codecs: Iterable[Codec],
        collective: Collective,
        world: Collective,
        device: torch.device,
        node_size: int | None = None,
    ) -> None:
        """Measure what is not known yet; all ranks of ``world`` come.

        Args:
            codecs: in the same order on all ranks.
            collective: the ranks.
            world: all ranks that have to decide alike.
            device: where vectors are.
            node_size: if it is known.
        """
        collective, world = collective.uncounted, world.uncounted
        wanted = {kind_of(each): each for each in (Dense(), *codecs)}
        elsewhere, new, *absent = self._missing(wanted, world, device)
        if elsewhere:
            self._come_to(Cluster.of(world, device), world, device)
            _, new, *absent = self._missing(wanted, world, device)
        if new:
            self._look_at_links(collective, world, device, node_size)
        for name in (name for name, each in zip(wanted, absent, strict=True) if each):
            speeds = time_codec(wanted[name], device)
            figures = [speeds.encode_s, speeds.decode_s, speeds.start_s]
            self.speeds[name] = Speeds(*agreed(figures, world, device))

    def _missing(self, kinds: Iterable[str], world: Collective, device: torch.device) -> list[bool]:
        """Whether to see which cluster this is, to measure its links, and each of the codecs; alike on all ranks."""
        # ranks that are threads share this object, and come at different moments
        missing = [not self._here, not self.node_size, *(kind not in self.speeds for kind in kinds)]
        return consensus.anywhere(missing, world, device)

    def _come_to(self, cluster: Cluster, world: Collective, device: torch.device) -> None:
        """Discard what was measured on another cluster; a collective call."""
        if any(consensus.anywhere([cluster != self.cluster], world, device)):
            self.links, self.speeds, self.node_size, self.nodes = {}, {}, 0, []
        self.cluster, self._here = cluster, True

    def _look_at_links(self, whole: Collective, world: Collective, device: torch.device, size: int | None) -> None:
        try:
            nodes = nodes_of(whole, size, device)
        except ValueError:  # of several sizes, which is for hierarchical to refuse
            nodes = [list(range(whole.size))]
        links = {"ranks": whole}
        if len(nodes) > 1 and len(nodes[0]) > 1:
            links |= {"inside": whole.part(nodes), "between": whole.part(list(zip(*nodes, strict=True)))}
        for name, collective in links.items():
            link = time_link(collective, device)
            self.links[name] = Link(*agreed([link.latency_s, link.bytes_per_s], world, device))
        self.nodes = nodes if len(links) > 1 else []
        self.node_size = len(nodes[0]) if len(links) > 1 else 1

    def as_primitives(self) -> dict[str, Any]:
        """For a checkpoint."""
        links = {name: [each.latency_s, each.bytes_per_s] for name, each in self.links.items()}
        speeds = {name: [each.encode_s, each.decode_s, each.start_s] for name, each in self.speeds.items()}
        cluster = self.cluster and asdict(self.cluster)
        return {"cluster": cluster, "links": links, "speeds": speeds, "node_size": self.node_size, "nodes": self.nodes}

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Measured:
        """From a checkpoint.

        Raises:
            ValueError: it is not what ``as_primitives`` gave.
        """
        made = cls()
        cluster = given.get("cluster")  # unknown in older checkpoints
        try:
            made.cluster = None if cluster is None else Cluster(**cluster)
            made.links = {str(name): Link(*each) for name, each in given["links"].items()}
            made.speeds = {str(name): Speeds(*each) for name, each in given["speeds"].items()}
            made.node_size = int(given["node_size"])
            made.nodes = [[int(rank) for rank in node] for node in given.get("nodes", [])]
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the state does not say what was measured: {error!r}") from error
        if made.node_size < 0 or (made.node_size and not made.links.keys() >= _LINKS[made.node_size > 1]):
            raise ValueError(f"the state has links {sorted(made.links)} of nodes of {made.node_size}")
        ranks = sorted(rank for node in made.nodes for rank in node)
        if ranks != list(range(len(ranks))) or any(len(node) != made.node_size for node in made.nodes):
            raise ValueError(f"the state has nodes {made.nodes}, which are none of {made.node_size} ranks each")
        return made
