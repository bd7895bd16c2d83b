"""Vector operations on rows of 16 codes: floats of N bits, and the planes that codes are packed in; see ``simd.py``.

Codes are uint32, whatever their bits, so that kernels around these operations are compiled once.
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lightning_compress.kernels.numba.llvm import (
    BYTES,
    FLOATS,
    INT,
    INTS,
    LANES,
    Operation,
    constant,
    gather_bits,
    plane_of,
    spread_bits,
)

_FINITE, _MAGNITUDE = 0x7F7FFFFF, 0x7FFFFFFF


def _zeros(vector: Any) -> Any:
    return ir.Constant(vector, [0] * vector.count)


# Floats of N bits; see codecs/quantize/formats.py


def _value(row: Operation, level: Any, below: Any, shift: Any, sign: Any) -> Any:
    """Return the ``level``-th magnitude of a format, 0.0 for level 0, with the highest bits of ``sign``."""
    make = row.builder
    pattern = make.add(make.shl(level, shift), below)
    pattern = make.select(make.icmp_signed(">", level, _zeros(INTS)), pattern, _zeros(INTS))
    return make.bitcast(make.or_(pattern, make.and_(sign, constant(0x80000000, INTS))), FLOATS)


def _encoder(leave: Callable[[Operation, Any, Any], Any] | None) -> Any:
    def encode(
        typing: Any, codes: Any, at: Any, values: Any, index: Any, shift: Any, half: Any, below: Any, positive: Any
    ) -> Any:
        def generate(*given: Any) -> Any:
            row = Operation(*given)
            make, shift, below = row.builder, row.spread(4, INTS), row.spread(6, INTS)
            numbers = row.load(2)
            bits = make.bitcast(numbers, INTS)
            magnitude = make.and_(bits, constant(_MAGNITUDE, INTS))
            most = row.fill(make.sub(INT(_FINITE), row.arguments[5]), INTS)  # beyond, rounding would give infinity
            magnitude = make.select(make.icmp_signed("<", magnitude, most), magnitude, most)
            move = row.fill(make.sub(row.arguments[5], row.arguments[6]), INTS)
            level = make.ashr(make.add(magnitude, move), shift)
            some = make.icmp_signed(">", level, _zeros(INTS))
            level = make.select(some, level, _zeros(INTS))
            later = make.and_(make.icmp_signed("<", bits, _zeros(INTS)), some)
            code = make.add(level, make.select(later, row.spread(7, INTS), _zeros(INTS)))
            row.store(code, 0)
            if leave:
                row.builder.store(
                    leave(row, numbers, _value(row, level, below, shift, bits)), row.pointer(2, FLOATS), 4
                )
            return row.done()

        return types.void(codes, at, values, index, *[types.int32] * 4), generate

    return intrinsic(encode)


encode = _encoder(None)
"""Write the codes of a row of ``values``, float32: ``codes, at, values, index, shift, half, below, positive``.

``shift``, ``half``, ``below`` and ``positive``, int32, are those of ``Formats``. Larger magnitudes than float32 numbers
that round to finite ones count as the largest of those. No NaN is allowed.
"""
encode_rounding = _encoder(lambda row, numbers, sent: sent)
"""Also overwrite the values by what their codes stand for; see ``encode``."""
encode_moving = _encoder(lambda row, numbers, sent: row.builder.fsub(numbers, sent))
"""Also subtract from the values what their codes stand for; see ``encode``."""


@intrinsic
def add_values(
    typing: Any,
    out: Any,
    at: Any,
    codes: Any,
    index: Any,
    shift: Any,
    below: Any,
    positive: Any,
    last: Any,
    factor: Any,
) -> Any:
    """Compute ``out += value of code * factor``. Numbers above ``last`` count as ``last``; see ``encode``."""

    def generate(*given: Any) -> Any:
        row = Operation(*given)
        make, last = row.builder, row.spread(7, INTS)
        code = row.load(2, INTS)
        code = make.select(make.icmp_unsigned("<", code, last), code, last)
        beyond = make.sub(code, row.spread(6, INTS))
        negative = make.icmp_signed(">", beyond, _zeros(INTS))
        level = make.select(negative, beyond, code)
        value = _value(row, level, row.spread(5, INTS), row.spread(4, INTS), make.sext(negative, INTS))
        row.store(make.fadd(row.load(0), make.fmul(value, row.spread(8))), 0)
        return row.done()

    return types.void(out, at, codes, index, *[types.int32] * 4, types.float32), generate


# Planes


def _writer(width: int) -> Any:
    def write(typing: Any, body: Any, index: Any, codes: Any, at: Any, low: Any) -> Any:
        def generate(*given: Any) -> Any:
            row = Operation(*given)
            make, plane = row.builder, row.load(2, INTS)
            if width == 16:
                plane = make.trunc(plane, ir.VectorType(ir.IntType(16), LANES))
            if width < 16:
                plane = gather_bits(row, make.trunc(make.lshr(plane, row.spread(4, INTS)), BYTES), width)
            row.store(make.bitcast(plane, plane_of(width)), 0)
            return row.done()

        return types.void(body, index, codes, at, types.int32), generate

    return intrinsic(write)


def _reader(width: int) -> Any:
    def read(typing: Any, codes: Any, at: Any, body: Any, index: Any, low: Any, mask: Any) -> Any:
        def generate(*given: Any) -> Any:
            row = Operation(*given)
            make, packed = row.builder, row.load(2, plane_of(width))
            if width > 8:
                bits = make.bitcast(packed, ir.VectorType(ir.IntType(width), LANES))
            else:
                bits = spread_bits(row, packed, width)
            if width < 32:
                bits = make.zext(bits, INTS)
            bits = make.shl(bits, row.spread(4, INTS))
            row.store(make.or_(make.and_(row.load(0, INTS), row.spread(5, INTS)), bits), 0)
            return row.done()

        return types.void(codes, at, body, index, types.int32, types.int32), generate

    return intrinsic(read)


write_1, write_2, write_4, write_8, write_16, write_32 = (_writer(1 << power) for power in range(6))
"""Write the bits from position ``low`` (int32) on of a row of codes to a plane of this width.

Arguments: ``body, index, codes, at, low``; the body is uint8. ``low`` is 0 for 16 and 32 bits.
"""
read_1, read_2, read_4, read_8, read_16, read_32 = (_reader(1 << power) for power in range(6))
"""Add a plane's bits, from position ``low`` on, to those of a row of codes in a mask.

Arguments: ``codes, at, body, index, low, mask``. The mask is 0 for the first plane, else -1, int32.
"""
