"""Python's own numbers and texts: what files may hold beside tensors, where no code in them is to run."""

from __future__ import annotations

from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """The same, in mappings and lists too, of Python's own numbers and texts where they are NumPy's."""
    if type(value) is dict:
        return {key: plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value.item() if isinstance(value, np.generic) else value
