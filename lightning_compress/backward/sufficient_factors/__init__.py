"""Send a linear layer's inputs and output gradients in place of its weight's gradient: sufficient factors.

The gradient of a weight ``[M, N]`` over the K rows of a batch is the product of the output gradients ``[K, M]`` and the
inputs ``[K, N]``. On P ranks, a rank sends K (M + N) (P - 1) numbers to gather them. An all-reduce of the matrix sends
2 M N (P - 1) / P, which is more if K P < 2 M N / (M + N). Nothing is lost: every rank forms the mean from the same rows
in the same order. Xie et al. (Petuum), UAI 2016, arXiv:1512.06216; Zhang et al., "Poseidon", USENIX ATC 2017,
arXiv:1706.03292; Chilimbi et al., "Project Adam", OSDI 2014.
"""

from lightning_compress.backward.sufficient_factors.decision import FactorSettings
from lightning_compress.backward.sufficient_factors.factors import Factors, enable

__all__ = ["FactorSettings", "Factors", "enable"]
