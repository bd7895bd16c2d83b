"""Which parameter takes which codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from lightning_compress.codecs import Codec, Dense
from lightning_compress.layout import Layout
from lightning_compress.reducers import Reducer

Shape = tuple[int, ...]
Method = Codec | Reducer


@dataclass(frozen=True)
class Stretch:
    """The part of a vector, beginning at ``start``, that one method takes care of."""

    method: Method
    layout: Layout
    start: int

    @property
    def place(self) -> slice:
        """Where it stands in the vector."""
        return slice(self.start, self.start + self.layout.numel)


@dataclass(frozen=True)
class Rules:
    """Small, 1-D and excluded parameters travel as float32, the others by the method.

    A method that treats every element alone (a cast) is given the small and 1-D parameters too: it has nothing to lose
    there, and one dtype is one all-reduce.

    Args:
        method: for what is worth compressing.
        min_numel: parameters with fewer elements stay dense.
        exclude: shell-style patterns of parameter names that stay dense.
    """

    method: Method
    min_numel: int
    exclude: tuple[str, ...]

    def compresses(self, name: str, shape: Shape) -> bool:
        """Whether this parameter is given to the method."""
        if any(fnmatchcase(name, pattern) for pattern in self.exclude):
            return False
        return self.method.elementwise or (len(shape) > 1 and prod(shape) >= self.min_numel)

    def stretches(self, parameters: Sequence[tuple[str, Shape]]) -> tuple[tuple[int, ...], tuple[Stretch, ...]]:
        """Order a group's parameters by method.

        Args:
            parameters: name and shape, in the bucket's order.

        Returns:
            the parameters' places in the bucket, in the vector's order; and the vector's stretches.
        """
        compressed = [self.compresses(*parameter) for parameter in parameters]
        order: list[int] = []
        stretches: list[Stretch] = []
        choices: tuple[tuple[Method, bool], ...] = ((Dense(), False), (self.method, True))
        for method, wanted in choices:
            places = [place for place, is_compressed in enumerate(compressed) if is_compressed is wanted]
            if places:
                start = stretches[-1].place.stop if stretches else 0
                stretches.append(Stretch(method, Layout.of(parameters[place] for place in places), start))
                order += places
        return tuple(order), tuple(stretches)

    def check(self, names: Sequence[str]) -> None:
        """Refuse patterns that match nothing.

        Raises:
            ValueError: a pattern in ``exclude`` matches no parameter.
        """
        for pattern in self.exclude:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"exclude={pattern!r} matches no parameter that is trained; patterns are shell-style "
                    f"('*.bias', 'head.*'), a shared parameter has its first name, and the names begin with "
                    f"{', '.join(names[:5])}"
                )
