"""Real data sets for tests that need them, where they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "export.py"


def public_data(name, folder):
    """A folder that holds a data set in its public format; skips the test where there is none.

    ``LIGHTNING_COMPRESS_DATA`` names it; else it is written into ``folder`` from the archive beside the checkout.
    """
    if given := os.environ.get("LIGHTNING_COMPRESS_DATA"):
        return Path(given)
    if not SHARED.exists():
        pytest.skip(f"needs {name}: set LIGHTNING_COMPRESS_DATA to a folder that holds it")
    subprocess.run([sys.executable, str(SHARED), str(folder), name], check=True, capture_output=True)
    return folder
