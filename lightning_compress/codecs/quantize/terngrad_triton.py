"""Every element as -1, 0 or 1 times its segment's scale; see ``terngrad.py``, whose bits these are.

Two launches: the first one measures, the second one rounds, from the last element to the first, since the last ones are
what a cache has after the measuring.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.codecs.quantize.levels_triton import round_levels
from lightning_compress.codecs.quantize.terngrad_scales_triton import Indices, Segments
from lightning_compress.kernels.triton.launch import (
    OPTIONS,
    Summands,
    clear,
    float_view,
    kernel,
    read,
    read_sum,
    sources,
    write,
)
from lightning_compress.kernels.triton.random import moved, random16, signed, words

ROWS = tl.constexpr(512)
"""Of four elements, which a program has in registers at a time."""
TILE = tl.constexpr(4 * ROWS.value)


@triton.jit
def span_of(spans, number):
    """The segments of the first and of the last one of some elements."""
    return tl.load(spans + 2 * number), tl.load(spans + 2 * number + 1)


@triton.jit
def tile():
    """Where a program's elements stand from its first one on, int32 ``[ROWS, 4]``."""
    return tl.arange(0, ROWS)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def up_to(stop, start):
    """How far a program's elements go, from where they start."""
    return tl.minimum(stop - start, TILE).to(tl.int32)


@triton.jit
def own(values, edges, start, index, owner, last, WHOLE: tl.constexpr):
    """The value of each element's segment, by the segments' values; where they are all of one, that one's."""
    found = tl.load(values + owner)
    if not WHOLE:
        found = tl.full(index.shape, 0.0, tl.float32) + found
        while owner < last:
            owner += 1
            edge = (tl.load(edges + owner) - start).to(tl.int32)
            found = tl.where(index >= edge, tl.load(values + owner), found)
    return found


