"""Measure the compressors on a user's own gradients."""

from __future__ import annotations

import dataclasses
import sys
from json import dumps


def compared(source: str, compressors: list[str] | None = None, json: bool = False) -> None:
    """Encode and decode your gradients with each compressor: bits, error and time.

    ``bits`` are those of a message, per element. ``error`` is the norm of what a message loses, over the norm of what
    was encoded: 0 if everything arrives, 1 if nothing does. ``of sum`` is the same for the sum over all steps, and
    ``cosine`` belongs to the angle between a gradient and its message. ``feedback`` is on where the error of a step was
    added to the next one. ``with Adam`` is no for biased methods: Adam and AdamW need more care with them.
    Times are those of one thread.

    Args:
        source: a file of gradients by torch.save; a checkpoint, whose optimizer's momentum is then taken; or
            module:function, which returns gradients by name, or a model after its backward pass.
        compressors: names, such as qsgd,onebit; all if none is given.
        json: print JSON instead of a table.
    """
    from lightning_compress.commands.busy import load, one_thread
    from lightning_compress.commands.gradients import gradients_of
    from lightning_compress.comparison import compare

    print("measuring; this takes some seconds for 10 million elements", file=sys.stderr, flush=True)
    gradients = gradients_of(source)
    with one_thread():
        found = compare(gradients, compressors)
    print(dumps(dataclasses.asdict(found), indent=2) if json else found)
    if busy := load():
        print(f"{busy}: these times are too high", file=sys.stderr)
