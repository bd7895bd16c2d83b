"""What stock PyTorch cannot do on this machine's processor."""

import pytest
import torch


def needs_lstm_in_bfloat16():
    """Skip the test where oneDNN has no LSTM in bfloat16: there PyTorch's own raises, or returns other dtypes."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("stock PyTorch has no LSTM in bfloat16 for this processor, which lacks AVX-512")


def needs_fused_adds():
    """Skip the test where ``add(alpha=)`` rounds the product before the sum, as kernels for GPUs never do."""
    odd = torch.full((64,), 1 + 2**-12, dtype=torch.float32)  # its square ends in 2**-24, which one rounding drops
    if not (torch.add(-torch.ones_like(odd), odd, alpha=1 + 2**-12) > 2**-11).all():
        pytest.skip("PyTorch adds without fused multiplications on this processor, which lacks AVX2")