@triton.jit
def round_tile(
    first, second, vector, scales, factors, edges, owner, last, start, stop, state, move,
    CLIP: tl.constexpr, SUM: tl.constexpr, KEEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Round the elements from ``start`` on: -1, 0 and 1 as 0, 1 and 2, int32 ``[ROWS, 4]``; beyond ``stop`` they are 0.

    ``owner`` and ``last`` are the segments of the first one and of the last one. ``WHOLE`` says that these are one
    segment, that all are before ``stop``, and that ``start`` is a multiple of 4.
    """
    index = tile()
    inside = index < up_to(stop, start)
    numbers = read_sum(first + start, second + start, index, inside, SUM, WHOLE)
    scaled = numbers * own(factors, edges, start, index, owner, last, WHOLE)
    if CLIP:
        scaled = tl.maximum(tl.minimum(scaled, 65536.0), -65536.0)
    if WHOLE:
        random = random16(state, start // 4 + tl.arange(0, ROWS))
    else:  # a byte's digits need not begin at a word's
        random = (words(state, (start + index) // 4) >> ((start + index) % 4 * 16).to(tl.uint64)).to(tl.int32)
    levels = round_levels(scaled, moved(random, move).to(tl.float32), 0.0)
    if KEEP:
        left = numbers - levels * own(scales, edges, start, index, owner, last, WHOLE)
        write(vector + start, index, left, inside, WHOLE)
    codes = levels.to(tl.int32) + 1
    return codes if WHOLE else tl.where(inside, codes, 0)


@triton.jit
def begin(out, index, end, add, WHOLE: tl.constexpr):
    """What messages are added to: what is there, or 0, by the same (masked) load, so that it is spread out alike."""
    if WHOLE:
        found = tl.load(out + index, mask=add != 0, other=0.0)
    else:
        found = tl.load(out + index, mask=(index < end) & (add != 0), other=0.0)
    return found


RUN = tl.constexpr(5 << 15)
"""Elements among which five digits of a byte are spread."""
_DIGITS = tl.constexpr(5)
_SIZE = tl.constexpr(RUN.value // _DIGITS.value)
"""Bytes of a whole run."""
_EACH = tl.constexpr(_SIZE.value // TILE.value)
"""Programs of a whole run."""


class Ternary:
    """Writes and reads messages of ``terngrad`` for one layout.

    Args:
        edges, clips, device: see ``Segments``.
        base3: five digits in a byte, and not four fields of two bits.
        body: where the codes begin in a message.
    """

    def __init__(
        self, edges: Indices, clips: npt.NDArray[np.float64] | None, device: torch.device, base3: bool, body: int
    ) -> None:
        self._segments = Segments(edges, clips, device)
        self._count, self._numel, self._clip = len(edges) - 1, int(edges[-1]), clips is not None
        self._body = body
        starts, stops = (_digits if base3 else _fields)(self._numel)
        self._programs = len(starts)
        spans = np.stack(
            [np.searchsorted(edges, index, "right") - 1 for index in (starts, np.maximum(stops - 1, starts))], -1
        )
        self._spans = torch.from_numpy(spans.clip(max=self._count - 1).astype(np.int32)).to(device)
        # five digits of as many elements as four fields have want more registers
        self._options = OPTIONS | {"num_warps": 8 if base3 else 4}
        self._encode, self._decode = (_encode_digits, _decode_digits) if base3 else (_encode_fields, _decode_fields)

    def encode(self, vector: Tensor, summands: Summands, message: Tensor, state: int, move: int, keep: bool) -> None:
        """Move every element's sign, at random, into the message.

        Args:
            vector: float32; gets what stays, if that is to be kept.
            summands: see ``Summands``.
            message: uint8, wholly overwritten.
            state: before the stream's first random word.
            move: added to the random bits, -32768 to 32767.
            keep: whether what stays is asked for.
        """
        scales = float_view(message, 0, self._count)
        self._segments.measure(vector, summands, scales)
        first, second, both = sources(vector, summands)
        gap = message[4 * self._count :], self._body - 4 * self._count
        tables = scales, self._segments.factors, self._segments.edges, self._spans
        self._encode[(self._programs,)](
            first, second, vector, *tables, *gap, message[self._body :], signed(state), move or None, self._numel,
            self._clip, both, keep, **self._options,
        )  # fmt: skip

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """Write, or add, ``weight`` times the sum of messages ``[M, size]``, whose rows may be strided."""
        scales, body = float_view(messages, 0, self._count), messages[:, self._body :]
        values = scales, scales.stride(0), body, body.stride(0), self._segments.edges, self._spans
        self._decode[(self._programs,)](
            *values, out, int(accumulate), weight, self._numel, len(messages), **self._options
        )


def _fields(numel: int) -> tuple[Indices, Indices]:
    """Where a program's elements begin and end, ``[programs, 1]`` each."""
    starts = np.arange(0, numel, TILE.value)[:, None]
    return starts, np.minimum(starts + TILE.value, numel)


def _digits(numel: int) -> tuple[Indices, Indices]:
    """Where the elements of each digit of a program's bytes begin and end, ``[programs, 5]`` each."""
    whole, rest = divmod(numel, RUN.value)
    number = np.arange(whole * _EACH.value + triton.cdiv(triton.cdiv(rest, 5), TILE.value))[:, None]
    run, first = number // _EACH.value * RUN.value, number % _EACH.value * TILE.value
    length = np.minimum(numel - run, RUN.value)
    size = -(-length // 5)
    starts = np.arange(5) * size + first
    stops = np.minimum(np.arange(5) * size + np.minimum(first + TILE.value, size), length)
    return run + starts, run + stops


@kernel(do_not_specialize=["padding", "state", "move", "numel"])
def _encode_fields(
    first, second, vector, scales, factors, edges, spans, gap, padding, body, state: tl.int64, move, numel,
    CLIP: tl.constexpr, SUM: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    start = number.to(tl.int64) * TILE
    owner, last = span_of(spans, number)
    values = first, second, vector, scales, factors, edges
    body += start // 4
    if (owner == last) & (start + TILE <= numel):
        codes = round_tile(*values, owner, last, start, numel, state, move, CLIP, SUM, KEEP, True)
        write(body, _field_bytes(), _pack(codes), True, True)
    else:
        codes = round_tile(*values, owner, last, start, numel, state, move, CLIP, SUM, KEEP, False)
        write(body, _field_bytes(), _pack(codes), 4 * _field_bytes() < up_to(numel, start), False)
    if number == 0:
        clear(gap, padding)


@kernel(do_not_specialize=["padding", "state", "move", "numel"])
def _encode_digits(
    first, second, vector, scales, factors, edges, spans, gap, padding, body, state: tl.int64, move, numel,
    CLIP: tl.constexpr, SUM: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    run, length, size, byte = _run(number, numel)
    values = first, second, vector, scales, factors, edges
    packed = tl.zeros([ROWS, 4], tl.int32)
    for back in range(_DIGITS):
        digit = _DIGITS - 1 - back
        owner, last = span_of(spans, number * _DIGITS + digit)
        start = run * RUN + byte
        if (owner == last) & (length == RUN):
            start += digit * _SIZE
            codes = round_tile(*values, owner, last, start, numel, state, move, CLIP, SUM, KEEP, True)
        else:
            start += digit * size
            stop = run * RUN + tl.minimum(digit * size + size, length)
            codes = round_tile(*values, owner, last, start, stop, state, move, CLIP, SUM, KEEP, False)
        packed = packed * 3 + codes
    body += run * _SIZE + byte
    if length == RUN:
        write(body, tile(), packed.to(tl.uint8), True, True)
    else:
        write(body, tile(), packed.to(tl.uint8), tile() < size - byte, False)
    if number == 0:
        clear(gap, padding)


@triton.jit
def _field_bytes():
    """Where the bytes of four elements each stand; the thread that has read these moves one: none changes hands."""
    return tl.max_contiguous(tl.arange(0, ROWS), 1)


@triton.jit
def _pack(codes):
    return tl.sum(codes << (tl.arange(0, 4) * 2)[None, :], axis=1).to(tl.uint8)


@triton.jit
def _run(number, numel):
    """A program's run, how many elements and bytes that has, and where among these the program's bytes begin."""
    run = (number // _EACH).to(tl.int64)
    length = tl.minimum(numel - run * RUN, RUN).to(tl.int32)
    return run, length, (length + _DIGITS - 1) // _DIGITS, number % _EACH * TILE


@kernel(do_not_specialize=["add", "numel"])
def _decode_fields(
    scales, step: tl.int64, body, stride: tl.int64, edges, spans, out, add, weight, numel,
    MESSAGES: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    start = number.to(tl.int64) * TILE
    owner, last = span_of(spans, number)
    values = scales, step, body + start // 4, stride, edges, owner, last, out, add, weight, start, numel
    if (owner == last) & (start + TILE <= numel):
        _add_fields(*values, MESSAGES, True)
    else:
        _add_fields(*values, MESSAGES, False)


@triton.jit
def _add_fields(
    scales, step, body, stride, edges, owner, last, out, add, weight, start, numel,
    MESSAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    byte, index, end = _field_bytes(), tile(), up_to(numel, start)
    total = begin(out + start, index, end, add, WHOLE)
    for message in range(MESSAGES):
        packed = read(body + message * stride, byte, 4 * byte < end, WHOLE).to(tl.int32)
        codes = (packed[:, None] >> (tl.arange(0, 4) * 2)[None, :]) & 3
        steps = own(scales + message * step, edges, start, index, owner, last, WHOLE) * weight
        total += (codes - 1).to(tl.float32) * steps
    write(out + start, index, total, index < end, WHOLE)


@kernel(do_not_specialize=["add", "numel"])
def _decode_digits(
    scales, step: tl.int64, body, stride: tl.int64, edges, spans, out, add, weight, numel,
    MESSAGES: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    run, length, size, byte = _run(number, numel)
    start = run * RUN + byte
    for digit in tl.static_range(_DIGITS):
        owner, last = span_of(spans, number * _DIGITS + digit)
        values = scales, step, body + run * _SIZE + byte, stride, edges, owner, last, out, add, weight
        if (owner == last) & (length == RUN):
            _add_digits(*values, start + digit * _SIZE, numel, 3**digit, MESSAGES, True)
        else:
            stop = run * RUN + tl.minimum(digit * size + size, length)
            _add_digits(*values, start + digit * size, stop, 3**digit, MESSAGES, False)


@triton.jit
def _add_digits(
    scales, step, body, stride, edges, owner, last, out, add, weight, start, stop,
    WORTH: tl.constexpr, MESSAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    index, end = tile(), up_to(stop, start)
    total = begin(out + start, index, end, add, WHOLE)
    for message in range(MESSAGES):
        packed = read(body + message * stride, index, index < end, WHOLE).to(tl.int32)
        steps = own(scales + message * step, edges, start, index, owner, last, WHOLE) * weight
        total += (packed // WORTH % 3 - 1).to(tl.float32) * steps
    write(out + start, index, total, index < end, WHOLE)
