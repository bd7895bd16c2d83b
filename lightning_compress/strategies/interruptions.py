"""A cluster's signals where ranks average in every step: all of them hear of it, and none waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_compress.collectives import TorchCollective
from lightning_compress.collectives.torch import backend_of
from lightning_compress.core import failures
from lightning_compress.strategies.signals import Signals

EVERY = 4
"""Batches from one question to the next. An answer is taken a batch later, so a job ends within five. On two ranks a
question takes 0.1 ms of the main thread, and Lightning's broadcast, in every batch, 0.2 ms and a round trip."""


class Interruptions:
    """Asks the ranks of one fit, at every fourth batch, whether a signal came to any; the answer travels beside it.

    It travels over the default process group, where Lightning's own broadcast did. Batches are counted, of which ranks
    have equal numbers, and no steps, which a module may skip.

    Args:
        trainer: of the fit, on two or more ranks; its signal handlers are not registered yet.
        device: of the ranks; on CUDA, where the process group does not carry tensors of the CPU, questions travel on a
            stream beside the batches, which nothing waits for but the answer.
    """

    def __init__(self, trainer: Any, device: torch.device) -> None:
        self.signals = Signals(trainer)
        self._device = torch.device("cpu") if backend_of("cpu") else device
        self._ranks = TorchCollective()
        self._batches = 0
        self._asked: Callable[[], Tensor] | None = None
        self._beside = _Beside(self._ranks, device) if self._device.type == "cuda" else None

    def next_batch(self) -> None:
        """Take the last question's answer, ask the next, or neither; save what is to be saved.

        Raises:
            ExchangeError: a rank died, or did not come in time.
        """
        if not self.signals.taken:
            return
        self._take()
        self.signals.act()
        if self._batches % EVERY == 0:
            self._ask()
        self._batches += 1

    def finish(self) -> None:
        """The last batch is done: ask once more, and wait for the answer."""
        if self.signals.taken:
            self._take()
            self._ask()
            self._take()
            self.signals.act()

    def _ask(self) -> None:
        flags = torch.tensor([self.signals.end, self.signals.save], dtype=torch.int32)
        if self._beside:
            self._asked = self._beside.ask(flags)
            return
        flags = flags.to(self._device)
        wait = self._ranks.begin_all_reduce_max(flags)

        def answer() -> Tensor:
            wait()
            return flags

        self._asked = answer

    def _take(self) -> None:
        if self._asked is None:
            return
        answer, self._asked = self._asked, None
        with failures.explained("asking the others whether a signal came", self._ranks.rank):
            end, save = answer().tolist()
        self.signals.agreed(bool(end), bool(save))

    def close(self) -> None:
        """The fit is over: Lightning has its own back."""
        self._asked = None
        self.signals.release()


class _Beside:
    """Asks on a stream of its own, from pinned memory and into it: one question at a time."""

    def __init__(self, ranks: TorchCollective, device: torch.device) -> None:
        self._ranks, self._stream = ranks, torch.cuda.Stream(device)
        self._flags = torch.zeros(2, dtype=torch.int32).pin_memory()
        with torch.cuda.stream(self._stream):
            self._there = torch.zeros(2, dtype=torch.int32, device=device)

    def ask(self, flags: Tensor) -> Callable[[], Tensor]:
        self._flags.copy_(flags)
        with torch.cuda.stream(self._stream):
            self._ranks.begin_all_reduce_max(self._there.copy_(self._flags, non_blocking=True))()
            self._flags.copy_(self._there, non_blocking=True)
            event = self._stream.record_event()

        def answer() -> Tensor:
            event.synchronize()
            return self._flags

        return answer
