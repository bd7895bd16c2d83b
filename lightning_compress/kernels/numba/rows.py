"""Sixteen neighbours as one vector: no compiler can know by itself that the arrays do not overlap.

Each operation takes contiguous arrays, each with the index of its first element.
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lightning_compress import kernels
from lightning_compress.kernels.numba import words

LANES = kernels.TILE
GAMMA = 0x9E3779B97F4A7C15
"""From one random word's state to the next one's."""
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""What makes a random word of its state."""
_INT = ir.IntType(32)
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_INT, LANES)
_PAIRS, _HALF = ir.VectorType(ir.IntType(16), LANES // 2), ir.VectorType(ir.IntType(8), LANES // 2)
_WORDS, _SHORTS = ir.VectorType(ir.IntType(64), LANES // 2), ir.VectorType(ir.IntType(16), 2 * LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_FIRST, _SECOND = (ir.Constant(_INTS, list(range(start, start + LANES))) for start in (0, LANES))


class _Operation:
    """The arguments of an operation as LLVM has them."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self._context, self.builder = context, builder
        self._kinds, self.arguments = signature.args, arguments

    def place(self, number: int, vector: Any, step: int = 0, ahead: int = 0) -> Any:
        """Where in the array that is argument ``number`` a vector begins, at the index after it."""
        array = self._context.make_array(self._kinds[number])(self._context, self.builder, self.arguments[number])
        index = self.arguments[number + 1]
        if step:  # further on by so many times the argument after it
            index = self.builder.add(index, self.builder.mul(self.arguments[number + 2], index.type(step)))
        if ahead:  # by so many rows
            index = self.builder.add(index, index.type(ahead * LANES))
        return self.builder.bitcast(self.builder.gep(array.data, [index]), vector.as_pointer())

    def load(self, number: int, vector: Any = _FLOATS, step: int = 0, ahead: int = 0) -> Any:
        """From the array that is argument ``number``, at the index after it."""
        return self.builder.load(self.place(number, vector, step, ahead), align=_bytes(vector))

    def store(self, value: Any, number: int, step: int = 0, ahead: int = 0) -> None:
        """Likewise."""
        self.builder.store(value, self.place(number, value.type, step, ahead), align=_bytes(value.type))

    def spread(self, number: int) -> Any:
        """The number that is argument ``number``, in all places."""
        return words.spread(self.builder, self.arguments[number], _FLOATS)

    def call(self, name: str, *values: Any) -> Any:
        """What LLVM knows by name."""
        name = f"llvm.{name}.v{LANES}f32"
        known = self.builder.module.globals.get(name)
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * len(values))
        return self.builder.call(known or ir.Function(self.builder.module, kind, name), values)

    def done(self) -> Any:
        return self._context.get_dummy_value()


def _bytes(vector: Any) -> int:
    return {ir.FloatType(): 4, ir.IntType(32): 4, ir.IntType(16): 2, ir.IntType(8): 1}[vector.element]


def _all(value: float) -> Any:
    return ir.Constant(_FLOATS, [value] * LANES)


def _pair(builder: Any, upper: Any, lower: Any) -> tuple[Any, Any]:
    total = builder.fadd(upper, lower)
    return total, _multiply_add(builder, lower, -2.0, total)


def _multiply_add(builder: Any, value: Any, power: float, other: Any) -> Any:
    """``value * power + other``, where a product with a power of two is exact: rounded once or twice is the same."""
    kind = ir.FunctionType(value.type, [value.type] * 3)
    name = f"llvm.fmuladd.v{value.type.count}f32"
    known = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(known, [value, ir.Constant(value.type, [power] * value.type.count), other])


@intrinsic
def butterfly(typing: Any, tile: Any, first: Any, distance: Any) -> Any:
    """``a, b = a + b, (a + b) - 2 b`` of rows that are so far apart."""

    def generate(*given: Any) -> Any:
        row = _Operation(*given)
        for number, value in enumerate(_pair(row.builder, row.load(0), row.load(0, step=1))):
            row.store(value, 0, step=number)
        return row.done()

    return types.void(tile, types.int64, types.int64), generate


@intrinsic
def butterflies(typing: Any, tile: Any, first: Any, distance: Any) -> Any:
    """The same for neighbours of four rows, and then for those that are two apart."""

    def generate(*given: Any) -> Any:
        row = _Operation(*given)
        a, b, c, d = (row.load(0, step=number) for number in range(4))
        (a, b), (c, d) = _pair(row.builder, a, b), _pair(row.builder, c, d)
        (a, c), (b, d) = _pair(row.builder, a, c), _pair(row.builder, b, d)
        for number, value in enumerate((a, b, c, d)):
            row.store(value, 0, step=number)
        return row.done()

    return types.void(tile, types.int64, types.int64), generate


@intrinsic
def scale(typing: Any, out: Any, at: Any, source: Any, place: Any, factor: Any) -> Any:
    """``out = source * factor``; -0.0 becomes 0.0."""

    def generate(*given: Any) -> Any:
        row = _Operation(*given)
        row.store(row.builder.fadd(row.builder.fmul(row.load(2), row.spread(4)), _all(0.0)), 0)
        return row.done()

    return types.void(out, at, source, place, types.float32), generate


@intrinsic
def fetch(typing: Any, source: Any, at: Any) -> Any:
    """Have the row that begins there brought to the caches, meanwhile; it may lie beyond the array's end."""

    def generate(*given: Any) -> Any:
        row = _Operation(*given)
        make, integer = row.builder, ir.IntType(32)
        place = row.place(0, _BYTES.element)
        kind = ir.FunctionType(ir.VoidType(), [place.type, integer, integer, integer])
        known = make.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        make.call(known, [place, integer(0), integer(3), integer(1)])
        return row.done()

    return types.void(source, types.int64), generate


@intrinsic
def add_scaled(typing: Any, out: Any, at: Any, source: Any, place: Any, factor: Any) -> Any:
    """``out += source * factor``."""

    def generate(*given: Any) -> Any:
        row = _Operation(*given)
        row.store(row.builder.fadd(row.load(0), row.builder.fmul(row.load(2), row.spread(4))), 0)
        return row.done()

    return types.void(out, at, source, place, types.float32), generate


@intrinsic
def raise_to(typing: Any, largest: Any, at: Any, source: Any, place: Any, distance: Any) -> Any:
    """``largest = max(largest, abs(source))`` for four rows that are so far apart."""

    def generate(*given: Any) -> Any:
        row = _Operation(*given)
        found = [row.call("fabs", row.load(2, step=number)) for number in range(4)]
        pairs = _greater(row, found[0], found[1]), _greater(row, found[2], found[3])
        row.store(_greater(row, _greater(row, *pairs), row.load(0)), 0)
        return row.done()

    return types.void(largest, at, source, place, distance), generate


def _greater(row: _Operation, one: Any, other: Any) -> Any:
    return row.builder.select(row.builder.fcmp_ordered(">", one, other), one, other)


def _random(row: _Operation, state: Any) -> Any:
    """Sixteen random bits for each element of two rows, as int16: eight words of ``codes/randomness.py``."""
    make = row.builder
    word = words.spread(make, state, _WORDS)
    word = make.add(word, ir.Constant(_WORDS, [number * GAMMA % 2**64 for number in range(_WORDS.count)]))
    for shift, factor in ((30, FACTORS[0]), (27, FACTORS[1]), (31, 1)):
        word = make.xor(word, make.lshr(word, ir.Constant(_WORDS, [shift] * _WORDS.count)))
        if factor > 1:
            word = make.mul(word, ir.Constant(_WORDS, [factor] * _WORDS.count))
    return make.bitcast(word, _SHORTS)


@intrinsic
def round_levels(typing: Any, tile: Any, at: Any, factors: Any, zero: Any, offset: Any, state: Any) -> Any:
    """``tile = floor(offset + (tile * factors + random) / 65536)`` for two rows, from the word after ``state`` on."""

    def generate(*given: Any) -> Any:
        row = _Operation(*given)
        make = row.builder
        factors, random = row.load(2), _random(row, row.arguments[5])
        for number, half in enumerate((_FIRST, _SECOND)):
            own = make.sitofp(make.shuffle_vector(random, random, half), _FLOATS)
            level = make.fadd(make.fmul(row.load(0, ahead=number), factors), own)
            level = _multiply_add(make, level, 1 / 65536, row.spread(4))
            row.store(row.call("floor", level), 0, ahead=number)
        return row.done()

    return types.void(tile, at, factors, zero, types.float32, types.uint64), generate


@intrinsic
def to_codes(typing: Any, codes: Any, place: Any, tile: Any, at: Any) -> Any:
    """``codes = int8(tile)``."""

    def generate(*given: Any) -> Any:
        row = _Operation(*given)
        row.store(_codes(row), 0)
        return row.done()

    return types.void(codes, place, tile, at), generate


@intrinsic
def to_nibbles(typing: Any, packed: Any, place: Any, tile: Any, at: Any) -> Any:
    """The same with two codes of four bits in each of eight bytes, the first one lowest."""

    def generate(*given: Any) -> Any:
        row = _Operation(*given)
        make = row.builder
        pairs = make.bitcast(_codes(row), _PAIRS)
        low, high = make.and_(pairs, _each(0x000F)), make.and_(make.lshr(pairs, _each(4)), _each(0x00F0))
        row.store(make.trunc(make.or_(low, high), _HALF), 0)
        return row.done()

    return types.void(packed, place, tile, at), generate


def _codes(row: _Operation) -> Any:
    make = row.builder
    return make.trunc(make.fptosi(row.load(2), _INTS), _BYTES)


@intrinsic
def to_numbers(typing: Any, tile: Any, at: Any, steps: Any, zero: Any, shift: Any) -> Any:
    """``tile = (tile + shift) * steps``."""

    def generate(*given: Any) -> Any:
        row = _Operation(*given)
        row.store(row.builder.fmul(row.builder.fadd(row.load(0), row.spread(4)), row.load(2)), 0)
        return row.done()

    return types.void(tile, at, steps, zero, types.float32), generate


@intrinsic
def add_codes(
    typing: Any, tile: Any, at: Any, codes: Any, place: Any, steps: Any, column: Any, shift: Any, sign: Any
) -> Any:
    """``tile += (level + shift) * steps``, of two's complements whose sign is the bit ``sign``."""

    def generate(*given: Any) -> Any:
        row = _Operation(*given)
        _stand_for(row, row.load(2, _BYTES))
        return row.done()

    return types.void(tile, at, codes, place, steps, column, types.float32, types.int32), generate


@intrinsic
def add_nibbles(
    typing: Any, tile: Any, at: Any, packed: Any, place: Any, steps: Any, column: Any, shift: Any, sign: Any
) -> Any:
    """The same for two codes in each byte."""

    def generate(*given: Any) -> Any:
        row = _Operation(*given)
        make = row.builder
        pairs = make.zext(row.load(2, _HALF), _PAIRS)
        pairs = make.and_(make.or_(pairs, make.shl(pairs, _each(4))), _each(0x0F0F))
        _stand_for(row, make.bitcast(pairs, _BYTES))
        return row.done()

    return types.void(tile, at, packed, place, steps, column, types.float32, types.int32), generate


def _stand_for(row: _Operation, codes: Any) -> None:
    """Add what codes stand for."""
    make = row.builder
    sign = words.spread(make, row.arguments[7], _INTS)
    level = make.sub(make.xor(make.zext(codes, _INTS), sign), sign)
    value = make.fmul(make.fadd(make.sitofp(level, _FLOATS), row.spread(6)), row.load(4))
    row.store(make.fadd(row.load(0), value), 0)


def _each(value: int) -> Any:
    return ir.Constant(_PAIRS, [value] * (LANES // 2))
