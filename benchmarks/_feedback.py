"""What feeding errors back costs on a CPU: LoCo's average in 8 bits against a residual."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from rich.table import Table
from torch import Tensor

from benchmarks._codecs import CASES
from lightning_compress.codecs import Codec
from lightning_compress.core.layout import Layout
from lightning_compress.core.state import State
from lightning_compress.core.vector import Vector, kernel_of
from lightning_compress.corrections.loco import LoCo, LoCoPlan

CPU, SOUND, NAMES = torch.device("cpu"), torch.tensor(False), ["weight"]
ENCODED = {name: case for name, case in CASES.items() if isinstance(case, Codec) and case.sum_dtype is None}
"""Codecs whose errors may be fed back, by name."""

Step = Callable[[int], None]


def steps_of(codec: Codec, gradient: Tensor) -> dict[str, Step]:
    """A group's work on a gradient up to its message, and that of the commit, with either kind of feedback."""
    layout = Layout.of([(NAMES[0], (len(gradient),))])
    plan = codec.plan(layout, CPU)
    message = torch.zeros(plan.message_size, dtype=torch.uint8)
    residual = State(layout, CPU)
    declared = LoCo.state(layout.segments)
    errors = State(declared.layout, CPU, dtype=declared.dtype)
    loco = LoCoPlan(LoCo(), layout, errors, alone=True)

    def encode(numbers: Tensor, step: int) -> None:
        plan.share(step)
        plan.encode(numbers, message, step)

    def classical(step: int) -> None:
        Vector([gradient], fast=kernel_of(CPU)).add(residual.committed, residual.pending)
        encode(residual.pending, step)
        _commit(residual)

    def averaged(step: int) -> None:
        vector = Vector([gradient], step)
        loco.before(vector)
        encode(vector.made(), step)
        loco.after(vector)
        _commit(errors)

    return {"residual": classical, "loco": averaged}


def _commit(state: State) -> None:
    state.touch()
    state.commit(SOUND, NAMES)


def measure(names: list[str], numel: int, repeats: int) -> dict[str, dict[str, float]]:
    """Least thread CPU time of a step in milliseconds, by codec and kind of feedback; all take turns.

    Args:
        names: of ``ENCODED``.
        numel: length of the gradient, N(0, 1).
        repeats: steps, after one that does not count.
    """
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    found: dict[str, dict[str, float]] = {}
    for name in names:
        steps = steps_of(ENCODED[name], gradient)
        times: dict[str, list[float]] = {kind: [] for kind in steps}
        for number in range(1, repeats + 2):  # at 0 LoCo's error begins anew
            for kind, step in steps.items():
                start = time.thread_time()
                step(number)
                times[kind].append(1e3 * (time.thread_time() - start))
        found[name] = {kind: min(each[1:]) for kind, each in times.items()}
    return found


def table(found: dict[str, dict[str, float]], numel: int) -> Table:
    """A line for each codec."""
    title = f"encoding with feedback, {numel:,} elements, one thread"
    shown = Table("codec", "residual ms", "loco ms", "loco / residual", title=title)
    for name, times in found.items():
        ratio = times["loco"] / times["residual"]
        shown.add_row(name, f"{times['residual']:.2f}", f"{times['loco']:.2f}", f"{ratio:.2f}")
    return shown
