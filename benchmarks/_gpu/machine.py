"""Where figures come from, and how they are printed."""

from __future__ import annotations

import datetime
import platform
from typing import Any

import torch

WIDTH = 170
"""Of tables, also where the output is a file."""


def surroundings(device: torch.device) -> dict[str, Any]:
    """The device, the software and the date."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    try:
        import triton

        compiler = f", triton {triton.__version__}"
    except ImportError:
        compiler = ""
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"device": name, "software": f"torch {torch.__version__}{compiler}", "date": date}
