"""Which of thirty-two elements are not 0, as a word, and how many bits a word has; as ``words`` does it."""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lightning_compress.kernels.numba import words


@intrinsic
def nonzero(typing: Any, values: Any, index: Any) -> Any:
    """``values[index + j] != 0``, as what is no number is, too, as bit j of an uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zeros = ir.Constant(ir.VectorType(ir.FloatType(), words.LANES), [0.0] * words.LANES)
        found = builder.load(words.at(context, builder, signature.args[0], *arguments), align=4)
        return builder.bitcast(builder.fcmp_unordered("!=", found, zeros), ir.IntType(words.LANES))

    return types.uint32(values, index), generate


@intrinsic
def ones(typing: Any, word: Any) -> Any:
    """How many bits of a word are 1."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint32(types.uint32), generate
