"""One rank of the lab that looks at its link and its codecs, as ``exchange="auto"`` does."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from lightning_compress.collectives import TorchCollective
from lightning_compress.commands.advise import codecs_of
from lightning_compress.planning.link import kind_of, time_codec, time_link
from lightning_compress.settings.run_state import RunState


def find(told: dict[str, Any]) -> dict[str, Any]:
    """Measure while all other ranks do: ``link``, and ``speeds`` by codec.

    Args:
        told: ``compressors``, as a user writes them; ``ranks``.
    """
    cpu = torch.device("cpu")
    link = time_link(TorchCollective(), cpu)
    settings = [RunState.of(each).stepped_by("sgd") for each in told["compressors"]]
    speeds = {}
    for codec in codecs_of(settings, told["ranks"]):
        dist.barrier()
        speeds[kind_of(codec)] = asdict(time_codec(codec, cpu, told["ranks"] / (os.cpu_count() or 1)))
    return {"link": asdict(link), "speeds": speeds}
