"""Moniqua's arithmetic: the cell of a number, its lowest bits as a code, and the cell recovered from a close number.

Cells have the width ``step``. The cell of x is ``n = floor(x / step + u)``; it stands for ``(n + o) * step``. A code is
``n mod 2^bits``. Of all cells with that code, a receiver takes the one nearest to its own number. If the two numbers
differ by less than theta, this is exactly n. Differences of cells are integers, so they are exact, too. Each block of a
vector has its own step and hash. Everything here is computed in float64 and int64, several blocks at a time;
``lattice_numba.py`` does the same in one pass.

    rounding     u        o        largest error, in steps
    nearest      0        1/2      1/2
    dither       random   1/2 - u  1/2, unbiased
    stochastic   random   0        1, unbiased

The random u of an element is the same on all ranks, so that close models are rounded in the same way.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.packing.planes import pack_plane, unpack_plane

Rounding = Literal["nearest", "dither", "stochastic"]
ROUNDINGS: tuple[str, ...] = get_args(Rounding)
BOUND = 2.0**51
"""Largest absolute value of a cell; larger values and NaN mean that the model has diverged."""
FACTORS = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xBF58476D1CE4E5B9)
"""Multipliers of the hash: of the cell, of its index, and of both."""


def relative_error(bits: int, rounding: str) -> float:
    """Return delta: the largest error of a code, as a share of the whole interval."""
    return 2.0**-bits if rounding == "stochastic" else 2.0 ** -(bits + 1)


class Blocks(NamedTuple):
    """Consecutive parts of a vector.

    Attributes:
        sizes: int64 ``[blocks]``: elements of each block.
        steps: float64 ``[blocks]``: width of a cell.
    """

    sizes: Tensor
    steps: Tensor

    @classmethod
    def single(cls, numel: int, step: float, device: torch.device) -> Blocks:
        """Return one block of ``numel`` elements."""
        numels = torch.tensor([numel], dtype=torch.int64, device=device)
        return cls(numels, torch.tensor([step], dtype=torch.float64, device=device))

    def spread(self, values: Tensor) -> Tensor:
        """Repeat the value of each block for all of its elements."""
        return torch.repeat_interleave(values, self.sizes)

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of each block's elements; int64 sums may wrap around."""
        stops = self.sizes.cumsum(0)
        total = torch.cat([values.new_zeros(1), values.cumsum(0)])
        return total[stops] - total[stops - self.sizes]


