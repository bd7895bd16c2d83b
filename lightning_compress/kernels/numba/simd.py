"""Vector operations written in LLVM, for loops that numba does not vectorise well.

Plain numba takes longer by these factors (65,536 to 4 million elements, AVX-512): encoding signs 1.2, decoding signs
1.3, selection 1.3 to 1.8, bitmaps 2, rotation 6. The code runs on any processor. It does two things that
compilers do not make of loops: comparing 32 numbers gives 32 booleans, which are the bits of a word, and a word selects
between two numbers. It also works on rows of 16 elements, where a loop would spend its time on checking for overlapping
arrays. Everything else is plain numba, in the kernels.

Each operation takes contiguous arrays. Each array is followed by the index of the first element to use.
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lightning_compress.kernels.numba.llvm import (
    BYTES,
    FLOAT,
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

GAMMA = 0x9E3779B97F4A7C15
"""Difference between the states of consecutive random words."""
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Factors of the hash that turns a state into a random word; see ``core/random.py``."""
_RANDOM, _SHORTS = ir.VectorType(ir.IntType(64), LANES // 2), ir.VectorType(ir.IntType(16), 2 * LANES)
_FIRST, _SECOND = (ir.Constant(INTS, list(range(start, start + LANES))) for start in (0, LANES))
_MANY, _BITS = ir.VectorType(FLOAT, 32), ir.VectorType(ir.IntType(1), 32)
_BLOCK, _CODES, _WORDS = (ir.VectorType(each, 64) for each in (FLOAT, ir.IntType(8), INT))


# Operations on 32 elements and a word


@intrinsic
def signs(typing: Any, values: Any, index: Any) -> Any:
    """Return a word with bit j set if ``values[index + j] >= 0``: uint32."""

    def generate(*given: Any) -> Any:
        many = Operation(*given)
        return many.word(many.builder.fcmp_ordered(">=", many.load(0, _MANY), constant(0.0, _MANY)))

    return types.uint32(values, index), generate


@intrinsic
def nonzero(typing: Any, values: Any, index: Any) -> Any:
    """Return a word with bit j set if ``values[index + j] != 0``, also for NaN: uint32."""

    def generate(*given: Any) -> Any:
        many = Operation(*given)
        return many.word(many.builder.fcmp_unordered("!=", many.load(0, _MANY), constant(0.0, _MANY)))

    return types.uint32(values, index), generate


@intrinsic
def reaching(typing: Any, values: Any, index: Any, least: Any) -> Any:
    """Return a word with bit j set if ``abs(values[index + j]) >= least``: uint32."""

    def generate(*given: Any) -> Any:
        many = Operation(*given)
        return many.word(many.builder.fcmp_ordered(">=", many.call("fabs", many.load(0, _MANY)), many.spread(2, _MANY)))

    return types.uint32(values, index, types.float32), generate


@intrinsic
def write_chosen(typing: Any, out: Any, index: Any, word: Any, high: Any, low: Any) -> Any:
    """Write ``high`` to ``out[index + j]`` if bit j of the word is 1, else ``low``; -0.0 becomes 0.0."""

    def generate(*given: Any) -> Any:
        many = Operation(*given)
        many.store(many.builder.fadd(_chosen(many), constant(0.0, _MANY)), 0)
        return many.done()

    return types.void(out, index, types.uint32, types.float32, types.float32), generate


@intrinsic
def add_chosen(typing: Any, out: Any, index: Any, word: Any, high: Any, low: Any) -> Any:
    """Add ``high`` to ``out[index + j]`` if bit j of the word is 1, else ``low``."""

    def generate(*given: Any) -> Any:
        many = Operation(*given)
        many.store(many.builder.fadd(many.load(0, _MANY), _chosen(many)), 0)
        return many.done()

    return types.void(out, index, types.uint32, types.float32, types.float32), generate


def _chosen(many: Operation) -> Any:
    bits = many.builder.bitcast(many.arguments[2], _BITS)
    return many.builder.select(bits, many.spread(3, _MANY), many.spread(4, _MANY))


# Operations on rows of 16 elements


def _pair(row: Operation, upper: Any, lower: Any) -> tuple[Any, Any]:
    total = row.builder.fadd(upper, lower)
    return total, _multiply_add(row, lower, -2.0, total)


def _multiply_add(row: Operation, value: Any, power: float, other: Any) -> Any:
    """Return ``value * power + other``. ``power`` is a power of two, so a fused operation gives the same bits."""
    return row.call("fmuladd", value, constant(power), other)


@intrinsic
def butterflies(typing: Any, tile: Any, first: Any, distance: Any) -> Any:
    """Do two steps of a Walsh-Hadamard transform, ``a, b = a + b, (a + b) - 2 b``, on four rows at this distance."""

    def generate(*given: Any) -> Any:
        row = Operation(*given)
        a, b, c, d = (row.load(0, step=number) for number in range(4))
        (a, b), (c, d) = _pair(row, a, b), _pair(row, c, d)
        (a, c), (b, d) = _pair(row, a, c), _pair(row, b, d)
        for number, value in enumerate((a, b, c, d)):
            row.store(value, 0, step=number)
        return row.done()

    return types.void(tile, types.int64, types.int64), generate


@intrinsic
def scale(typing: Any, out: Any, at: Any, source: Any, index: Any, factor: Any) -> Any:
    """Write ``out = source * factor``; -0.0 becomes 0.0."""

    def generate(*given: Any) -> Any:
        row = Operation(*given)
        row.store(row.builder.fadd(row.builder.fmul(row.load(2), row.spread(4)), constant(0.0)), 0)
        return row.done()

    return types.void(out, at, source, index, types.float32), generate


@intrinsic
def fetch(typing: Any, source: Any, at: Any) -> Any:
    """Prefetch a row into the caches. It may be beyond the array's end."""

    def generate(*given: Any) -> Any:
        row = Operation(*given)
        make, integer = row.builder, ir.IntType(32)
        pointer = row.pointer(0, BYTES.element)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, integer, integer, integer])
        known = make.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        make.call(known, [pointer, integer(0), integer(3), integer(1)])
        return row.done()

    return types.void(source, types.int64), generate


