"""What ``torch.load`` with ``weights_only`` refuses."""

import re


def foreign_class(error: Exception) -> str | None:
    """Return the class that a file holds besides tensors, by torch's error, or None; torch advises to run any code."""
    found = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
    return found and found[1]
