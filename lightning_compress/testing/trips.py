"""Trips of a vector through a codec, on this rank alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_compress.codecs import Codec
from lightning_compress.codecs.base import aligned
from lightning_compress.core.layout import Layout
from lightning_compress.testing.laws import law
from lightning_compress.testing.vectors import CPU, layout, make

CALLS = 40
"""Of one plan with the same vector and key: it may keep nothing, a count of them included."""


class Trip(NamedTuple):
    """A vector that went through a codec; the message is what was used of it."""

    decoded: Tensor
    residual: Tensor
    message: Tensor


def trip(codec: Codec, given: Tensor, key: int = 1) -> Trip:
    """Encode and decode, on this rank alone."""
    plan = codec.plan(layout(len(given)), CPU)
    residual = given.clone()
    message = torch.full((plan.message_size,), 0xAB, dtype=torch.uint8)
    plan.encode(residual, message, key)
    figures = f"{codec} of {len(given)} elements used {plan.used} bytes, and message_size is {plan.message_size}"
    law(2, 0 <= plan.used <= plan.message_size, figures)
    message = message[: plan.used]
    decoded = torch.full_like(given, torch.nan)
    plan.decode(message[None], decoded, 1.0, False)
    return Trip(decoded, residual, message)


def written(codec: Codec, given: Tensor, key: int) -> list[Tensor]:
    """Law 2: a new plan's message, and, over other fillings, those of one that took others first, and of ``send``."""
    new, old = (codec.plan(layout(len(given)), CPU) for _ in range(2))
    found = []
    for plan, fill, write in ((new, 0x00, new.encode), (old, 0xFF, old.encode), (old, 0x55, old.send)):
        message = torch.full((plan.message_size,), fill, dtype=torch.uint8)
        if plan is old:
            plan.encode(10 * make("heavy", len(given), fill), message.clone(), key + 1 & 2**64 - 1)
        write(given.clone(), message, key)
        found.append(message[: plan.used])
    return found


def rows_added(codec: Codec, numel: int, accumulate: bool, anywhere: bool = False) -> tuple[Tensor, Tensor]:
    """Law 4: three messages decoded at once, and one after the other: nearly equal.

    They are strided rows, as sections of longer messages are; ``anywhere``: at addresses that exchanges never have.
    """
    plan = codec.plan(layout(numel), CPU)
    start, width = (8, plan.message_size + 24) if anywhere else (16, aligned(plan.message_size) + 32)
    rows = torch.zeros(3, width, dtype=torch.uint8)[:, start : start + plan.message_size]
    total = torch.zeros(numel)
    for seed, row in enumerate(rows):
        plan.encode(make("normal", numel, seed), row, seed)
        single = torch.zeros(numel)
        plan.decode(row[None], single, 1.0, False)
        total += single
    out = torch.ones(numel)
    plan.decode(rows, out, 0.25, accumulate)
    return out, 0.25 * total + accumulate


def changing_call(codec: Codec) -> int | None:
    """Law 6: the first of ``CALLS`` calls of one plan whose message or decode is not that of the first; None: none."""
    given = make("normal", 64)
    send = sender(codec, layout(len(given)))
    first = Trip(*(each.clone() for each in send(given.clone(), 1)))
    for call in range(2, CALLS + 1):
        again = send(given.clone(), 1)
        if not all(before.equal(after) for before, after in zip(first, again, strict=True)):
            return call
    return None


def sender(codec: Codec, whole: Layout) -> Callable[[Tensor, int], Trip]:
    """One plan that takes vectors and keys, one after the other; the next one overwrites what it returned."""
    plan = codec.plan(whole, CPU)
    message = torch.zeros(1, plan.message_size, dtype=torch.uint8)
    decoded = torch.empty(whole.numel)

    def send(vector: Tensor, key: int) -> Trip:
        plan.share(key)
        plan.encode(vector, message[0], key)
        used = message[:, : plan.used]
        plan.decode(used, decoded, 1.0, False)
        return Trip(decoded, vector, used[0])

    return send
