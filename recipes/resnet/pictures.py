"""Picture files: read them, cut them to one size."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

__all__ = ["SUFFIXES", "as_tensor", "centre", "check", "random_part", "read", "ready"]

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
MODES = {1: "L", 3: "RGB"}
ENDS = {b"\xff\xd8": b"\xff\xd9", b"\x89P": b"IEND"}
"""How JPEG and PNG end, by how they begin."""
TAIL = 65_536
"""Bytes at the end of a file in which that must be: some writers add a few."""


def read(path: Path, channels: int = 3) -> Image.Image:
    """Decode a picture, upright as its EXIF says; grey ones of 16 bits are brought to 8.

    Args:
        path: the file.
        channels: 3 for colour, 1 for grey.

    Raises:
        ValueError: there is no such file, or it is no whole picture.
    """
    try:
        with Image.open(path) as file:
            picture = ImageOps.exif_transpose(file)
            if picture.mode.startswith("I"):  # which Pillow would clip at 255, so that all is white
                picture = Image.fromarray(((np.array(picture).clip(0, 65_535) + 0.5) / 257).astype(np.uint8))
            return picture.convert(MODES[channels])
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file; give the path of a picture") from None
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"{path}: no whole picture that Pillow can read ({error}); give another one, or leave it out"
        ) from None


def check(path: Path) -> None:
    """See whether a file is a picture, and was not cut off, without decoding it (0.1 ms).

    Args:
        path: the file.

    Raises:
        ValueError: it is neither, as :func:`read` would find.
    """
    with path.open("rb") as file:
        start = file.read(2)
        file.seek(max(0, path.stat().st_size - TAIL))
        if start in ENDS and ENDS[start] not in file.read():
            raise ValueError(f"{path}: the end of the picture is missing; give another one, or leave it out")
    if start not in ENDS:
        read(path)


def centre(picture: Image.Image, size: int, shorter: int) -> Image.Image:
    """Shrink or enlarge the shorter side to ``shorter`` pixels, cut the middle ``size`` x ``size``.

    Args:
        picture: of any size.
        size: pixels a side of the result, at most ``shorter``.
        shorter: 256 for 224 in He et al. 2015.
    """
    width, height = picture.size
    side = min(width, height) * size / shorter  # of the square in the picture that becomes the result
    left, top = (width - side) / 2, (height - side) / 2
    return picture.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + side, top + side), 2.0)


def random_part(picture: Image.Image, size: int, bits: int, least: float = 0.08) -> Image.Image:
    """A random part of the picture, mirrored half of the time (Szegedy et al. 2014, arXiv:1409.4842, section 6).

    Its area is uniform in [``least``, 1] of the picture's, its aspect log-uniform in [3/4, 4/3]; after ten draws that
    do not fit, the largest middle one.

    Args:
        picture: of any size.
        size: pixels a side of the result.
        bits: decides, as from :func:`recipes.loading.draw`.
        least: smallest share of the area, in (0, 1].
    """
    drawn = random.Random(bits)
    width, height = picture.size
    for _ in range(10):
        area, aspect = drawn.uniform(least, 1) * width * height, math.exp(drawn.uniform(-1, 1) * math.log(4 / 3))
        wide, high = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if wide <= width and high <= height:
            left, top = drawn.uniform(0, width - wide), drawn.uniform(0, height - high)
            break
    else:
        wide, high = min(width, height * 4 / 3), min(height, width * 4 / 3)
        left, top = (width - wide) / 2, (height - high) / 2
    out = picture.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + wide, top + high), 2.0)
    return ImageOps.mirror(out) if drawn.random() < 0.5 else out


def as_tensor(picture: Image.Image) -> Tensor:
    """uint8 [C, H, W]."""
    pixels = torch.from_numpy(np.array(picture))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()


def ready(path: Path, facts: dict[str, Any]) -> Tensor:
    """A picture file as a batch of one that a model takes.

    Args:
        path: the file.
        facts: as :attr:`recipes.resnet.data.ImageData.facts`.

    Returns:
        float32 [1, C, size, size].

    Raises:
        ValueError: as :func:`read`.
    """
    picture = centre(read(path, len(facts["mean"])), facts["size"], facts["shorter"])
    pixels = as_tensor(picture).float() * facts["white"] / 255
    mean, std = (torch.tensor(facts[key])[:, None, None] for key in ("mean", "std"))
    out: Tensor = (pixels - mean) / std
    return out[None]
