"""Kernels that are compiled in place of being launched, for a GPU that need not be there."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.launches import averaging
from lightning_compress import kernels
from lightning_compress.codecs import CODECS
from lightning_compress.codecs.codec import aligned
from lightning_compress.core import state
from lightning_compress.core import vector as vectors
from lightning_compress.core.layout import Layout
from lightning_compress.core.source import Source
from lightning_compress.engine import unused

_MINUS_TWO = "0fC0000000"
LAYOUTS = [Layout.of([("weight", (1 << 16,)), ("bias", (100,))]), Layout.of([("weight", (1,))])]
"""A long one; and one whose lengths are 1, which the compiler takes for constants."""
WAYS = ("all_gather", 2), ("two_shot", 4)
"""Exchanges of a group, and numbers of ranks."""
GROUP = "group"
"""Stands among the codecs for what is done to a group's vectors beside encoding."""


def report(codecs: Sequence[str], capability: int) -> list[dict[str, Any]]:
    """Compile all kernels that codecs launch to encode, send and decode.

    Args:
        codecs: names, with default settings; or "group".
        capability: of the GPU to compile for, times ten: 80, 90.

    Returns:
        for each kernel its codec, name, registers and bytes of stack (spills) of a thread, bytes of shared memory,
        fused multiply-adds of float32 that PTX has, but for exact ones by -2, and the bits that a load or a store
        moves at most.
    """
    rows = []
    with _compiling(capability) as made:
        for name in codecs:
            made.clear()
            for layout in LAYOUTS:
                _launch_group(layout) if name == GROUP else _launch(name, layout)
            rows += [{"codec": name, **_read(kernel)} for kernel in made.values()]
    return rows


@contextmanager
def _compiling(capability: int) -> Iterator[dict[str, Any]]:
    """Compile in place of launching, for a GPU that need not be there."""
    os.environ.pop("TRITON_INTERPRET", None)
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    made: dict[str, Any] = {}

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(self, *arguments, grid=grid, warmup=True, **options)
        made[compiled.hash] = compiled
        return compiled

    run, compiler = JITFunction.run, kernels.compiler
    driver.set_active(Driver())
    JITFunction.run, kernels.compiler = compile_only, lambda device: "triton"
    try:
        yield made
    finally:
        JITFunction.run, kernels.compiler = run, compiler


def _launch(name: str, layout: Layout) -> None:
    plan = CODECS[name]().plan(layout, torch.device("cpu"))
    vector = torch.zeros(layout.numel)
    messages = torch.zeros(2, aligned(plan.message_size), dtype=torch.uint8)[:, : plan.message_size]
    plan.share(1)
    plan.encode_from(Source(vector, vector), vector.clone(), messages[0], 1)
    plan.encode_from(Source(vector.clone()), None, messages[0], 1)
    for accumulate in (False, True):
        plan.decode(messages, vector, 0.5, accumulate)


def _launch_group(layout: Layout) -> None:
    """Start what a group of such a vector starts, by methods with and without state, and what few steps need."""
    vector, scalar = torch.zeros(layout.numel), torch.zeros(())
    made = (kernels.backend(each.__name__, vector.device, "triton") for each in (vectors, state, unused))
    of_gradients, of_state, of_unused = (each for each in made if each)
    of_gradients.clean(vector, 1.0, scalar)
    of_state.replace(scalar > 0, vector, vector)
    of_gradients.add_flag(scalar, vector)
    tiles = of_unused.table([(0, 0, layout.numel)], vector.device)
    of_unused.restore_unused(tiles, torch.zeros(1, dtype=torch.uint8), vector, vector)
    started = [(method, way) for method in ("qsgd", "rotated", "onebit", "efsign") for way in WAYS]
    started += [("bf16", ("all_reduce", 2)), ("powersgd", ("auto", 2))]
    for method, (exchange, ranks) in started:
        shapes = [(max(1, layout.numel // 64), 64)] * 4 + [(37,)] * 4
        average, commit = averaging(method, exchange, ranks, [], vector.device, shapes)
        average()
        commit()


def _read(kernel: Any) -> dict[str, Any]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = [
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        ]
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said[0]).groups()  # type: ignore[union-attr]
    moves = {"load": r"\bLDG\.E(\.\w+)*", "store": r"\bSTG\.E(\.\w+)*"}
    widths = {move: [_bits(found[0]) for found in re.finditer(form, said[1])] for move, form in moves.items()}
    return {
        "kernel": kernel.name,
        "registers": int(registers),
        "stack": int(stack),
        "shared": kernel.metadata.shared,
        "fma": len(re.findall(rf"fma\.rn\.f32(?!.*{_MINUS_TWO})", kernel.asm["ptx"])),
        **{move: max(found, default=0) for move, found in widths.items()},
    }


def _bits(instruction: str) -> int:
    found = re.search(r"\.U?(8|16|64|128)\b", instruction)
    return int(found[1]) if found else 32
