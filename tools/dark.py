"""Write a dark variant beside each picture of the documentation: ``python -m tools.dark``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
MARK = "_dark"
PAPER = (13, 17, 23)
"""Takes the place of white: the page of the dark site."""


def pictures() -> list[Path]:
    """Return the pictures of the documentation that have a dark variant."""
    return [path for path in sorted((ROOT / "docs").rglob("*.png")) if not path.stem.endswith(MARK)]


def beside(picture: Path) -> Path:
    """Return where a picture's dark variant lies."""
    return picture.with_stem(picture.stem + MARK)


def darkened(picture: Path) -> Any:
    """Return a picture of at most 256 colours with light and dark exchanged, and its hues kept; an image of PIL."""
    given = Image.open(picture)
    image = given if given.mode == "P" else given.convert("RGB").quantize(256)
    colors = image.getpalette("RGB")
    assert colors is not None
    turned = [each for place in range(0, len(colors), 3) for each in _turned(colors[place : place + 3])]
    image.putpalette(turned)
    return image


def _turned(color: list[int]) -> list[int]:
    shift = 255 - max(color) - min(color)  # of HSL's lightness; its hue and its saturation stay
    return [round(low + (value + shift) * (235 - low) / 255) for value, low in zip(color, PAPER, strict=True)]


def main() -> int:
    """Write all dark variants.

    Returns:
        the exit status.
    """
    for picture in pictures():
        darkened(picture).save(beside(picture), optimize=True)
        print(beside(picture).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
