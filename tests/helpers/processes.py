"""Lasting pools of ranks, mostly of Gloo, to which tests send functions."""

import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

from benchmarks.harness.forking import PRELOAD, forking
from benchmarks.harness.nccl import share_a_gpu
from tests.helpers.loopback import enter

NUMBA = "lightning_compress.core.source_numba"
USED = ("omegaconf", "sklearn.datasets", "torch.profiler")
PRELOADED = (
    *PRELOAD,
    *USED,
    NUMBA,
    "tests.helpers.numba_ready",
    "tests.helpers.training",
    "tests.helpers.fsdp",
    "tests.cases",
    "tests.helpers.frozen",
)


class RankError(AssertionError):
    """A rank raised; carries its traceback."""


def _serve(rank: int, size: int, store: str, pipe, backend: str, network: str | None) -> None:
    if network is not None:
        enter(network)
    if backend == "nccl":
        share_a_gpu(rank)
    import torch
    import torch.distributed as dist

    from tests.helpers import link

    link.pretend()
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=300 if backend == "nccl" else 60),
    )
    environment = dict(os.environ)
    while (job := pipe.recv()) is not None:
        function, arguments = job
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        _destroy_other_groups()
        os.environ.clear()  # of a seed, which the next test's samplers would take
        os.environ.update(environment)
    dist.destroy_process_group()


def _destroy_other_groups() -> None:
    """Destroy the groups that a test has left: each of Gloo has a thread that wakes 100 times a second."""
    import torch.distributed as dist

    from lightning_compress.collectives import torch as transport

    transport._parts.clear()
    for group in set(dist.distributed_c10d._world.pg_map) - {dist.group.WORLD}:
        dist.destroy_process_group(group)
    if len(os.listdir("/proc/self/task")) > 40:  # threads end with the models that hold their groups
        gc.collect()


class Pool:
    """``size`` processes in one group, of Gloo or, all on one GPU, of NCCL; in the network namespace of a file."""

    def __init__(self, size: int, backend: str = "gloo", network: str | None = None) -> None:
        spawning = multiprocessing.get_context("spawn")  # CUDA takes no fork
        context = forking(PRELOADED) if backend == "gloo" else spawning
        self.size = size
        self.broken = False
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store, theirs, backend, network), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable, *arguments, timeout: float = 240.0) -> list:
        """``function(*arguments)`` on every rank; the results in the order of the ranks.

        Raises:
            RankError: a rank raised; the pool must not be used afterwards unless all ranks raised.
        """
        broken, self.broken = self.broken, True  # until all have answered
        assert not broken, "a rank did not answer, and the next answer would be of another function"
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send((function, arguments))
        replies: dict[int, tuple] = {}
        while len(replies) < self.size:
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank not in replies]
            ready = wait(open_pipes, timeout)
            if not ready:
                raise RankError(f"ranks {sorted(set(range(self.size)) - set(replies))} did not answer in {timeout} s")
            for pipe in ready:
                replies[self._pipes.index(pipe)] = pipe.recv()
        for rank in range(self.size):
            succeeded, result = replies[rank]
            if not succeeded:
                self.broken = any(other for other, _ in replies.values())
                raise RankError(f"rank {rank}:\n{result}")
        self.broken = False
        self._signal(signal.SIGSTOP)  # between tests, threads of Gloo would wake 100 times a second
        return [replies[rank][1] for rank in range(self.size)]

    def _signal(self, number: int) -> None:
        for process in self._processes:
            os.kill(process.pid, number)

    def close(self) -> None:
        """End the processes."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        last = time.monotonic() + (0 if self.broken else 2)
        for process in self._processes:
            process.join(max(0, last - time.monotonic()))
            process.kill()
        self._folder.cleanup()


class Pools:
    """A pool per world size, made when first asked for; in the network namespace of a file, if any."""

    def __init__(self, network: str | None = None) -> None:
        self._network = network
        self._pools: dict[int, Pool] = {}

    def __getitem__(self, size: int) -> Pool:
        if size not in self._pools:
            self._pools[size] = Pool(size, network=self._network)
        return self._pools[size]

    def close(self) -> None:
        """End all of them."""
        for pool in self._pools.values():
            pool.close()
