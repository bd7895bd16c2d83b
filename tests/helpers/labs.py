"""Network labs take down what killed ones left, and compare the host's links: one at a time on this machine."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock


def only_lab():
    """A lock around a lab, over all workers of all runs."""
    return FileLock(Path(tempfile.gettempdir()) / "lightning_compress_lab.lock")


able = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc") or not shutil.which("unshare"),
    reason="needs root, iproute2 and unshare for network namespaces",
)


def root(test):
    """Mark a test that makes network namespaces."""
    return able(pytest.mark.usefixtures("only_lab")(test))
