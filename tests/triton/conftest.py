"""Kernels of accelerators run on one where there is one, and elsewhere in Triton's interpreter."""

import os

import pytest
import torch

from lightning_compress import kernels

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported


@pytest.fixture
def device():
    """Where the kernels run."""
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def by(monkeypatch):
    """Have plans made with kernels of a choice: ``by("triton")``."""
    return lambda choice: monkeypatch.setenv(kernels.VARIABLE, choice)
