"""Float32 numbers where they lie: what is encoded, which is read once, and where decoded numbers go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_compress.core.blocks import Segments, table

NOTHING = np.empty(0, np.float32)
"""What kernels for a CPU get in place of an array that is not there."""
NO_CODES = np.empty(0, np.uint8)
_WHOLE = np.array([[0, 0, 2**62, -1, -1, 0]], np.int64)
"""The row of a vector that is one piece; see ``blocks.table``."""


Place = tuple[Any, Any, int, int]
"""Where the numbers of a vector lie in a CPU's memory; see ``source_numba.py``."""


def place_of(vector: Tensor | Pieces, span: slice | None = None) -> Place:
    """Return where a float32 vector on a CPU lies, or a slice of it."""
    place = (vector.numpy(), _WHOLE, 0, len(vector)) if isinstance(vector, Tensor) else vector.place
    return place if span is None else (*place[:2], place[2] + span.start, span.stop - span.start)


class Source:
    """The numbers of a vector, or the sum of a vector and an addend.

    Args:
        values: float32 ``[numel]``, finite.
        addend: float32 ``[numel]``, finite; or None.
        spare: float32 ``[numel]``, memory that encoding may overwrite if nothing is kept; None: that of ``values``.
    """

    def __init__(self, values: Tensor, addend: Tensor | None = None, spare: Tensor | None = None) -> None:
        self.values, self.addend, self.spare = values, addend, values if spare is None else spare

    def part(self, span: slice) -> Source:
        """Return the numbers of a slice."""
        return Source(self.values[span], None if self.addend is None else self.addend[span], self.spare[span])

    def into(self, out: Tensor | None) -> Tensor:
        """Write the numbers to one tensor and return it.

        Args:
            out: float32 ``[numel]``; it may be the memory of ``values`` or ``addend``. None: spare memory.
        """
        target = self.spare if out is None else out
        if self.addend is not None:
            return torch.add(self.values, self.addend, out=target)
        return target if target.data_ptr() == self.values.data_ptr() else target.copy_(self.values)

    def terms(self, span: slice) -> list[Tensor]:
        """Return the tensors whose sum a slice is."""
        return [self.values[span], *([] if self.addend is None else [self.addend[span]])]

    def pointers(self, rest: Tensor | None) -> tuple[tuple[Tensor, Tensor, Tensor], bool, bool]:
        """Return what kernels for accelerators read and write.

        Args:
            rest: see ``Plan.encode_from``.

        Returns:
            The tensors ``first`` and ``second`` of ``read_sum``, and ``rest`` or spare memory; whether both are added;
            whether ``rest`` is written.
        """
        second = self.values if self.addend is None else self.addend
        written = self.spare if rest is None else rest
        return (self.values, second, written), self.addend is not None, rest is not None

    def feed(self, kernel: Callable[..., int], *arguments: Any) -> None:
        """Call a CPU kernel whose first argument is the source, and which returns ``source_numba.largest`` of it."""
        addend = NOTHING if self.addend is None else self.addend.numpy()
        kernel((place_of(self.values), addend, NO_CODES), *arguments)


class Pieces:
    """A part of a vector whose numbers lie in several pieces of one CPU's memory, in any order.

    Args:
        place: see ``source_numba.py``.
    """

    def __init__(self, place: Place) -> None:
        self.place = place

    def __len__(self) -> int:
        return self.place[3]

    def __getitem__(self, span: slice) -> Pieces:
        numbers, rows, begin, numel = self.place
        if span.start == 0 and span.stop == numel:
            return self
        return Pieces((numbers, rows, begin + span.start, span.stop - span.start))

    def copy_(self, values: Tensor) -> None:
        """Write float32 ``values [numel]``."""
        kernel().store(self.place, 0, values.numpy())


