r"""What an elastic job runs: go on from the last checkpoint, if there is one.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 python -m torch.distributed.run --standalone --nproc-per-node=2 \
        --max-restarts=1 -m benchmarks.harness.faults.elastic DIR

Rank 1 kills itself in step 5 the first time.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.harness.faults.injection import Fault
from benchmarks.harness.faults.training import Job, digest, fit


def main() -> None:
    """Train on this rank, and write down how it began and ended."""
    folder, rank = sys.argv[1], int(os.environ["RANK"])
    job = Job(folder, "topk", int(os.environ["WORLD_SIZE"]), resume="last", fault="killed in forward", victim=1, at=5)
    again = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) > 0 or os.path.exists(f"{job.checkpoints}/last.ckpt")
    told = digest(*fit(job, [] if again else [Fault(job, rank)]))
    Path(folder, f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
