"""Measure the speed of the link and of the codecs, once at setup; all ranks use rank 0's figures."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch

from lightning_compress.codecs import Codec, Dense
from lightning_compress.collectives import Collective, consensus
from lightning_compress.collectives.counting import Meter, all_reduce_bytes, all_reduce_rounds, all_to_all_rounds
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges.message import MessagePlan, Section
from lightning_compress.exchanges.nodes import Cluster, nodes_of
from lightning_compress.planning.cost import Link, Speeds

SMALL, LARGE = 1 << 14, 1 << 22
"""Elements with which a codec is timed: the difference gives the time per element, the rest the time per call. Fewer
would stay in a core's own caches, as gradients do not."""
LEAST, MOST = 1 << 16, 1 << 24
"""Bytes of the smallest and the largest message that measure the bandwidth."""
LONG = 0.01
"""Seconds that the smaller of two messages should take. A slow link reaches them with few bytes."""
LARGER = 4
"""How many times larger the other one is. The difference counts neither latency nor a burst that a link lets pass."""
OVER = 4
"""It must also take this many times as long as a message of a few bytes, because ranks may share cores."""
BESIDE = 1.3
"""On CPUs, how many times as long a codec takes beside a backward pass, with which it shares caches and memory, as
alone; fitted to the steps of ``benchmarks.choices``."""
REPEATS = 3
TOO_LONG = 0.1
"""Seconds after which a codec is not timed again."""


