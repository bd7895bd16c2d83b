"""Bytes that are allocated on a GPU; on a CPU nobody counts them."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from lightning_compress.core.workspace import release


def allocated(device: torch.device) -> int:
    """Bytes of all tensors on the device."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def counted(tensor: torch.Tensor) -> int:
    """Bytes that ``allocated`` has of a tensor."""
    return tensor.nbytes if tensor.is_cuda else 0


def peak_of(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that a call allocates at the most, beside what there was."""
    if device.type != "cuda":
        call()
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    before = allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def give_back(device: torch.device) -> None:
    """Free what nobody holds, and the scratch memory that plans share, so that the next plan pays for its own."""
    gc.collect()
    release()
    if device.type == "cuda":
        torch.cuda.empty_cache()
