"""Write the checkpoints that are missing, and what they lead to."""

import base64
import json
import shutil
import tempfile
from pathlib import Path

from tests.golden_checkpoints.runs import CASES, NAME, fit, folder_of, machine
from tests.helpers.processes import Pools


def write(pool, method, size):
    """One case."""
    with tempfile.TemporaryDirectory() as place:
        answers = pool.run(fit, place, method)
        weights, _, _ = answers[0]
        assert all((each == weights).all() and not said for each, _, said in answers)
        expected = {
            "machine": pool.run(machine)[0],
            "weights": base64.b64encode(weights.tobytes()).decode(),
            "kept": [kept for _, kept, _ in answers],
        }
        folder = folder_of(method, size)
        shutil.copytree(Path(place, f"{NAME}.lc"), folder / f"{NAME}.lc")
        shutil.copy(Path(place, NAME), folder)
        (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def main():
    """Write those that have no folder."""
    pools = Pools()
    for method, size in CASES:
        if not folder_of(method, size).exists():
            write(pools[size], method, size)
    pools.close()


if __name__ == "__main__":  # not in the ranks, which import this file
    main()
