"""Operations in LLVM for streams of Huffman codes; see ``simd.py``."""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lightning_compress.kernels.numba.llvm import BYTES, FLOATS, INTS, Operation, constant, plane_of, spread_bits

_WORD = ir.VectorType(ir.IntType(64), 1)


@intrinsic
def load_word(typing: Any, data: Any, at: Any) -> Any:
    """Return the 8 bytes from ``at`` on, the first lowest: uint64."""

    def generate(*given: Any) -> Any:
        one = Operation(*given)
        make = one.builder
        return make.load(make.bitcast(one.pointer(0, BYTES), _WORD.element.as_pointer()), align=1)

    return types.uint64(data, types.int64), generate


@intrinsic
def store_word(typing: Any, data: Any, at: Any, word: Any) -> Any:
    """Write 8 bytes; see ``load_word``."""

    def generate(*given: Any) -> Any:
        one = Operation(*given)
        make = one.builder
        make.store(one.arguments[2], make.bitcast(one.pointer(0, BYTES), _WORD.element.as_pointer()), align=1)
        return one.done()

    return types.void(data, types.int64, types.uint64), generate


def _adder(bits: int) -> Any:
    raw = bits - 4

    def add_pairs(
        typing: Any, tile: Any, at: Any, pairs: Any, index: Any, low: Any, four: Any, two: Any, one: Any, step: Any
    ) -> Any:
        def generate(*given: Any) -> Any:
            row = Operation(*given)
            make = row.builder
            codes = make.shl(spread_bits(row, row.load(2, plane_of(4)), 4), constant(raw, BYTES))
            place = 0
            for number, width in enumerate((4, 2, 1), 1):
                if raw & width:
                    plane = spread_bits(row, row.load(4, plane_of(width), index=number), width)
                    codes = make.or_(codes, make.shl(plane, constant(place, BYTES)))
                    place += width
            sign = constant(2 ** (bits - 1), INTS)
            level = make.sub(make.xor(make.zext(codes, INTS), sign), sign)
            row.store(make.fadd(row.load(0), make.fmul(make.sitofp(level, FLOATS), row.spread(8))), 0)
            return row.done()

        return types.void(tile, at, pairs, index, low, four, two, one, types.float32), generate

    return intrinsic(add_pairs)


add_4, add_5, add_6, add_7, add_8 = (_adder(bits) for bits in range(4, 9))
"""Compute ``tile += level * step`` of a row of levels of 4 to 8 bits, two's complements.

Their highest four bits are in ``pairs``, the others in ``low``, in planes of 4, 2 and 1 bits, as far as there are any.
"""
