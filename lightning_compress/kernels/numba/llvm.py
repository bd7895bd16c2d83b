"""What an operation in LLVM is built from: its arguments as vectors."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from lightning_compress import kernels

LANES = kernels.TILE
"""Elements of a row."""
INT, FLOAT = ir.IntType(32), ir.FloatType()
FLOATS, INTS, BYTES = (ir.VectorType(each, LANES) for each in (FLOAT, INT, ir.IntType(8)))


class Operation:
    """The arguments of an operation in LLVM."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self._context, self.builder = context, builder
        self._kinds, self.arguments = signature.args, arguments

    def pointer(self, number: int, vector: Any, step: int = 0, ahead: int = 0, index: int = 1) -> Any:
        """Return a pointer to a vector in an array.

        Args:
            number: position of the array among the arguments. The next argument is the index of the first element.
            vector: type of the vector.
            step: move on by this multiple of the argument after the index.
            ahead: move on by this number of rows.
            index: the index is this number of arguments after the array.
        """
        array = self._context.make_array(self._kinds[number])(self._context, self.builder, self.arguments[number])
        place = self.arguments[number + index]
        if step:
            place = self.builder.add(place, self.builder.mul(self.arguments[number + 2], place.type(step)))
        if ahead:
            place = self.builder.add(place, place.type(ahead * LANES))
        return self.builder.bitcast(self.builder.gep(array.data, [place]), vector.as_pointer())

    def load(self, number: int, vector: Any = FLOATS, step: int = 0, ahead: int = 0, index: int = 1) -> Any:
        """Load a vector; see ``pointer``."""
        return self.builder.load(self.pointer(number, vector, step, ahead, index), align=_bytes(vector))

    def store(self, value: Any, number: int, step: int = 0, ahead: int = 0) -> None:
        """Store a vector; see ``pointer``."""
        self.builder.store(value, self.pointer(number, value.type, step, ahead), align=_bytes(value.type))

    def spread(self, number: int, vector: Any = FLOATS) -> Any:
        """Return the scalar argument ``number`` in all lanes of a vector."""
        return self.fill(self.arguments[number], vector)

    def fill(self, scalar: Any, vector: Any) -> Any:
        """Return a scalar in all lanes of a vector."""
        first = ir.Constant(ir.VectorType(INT, vector.count), [0] * vector.count)
        lane = self.builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, INT(0))
        return self.builder.shuffle_vector(lane, lane, first)

    def call(self, name: str, *values: Any) -> Any:
        """Call an LLVM intrinsic of float32 vectors by name."""
        vector = values[0].type
        name = f"llvm.{name}.v{vector.count}f32"
        known = self.builder.module.globals.get(name)
        kind = ir.FunctionType(vector, [vector] * len(values))
        return self.builder.call(known or ir.Function(self.builder.module, kind, name), values)

    def word(self, booleans: Any) -> Any:
        """Return 32 booleans as the bits of a word, the first lowest."""
        return self.builder.bitcast(booleans, INT)

    def done(self) -> Any:
        """Return what an operation without a result returns."""
        return self._context.get_dummy_value()


def _bytes(vector: Any) -> int:
    return {FLOAT: 4, INT: 4, ir.IntType(16): 2, ir.IntType(8): 1}[vector.element]


def constant(value: float, vector: Any = FLOATS) -> Any:
    """Return a vector that has this value in all lanes."""
    return ir.Constant(vector, [value] * vector.count)


def plane_of(width: int) -> Any:
    """Return the type of a row of codes' bits in a plane of this width (codecs/packing/planes.py): bytes."""
    return ir.VectorType(ir.IntType(8), LANES * width // 8)


def spread_bits(row: Operation, packed: Any, width: int) -> Any:
    """Return the bits of a plane of 1, 2, 4 or 8 bits, ``packed``, as a code each: ``BYTES``."""
    make = row.builder
    if width == 8:
        return packed
    if width == 1:
        return make.zext(make.bitcast(packed, ir.VectorType(ir.IntType(1), LANES)), BYTES)
    lane = ir.VectorType(ir.IntType(64 // width), packed.type.count)
    spread = make.zext(packed, lane)
    for shift, mask in ((4, 0x0F0F),) if width == 4 else ((12, 0x000F000F), (6, 0x03030303)):
        spread = make.and_(make.or_(spread, make.shl(spread, constant(shift, lane))), constant(mask, lane))
    return make.bitcast(spread, BYTES)


def gather_bits(row: Operation, codes: Any, width: int) -> Any:
    """Undo ``spread_bits``."""
    make = row.builder
    if width == 8:
        return codes
    if width == 1:
        return make.bitcast(make.trunc(codes, ir.VectorType(ir.IntType(1), LANES)), plane_of(1))
    lane = ir.VectorType(ir.IntType(64 // width), plane_of(width).count)
    folded = make.bitcast(make.and_(codes, constant(2**width - 1, BYTES)), lane)
    for shift in (4,) if width == 4 else (6, 12):
        folded = make.or_(folded, make.lshr(folded, constant(shift, lane)))
    return make.trunc(folded, plane_of(width))
