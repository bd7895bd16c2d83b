"""Predict the time of a training step: computing, encoding and messages, bucket by bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from lightning_compress.collectives import Collective, World
from lightning_compress.collectives.counting import Meter
from lightning_compress.exchanges import AllReduce, Exchange
from lightning_compress.planning.choose import Auto, Offer
from lightning_compress.reducers import Reducer
from lightning_compress.settings.rules import Shape
from lightning_compress.settings.run_state import RunState

CPU = torch.device("cpu")
BACKWARD = 2 / 3
"""The backward pass's part of a step's computing."""
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
"""Bytes of DistributedDataParallel's first bucket, and of the others."""


@dataclass(frozen=True)
class Bucket:
    """What one bucket adds to a step.

    Args:
        backward_s: seconds of the backward pass from the bucket before until it is ready.
        device_s: seconds that the device encodes and decodes it.
        wire_s: seconds of its exchange that nothing of its own hides.
        bytes_sent: by a rank.
        exchange: how it travels.
    """

    backward_s: float
    device_s: float
    wire_s: float
    bytes_sent: int = 0
    exchange: str = ""


@dataclass(frozen=True)
class Prediction:
    """A predicted step.

    Args:
        step_s: seconds of a step.
        exchange_s: seconds of all exchanges, one after the other, with nothing beside them.
        bytes_sent: by a rank in a step.
        exchange: how the buckets travel.
    """

    step_s: float
    exchange_s: float
    bytes_sent: int
    exchange: str


def backward_seconds(buckets: Sequence[Bucket]) -> float:
    """Return the seconds from the beginning of backward until all means are there; messages travel beside it.

    Args:
        buckets: in the order of the backward pass.
    """
    computed = arrived = 0.0
    for bucket in buckets:
        computed += bucket.backward_s + bucket.device_s
        arrived = max(arrived, computed) + bucket.wire_s  # one after the other; nothing hides the last one
    return max(computed, arrived)


def predict(
    settings: RunState | None,
    parameters: Sequence[tuple[str, Shape]],
    place: Place,
    computing_s: float,
    ready: Mapping[str, float] | None = None,
) -> Prediction:
    """Predict a step.

    Args:
        settings: of the compression; None: DistributedDataParallel.
        parameters: names and shapes, in the model's order.
        place: where it trains.
        computing_s: seconds of a step without communication.
        ready: the part of these seconds after which each gradient is complete, 0 to 1, by name; None: not known.
    """
    return Buckets.of(settings, parameters, place, ready).step(computing_s)


@dataclass(frozen=True)
class Buckets:
    """The buckets of a step, for any time of computing.

    Args:
        each: in the order of the backward pass; their ``backward_s`` are those of a second of computing.
        hides: see ``Place``.
        delayed: averages are applied one step later.
    """

    each: Sequence[Bucket]
    hides: bool
    delayed: bool

    @classmethod
    def of(
        cls,
        settings: RunState | None,
        parameters: Sequence[tuple[str, Shape]],
        place: Place,
        ready: Mapping[str, float] | None = None,
    ) -> Buckets:
        """Return the buckets of a model; the arguments are those of ``predict``."""
        if ready:  # DistributedDataParallel fills its buckets as gradients come
            parameters = sorted(parameters, key=lambda each: -ready[each[0]])
        parts, filled = _parts(parameters, ready), place.bucket_bytes if settings else BUCKET
        running = settings or RunState.of("none", AllReduce())
        offers = dict[object, Offer]()  # large models have many buckets that are alike
        buckets = []
        for bucket in buckets_of(parameters, filled):
            alike = tuple((running.rules.method_of(name, shape), shape) for name, shape in bucket)
            offer = offers[alike] = offers.get(alike) or place.offer(running, bucket)
            device_s = offer.device_s if settings else 0.0  # DistributedDataParallel sends its buckets as they are
            sent, wire_s = offer.plan.cost.bytes_sent, offer.seconds - offer.device_s
            backward_s = sum(parts[name] for name, _ in bucket)
            buckets.append(Bucket(backward_s, device_s, wire_s, sent, offer.plan.description))
        return cls(buckets, place.hides, bool(settings and settings.options.delay))

    def step(self, computing_s: float) -> Prediction:
        """Return the predicted step; ``computing_s``: seconds of it without communication."""
        buckets = [replace(each, backward_s=computing_s * each.backward_s) for each in self.each]
        device_s = sum(each.device_s for each in buckets)
        exchange_s = device_s + sum(each.wire_s for each in buckets)
        if self.delayed:  # messages travel beside all of the next step
            step_s = max(computing_s + device_s, exchange_s)
        elif self.hides:
            step_s = computing_s - sum(each.backward_s for each in buckets) + backward_seconds(buckets)
        else:
            step_s = computing_s + exchange_s
        return Prediction(
            step_s=step_s,
            exchange_s=exchange_s,
            bytes_sent=sum(each.bytes_sent for each in buckets),
            exchange=", ".join(dict.fromkeys(each.exchange for each in buckets)),
        )

    def computing(self, step_s: float) -> float:
        """Return the seconds of computing with which a step is predicted to take ``step_s``; 0: any take longer."""
        least, most = 0.0, step_s
        for _ in range(40):
            middle = (least + most) / 2
            least, most = (middle, most) if self.step(middle).step_s < step_s else (least, middle)
        return least


