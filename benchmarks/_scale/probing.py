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

from lightning_compress.codecs import Codec
from lightning_compress.collectives import TorchCollective
from lightning_compress.planning.link import time_codec, time_link
from lightning_compress.settings.parsing import build_compressor


def main(told: dict[str, Any]) -> None:
    """Measure while all other ranks do, and leave what was found.

    Args:
        told: ``codecs``, as a user names them; ``rank``, ``ranks``, ``master``, ``result``.
    """
    torch.set_num_threads(1)
    address, cpu = f"tcp://{told['master']}:29500", torch.device("cpu")
    dist.init_process_group("gloo", init_method=address, rank=told["rank"], world_size=told["ranks"])
    link = time_link(TorchCollective(), cpu)
    speeds = {}
    for name in told["codecs"]:
        dist.barrier()
        codec = build_compressor(name)
        assert isinstance(codec, Codec)
        speeds[str(name)] = asdict(time_codec(codec, cpu, told["ranks"] / (os.cpu_count() or 1)))
    Path(told["result"]).write_text(json.dumps({"link": asdict(link), "speeds": speeds}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
