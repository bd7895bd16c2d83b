"""Float32 numbers where they lie: what is encoded, which is read once, and where decoded numbers go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_compress import kernels

NOTHING = np.empty(0, np.float32)
"""What kernels for a CPU get in place of an array that is not there."""
_NO_CODES = np.empty(0, np.uint8)
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

    @property
    def arrays(self) -> tuple[Place, Any, Any]:
        """The source as kernels for a CPU read it; see ``source_numba.py``."""
        return place_of(self.values), NOTHING if self.addend is None else self.addend.numpy(), _NO_CODES

    def feed(self, kernel: Callable[..., int], *arguments: Any) -> None:
        """Call a CPU kernel whose first argument is the source, and which returns ``source_numba.largest`` of it."""
        kernel(self.arrays, *arguments)


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

    @property
    def arrays(self) -> list[Any]:
        """What lies in one piece each, float32 ``[n]``, in order."""
        numbers, rows, begin, numel = self.place
        ends = np.minimum(rows[:, 1] + rows[:, 2], begin + numel) - rows[:, 1]
        starts = np.maximum(rows[:, 1], begin) - rows[:, 1]
        spans = zip((rows[:, 0] + starts).tolist(), (rows[:, 0] + ends).tolist(), strict=True)
        return [numbers[start:end] for start, end in spans if start < end]

    def copy_(self, values: Tensor) -> None:
        """Write float32 ``values [numel]``."""
        kernel().store(self.place, 0, values.numpy())


class Gradients(Source):
    """Gradients in pieces, plus an addend and coded errors.

    Args:
        pieces: where they lie.
        spare: see ``Source``.
        tensors: of each gradient in the vector's order, the tensors whose sum is zero if all are zero.
        check: is told the largest magnitude of what was read, and returns whether it may be sent.
        addend: see ``Source``.
        codes: uint8 array, of errors that are added where the pieces' rows say so; see ``blocks.table``.
    """

    def __init__(
        self,
        pieces: Pieces,
        spare: Tensor,
        tensors: Mapping[int, Sequence[Tensor]],
        check: Callable[[int], bool],
        addend: Tensor | None = None,
        codes: Any = _NO_CODES,
    ) -> None:
        super().__init__(spare, addend, spare)
        self._pieces, self._tensors, self._check, self._codes = pieces, tensors, check, codes

    def part(self, span: slice) -> Gradients:
        """See ``Source``."""
        if (pieces := self._pieces[span]) is self._pieces:
            return self
        addend = None if self.addend is None else self.addend[span]
        return Gradients(pieces, self.spare[span], self._tensors, self._check, addend, self._codes)

    def into(self, out: Tensor | None) -> Tensor:
        """See ``Source``; zeros if a gradient is not finite."""
        out = self.spare if out is None else out
        return out if self._check(kernel().load(self.arrays, 0, len(self._pieces), out.numpy())) else out.zero_()

    def terms(self, span: slice) -> list[Tensor]:
        """See ``Source``; of a whole gradient."""
        return [*self._tensors[span.start], *([] if self.addend is None else [self.addend[span]])]

    @property
    def arrays(self) -> tuple[Place, Any, Any]:
        """See ``Source``."""
        return self._pieces.place, NOTHING if self.addend is None else self.addend.numpy(), self._codes

    def feed(self, kernel: Callable[..., int], *arguments: Any) -> None:
        """See ``Source``; what is not finite spoils the vector."""
        self._check(kernel(self.arrays, *arguments))


def kernel() -> Any:
    """Return the kernels for a CPU."""
    return kernels.backend(__name__, torch.device("cpu"), "numba")


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
