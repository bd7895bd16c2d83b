"""Where figures come from, and how they are printed."""

from __future__ import annotations

import datetime
import platform
from pathlib import Path
from typing import Any

import torch

WIDTH = 170
"""Of tables, also where the output is a file."""


def surroundings(device: torch.device) -> dict[str, Any]:
    """The device, the software and the date."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    try:
        import triton

        compiler = f", triton {triton.__version__}"
    except ImportError:
        compiler = ""
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"device": name, "software": f"torch {torch.__version__}{compiler}", "date": date}


def _processor() -> str:
    name, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
