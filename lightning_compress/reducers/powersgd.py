"""PowerSGD: low-rank approximation of gradient matrices, by one step of a power iteration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import ClassVar

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.collectives import World
from lightning_compress.collectives.counting import all_reduce_bytes, all_reduce_rounds
from lightning_compress.core.layout import Layout, Segment
from lightning_compress.core.random import RandomBits, mix, name_key
from lightning_compress.core.state import State, States, StateSpec
from lightning_compress.reducers.reducer import Reducer, ReducerPlan


@dataclass(frozen=True)
class PowerSGD(Reducer):
    """Approximate the mean gradient ``M [n, m]`` by ``P Q^T``, with orthonormal ``P [n, r]`` and ``Q [m, r]``.

    Q is that of the last step. Then ``P = orthonormal(sum over ranks of M Q)`` and ``Q = mean over ranks of M^T P``.
    The mean of the gradients is approximated by ``P Q^T``. That is exact once the iteration has converged to a mean of
    rank r. The method is biased and needs error feedback.

    A rank keeps the residual ``M - P (M^T P)^T``, with its own ``M^T P``. The residual ``M - P Q^T`` would have the
    same sum over the ranks and give the same means, but grow as long as the ranks' gradients differ. The paper does not
    say which of the two it uses.

    A parameter of shape ``(n, ...)`` is a matrix of n rows. It is averaged as float32 if
    ``r (n + m) min_compression_rate`` is more than ``n m``, or if the vector has only a part of it. A group needs
    two float32 all-reduces: of the dense parameters and every P, and of every Q. That is ``32 r (n + m) / (n m)`` bits
    per element.

    Every rank computes the QR decomposition (Householder, which works for zeros) and the products itself, so ranks have
    equal bits only on equal hardware with an equal number of threads. A column of Q that becomes 0, as after a gradient
    of zeros, keeps its last value. Otherwise it could stay 0 for ever: the QR of 0 gives unit vectors, whose product
    with rows without a gradient is 0 again.

    State: every Q, ``4 r m`` bytes, equal on all ranks. The first Q is drawn from N(0, 1) with the parameter's name as
    seed.

    Args:
        rank: r, at least 1. The paper uses 1 to 4. With a rank that is too large for every matrix, all parameters are
            averaged exactly.
        warm_start: start from the last Q. Without it, every step draws a new Q.
        min_compression_rate: least ratio of the matrix's size to the factors' size, at least 1. The authors'
            implementation uses 2.

    Raises:
        ValueError: a setting is out of range.

    Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
    NeurIPS 2019, arXiv 1905.13727.
    """

    name: ClassVar[str] = "powersgd"
    contractive: ClassVar[bool] = True
    rank: int = 2
    warm_start: bool = True
    min_compression_rate: float = 2.0

    gone: ClassVar[Mapping[str, str]] = {"seed": "the first Q follows from names; give seed= beside the compressor"}

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"PowerSGD(rank={self.rank!r}): rank must be an integer, at least 1; try 2")
        if not isinstance(self.warm_start, bool):
            raise ValueError(f"PowerSGD(warm_start={self.warm_start!r}): warm_start must be true or false")
        rate = self.min_compression_rate
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 1 <= rate < math.inf:
            raise ValueError(
                f"PowerSGD(min_compression_rate={rate!r}): min_compression_rate must be a number, at least 1; try 2"
            )

    def factors(self, segment: Segment) -> bool:
        """Return True if a parameter is sent as factors: the vector has all of it, and the factors are small enough."""
        rows, columns = _matrix(segment)
        whole = segment.numel == rows * columns
        return whole and self.rank * (rows + columns) * self.min_compression_rate <= segment.numel

    def state(self, layout: Layout) -> Mapping[str, StateSpec]:
        """Declare every Q, transposed. Those of matrices of equal shape are adjacent."""
        stacks = _stacks(layout, self)
        if not stacks or not self.warm_start:
            return {}
        transposed = [(s.name, (self.rank, stack.columns)) for stack in stacks for s in stack.segments]
        return {"q": StateSpec(Layout.of(transposed), "shared", self._first)}

    def _first(self, segment: Segment) -> Tensor:
        return normal(mix(0, name_key((segment.name,))), segment.numel, torch.device("cpu"))

    def plan(self, layout: Layout, carried: int, world: World, states: States) -> ReducerPlan:
        """See ``Reducer.plan``."""
        return _PowerSGDPlan(layout, carried, world, states.get("q"), self)


@dataclass(frozen=True)
class _Stack:
    """A batch of matrices of equal shape, at equal distances in the vector.

    Args:
        segments: the parameters.
        rows: n.
        columns: m.
    """

    segments: tuple[Segment, ...]
    rows: int
    columns: int

    @property
    def count(self) -> int:
        """Number of matrices."""
        return len(self.segments)

    def view(self, vector: Tensor) -> Tensor:
        """Return a view of the matrices in the vector, ``[count, n, m]``."""
        first = self.segments[0].offset
        distance = self.segments[1].offset - first if self.count > 1 else 0
        return vector[first:].as_strided((self.count, self.rows, self.columns), (distance, self.columns, 1))


class _PowerSGDPlan(ReducerPlan):
    """Keeps factors transposed, ``[count, r, n]`` and ``[count, r, m]``: products along rows are twice as fast."""

    def __init__(self, layout: Layout, carried: int, world: World, state: State | None, reducer: PowerSGD) -> None:
        collective, device, meter = world
        self._collective, self._meter, self._state = collective, meter, state
        self._stacks = _stacks(layout, reducer)
        self._dense = [slice(s.offset, s.end) for s in layout.segments if not reducer.factors(s)]
        lengths = [part.stop - part.start for part in self._dense]
        lefts = [(stack.count, reducer.rank, stack.rows) for stack in self._stacks]
        bases = [(sum(count for count, *_ in same), *shape) for shape, same in groupby(lefts, itemgetter(1, 2))]
        self._rights = [(stack.count, reducer.rank, stack.columns) for stack in self._stacks]
        first = carried + sum(lengths) + sum(map(math.prod, lefts))
        self._first = torch.zeros(first, dtype=torch.float32, device=device)
        self._carried, rest = self._first[:carried], self._first[carried:]
        self._sums = rest[: sum(lengths)].split(lengths)
        self._left = _views(rest[sum(lengths) :], lefts)
        self._base = rest[sum(lengths) :]  # the same memory, with equal shapes in one batch
        self._bases = _views(self._base, bases)
        second = sum(map(math.prod, self._rights))
        self._start = torch.empty(second, dtype=torch.float32, device=device)
        self.bytes_sent = sum(all_reduce_bytes(4 * count, collective.size) for count in (len(self._first), second))
        self.rounds = 2 * all_reduce_rounds(collective.size)
        if fused := kernels.backend(__name__, device, "triton"):
            self._rows = fused.table(bases, device), fused.table(self._rights, device)
        self._fused = fused

    def mean(self, vector: Tensor, out: Tensor, carried: Tensor, key: int) -> None:
        matrices = [stack.view(vector) for stack in self._stacks]
        with self._meter.encode:
            rights = self._directions(key, carried)
            for part, total in zip(self._dense, self._sums, strict=True):
                total.copy_(vector[part])
                vector[part].zero_()
            for matrix, left, right in zip(matrices, self._left, rights, strict=True):
                torch.bmm(right, matrix.mT, out=left)
        self._collective.all_reduce(self._first)
        with self._meter.decode:
            if self._fused:
                self._fused.about_one(self._rows[0], self._base, self._base, self._carried, carried)
            else:
                carried.copy_(self._carried)
            for part, total in zip(self._dense, self._sums, strict=True):
                torch.mul(total, 1 / self._collective.size, out=out[part])
        if self._stacks:
            self._multiply_back(matrices, [stack.view(out) for stack in self._stacks])

    def _multiply_back(self, matrices: Sequence[Tensor], means: Sequence[Tensor]) -> None:
        second = self._state.pending if self._state else self._start
        rights = _views(second, self._rights)
        with self._meter.encode:
            for base in self._bases:
                scaled = base if self._fused else _about_one(base, out=base)
                base.copy_(torch.linalg.qr(scaled.mT).Q.mT)
            for matrix, left, right in zip(matrices, self._left, rights, strict=True):
                torch.bmm(left, matrix, out=right)
                _add_product(matrix, left, right, -1.0)
        self._collective.all_reduce(second)
        with self._meter.decode:
            averaged = self._averaged(second)
            for mean, left, right in zip(means, self._left, averaged, strict=True):
                if _rounds_products(mean.device):
                    _add_product(mean.zero_(), left, right, 1.0)
                else:
                    torch.bmm(left.mT, right, out=mean)
            if self._state and not self._fused:  # a column of zeros keeps its last value; 0 would stay 0
                for right, before in zip(rights, _views(self._state.committed, self._rights), strict=True):
                    largest = torch.linalg.vector_norm(right, math.inf, -1, keepdim=True)
                    right.addcmul_(before, (largest == 0).float())

    def _averaged(self, second: Tensor) -> list[Tensor]:
        """Return every Q as the mean over the ranks; of kernels, ``second`` has what is kept of them then."""
        weight = 1 / self._collective.size
        if self._fused and self._state:
            self._fused.average(self._rows[1], second, weight, self._state.committed, self._start)
            return _views(self._start, self._rights)
        return _views(second.mul_(weight), self._rights)

    def _directions(self, key: int, carried: Tensor) -> list[Tensor]:
        """Return every Q to multiply with, and copy the carried floats. The Q of the last step is scaled to about 1.

        Unscaled, P would have the magnitude of the squared gradient. Scaling by powers of two is exact.
        """
        rights = _views(self._start, self._rights)
        if self._fused and self._state:
            self._fused.about_one(self._rows[1], self._state.base(), self._start, carried, self._carried)
            return rights
        self._carried.copy_(carried)
        if self._state is None:
            self._start.copy_(normal(key, len(self._start), self._start.device))
            return rights
        for right, before in zip(rights, _views(self._state.base(), self._rights), strict=True):
            _about_one(before, out=right)
        return rights


def _about_one(rows: Tensor, out: Tensor) -> Tensor:
    """Write to ``out`` each row times a power of two, such that its largest magnitude is about 1."""
    exponent = torch.linalg.vector_norm(rows, math.inf, -1, keepdim=True).frexp().exponent
    return torch.ldexp(rows, exponent.neg_().clamp_(-126, 126), out=out)


def _rounds_products(device: torch.device) -> bool:
    """Return True if matrix products use TensorFloat-32, which rounds the factors to less than float32."""
    if device.type != "cuda":
        return False
    matmul = torch.backends.cuda.matmul
    precision: str | None = getattr(matmul, "fp32_precision", None)  # from torch 2.9 on, where allow_tf32 may raise
    return precision not in ("ieee", "none") if precision else bool(matmul.allow_tf32)


def _add_product(matrix: Tensor, left: Tensor, right: Tensor, sign: float) -> None:
    """Compute ``matrix += sign * left^T right`` in full float32, so that exactly what is sent leaves the vector."""
    if not _rounds_products(matrix.device):
        matrix.baddbmm_(left.mT, right, alpha=sign)
        return
    for column in range(left.shape[1]):
        matrix.addcmul_(left[:, column, :, None], right[:, column, None, :], value=sign)


def _matrix(segment: Segment) -> tuple[int, int]:
    """Return rows and columns of a parameter."""
    rows, *rest = segment.shape or (1,)
    return rows, math.prod(rest)


def _stacks(layout: Layout, reducer: PowerSGD) -> list[_Stack]:
    """Return the batches of the parameters that are sent as factors, ordered by rows and columns."""
    stacks = []
    segments = sorted(filter(reducer.factors, layout.segments), key=_matrix)
    for (rows, columns), same in groupby(segments, _matrix):
        run: list[Segment] = []
        for segment in same:
            if len(run) > 1 and segment.offset - run[-1].offset != run[1].offset - run[0].offset:
                stacks.append(_Stack(tuple(run), rows, columns))
                run = []
            run.append(segment)
        stacks.append(_Stack(tuple(run), rows, columns))
    return stacks


def _views(buffer: Tensor, shapes: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    """Return views of these shapes, which fill the buffer in order."""
    return [part.view(shape) for part, shape in zip(buffer.split([*map(math.prod, shapes)]), shapes, strict=True)]


def normal(key: int, numel: int, device: torch.device) -> Tensor:
    """Return numbers from N(0, 1) that depend on the key only, by the Box-Muller transform: float32 ``[numel]``."""
    bits = RandomBits(2 * numel, device).draw(key, 0, 2 * numel).view(2, numel)
    radius, angle = (bits.float() + 32768.5) / 65536
    return torch.sqrt(-2 * torch.log(radius)) * torch.cos(2 * math.pi * angle)
