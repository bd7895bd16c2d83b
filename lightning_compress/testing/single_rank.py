"""Checks of the laws for a codec on a single rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_compress.codecs import Codec
from lightning_compress.codecs.codec import aligned
from lightning_compress.core.layout import Layout
from lightning_compress.core.source import Source
from lightning_compress.exchanges.exchange import META
from lightning_compress.testing.bias import Measure, T, check_sent
from lightning_compress.testing.fuzz import CodecReader, Guarded
from lightning_compress.testing.laws import law, located
from lightning_compress.testing.vectors import CPU, KINDS, LENGTHS, layout, make

Size = Callable[[Layout], int]
Reference = Callable[[Tensor], Tensor]
INPUTS = 30
"""The number of inputs that no ``encode`` wrote."""
CALLS = 40
"""How often one plan gets the same vector and key: it must not keep anything between calls, not even a counter."""


def check_single_rank(codec: Codec, size: Size | None, reference: Reference | None) -> None:
    """Check a codec on vectors of every kind, and what needs many steps on one of them."""
    for numel in LENGTHS:
        _check_size(codec, numel, size)
        for kind in KINDS:
            where = f"{codec} of {numel} elements ({kind})"
            with located(where):
                _check_vector(codec, make(kind, numel), where, reference)
        with located(f"{codec}: messages of {numel} elements"):
            _check_rows(codec, numel)
    with located(f"{codec} of 64 elements (normal)"):
        call = changing_call(codec)
    figures = f"given the same vector and key {CALLS} times, a plan has another message or decode in call {call}"
    law(6, call is None, f"{codec}: {figures}; a plan must not keep anything between calls")
    _check_flags(codec)
    _check_any_bytes(codec)
    with located(f"{codec} over many steps"):
        check_sent(codec, str(codec), lambda whole, measure: _measured(codec, whole, measure))


def _measured(codec: Codec, whole: Layout, measure: Measure[T]) -> T:
    given, send = make("normal", whole.numel, 3), sender(codec, whole)
    return measure(lambda vector, key: send(vector, key).decoded, given, given)


def _check_size(codec: Codec, numel: int, size: Size | None) -> None:
    where = f"{codec} of {numel} elements"
    with located(where):
        plan = codec.plan(layout(numel), CPU)
        wanted = plan.message_size if size is None else size(layout(numel))
        usual = plan.expected_size
    fits = plan.message_size <= wanted if plan.variable else plan.message_size == wanted
    law(2, fits, f"{where} takes {plan.message_size} bytes, but the formula says {wanted}")
    law(2, usual <= plan.message_size, f"{where}: expected_size is {usual}, above message_size {plan.message_size}")
    with located(f'{where}: plan() on the device "meta", by which auto learns sizes'):
        dry = codec.plan(layout(numel), META)
        figures = f"a plan has {dry.message_size} bytes on the device meta, and {plan.message_size} on {CPU}"
        law(2, dry.message_size == plan.message_size and dry.expected_size == usual, f"{where}: {figures}")


def _check_vector(codec: Codec, given: Tensor, where: str, reference: Reference | None) -> None:
    plan = codec.plan(layout(len(given)), CPU)
    decoded, residual, message = trip(codec, given)
    whole = f"{where} wrote {len(message)} bytes, not {plan.message_size}"
    law(2, plan.variable or len(message) == plan.message_size, whole)
    error = float((decoded.double() + residual.double() - given.double()).abs().max())
    # rounding among denormals adds up to half of the smallest number per operation
    room = 2.0**-22 * float(given.abs().max() + decoded.abs().max()) + 2.0**-142
    law(1, error <= room, f"{where}: message and rest differ from the vector by {error:.3g}, more than {room:.3g}")
    first, again, sent = written(codec, given, 1)
    law(2, first.equal(again), f"{where}: the message depends on more than vector and key, or has unwritten bytes")
    law(2, first.equal(sent), f"{where}: encode writes another message where what stays is not kept")
    before, after = float(given.double().norm()), float(residual.double().norm())
    shrinks = not codec.contractive or after <= before * (1 + 1e-6)
    law(8, shrinks, f"{where} is declared contractive, and leaves a norm of {after:.6g} of {before:.6g}")
    zeros_kept = not codec.keeps_zeros or not decoded[given == 0].any()
    law(8, zeros_kept, f"{where} is declared keeps_zeros, and decodes zeros to other numbers")
    if reference is not None:
        off = float((reference(given.clone()) - decoded).abs().max())
        law(8, off <= room, f"{where} is off its reference by {off:.3g}")


def _check_rows(codec: Codec, numel: int) -> None:
    for accumulate in (False, True):
        out, expected = rows_added(codec, numel, accumulate)
        off = float((out - expected).abs().max() / (1 + expected.abs().max()))
        law(4, off <= 1e-5, f"{codec}: three messages decoded at once are off their sum by {off:.3g}")
    plan = codec.plan(layout(numel), CPU)
    plan.decode(torch.zeros(0, plan.message_size, dtype=torch.uint8), out, 0.25, False)
    law(4, not out.any(), f"{codec} of {numel} elements: no messages decode to other numbers than zeros")


def _check_flags(codec: Codec) -> None:
    """Check the properties that a codec declares and exchanges rely on."""
    given, where = make("normal", 300), f"{codec} of 300 elements (normal)"
    with located(where):
        decoded, residual, message = trip(codec, given)
        if codec.elementwise:
            # some elements of each block and parameter, not all
            changed = torch.arange(len(given), dtype=torch.int64) % 7 == 0
            other = trip(codec, torch.where(changed, 100 * given, given))
            alone = other.decoded[~changed].equal(decoded[~changed])
            law(8, alone, f"{where} is declared elementwise, and elements change what others are decoded to")
        if codec.sparse:
            held = decoded != 0
            rest = float(residual[held].norm() / given[held].norm()) if held.any() else 0.0
            share = float(held.double().mean())
            few = share <= max(0.5, codec.sent_share if codec.sent_share < 1 else 0.0)
            figures = f"a message holds {share:.0%} of the elements, and leaves {rest:.0%} of these"
            law(8, few or rest <= 1e-2, f"{where} is declared sparse, but {figures}")
        if codec.correlated:
            plan = codec.plan(layout(300), CPU)
            plan.correlate(5, 1, 4)
            correlated = torch.empty(plan.message_size, dtype=torch.uint8)
            plan.encode(given.clone(), correlated, 1)
            changes = not correlated[: plan.used].equal(message)
            figures = "writes the same message after Plan.correlate; draw random bits from self.stream(key)"
            law(8, changes, f"{where} is declared correlated, and {figures}")


def _check_any_bytes(codec: Codec) -> None:
    guarded = Guarded(CodecReader(codec, layout(300)), seed=1)
    for number in range(INPUTS):
        try:
            guarded.attempt(np.random.default_rng([1, number]))
        except Exception as error:
            what = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            figures = f"decode must return numbers or raise ValueError for any bytes; input {number}: {what}"
            law(9, False, f"{codec} of 300 elements: {figures}")


class Trip(NamedTuple):
    """A vector after encoding and decoding, with the used part of its message."""

    decoded: Tensor
    residual: Tensor
    message: Tensor


def trip(codec: Codec, given: Tensor, key: int = 1) -> Trip:
    """Encode and decode a vector on this rank."""
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
    """Law 2: return messages of the same vector, which must be equal.

    They are a new plan's message; that of a plan which encoded other vectors before, into a buffer with other bytes;
    and the latter without keeping the residual.
    """
    new, old = (codec.plan(layout(len(given)), CPU) for _ in range(2))
    messages = []
    for plan, fill, keep in ((new, 0x00, True), (old, 0xFF, True), (old, 0x55, False)):
        message = torch.full((plan.message_size,), fill, dtype=torch.uint8)
        if plan is old:
            plan.encode(10 * make("heavy", len(given), fill), message.clone(), key + 1 & 2**64 - 1)
        vector = given.clone()
        plan.encode_from(Source(vector), vector if keep else None, message, key)
        messages.append(message[: plan.used])
    return messages


def rows_added(codec: Codec, numel: int, accumulate: bool, anywhere: bool = False) -> tuple[Tensor, Tensor]:
    """Law 4: return three messages decoded at once, and their sum decoded one by one, which must be nearly equal.

    The messages are strided rows, as sections of longer messages are. With ``anywhere``, they lie at addresses that
    exchanges never use.
    """
    plan = codec.plan(layout(numel), CPU)
    start, width = (8, plan.message_size + 24) if anywhere else (16, aligned(plan.message_size) + 32)
    rows = torch.zeros(3, width, dtype=torch.uint8)[:, start : start + plan.message_size]
    total = torch.zeros(numel, dtype=torch.float32)
    for seed, row in enumerate(rows):
        plan.encode(make("normal", numel, seed), row, seed)
        single = torch.zeros(numel, dtype=torch.float32)
        plan.decode(row[None], single, 1.0, False)
        total += single
    out = torch.ones(numel, dtype=torch.float32)
    plan.decode(rows, out, 0.25, accumulate)
    return out, 0.25 * total + accumulate


def changing_call(codec: Codec) -> int | None:
    """Law 6: return the first of ``CALLS`` calls of one plan that differs from the first call, or None."""
    given = make("normal", 64)
    send = sender(codec, layout(len(given)))
    first = Trip(*(each.clone() for each in send(given.clone(), 1)))
    for call in range(2, CALLS + 1):
        again = send(given.clone(), 1)
        if not all(before.equal(after) for before, after in zip(first, again, strict=True)):
            return call
    return None


def sender(codec: Codec, whole: Layout) -> Callable[[Tensor, int], Trip]:
    """Return a function that sends vectors by one plan. Each call overwrites the previous result."""
    plan = codec.plan(whole, CPU)
    message = torch.zeros(1, plan.message_size, dtype=torch.uint8)
    decoded = torch.empty(whole.numel, dtype=torch.float32)

    def send(vector: Tensor, key: int) -> Trip:
        plan.share(key)
        plan.encode(vector, message[0], key)
        used = message[:, : plan.used]
        plan.decode(used, decoded, 1.0, False)
        return Trip(decoded, vector, used[0])

    return send