@intrinsic
def add_scaled(typing: Any, out: Any, at: Any, source: Any, index: Any, factor: Any) -> Any:
    """Compute ``out += source * factor``."""

    def generate(*given: Any) -> Any:
        row = Operation(*given)
        row.store(row.builder.fadd(row.load(0), row.builder.fmul(row.load(2), row.spread(4))), 0)
        return row.done()

    return types.void(out, at, source, index, types.float32), generate


@intrinsic
def raise_to(typing: Any, largest: Any, at: Any, source: Any, index: Any, distance: Any) -> Any:
    """Compute ``largest = max(largest, abs(source))`` for four rows at this distance."""

    def generate(*given: Any) -> Any:
        row = Operation(*given)
        rows = [row.call("fabs", row.load(2, step=number)) for number in range(4)]
        pairs = _greater(row, rows[0], rows[1]), _greater(row, rows[2], rows[3])
        row.store(_greater(row, _greater(row, *pairs), row.load(0)), 0)
        return row.done()

    return types.void(largest, at, source, index, distance), generate


def _greater(row: Operation, one: Any, other: Any) -> Any:
    return row.builder.select(row.builder.fcmp_ordered(">", one, other), one, other)


def _lesser(row: Operation, one: Any, other: Any) -> Any:
    return row.builder.select(row.builder.fcmp_ordered("<", one, other), one, other)


def _random(row: Operation) -> Any:
    """Return 16 random bits for each element of two rows, as int16: eight words of ``core/random.py``."""
    make = row.builder
    word = row.spread(7, _RANDOM)
    word = make.add(word, ir.Constant(_RANDOM, [number * GAMMA % 2**64 for number in range(_RANDOM.count)]))
    for shift, factor in ((30, FACTORS[0]), (27, FACTORS[1]), (31, 1)):
        word = make.xor(word, make.lshr(word, ir.Constant(_RANDOM, [shift] * _RANDOM.count)))
        if factor > 1:
            word = make.mul(word, ir.Constant(_RANDOM, [factor] * _RANDOM.count))
    return make.bitcast(word, _SHORTS)


@intrinsic
def round_levels(
    typing: Any, out: Any, at: Any, source: Any, index: Any, factors: Any, first: Any, offset: Any, state: Any, by: Any
) -> Any:
    """Write ``out = floor(offset + (source * factors + random) / 65536)`` for two rows.

    ``random`` are the 16 bits of the words that follow ``state``, plus ``by``, as int16.
    """

    def generate(*given: Any) -> Any:
        row = Operation(*given)
        make = row.builder
        factors, random = row.load(4), make.add(_random(row), row.spread(8, _SHORTS))
        for number, half in enumerate((_FIRST, _SECOND)):
            bits = make.sitofp(make.shuffle_vector(random, random, half), FLOATS)
            level = make.fadd(make.fmul(row.load(2, ahead=number), factors), bits)
            level = _multiply_add(row, level, 1 / 65536, row.spread(6))
            row.store(row.call("floor", level), 0, ahead=number)
        return row.done()

    return types.void(out, at, source, index, factors, first, types.float32, types.uint64, types.int16), generate


@intrinsic
def to_numbers(typing: Any, tile: Any, at: Any, steps: Any, first: Any, shift: Any) -> Any:
    """Compute ``tile = (tile + shift) * steps``."""

    def generate(*given: Any) -> Any:
        row = Operation(*given)
        row.store(row.builder.fmul(row.builder.fadd(row.load(0), row.spread(4)), row.load(2)), 0)
        return row.done()

    return types.void(tile, at, steps, first, types.float32), generate


# Operations on a row of 16 codes, whose bits lie in planes (codecs/packing/planes.py)