class Lattice:
    """The arithmetic for one width of codes.

    Args:
        bits: of a code: 1, 2, 4 or 8.
        rounding: see above.
        device: of the vectors.
    """

    def __init__(self, bits: int, rounding: Rounding, device: torch.device) -> None:
        self.bits, self._rounding = bits, rounding
        self._fast = kernels.backend(__name__, device, "numba")

    def encode(self, x: Tensor, blocks: Blocks, draws: Tensor | None, first: int, packed: Tensor) -> Tensor:
        """Write the codes of ``x`` into ``packed``.

        Args:
            x: float32 ``[n]``, contiguous.
            blocks: of x.
            draws: int16 ``[n]``, random bits, the same on all ranks; None for nearest.
            first: index of ``x[0]`` in the whole vector.
            packed: uint8 ``[ceil(n bits / 8)]``, overwritten; the first code is in the lowest bits of each byte.

        Returns:
            int64 ``[blocks]``: the hash of the cells and their indices. It is wrong on purpose if a cell is beyond
            ``BOUND``: all such cells look alike, so the block must be sent as float32.
        """
        if self._fast:
            hashes = np.zeros(len(blocks.sizes), np.int64)
            self._fast.encode(*self._arrays(x, blocks, draws), first, packed.numpy(), hashes)
            return torch.from_numpy(hashes)
        scaled = _scaled(x, blocks)
        cells = torch.floor(scaled + self._shift(draws)).long()
        codes = torch.zeros(-(-len(x) // 8) * 8, dtype=torch.uint8, device=x.device)
        codes[: len(x)] = cells & (2**self.bits - 1)
        pack_plane(codes, 0, self.bits, packed)
        return blocks.sums(_words(cells, first) + (scaled.abs() >= BOUND))

    def hash(self, x: Tensor, blocks: Blocks, draws: Tensor | None, first: int, packed: Tensor) -> Tensor:
        """Return the hashes of the cells recovered from a neighbour's codes and ``x``; see ``encode``."""
        if self._fast:
            hashes = np.zeros(len(blocks.sizes), np.int64)
            self._fast.hash_cells(*self._arrays(x, blocks, draws), first, packed.numpy(), hashes)
            return torch.from_numpy(hashes)
        return blocks.sums(_words(self.recover(_scaled(x, blocks), draws, packed), first))

    def move(
        self,
        x: Tensor,
        blocks: Blocks,
        draws: Tensor | None,
        packed: list[Tensor],
        weights: Tensor,
        extra: Tensor | None,
        moved: Tensor | None = None,
    ) -> None:
        """Add ``step * sum_j weight_j (n_j - n) + extra`` to ``x``, in place; see ``encode``.

        Args:
            x: see ``encode``.
            blocks: see ``encode``.
            draws: see ``encode``.
            packed: the codes of each neighbour.
            weights: float64 ``[neighbours, blocks]``.
            extra: float64 ``[n]``, or None.
            moved: float32 ``[n]``, which gets the same addition, or None.
        """
        if self._fast:
            rows = np.stack([each.numpy() for each in packed]) if packed else np.zeros((0, 1), np.uint8)
            more = np.zeros(0) if extra is None else extra.numpy()
            sums = np.zeros(0, np.float32) if moved is None else moved.numpy()
            self._fast.move(*self._arrays(x, blocks, draws), rows, weights.numpy(), more, sums)
            return
        scaled = _scaled(x, blocks)
        own = torch.floor(scaled + self._shift(draws)).long()
        total = torch.zeros_like(scaled)
        for codes, weight in zip(packed, weights, strict=True):
            total += blocks.spread(weight) * (self.recover(scaled, draws, codes) - own).double()
        change = blocks.spread(blocks.steps) * total
        if extra is not None:
            change += extra
        x.copy_(x.double() + change)
        if moved is not None:
            moved.copy_(moved.double() + change)

    def differences(self, x: Tensor, step: float, packed: Tensor, first: int, out: Tensor) -> tuple[int, int]:
        """Write how many cells a neighbour's cells, recovered from its codes, are above those of ``x``.

        One block, rounded to nearest. A difference is written as a code, plus ``2^(bits - 1)``. Those that a code
        cannot hold become the nearest that it can: recovered cells may be ``2^(bits - 1)`` above.

        Args:
            x: see ``encode``.
            step: width of a cell.
            packed: the neighbour's codes, see ``encode``.
            first: see ``encode``.
            out: the differences, as ``packed``.

        Returns:
            the hash of the recovered cells, and the largest difference.
        """
        if self._fast:
            word, largest = self._fast.differences(x.numpy(), step, self.bits, first, packed.numpy(), out.numpy())
            return _signed(int(word)), int(largest)
        scaled, half = _scaled(x, Blocks.single(len(x), step, x.device)), 2 ** (self.bits - 1)
        cells = self.recover(scaled, None, packed)
        apart = cells - torch.floor(scaled).long()
        codes = torch.zeros(-(-len(x) // 8) * 8, dtype=torch.uint8, device=x.device)
        codes[: len(x)] = apart.clamp(-half, half - 1) + half
        pack_plane(codes, 0, self.bits, out)
        return int(_words(cells, first).sum()), int(apart.abs().max()) if len(x) else 0

    def add_differences(self, packed: Tensor, factor: float, x: Tensor) -> None:
        """Add ``factor`` times what ``differences`` wrote to ``x``, in place.

        Factor, product and sum are rounded to float32, so that two vectors from which the same is added and subtracted
        move by the same numbers.

        Args:
            packed: what ``differences`` wrote.
            factor: of each.
            x: see ``encode``.
        """
        if self._fast:
            self._fast.add_differences(packed.numpy(), self.bits, np.float32(factor), x.numpy())
            return
        codes = torch.empty(-(-len(x) // 8) * 8, dtype=torch.uint8, device=x.device)
        unpack_plane(packed, 0, self.bits, codes)
        x.add_((codes[: len(x)].float() - 2 ** (self.bits - 1)).mul_(factor))

    def recover(self, scaled: Tensor, draws: Tensor | None, packed: Tensor) -> Tensor:
        """Return the cells of a neighbour's codes, int64 ``[n]``: the nearest cells to ``scaled`` with these codes.

        Args:
            scaled: float64 ``[n]``: this rank's numbers, divided by the step.
            draws: see ``encode``.
            packed: the neighbour's codes.
        """
        codes = torch.zeros(-(-len(scaled) // 8) * 8, dtype=torch.uint8, device=scaled.device)
        unpack_plane(packed, 0, self.bits, codes)
        least = torch.ceil(scaled - self._offset(draws)).long() - 2 ** (self.bits - 1)
        cells: Tensor = least + ((codes[: len(scaled)] - least) & (2**self.bits - 1))
        return cells

    def _arrays(self, x: Tensor, blocks: Blocks, draws: Tensor | None) -> tuple[Any, ...]:
        rounding = ROUNDINGS.index(self._rounding)
        return x.numpy(), blocks.sizes.numpy(), blocks.steps.numpy(), rounding, _array(draws), self.bits

    def _shift(self, draws: Tensor | None) -> Tensor | float:
        return 0.0 if draws is None else (draws.double() + 32768.5) / 65536

    def _offset(self, draws: Tensor | None) -> Tensor | float:
        if self._rounding == "stochastic":
            return 0.0
        return 0.5 - self._shift(draws)


def _scaled(x: Tensor, blocks: Blocks) -> Tensor:
    scaled = x.double() * blocks.spread(1 / blocks.steps)
    return torch.nan_to_num(scaled, nan=BOUND).clamp_(-BOUND, BOUND)


def _words(cells: Tensor, first: int) -> Tensor:
    places = torch.arange(first, first + len(cells), dtype=torch.int64, device=cells.device)
    words = cells * _signed(FACTORS[0]) + places * _signed(FACTORS[1])
    words ^= (words >> 32) & 0xFFFFFFFF
    words *= _signed(FACTORS[2])
    words ^= (words >> 29) & (2**35 - 1)
    return words


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _array(draws: Tensor | None) -> npt.NDArray[np.int16]:
    return np.zeros(0, np.int16) if draws is None else draws.numpy()