class Gradients(Source):
    """Gradients where they lie, plus an addend and coded errors.

    Args:
        pieces: where they lie.
        spare: see ``Source``.
        addend: see ``Source``.
        codes: uint8 array, of errors that are added where the pieces' rows say so; see ``blocks.table``.
        most: the largest magnitude that may be sent, as the bits of a float32.
        spoil: called if a larger one was read.
    """

    def __init__(
        self, pieces: Pieces, spare: Tensor, addend: Tensor | None, codes: Any, most: int, spoil: Callable[[], None]
    ) -> None:
        self.values, self.addend, self.spare = spare, addend, spare
        self._pieces, self._codes, self._most, self._spoil = pieces, codes, most, spoil
        self._arrays = pieces.place, NOTHING if addend is None else addend.numpy(), codes

    def part(self, span: slice) -> Gradients:
        """See ``Source``."""
        if span.start == 0 and span.stop == self._pieces.place[3]:
            return self
        addend = None if self.addend is None else self.addend[span]
        return Gradients(self._pieces[span], self.spare[span], addend, self._codes, self._most, self._spoil)

    def into(self, out: Tensor | None) -> Tensor:
        """See ``Source``; zeros if a gradient is not finite."""
        out = self.spare if out is None else out
        if kernel().load(self._arrays, 0, self._pieces.place[3], out.numpy()) > self._most:
            self._spoil()
            out.zero_()
        return out

    def feed(self, kernel: Callable[..., int], *arguments: Any) -> None:
        """See ``Source``; what is not finite spoils the vector."""
        if kernel(self._arrays, *arguments) > self._most:
            self._spoil()


@cache
def kernel() -> Any:
    """Return the kernels for a CPU, which whoever has pieces was told to use."""
    return import_module(f"{__name__}_numba")


class Memory:
    """Where the gradients of a group's parameters lie, which is mostly the same place in every step.

    Args:
        pieces: of parameters that are not empty: one-dimensional, contiguous, of one dtype.
        fast: kernels for a CPU may read them there.

    Attributes:
        pieces: as given.
        sizes: the elements of each.
        starts: the first element of each in a vector.
        bucket: where they lie if they fill one piece of memory.
        place: the same for float32 pieces and kernels for a CPU.
    """

    def __init__(self, pieces: list[Tensor], fast: bool) -> None:
        self.pieces = pieces
        self.sizes = tuple(each.numel() for each in pieces)
        *starts, self.numel = accumulate(self.sizes, initial=0)
        self.starts, self.bucket = tuple(starts), adjacent(pieces)
        here = fast and self.bucket is not None and pieces[0].dtype == torch.float32
        nothing = (-1,) * len(pieces)
        self.place = self.placed(nothing, nothing) if here else None

    def placed(self, coded: tuple[int, ...], treated: tuple[int, ...]) -> Pieces:
        """Return where they lie, with errors to add; see ``blocks.Segments``."""
        assert self.bucket
        rows = table(Segments(self.bucket.places, self.sizes, coded, treated), None, self.pieces[0].device)
        return Pieces((self.bucket.whole().numpy(), rows.numpy(), 0, self.numel))


@dataclass(frozen=True)
class Adjacent:
    """Tensors that together fill a piece of memory, in any order.

    Attributes:
        first: the tensor at the lowest address.
        places: of each tensor, the elements from there to its own first one.
        numel: elements of all of them.
    """

    first: Tensor
    places: tuple[int, ...]
    numel: int

    def whole(self) -> Tensor:
        """Return all of them as one tensor."""
        return self.first.as_strided((self.numel,), (1,))


def adjacent(tensors: Sequence[Tensor]) -> Adjacent | None:
    """Return where contiguous tensors of one dtype lie if they fill one piece of one storage, as in a bucket."""
    first = min(tensors, key=torch.Tensor.data_ptr)
    size, begin = first.element_size(), first.data_ptr()
    places = tuple((each.data_ptr() - begin) // size for each in tensors)
    numel, last = sum(each.numel() for each in tensors), tensors[max(range(len(places)), key=places.__getitem__)]
    if last.data_ptr() + last.nbytes - begin != numel * size:
        return None
    if last.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
        return None
    return Adjacent(first, places, numel)
