"""How fast codecs are: timed on this machine, or as published for a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from lightning_compress.codecs import Codec, Dense
from lightning_compress.commands.busy import one_thread
from lightning_compress.commands.jobs import SIDE
from lightning_compress.core.registry import name_of
from lightning_compress.planning.cost import Speeds
from lightning_compress.planning.link import kind_of, time_codec
from lightning_compress.planning.predict import CPU
from lightning_compress.settings.parsing import COMPRESSORS
from lightning_compress.settings.run_state import RunState

LAUNCH_S = 0.25e-3
"""Seconds that a call of a codec takes to start on a GPU: 1.3 to 2 ms were measured for a bucket's 20 kernels
(docs/results/gpu.md, "Time of a step"), and a bucket starts 7 by all_gather in 2 calls, or 11 by two_shot in 6."""
NUMEL = 6_553_600
"""Elements of the published times."""
H100_MS = {
    "qsgd": (0.0302, 0.0214),
    "rotated": (0.0391, 0.0239),
    "onebit": (0.0327, 0.0206),
    "topk": (0.0988, 0.0071),
    "bf16": (0.0199, 0.0199),
    "none": (0.0199, 0.0199),
}
"""Milliseconds to encode with residual and to decode ``NUMEL`` elements on one H100, from
docs/results/gpu/codecs_25mb.json; casts and float32 as its copy."""


def speeds_for(
    settings: Iterable[RunState], ranks: int, device: str | None, gpu: str, busy: str, crowd: float
) -> tuple[dict[str, Speeds], torch.device, str]:
    """Return the speeds of these settings' codecs, the device that encodes, and a sentence on their source.

    Args:
        settings: what runs.
        ranks: how many processes train together.
        device: as the user chose it; None: what trains.
        gpu: the name of the GPU on which a script was measured here, or empty.
        busy: that other programs use this machine, or empty.
        crowd: ranks per core of a CPU.
    """
    if device == "cuda" and not gpu:
        text = "those published for one H100, kernel launches included. They were never run between several GPUs."
        return published(settings, ranks), torch.device("cuda"), f"Codecs: {text}"
    if gpu and device != "cpu":
        here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        return timed(settings, ranks, here), here, f"Codecs: timed on this {gpu}."
    found = timed(settings, ranks, CPU, crowd)
    text = f"timed on one core of this CPU{f'; {busy}: these times are too high' if busy else ''}"
    other = " The script trained on a GPU." if gpu else " For training on GPUs, add --device cuda."
    return found, CPU, f"Codecs: {text}.{other}"


def timed(settings: Iterable[RunState], ranks: int, device: torch.device, crowd: float = 1.0) -> dict[str, Speeds]:
    """Measure the codecs of these settings, and of their sums, with one thread."""
    with one_thread():
        return {kind_of(each): time_codec(each, device, crowd) for each in codecs_of(settings, ranks)}


def published(settings: Iterable[RunState], ranks: int) -> dict[str, Speeds]:
    """Return the published speeds of these settings' codecs on one H100."""
    found = {}
    for codec in codecs_of(settings, ranks):
        encode_ms, decode_ms = H100_MS[name_of(type(codec), COMPRESSORS) or ""]
        start_s = 0.0 if isinstance(codec, Dense) else LAUNCH_S
        found[kind_of(codec)] = Speeds(encode_ms / 1e3 / NUMEL, decode_ms / 1e3 / NUMEL, start_s)
    return found


def codecs_of(settings: Iterable[RunState], ranks: int) -> list[Codec]:
    """Return a codec of each kind that these settings run on so many ranks, and that of float32."""
    found: dict[str, Codec] = {kind_of(Dense()): Dense()}
    for running in settings:
        for section in running.rules.sections([("weight", (SIDE, SIDE))])[1]:
            fed = running.fed(section)
            found |= {kind_of(each): each for each in (fed.codec, fed.codec_of_sums(ranks))}
    return list(found.values())
