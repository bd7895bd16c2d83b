"""Thirty-two elements and a word of thirty-two bits, as one vector instruction each; no compiler finds these by itself.

LLVM's vectors of booleans are words: comparing gives one, and one chooses between two numbers, on any processor.
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 32
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_ZEROS = ir.Constant(_VECTOR, [0.0] * LANES)


def at(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    """Where in a contiguous float32 array a vector begins."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _VECTOR.as_pointer())


def spread(builder: Any, number: Any, vector: Any = _VECTOR) -> Any:
    """One number in all places of a vector of its type."""
    integer = ir.IntType(32)
    all_first = ir.Constant(ir.VectorType(integer, vector.count), [0] * vector.count)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.Constant(integer, 0))
    return builder.shuffle_vector(one, one, all_first)


def _chosen(builder: Any, word: Any, high: Any, low: Any) -> Any:
    """``high`` where the word has a bit, the first one lowest, and ``low`` elsewhere."""
    bits = builder.bitcast(word, ir.VectorType(ir.IntType(1), LANES))
    return builder.select(bits, spread(builder, high), spread(builder, low))


@intrinsic
def signs(typing: Any, values: Any, index: Any) -> Any:
    """``values[index + j] >= 0`` as bit j of an uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = builder.load(at(context, builder, signature.args[0], *arguments), align=4)
        return builder.bitcast(builder.fcmp_ordered(">=", found, _ZEROS), ir.IntType(LANES))

    return types.uint32(values, index), generate


@intrinsic
def put(typing: Any, out: Any, index: Any, word: Any, high: Any, low: Any) -> Any:
    """``out[index + j] = high`` or ``low`` by bit j of the word."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = at(context, builder, signature.args[0], *arguments[:2])
        builder.store(builder.fadd(_chosen(builder, *arguments[2:]), _ZEROS), place, align=4)  # -0.0 becomes 0.0
        return context.get_dummy_value()

    return types.void(out, index, types.uint32, types.float32, types.float32), generate


@intrinsic
def add(typing: Any, out: Any, index: Any, word: Any, high: Any, low: Any) -> Any:
    """``out[index + j] += high`` or ``low`` by bit j of the word."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = at(context, builder, signature.args[0], *arguments[:2])
        total = builder.fadd(builder.load(place, align=4), _chosen(builder, *arguments[2:]))
        builder.store(total, place, align=4)
        return context.get_dummy_value()

    return types.void(out, index, types.uint32, types.float32, types.float32), generate


@intrinsic
def reaching(typing: Any, values: Any, index: Any, least: Any) -> Any:
    """``abs(values[index + j]) >= least`` as bit j of an uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = builder.load(at(context, builder, signature.args[0], *arguments[:2]), align=4)
        upper = builder.fcmp_ordered(">=", found, spread(builder, arguments[2]))
        lower = builder.fcmp_ordered("<=", found, spread(builder, builder.fneg(arguments[2])))
        return builder.bitcast(builder.or_(upper, lower), ir.IntType(LANES))

    return types.uint32(values, index, types.float32), generate


@intrinsic
def lowest(typing: Any, word: Any) -> Any:
    """The place of the lowest bit of a word that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint32(types.uint32), generate
