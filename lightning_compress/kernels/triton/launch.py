"""Launching of GPU kernels, and functions that several kernels share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_compress.kernels import program

OPTIONS: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 4}
"""Launch options. Products and sums are rounded separately, as in tensor operations."""


def kernel(function: Callable[..., None] | None = None, **settings: Any) -> Any:
    """Compile a kernel that runs on the device of its first argument. Triton alone would use the current device.

    Args:
        function: the kernel; its first argument is a tensor.
        **settings: arguments of ``triton.jit``.
    """
    if function is None:
        return partial(kernel, **settings)
    compiled = triton.jit(function, **settings)

    def run(*arguments: Any, **options: Any) -> Any:
        tape = program.here.tape
        if tape is None:
            with on_device_of(arguments[0]):
                return type(compiled).run(compiled, *arguments, **options)
        with tape.apart(), on_device_of(arguments[0]):
            kept = type(compiled).run(compiled, *map(program.plain, arguments), **options)
        tape.add(*bind(compiled, arguments, options, kept))
        return kept

    compiled.run = run
    return compiled


_VERSIONS = ("3.6.",)
"""Versions of Triton whose launcher was read: its methods are private, and change."""


def bind(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], kept: Any) -> program.Call:
    """Return what launches a kernel again, without what Triton does at each launch to find the compiled kernel.

    Arguments may differ in the next launch where the kernel does not depend on them: integers whose type is declared
    and that it does not specialize on, and tensors at multiples of 16 bytes.

    Args:
        kernel: of ``kernel``.
        arguments: by position.
        options: by name; the grid, and constants and launch options.
        kept: what the launch returned: Triton's ``CompiledKernel``, or None from its interpreter.

    Returns:
        a function and its arguments, which contain those of the launch as they are: a call of the compiled kernel, or
        where Triton is not as it was read, or something watches launches, the same call of the kernel as before.
    """
    direct = _direct(kernel, arguments, options, kept) if triton.__version__.startswith(_VERSIONS) else None
    return direct or (partial(type(kernel).run, kernel, **options), list(arguments))


def _direct(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], kept: Any) -> program.Call | None:
    """Return a call of the compiled kernel's launcher, as ``JITFunction.run`` makes it; None if it may do more."""
    from triton import knobs

    names, launcher = getattr(kernel, "arg_names", ()), getattr(kept, "run", None)
    watched = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if not hasattr(launcher, "launch_pdl") or any(hook is not None and hook.calls for hook in watched):
        return None
    allocates = launcher.global_scratch_size or launcher.profile_scratch_size or kernel.pre_run_hooks
    rest = names[len(arguments) :]
    if allocates or not all(name in options for name in rest):
        return None
    grid = (*options["grid"], 1, 1)[:3]
    modes = launcher.launch_cooperative_grid, launcher.launch_pdl
    # without scratch memory, without the metadata that hooks read, and without hooks
    before = *grid, program.STREAM, kept.function, *modes, None, None, kept.packed_metadata, None, None, None
    return launcher.launch, [*before, *arguments, *(options[name] for name in rest)]


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Return the context in which a tensor's device is the current one: none if it is, because entering one is slow."""
    device = tensor.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def width_of(count: int) -> int:
    """Return the next power of two, because the sides of a tile must be powers of two."""
    return triton.next_power_of_2(max(1, count))


def float_view(message: Tensor, start: int, count: int) -> Tensor:
    """Return a float32 view of ``count`` numbers from byte ``start`` on, of a message or of each row of messages."""
    part = message[..., start : start + 4 * count]
    if part.dim() == 2 and len(part) == 1:  # its stride may not be a multiple of 4, which torch would refuse
        return part[0].view(torch.float32)[None]
    return part.view(torch.float32)


@triton.jit
def read(numbers, index, inside, WHOLE: tl.constexpr):
    """Load numbers, 0 where ``inside`` is false. Without a mask (``WHOLE``), the compiler loads 16 bytes at a time."""
    if WHOLE:
        loaded = tl.load(numbers + index)
    else:
        loaded = tl.load(numbers + index, mask=inside, other=0)
    return loaded


@triton.jit
def write(numbers, index, values, inside, WHOLE: tl.constexpr):
    """Store values where ``inside`` is true; see ``read``."""
    if WHOLE:
        tl.store(numbers + index, values)
    else:
        tl.store(numbers + index, values, mask=inside)


@triton.jit
def read_sum(first, second, index, inside, SUM: tl.constexpr, WHOLE: tl.constexpr):
    """Load the numbers of ``first``, or with ``SUM`` the sums of both; see ``Source.pointers`` and ``read``."""
    numbers = read(first, index, inside, WHOLE)
    if SUM:
        numbers += read(second, index, inside, WHOLE)
    return numbers


@triton.jit
def shard(table):
    """Return a program's row of four numbers: tile (int32), start, numel, and the place of its message."""
    row = table + tl.program_id(0).to(tl.int64) * 4
    return tl.load(row).to(tl.int32), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def clear(gap, padding):
    """Write ``padding`` zeros, fewer than 16, between a message's header and its codes."""
    zeros = tl.arange(0, 16)
    tl.store(gap + zeros, tl.zeros([16], tl.uint8), mask=zeros < padding)


@triton.jit
def indices(number, numel, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Return the indices of blocks' elements, ``[ROWS, WIDTH]``, and which of them exist."""
    column = tl.arange(0, WIDTH)
    index = number[:, None] * BLOCK + column[None, :]
    return index, (column < BLOCK)[None, :] & (index < numel)


@triton.jit
def pack(codes, WIDTH: tl.constexpr):
    """Pack codes of ``WIDTH`` bits (1, 2 or 4), int32 ``[ROWS, n]``, the first code lowest, to uint8 ``[ROWS, m]``."""
    EACH: tl.constexpr = 8 // WIDTH
    parts = tl.reshape(codes, [codes.shape[0], codes.shape[1] // EACH, EACH])
    return tl.sum(parts << (tl.arange(0, EACH) * WIDTH)[None, None, :], axis=2).to(tl.uint8)


@triton.jit
def unpack(packed, WIDTH: tl.constexpr):
    """Return the codes, int32 ``[ROWS, n]``, of uint8 ``[ROWS, m]``; the inverse of ``pack``.

    A reshape, unlike an index of None, leaves the codes in the thread that read their byte.
    """
    EACH: tl.constexpr = 8 // WIDTH
    parts = tl.reshape(packed, [packed.shape[0], packed.shape[1], 1]).to(tl.int32)
    parts = (parts >> (tl.arange(0, EACH) * WIDTH)[None, None, :]) & (2**WIDTH - 1)
    return tl.reshape(parts, [packed.shape[0], packed.shape[1] * EACH])
