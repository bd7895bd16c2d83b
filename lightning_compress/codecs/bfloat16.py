"""Float32 to bfloat16, right on average."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs.buffers import chunk_size, pieces, scratch
from lightning_compress.codecs.randomness import RandomBits, word_state

_LARGEST = torch.finfo(torch.bfloat16).max


class StochasticRounding:
    """Rounds up or down at random, in proportion to how near the two are, so that sums of many are right on average.

    To the nearest, 256 + 1 would be 256 for ever: what is small beside the sum that it is added to would never arrive.
    A number that bfloat16 has stays as it is; a larger one than its largest, 3.39e38, becomes that.

    Args:
        numel: how many numbers.
        device: where.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self._fused = kernels.fused(device)
        if self._fused:
            return
        self._chunk = min(chunk_size(device), numel)
        self._bits = RandomBits(self._chunk, device)
        self._words = scratch("rounded words", self._chunk, torch.int32, device)
        self._noise = scratch("rounding noise", self._chunk, torch.int32, device)

    def round(self, values: Tensor, out: Tensor, key: int) -> None:
        """Round float32 ``values [numel]`` into bfloat16 ``out [numel]``; equal keys round alike."""
        if self._fused:
            self._fused.halves.round_at_random(values, out, word_state(key, 0))
            return
        for piece in pieces(len(values), self._chunk):
            numel = piece.stop - piece.start
            words, noise = self._words[:numel], self._noise[:numel]
            torch.clamp(values[piece], -_LARGEST, _LARGEST, out=words.view(torch.float32))
            noise.copy_(self._bits.draw(key, piece.start, numel)).bitwise_and_(0xFFFF)
            words.add_(noise).bitwise_right_shift_(16)
            out[piece].view(torch.int16).copy_(words)
