"""What the user chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_compress.exchanges.cost import Link, link_of

Sent = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class FactorSettings:
    """Which layers, and how.

    Args:
        layers: shell-style patterns of module names, such as ``["classifier.*"]``; None: every linear layer of 65,536
            weights or more for which so many ranks can pay at all.
        exclude: patterns of module names that are left out.
        dtype: "float32": rows travel in the dtype in which backward has them, without loss; "bfloat16": in half as many
            bytes, rounded.
        force: every one of these layers goes by factors, measured or not; refused where they would send more.
        link: what is taken for the ranks' link, in place of a measurement: see ``Link``.

    Raises:
        ValueError: a value is none of these.
    """

    layers: Sequence[str] | str | None = None
    exclude: Sequence[str] | str = ()
    dtype: Sent = "float32"
    force: bool = False
    link: Link | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "exclude"):
            object.__setattr__(self, name, _patterns(name, getattr(self, name)))
        if self.layers == ():
            raise ValueError("layers=[] names no layer; name some, as in ['classifier.*'], or give None for all")
        if self.dtype not in get_args(Sent):
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(map(repr, get_args(Sent)))}")
        if not isinstance(self.force, bool):
            raise ValueError(f"force={self.force!r} must be true or false")
        if self.link is not None:
            object.__setattr__(self, "link", link_of(self.link))


def _patterns(name: str, given: object) -> tuple[str, ...] | None:
    if given is None and name == "layers":
        return None
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, Sequence) or not all(isinstance(each, str) and each for each in given):
        raise ValueError(f"{name}={given!r} must be a pattern of module names, or a list of them")
    return tuple(given)
