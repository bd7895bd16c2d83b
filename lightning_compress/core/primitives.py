"""Python's own numbers and texts: what files may hold beside tensors, where no code in them is to run."""

from __future__ import annotations

from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """The same, in mappings and lists too, of Python's own numbers and texts where they are others', as NumPy's are."""
    if type(value) is dict:
        return {key: plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if isinstance(value, np.generic):
        return value.item()
    return next((kind(value) for kind in (bool, int, float, str) if isinstance(value, kind)), value)
