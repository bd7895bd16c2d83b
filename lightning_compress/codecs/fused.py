"""Plans whose work a kernel of an accelerator does."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from lightning_compress.codecs.base import Plan
from lightning_compress.core.buffers import check
from lightning_compress.kernels import Summands


class FusedPlan(Plan):
    """Encodes in one pass, which adds up gradient and residual, if there are any, and leaves what is not sent."""

    @abstractmethod
    def write(self, vector: Tensor, summands: Summands, message: Tensor, key: int, keep: bool) -> None:
        """Write the message.

        Args:
            vector: float32 ``[numel]``; gets what stays.
            summands: two more of these, or None.
            message: uint8 ``[message_size]``, which begins at a multiple of 16 bytes.
            key: see ``Plan.encode``.
            keep: the residual is used.
        """

    @abstractmethod
    def read(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Plan.decode``; rows begin at multiples of 16 bytes."""

    def encode(self, vector: Tensor, message: Tensor, key: int) -> None:
        """See ``Plan.encode``."""
        check(vector, message, self.layout.numel, self.message_size)
        self.write(vector, None, message, key, keep=True)

    def encode_sum(self, gradient: Tensor, residual: Tensor, vector: Tensor, message: Tensor, key: int) -> None:
        """See ``Plan.encode_sum``."""
        check(vector, message, self.layout.numel, self.message_size)
        self.write(vector, (gradient, residual), message, key, keep=True)

    def send(self, vector: Tensor, message: Tensor, key: int) -> None:
        """See ``Plan.send``."""
        check(vector, message, self.layout.numel, self.message_size)
        self.write(vector, None, message, key, keep=False)

    def decode(self, messages: Tensor, out: Tensor, weight: float, accumulate: bool) -> None:
        """See ``Plan.decode``."""
        check(out, messages, self.layout.numel, self.message_size)
        self.read(messages, out, weight, accumulate)
