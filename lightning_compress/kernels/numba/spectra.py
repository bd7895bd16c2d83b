"""Vector operations on the coefficients of a spectrum, written in LLVM; see ``simd.py``."""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lightning_compress.kernels.numba.llvm import FLOAT, INT, LANES, Operation, constant

__all__ = ["LANES", "MANY", "add_pair", "count", "energies", "reaching", "write_places"]

MANY = 64
"""Coefficients whose energies are compared at a time."""
_PAIR, _PAIRS, _PATTERNS = ir.VectorType(FLOAT, 2), ir.VectorType(FLOAT, 2 * LANES), ir.VectorType(INT, LANES)
_HALVES, _SHORTS = (ir.VectorType(ir.IntType(16), lanes) for lanes in (2 * LANES, MANY))
_WORD, _WORDS = ir.IntType(64), ir.VectorType(INT, MANY)
_EVEN, _ODD = (ir.Constant(_PATTERNS, list(range(first, first + 2 * LANES, 2))) for first in (0, 1))
_HIGHER = ir.Constant(ir.VectorType(INT, 2 * LANES), list(range(1, 4 * LANES, 2)))


@intrinsic
def energies(typing: Any, out: Any, at: Any, coarse: Any, first: Any, spectrum: Any, index: Any) -> Any:
    """Write the bits of the squared magnitudes of 32 complex numbers, ``spectrum[index:]``, to ``out``, int32.

    ``coarse``, int16, gets the higher halves. The second square is not rounded before it is added, as in torch.
    """

    def generate(*given: Any) -> Any:
        row, halves = Operation(*given), []
        make = row.builder
        for number in range(2):
            both = row.load(4, _PAIRS, ahead=2 * number)
            real, imaginary = (make.shuffle_vector(both, both, places) for places in (_EVEN, _ODD))
            energy = row.call("fma", imaginary, imaginary, make.fmul(real, real))
            bits = make.and_(make.bitcast(energy, _PATTERNS), constant(0x7FFFFFFF, _PATTERNS))
            row.store(bits, 0, ahead=number)
            halves.append(make.bitcast(bits, _HALVES))
        row.store(make.shuffle_vector(*halves, _HIGHER), 2)
        return row.done()

    return types.void(out, at, coarse, first, spectrum, index), generate


@intrinsic
def reaching(typing: Any, energies: Any, index: Any, least: Any) -> Any:
    """Return a word with bit j set if ``energies[index + j] >= least``, of 64 energies, int32: uint64."""

    def generate(*given: Any) -> Any:
        return _reaching(Operation(*given), _WORDS)

    return types.uint64(energies, index, types.int32), generate


@intrinsic
def count(typing: Any, energies: Any, index: Any, least: Any) -> Any:
    """Return how many of ``energies[index : index + 64]``, int32 or int16 as ``least``, are at least that: int64."""

    def generate(*given: Any) -> Any:
        many = Operation(*given)
        return many.builder.ctpop(_reaching(many, _WORDS if energies.dtype == types.int32 else _SHORTS))

    return types.int64(energies, index, energies.dtype), generate


def _reaching(many: Operation, vector: Any) -> Any:
    make = many.builder
    return make.bitcast(make.icmp_signed(">=", many.load(0, vector), many.spread(2, vector)), _WORD)


@intrinsic
def write_places(typing: Any, places: Any, at: Any, word: Any, first: Any) -> Any:
    """Write ``first`` plus the indices of the lowest 8 bits of a word that are 1: uint32; 32 for bits that are not.

    Returns:
        The word without these bits, uint32.
    """

    def generate(*given: Any) -> Any:
        few = Operation(*given)
        make, word, offset = few.builder, few.arguments[2], few.arguments[3]
        for number in range(8):  # without a branch, as none can then be mispredicted
            place = make.add(make.cttz(word, ir.IntType(1)(0)), offset)
            make.store(place, make.gep(few.pointer(0, INT), [INT(number)]))
            word = make.and_(word, make.sub(word, INT(1)))
        return word

    return types.uint32(places, at, types.uint32, types.int32), generate


@intrinsic
def add_pair(typing: Any, spectrum: Any, place: Any, values: Any, index: Any) -> Any:
    """Add two numbers, ``values[index:]``, to two others, ``spectrum[place:]``."""

    def generate(*given: Any) -> Any:
        pair = Operation(*given)
        pair.store(pair.builder.fadd(pair.load(0, _PAIR), pair.load(2, _PAIR)), 0)
        return pair.done()

    return types.void(spectrum, place, values, index), generate