def _parts(parameters: Sequence[tuple[str, Shape]], ready: Mapping[str, float] | None) -> dict[str, float]:
    """Return the part of a step's computing that passes until each gradient is complete, after the one before it.

    If it is not known, gradients of equal size take equal parts of the backward pass.
    """
    if not ready:
        total = sum(prod(shape) for _, shape in parameters)
        return {name: BACKWARD * prod(shape) / total for name, shape in parameters}
    found, before = dict[str, float](), 0.0
    for name, _ in reversed(parameters):
        found[name], before = ready[name] - before, ready[name]
    return found


def buckets_of(parameters: Sequence[tuple[str, Shape]], most: int) -> list[list[tuple[str, Shape]]]:
    """Return the parameters of each of DistributedDataParallel's buckets, in the order of the backward pass.

    Args:
        parameters: names and shapes, float32, in the model's order.
        most: bytes of a bucket; the first one is smaller.
    """
    buckets: list[list[tuple[str, Shape]]] = [[]]
    limit, size = min(FIRST_BUCKET, most), 0
    for name, shape in reversed(parameters):
        if size >= limit:
            buckets.append([])
            limit, size = most, 0
        buckets[-1].append((name, shape))
        size += 4 * prod(shape)
    return buckets


@dataclass(frozen=True)
class Place:
    """Ranks that train.

    Args:
        ranks: 2 or more.
        planner: knows the speeds of their links and of their codecs.
        bucket_bytes: of DistributedDataParallel's buckets where something is compressed.
        hides: exchanges run beside the backward pass. They do not where it keeps all cores busy: encoding, Gloo and the
            kernel's network stack then take from it what they save.
        device: that encodes.
    """

    ranks: int
    planner: Auto
    bucket_bytes: int = BUCKET
    hides: bool = True
    device: torch.device = CPU

    def offer(self, settings: RunState, bucket: Sequence[tuple[str, Shape]]) -> Offer:
        """Return the predicted exchange of a bucket.

        Raises:
            ValueError: a method is a reducer, whose computing no model predicts.
        """
        sections = [settings.fed(each) for each in settings.rules.sections(bucket)[1]]
        if reducers := [each.method for each in sections if isinstance(each.method, Reducer)]:
            raise ValueError(f"{reducers[0]} communicates between its stages: no model predicts its time")
        way = settings.exchange if isinstance(settings.exchange, Exchange) else None
        return self.planner.offer(sections, World(Absent(self.ranks), self.device, Meter(CPU)), way)


class Absent(Collective):
    """So many ranks, which never meet: for plans whose cost is read, and which never run.

    Args:
        size: the number of ranks.
    """

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def _never(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("these ranks are only planned for")

    all_reduce = all_gather = all_to_all = swap = _never

    def part(self, ranks: Sequence[Sequence[int]]) -> Absent:
        """Return the part of rank 0."""
        return Absent(next(len(part) for part in ranks if 0 in part))
