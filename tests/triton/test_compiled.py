"""Kernels compile for GPUs that are not here, into what the design counts on."""

import json
import os
import subprocess
import sys

import pytest

from tests.triton.cases import EXACT

PROGRAM = (
    "import json, sys; from benchmarks.kernels import report; print(json.dumps(report(sys.argv[2:], int(sys.argv[1]))))"
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("capability", "codecs"),
    [
        (90, ["rotated"]),
        pytest.param(90, EXACT, marks=pytest.mark.thorough),
        pytest.param(80, EXACT, marks=pytest.mark.thorough),
    ],
)
def test_nothing_spills_nothing_is_fused_and_numbers_move_16_bytes_at_a_time(capability, codecs):
    pytest.importorskip("triton")
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM, str(capability), *codecs, "group"]
    done = subprocess.run(command, capture_output=True, text=True, env=surroundings)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["codec"] for row in rows} == {*codecs, "group"}
    for row in rows:
        assert row["stack"] == 0, row
        assert row["fma"] == 0, row
    for codec in codecs:
        assert max(row["load"] for row in rows if row["codec"] == codec) == 128
        assert max(row["store"] for row in rows if row["codec"] == codec) == 128
