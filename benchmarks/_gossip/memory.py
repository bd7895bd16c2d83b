"""Bytes that a rank keeps for each parameter, by method: what its state says, and the tensors that are alive."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from benchmarks._gossip.methods import ALL_REDUCE, METHODS
from benchmarks.harness.tables import show
from lightning_compress.collectives import Collective, run_threads
from lightning_compress.core.layout import Layout
from lightning_compress.gossip.build import build_algorithm, build_gossip_compressor
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.topology import build_topology

ROUNDS = 20


def alive() -> int:
    """Bytes of all tensors of this process, memory that they share counted once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def kept(method: str, ranks: int, numel: int) -> tuple[float, float]:
    """Mix on ranks that are threads.

    Returns:
        bytes for each parameter between two rounds: of the state that a checkpoint holds; and of all tensors of a rank
        but the model, mean of the ranks.
    """
    algorithm = build_algorithm(METHODS[method]["algorithm"])
    compressor = build_gossip_compressor(METHODS[method].get("compressor"), algorithm)
    topology = algorithm.fit_topology(build_topology(METHODS[method].get("topology", "ring"), ranks), None)
    before = alive()

    def program(collective: Collective) -> tuple[int, int]:
        layout, vector = Layout.of([("x", (numel,))]), torch.zeros(numel)
        mixing = algorithm.begin(vector, Neighbours(collective, topology), compressor, layout, 0)
        for number in range(ROUNDS):
            vector += 0.01 * torch.randn(numel, generator=torch.Generator().manual_seed(99 * number + collective.rank))
            mixing.mix(vector, 0.1)
        collective.all_reduce(torch.zeros(1))  # all have mixed
        found = 0 if collective.rank else alive() - before
        collective.all_reduce(torch.zeros(1))
        return sum(each.nbytes for each in mixing.state_dict()["vectors"].values()), found

    state, found = run_threads(ranks, program)[0]
    return state / numel, found / ranks / numel - 4


def measure(ranks: int, numel: int) -> None:
    """Print a row for each method."""
    every = {method: kept(method, ranks, numel) for method in METHODS if method != ALL_REDUCE and "every" not in method}
    rows = ((method, *(f"{value:.2f}" for value in values)) for method, values in every.items())
    head = ("method", "state", "and buffers")
    show(head, rows, f"bytes for each parameter, beside the model: {ranks} ranks, {numel:,} parameters")
