"""meProp as its paper says it, with dense products: the gradient of the outputs is masked, and nothing else."""

import torch
from torch import nn
from torch.nn import functional

from lightning_compress.backward.sparsity import SparseLayer


def mask_of(gradient, k):
    """1 for the k columns with the largest sums of absolute values; of equal ones the first."""
    sums = gradient.abs().sum([0, *range(2, gradient.ndim)]).tolist()
    chosen = sorted(range(len(sums)), key=lambda column: (-sums[column], column))[:k]
    mask = torch.zeros(len(sums), dtype=gradient.dtype)
    mask[chosen] = 1
    return mask.view(-1, *[1] * (gradient.ndim - 2))


def mask_of_each(gradient, k):
    """1 for the k largest of each row; of equal ones the first."""
    mask = torch.zeros_like(gradient)
    for row, values in enumerate(gradient.abs().tolist()):
        mask[row, sorted(range(len(values)), key=lambda column: (-values[column], column))[:k]] = 1
    return mask


def enabled(model):
    """The layers of a model that have a sparse backward pass, by name."""
    return {name: layer.sparsity for name, layer in model.named_modules() if isinstance(layer, SparseLayer)}


class Keep(torch.autograd.Function):
    """Does nothing forward, and masks the gradient."""

    @staticmethod
    def forward(ctx, y, k, mask):
        ctx.k, ctx.mask = k, mask
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):
        rows = gradient.reshape(-1, gradient.shape[-1]) if ctx.mask is mask_of_each else gradient
        return (rows * ctx.mask(rows, ctx.k)).view_as(gradient), None, None


class MaskedLinear(nn.Linear):
    """The bias is added behind the mask: its gradient is dense."""

    k, mask = 0, staticmethod(mask_of)

    def forward(self, x):
        y = functional.linear(x.reshape(-1, x.shape[-1]), self.weight)
        y = Keep.apply(y, self.k, self.mask).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def whole(shape, low=-4, high=5, seed=0, dtype=torch.float32):
    """Small whole numbers, whose sums of products are exact in any order."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