def _adder(bits: int) -> Any:
    def add_codes(
        typing: Any,
        tile: Any,
        at: Any,
        body: Any,
        wide: Any,
        two: Any,
        one: Any,
        steps: Any,
        column: Any,
        shift: Any,
        sign: Any,
    ) -> Any:
        def generate(*given: Any) -> Any:
            row = Operation(*given)
            make, codes, low = row.builder, None, 0
            for number, width in enumerate((8 if bits == 8 else 4, 2, 1), 1):
                if bits & width:
                    plane = spread_bits(row, row.load(2, plane_of(width), index=number), width)
                    codes = make.or_(codes, make.shl(plane, constant(low, BYTES))) if codes else plane
                    low += width
            sign = row.spread(9, INTS)
            level = make.sub(make.xor(make.zext(codes, INTS), sign), sign)
            value = make.fmul(make.fadd(make.sitofp(level, FLOATS), row.spread(8)), row.load(6))
            row.store(make.fadd(row.load(0), value), 0)
            return row.done()

        places = wide, two, one
        return types.void(tile, at, body, *places, steps, column, types.float32, types.int32), generate

    return intrinsic(add_codes)


def _writer(width: int) -> Any:
    def write(typing: Any, body: Any, index: Any, levels: Any, at: Any, low: Any) -> Any:
        def generate(*given: Any) -> Any:
            row = Operation(*given)
            make = row.builder
            codes = make.trunc(make.fptosi(row.load(2), INTS), BYTES)
            row.store(gather_bits(row, make.lshr(codes, row.spread(4, BYTES)), width), 0)
            return row.done()

        return types.void(body, index, levels, at, types.uint8), generate

    return intrinsic(write)


add_2, add_3, add_4, add_5, add_6, add_7, add_8 = (_adder(bits) for bits in range(2, 9))
"""Compute ``tile += (level + shift) * steps`` of codes of 2 to 8 bits, two's complements whose highest bit is ``sign``.

``wide``, ``two`` and ``one`` are the row's first bytes in the planes of 4 or 8, 2 and 1 bits, as far as there are any.
"""
write_1, write_2, write_4, write_8 = (_writer(width) for width in (1, 2, 4, 8))
"""Write a row's bits from position ``low`` on of levels, float32, as two's complements, to a plane of this width."""


# Operations on blocks of 64 codes and a scale


@intrinsic
def blend_codes(
    typing: Any, out: Any, at: Any, codes: Any, first: Any, values: Any, index: Any, factor: Any, share: Any
) -> Any:
    """Write ``codes * factor + values * share`` as codes, rounded to nearest, ties to even; return their exponent.

    The exponent of the largest magnitude is uint8, or 0 where it is too small or too large for codes, which are then 0.
    Numbers stay in registers.
    """

    def generate(*given: Any) -> Any:
        block = Operation(*given)
        make = block.builder
        mixed = make.fadd(_coded(block, 2, 6), make.fmul(block.load(4, _BLOCK), block.spread(7, _BLOCK)))
        exponent = make.lshr(_largest(block, mixed), INT(23))
        valid = make.icmp_unsigned("<", make.sub(exponent, INT(7)), INT(247))  # 7 to 253; see core/blocks.py
        exponent = make.select(valid, exponent, INT(0))
        inverse = make.select(valid, make.shl(make.sub(INT(260), exponent), INT(23)), INT(0))
        scaled = make.fmul(mixed, block.fill(make.bitcast(inverse, FLOAT), _BLOCK))
        scaled = _lesser(block, scaled, constant(127.0, _BLOCK))
        scaled = _greater(block, scaled, constant(-127.0, _BLOCK))
        moved = make.fadd(scaled, constant(1.5 * 2**23, _BLOCK))
        nearest = make.bitcast(moved, _WORDS)  # its lowest bits are the integer
        block.store(make.trunc(nearest, _CODES), 0)
        return make.trunc(exponent, ir.IntType(8))

    return types.uint8(out, at, codes, first, values, index, types.float32, types.float32), generate


@intrinsic
def add_block(typing: Any, out: Any, at: Any, codes: Any, first: Any, values: Any, index: Any, factor: Any) -> Any:
    """Write ``out = values + codes * factor``; return the values' largest magnitude as the bits of a float32."""

    def generate(*given: Any) -> Any:
        block = Operation(*given)
        values = block.load(4, _BLOCK)
        block.store(block.builder.fadd(values, _coded(block, 2, 6)), 0)
        return _largest(block, values)

    return types.int32(out, at, codes, first, values, index, types.float32), generate


def _coded(block: Operation, number: int, factor: int) -> Any:
    make = block.builder
    return make.fmul(make.sitofp(block.load(number, _CODES), _BLOCK), block.spread(factor, _BLOCK))


def _largest(block: Operation, values: Any) -> Any:
    make, name = block.builder, "llvm.vector.reduce.umax.v64i32"
    bits = make.and_(make.bitcast(values, _WORDS), ir.Constant(_WORDS, [0x7FFFFFFF] * _WORDS.count))
    known = make.module.globals.get(name)
    return make.call(known or ir.Function(make.module, ir.FunctionType(INT, [_WORDS]), name), [bits])
