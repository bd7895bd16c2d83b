"""Sufficient factors: a linear layer's inputs and output gradients travel in place of its weight's gradient.

The gradient of a weight ``[M, N]`` over the K rows of a batch is the product of the output gradients ``[K, M]`` and the
inputs ``[K, N]``. For P ranks, gathering those takes K (M + N) (P - 1) numbers a rank, where an all-reduce of the
matrix takes 2 M N (P - 1) / P: less where K P < 2 M N / (M + N). Nothing is lost: every rank forms the mean from the
same rows in the same order. Xie et al. (Petuum), UAI 2016, arXiv:1512.06216; Zhang et al., "Poseidon", USENIX ATC 2017,
arXiv:1706.03292; Chilimbi et al., "Project Adam", OSDI 2014.
"""

from lightning_compress.backward.sufficient_factors.decision import FactorSettings
from lightning_compress.backward.sufficient_factors.factors import Factors, enable

__all__ = ["FactorSettings", "Factors", "enable"]
