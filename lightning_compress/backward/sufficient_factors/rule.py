"""Poseidon's rule: a layer goes by factors where that sends less, and is expected to take less time.

Zhang et al., "Poseidon: An Efficient Communication Architecture for Distributed Deep Learning on GPU Clusters", USENIX
ATC 2017, arXiv:1706.03292, with a ring all-reduce in place of its parameter server.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from lightning_compress.backward.sufficient_factors.layers import Layer
from lightning_compress.collectives.counting import all_gather_rounds, all_reduce_bytes, all_reduce_rounds
from lightning_compress.exchanges.cost import Cost, Link, wire_seconds

REPEATS = 3
"""Of a product, whose least time counts."""


def factor_bytes(layer: Layer, rows: int, ranks: int, size: int) -> int:
    """What a rank sends for ``rows`` of each rank, in numbers of ``size`` bytes: K (M + N) (P - 1) numbers."""
    return rows * layer.width * size * (ranks - 1)


def matrix_bytes(layer: Layer, ranks: int) -> int:
    """What a rank sends to all-reduce the layer's parameters: 2 M N (P - 1) / P numbers, and those of the bias."""
    return all_reduce_bytes(sum(each.nbytes for each in layer.parameters), ranks)


def sends_less(layer: Layer, rows: int, ranks: int, size: int) -> bool:
    """Whether factors do: K P < 2 M N / (M + N), where both travel as float32."""
    matrix = 2 * layer.weight.numel() * layer.weight.element_size()
    return rows * ranks * layer.width * size < matrix


def limit(layer: Layer, size: int) -> float:
    """Below which K P has to be for that."""
    return 2 * layer.weight.numel() * layer.weight.element_size() / (layer.width * size)


def seconds(layer: Layer, rows: int, ranks: int, size: int, link: Link) -> tuple[float, float]:
    """What a step is expected to take by factors, and the ordinary way; runs the products.

    Args:
        layer: whose gradient it is.
        rows: of a rank.
        ranks: that average.
        size: bytes of a number of a row.
        link: between the ranks.
    """
    gather = Cost(factor_bytes(layer, rows, ranks, size), 2 * all_gather_rounds(ranks))  # their number goes first
    reduce = Cost(matrix_bytes(layer, ranks), all_reduce_rounds(ranks))
    return (
        wire_seconds(gather, link) + product_seconds(layer, rows * ranks),
        wire_seconds(reduce, link) + product_seconds(layer, rows),
    )


def product_seconds(layer: Layer, rows: int) -> float:
    """How long the gradient of so many rows takes to be formed."""
    outer, inner = layer.weight.shape
    out = layer.memory()
    inputs, gradients = out.new_ones(rows, inner), out.new_ones(rows, outer)
    took = []
    for _ in range(REPEATS):
        start = _now(out)
        out.addmm_(gradients.t(), inputs, beta=0)
        took.append(_now(out) - start)
    return min(took)


def _now(tensor: Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
