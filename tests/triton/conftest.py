"""Kernels of accelerators run on one where there is one, and elsewhere in Triton's interpreter."""

from contextlib import ExitStack

import pytest
import torch

from lightning_compress import kernels


@pytest.fixture
def device():
    """Where the kernels run."""
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def by():
    """Have plans made with kernels of a choice: ``by("triton")``."""
    with ExitStack() as choices:
        yield lambda choice: choices.enter_context(kernels.using(choice))
