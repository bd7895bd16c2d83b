"""One rank of the lab that looks at its link and its codecs, as ``exchange="auto"`` does."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_compress.collectives import TorchCollective
from lightning_compress.commands.advise import codecs_of
from lightning_compress.planning.link import kind_of, time_codec, time_link
from lightning_compress.settings.run_state import RunState


def main(told: dict[str, Any]) -> None:
    """Measure while all other ranks do, and leave what was found.

    Args:
        told: ``compressors``, as a user writes them; ``rank``, ``ranks``, ``master``, ``result``.
    """
    torch.set_num_threads(1)
    address, cpu = f"tcp://{told['master']}:29500", torch.device("cpu")
    dist.init_process_group("gloo", init_method=address, rank=told["rank"], world_size=told["ranks"])
    link = time_link(TorchCollective(), cpu)
    settings = [RunState.of(each).stepped_by("sgd") for each in told["compressors"]]
    speeds = {}
    for codec in codecs_of(settings, told["ranks"]):
        dist.barrier()
        speeds[kind_of(codec)] = asdict(time_codec(codec, cpu, told["ranks"] / (os.cpu_count() or 1)))
    Path(told["result"]).write_text(json.dumps({"link": asdict(link), "speeds": speeds}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
