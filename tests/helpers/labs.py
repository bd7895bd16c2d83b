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


ABLE = os.geteuid() == 0 and shutil.which("tc") and shutil.which("unshare")
ROOT = (
    pytest.mark.usefixtures("only_lab"),
    pytest.mark.skipif(not ABLE, reason="needs root, iproute2 and unshare for network namespaces"),
)
"""Marks of tests that make network namespaces."""


def root(test):
    """Give a test these marks."""
    for mark in ROOT:
        test = mark(test)
    return test
