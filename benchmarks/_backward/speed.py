"""Milliseconds of backward passes and whole training steps, sparse and as PyTorch has them, in turns."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.harness.models import Outputs, perceptron
from lightning_compress.backward import enable
from lightning_compress.collectives.counting import now


@dataclass(frozen=True)
class Case:
    """A model that is timed.

    Args:
        label: to show.
        k: outputs that are kept, as ``enable`` takes them.
        make: builds the model.
        shape: of the input.
        output: the last layer is sparse as well: it is the only one.
        memory: see ``enable``.
        per_sequence: see ``enable``.
    """

    label: str
    k: int | float
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    output: bool = False
    memory: float = 0.0
    per_sequence: bool = False


def recurrent(cell: type[nn.LSTM | nn.GRU], width: int, batch: int, steps: int, k: float, per_sequence: bool) -> Case:
    """One recurrent layer, whose inputs are as wide as its outputs."""
    once = "once" if per_sequence else "each step"
    label = f"{cell.__name__} {width}, batch {batch}, {steps} steps, k {100 * k:g} % {once}"
    return Case(label, k, lambda: Outputs(cell(width, width)), (steps, batch, width), True, per_sequence=per_sequence)


def linear(width: int, batch: int, k: int | float, memory: float = 0.0) -> Case:
    """One square layer, whose input needs a gradient too, as inside of a network."""
    share = f"k {k}" if isinstance(k, int) else f"k {100 * k:g} %"
    label = f"Linear {width}, batch {batch}, {share}" + (f", memory {memory:g}" if memory else "")
    return Case(label, k, lambda: nn.Sequential(nn.Linear(width, width)), (batch, width), True, memory)


def paper(hidden: int, batch: int, k: int, memory: float = 0.0) -> Case:
    """The MLP of the paper on images of 784 pixels."""
    label = f"MLP 784-{hidden}-{hidden}-10, batch {batch}, k {k}" + (f", memory {memory:g}" if memory else "")
    return Case(label, k, lambda: perceptron(784, hidden, hidden, 10), (batch, 784), False, memory)


def conv(channels: int, size: int, batch: int, k: float) -> Case:
    """One convolution of 3 x 3."""
    label = f"Conv2d {channels}, {size} x {size}, batch {batch}, k {100 * k:g} %"
    make = lambda: nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1))  # noqa: E731
    return Case(label, k, make, (batch, channels, size, size), True)


class Trial:
    """One model and its optimizer, and what its steps took.

    Args:
        model: trained by SGD without momentum.
        x: its input.
        needs_x: whether the input's gradient is asked for.
    """

    def __init__(self, model: nn.Module, x: Tensor, needs_x: bool) -> None:
        self._model, self._x = model, x.clone().requires_grad_(needs_x)
        self._optimizer = torch.optim.SGD(model.parameters(), 1e-6)
        with torch.no_grad():
            self._gradient = torch.randn_like(model(x)) / 1e3
        self.backward: list[float] = []
        self.step: list[float] = []

    def run(self) -> None:
        """Time one training step."""
        begin = now(self._x.device)
        self._optimizer.zero_grad()
        self._x.grad = None
        y = self._model(self._x)
        middle = now(self._x.device)
        y.backward(self._gradient)
        end = now(self._x.device)
        self._optimizer.step()
        self.backward.append(1e3 * (end - middle))
        self.step.append(1e3 * (now(self._x.device) - begin))


def measure(case: Case, rounds: int, seconds: float, device: torch.device) -> list[str]:
    """Time a case and its dense twin in turns.

    Args:
        case: what is timed.
        rounds: at most so many steps of each; the first two do not count.
        seconds: no further round begins after these.
        device: where.

    Returns:
        the label; milliseconds of the dense and the sparse backward pass (the least) and their ratio; the same of the
        whole step; and the median of the rounds' ratios.
    """
    torch.manual_seed(0)
    model = case.make().to(device)
    x = torch.randn(case.shape, device=device)
    sparse = copy.deepcopy(model)
    enable(sparse, case.k, output=case.output, memory=case.memory, per_sequence=case.per_sequence)
    trials = [Trial(each, x, needs_x=case.output) for each in (model, sparse)]
    end = time.monotonic() + seconds
    for number in range(rounds + 2):
        for trial in trials:
            trial.run()
        if number >= 4 and time.monotonic() > end:
            break
    dense, ours = trials
    cells = [case.label]
    for one, other in ((dense.backward[2:], ours.backward[2:]), (dense.step[2:], ours.step[2:])):
        median = statistics.median(a / b for a, b in zip(one, other, strict=True))
        cells += [f"{min(one):.2f}", f"{min(other):.2f}", f"{min(one) / min(other):.1f}", f"{median:.1f}"]
    return cells