def time_link(collective: Collective, device: torch.device) -> Link:
    """Measure latency and bandwidth.

    Collective. It takes a quarter of a second at 1 Gbit/s and at 100 Mbit/s, longer on slower links.
    """
    size = collective.size

    def seconds(count: int) -> float:  # of an all-reduce and an all-to-all of ``count`` bytes each
        numbers = torch.ones(max(1, count // 4), dtype=torch.float32, device=device)  # so that the memory is mapped
        rows = torch.ones(size, max(1, count // 4 // size), dtype=torch.float32, device=device)
        received = torch.ones_like(rows)
        start = _now(device)
        collective.all_reduce(numbers)
        collective.all_to_all(rows, received)
        return _now(device) - start

    def least(count: int) -> float:
        return min(agreed([seconds(count) for _ in range(REPEATS)], collective, device))

    seconds(4 * size)  # opens the connections
    start, count = least(4 * size), LEAST
    while (took := least(count)) < max(LONG, OVER * start) and count < MOST // LARGER:
        count *= 2
    larger = LARGER * count
    rounds = all_reduce_rounds(size) + all_to_all_rounds(size)
    sent = 1.5 * (all_reduce_bytes(larger, size) - all_reduce_bytes(count, size))  # an all-to-all sends half as much
    whole = least(larger)
    longer = max(whole - took, whole / LARGER)  # on a busy machine, the shorter one may take as long
    return Link(max(1e-7, start / rounds), sent / max(1e-7, longer))


def time_codec(codec: Codec, device: torch.device, crowd: float = 1.0) -> Speeds:
    """Measure the time to encode and to decode a message.

    It takes medians, not minima: in training, too, other ranks use the same cores.

    Args:
        codec: what is timed.
        device: where vectors are.
        crowd: ranks per core. Above 1, CPU time times this counts: how long ranks wait for a core varies.
    """
    clock = _clock(device, crowd)
    _time_codec(codec, clock, device, SMALL)  # compiles or loads kernels
    (small_in, small_out), (large_in, large_out) = (_time_codec(codec, clock, device, each) for each in (SMALL, LARGE))
    encode_s, decode_s = (
        (large - small) / (LARGE - SMALL) for small, large in ((small_in, large_in), (small_out, large_out))
    )
    slower = BESIDE if device.type == "cpu" else 1.0
    encode_s, decode_s = slower * max(1e-11, encode_s), slower * max(1e-11, decode_s)
    return Speeds(encode_s, decode_s, max(0.0, slower * (small_in + small_out) - SMALL * (encode_s + decode_s)) / 2)


def _time_codec(codec: Codec, clock: Callable[[], float], device: torch.device, numel: int) -> tuple[float, float]:
    """Return seconds to encode and to decode ``numel`` elements of a matrix."""
    section = Section(codec, Layout.of([("probe", (numel // 1024, 1024))]), 0)
    plan = MessagePlan([section], device, Meter(device))
    data = torch.randn(numel, dtype=torch.float32, generator=torch.Generator().manual_seed(0)).to(device)
    vector, out, flag = torch.empty_like(data), torch.zeros_like(data), data.new_zeros(())
    message = torch.zeros(plan.size, dtype=torch.uint8, device=device)
    encoding, decoding = [], []
    plan.share(0)
    for key in range(REPEATS + 1):
        vector.copy_(data)
        start = clock()
        used = plan.encode(vector, message, key, flag)
        encoded = clock()
        plan.decode(message[None, :used], out, 1.0, accumulate=True)  # as for every message but the first
        encoding.append(encoded - start)
        decoding.append(clock() - encoded)
        if sum(encoding) + sum(decoding) > TOO_LONG:
            break
    return statistics.median(encoding[1:] or encoding), statistics.median(decoding[1:] or decoding)


def _clock(device: torch.device, crowd: float) -> Callable[[], float]:
    if device.type == "cpu" and crowd > 1 and torch.get_num_threads() == 1:
        return lambda: crowd * time.thread_time()
    return lambda: _now(device)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def agreed(figures: list[float], collective: Collective, device: torch.device) -> list[float]:
    """Return rank 0's figures on every rank. Collective."""
    values = torch.tensor(figures, dtype=torch.float64, device=device)
    collective.all_reduce(values if collective.rank == 0 else values.zero_())
    return values.tolist()


_LINKS = ({"ranks"}, {"ranks", "inside", "between"})
"""The links measured on one node, and on several."""


def kind_of(codec: Codec) -> str:
    """Return a name that all codecs with the same speed share: the class and its settings that are strings.

    Strings select other code (indices as ``rice`` or ``int32``). Numbers change the speed little, and a schedule that
    changes them must not cause new measurements during a run.
    """
    names: list[str] = [each.name for each in fields(codec)] if is_dataclass(codec) else []
    settings = {name: getattr(codec, name) for name in names}
    words = [f"{name}={value}" for name, value in settings.items() if isinstance(value, str)]
    return " ".join([type(codec).__name__, *words])


@dataclass(eq=False)
class Measured:
    """All measurements so far, equal on all ranks. On another cluster, everything is measured again.

    Attributes:
        cluster: where it was measured; None if nothing was measured.
        links: "ranks": between any two ranks. With several nodes of several ranks also "inside": within a node, and
            "between": between ranks of the same index in each node.
        speeds: of codecs, by ``kind_of``.
        node_size: ranks per node; 1 if there is one node, or if nodes differ in size; 0 if unknown.
        nodes: the ranks of each node, not necessarily consecutive; empty if ``node_size`` is 0 or 1.
    """

    cluster: Cluster | None = None
    links: dict[str, Link] = field(default_factory=dict)
    speeds: dict[str, Speeds] = field(default_factory=dict)
    node_size: int = 0
    nodes: list[list[int]] = field(default_factory=list)
    _here: bool = False

    def measure(
        self,
        codecs: Iterable[Codec],
        collective: Collective,
        world: Collective,
        device: torch.device,
        node_size: int | None = None,
    ) -> None:
        """Measure what is not known yet. Collective over ``world``.

        Args:
            codecs: in the same order on all ranks.
            collective: the ranks that exchange vectors.
            world: all ranks that must decide alike.
            device: where vectors are.
            node_size: ranks per node, if known.
        """
        collective, world = collective.uncounted, world.uncounted
        wanted = {kind_of(each): each for each in (Dense(), *codecs)}
        elsewhere, new, *absent = self._missing(wanted, world, device)
        if elsewhere:
            self._identify(Cluster.of(world, device), world, device)
            _, new, *absent = self._missing(wanted, world, device)
        if new:
            self._measure_links(collective, world, device, node_size)
        for name in (name for name, each in zip(wanted, absent, strict=True) if each):
            speeds = time_codec(wanted[name], device, self._crowd())
            figures = [speeds.encode_s, speeds.decode_s, speeds.start_s]
            self.speeds[name] = Speeds(*agreed(figures, world, device))

    def _missing(self, kinds: Iterable[str], world: Collective, device: torch.device) -> list[bool]:
        """Return whether to identify the cluster, to measure its links, and to time each codec; equal on all ranks."""
        # ranks that are threads share this object and call at different times
        missing = [not self._here, not self.node_size, *(kind not in self.speeds for kind in kinds)]
        return consensus.anywhere(missing, world, device)

    def _identify(self, cluster: Cluster, world: Collective, device: torch.device) -> None:
        """Discard measurements of another cluster. Collective."""
        if any(consensus.anywhere([cluster != self.cluster], world, device)):
            self.links, self.speeds, self.node_size, self.nodes = {}, {}, 0, []
        self.cluster, self._here = cluster, True

    def _measure_links(self, whole: Collective, world: Collective, device: torch.device, size: int | None) -> None:
        try:
            nodes = nodes_of(whole, size, device)
        except ValueError:  # nodes differ in size; only hierarchical raises for that
            nodes = [list(range(whole.size))]
        links = {"ranks": whole}
        if len(nodes) > 1 and len(nodes[0]) > 1:
            links |= {"inside": whole.part(nodes), "between": whole.part(list(zip(*nodes, strict=True)))}
        for name, collective in links.items():
            link = time_link(collective, device)
            self.links[name] = Link(*agreed([link.latency_s, link.bytes_per_s], world, device))
        self.nodes = nodes if len(links) > 1 else []
        self.node_size = len(nodes[0]) if len(links) > 1 else 1

    def _crowd(self) -> float:
        """Return the ranks per core of this host."""
        return self.cluster.ranks / self.cluster.nodes / (os.cpu_count() or 1) if self.cluster else 1.0

    def rounded(self) -> Measured:
        """Return the same with the links' figures rounded to 1, 2.5 or 5 times a power of ten, in bits and seconds.

        Ethernet comes in such speeds, and noise seldom takes a figure half of the way to the next one.
        """
        links = {
            name: Link(_round(each.latency_s), _round(8 * each.bytes_per_s) / 8) for name, each in self.links.items()
        }
        return replace(self, links=links)

    def as_primitives(self) -> dict[str, Any]:
        """Return the measurements for a checkpoint."""
        links = {name: [each.latency_s, each.bytes_per_s] for name, each in self.links.items()}
        speeds = {name: [each.encode_s, each.decode_s, each.start_s] for name, each in self.speeds.items()}
        cluster = self.cluster and asdict(self.cluster)
        return {"cluster": cluster, "links": links, "speeds": speeds, "node_size": self.node_size, "nodes": self.nodes}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Measured:
        """Return measurements from a checkpoint.

        Raises:
            ValueError: they are not what ``as_primitives`` returned.
        """
        cluster = saved.get("cluster")  # missing in older checkpoints
        try:
            measured = cls(
                cluster=None if cluster is None else Cluster(**cluster),
                links={str(name): Link(*figures) for name, figures in saved["links"].items()},
                speeds={str(name): Speeds(*figures) for name, figures in saved["speeds"].items()},
                node_size=int(saved["node_size"]),
                nodes=[[int(rank) for rank in node] for node in saved.get("nodes", [])],
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the checkpoint's measurements are invalid: {error!r}") from error
        if measured.node_size < 0 or (
            measured.node_size and not measured.links.keys() >= _LINKS[measured.node_size > 1]
        ):
            raise ValueError(
                f"the checkpoint has links {sorted(measured.links)} for nodes of {measured.node_size} ranks"
            )
        ranks = sorted(rank for node in measured.nodes for rank in node)
        if ranks != list(range(len(ranks))) or any(len(node) != measured.node_size for node in measured.nodes):
            raise ValueError(f"the checkpoint has nodes {measured.nodes}, not nodes of {measured.node_size} ranks each")
        return measured


def _round(figure: float) -> float:
    """Return the nearest of 1, 2.5 and 5 times the powers of ten, on a logarithmic scale."""
    power = 10.0 ** math.floor(math.log10(figure))
    return min((step * power for step in (1.0, 2.5, 5.0, 10.0)), key=lambda each: abs(math.log(each / figure)))
