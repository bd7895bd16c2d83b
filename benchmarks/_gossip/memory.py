"""Bytes that a rank keeps for each parameter, by method: what its state says, and the tensors that are alive."""

from __future__ import annotations

import argparse
import gc

import torch
from torch import Tensor, nn

from benchmarks._gossip.methods import ALL_REDUCE, METHODS, begin
from benchmarks.harness.tables import show
from lightning_compress.collectives import Collective, run_threads

ROUNDS = 20


def alive() -> int:
    """Bytes of all tensors of this process, memory that they share counted once."""
    gc.collect()
    tensors = [
        each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)
    ]  # not those of tracers, without any
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def kept(method: str, ranks: int, numel: int) -> tuple[float, float]:
    """Mix on ranks that are threads.

    Returns:
        bytes for each parameter between two rounds: of the state that a checkpoint holds; and of all tensors of a rank
        but the model, mean of the ranks.
    """

    def program(collective: Collective) -> tuple[int, int]:
        mixing, vector = begin(METHODS[method], collective, numel), torch.zeros(numel)
        for number in range(ROUNDS):
            generator = torch.Generator().manual_seed(99 * number + collective.rank)
            mixing.mix(vector.add_(torch.randn(numel, generator=generator), alpha=0.01), 0.1)
        collective.all_reduce(torch.zeros(1))  # all have mixed
        found = 0 if collective.rank else alive() - before
        collective.all_reduce(torch.zeros(1))
        return sum(each.nbytes for each in mixing.state_dict()["vectors"].values()), found

    before = alive()
    state, found = run_threads(ranks, program)[0]
    return state / numel, found / ranks / numel - 4


def measure(given: argparse.Namespace) -> None:
    """Print a row for each method, as the command line of ``benchmarks.gossip memory`` says."""
    shown = [method for method in METHODS if method != ALL_REDUCE and "every" not in method]
    rows = ((method, *(f"{value:.2f}" for value in kept(method, given.ranks, given.numel))) for method in shown)
    title = f"bytes for each parameter, beside the model: {given.ranks} ranks, {given.numel:,} parameters"
    show(("method", "state", "with buffers"), rows, title)
