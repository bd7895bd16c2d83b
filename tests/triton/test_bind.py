"""A kernel that is launched again gets what Triton would give it; where that is not known, Triton launches it."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lightning_compress.kernels.program import STREAM

triton = pytest.importorskip("triton")
launch = pytest.importorskip("lightning_compress.kernels.triton.launch")


class Kernel:
    """What is asked of Triton's ``JITFunction``."""

    arg_names = ("first", "second", "SIZE")
    pre_run_hooks = ()

    def run(self, *arguments, **options):
        """By Triton."""


@pytest.fixture
def kept():
    launcher = SimpleNamespace(
        launch="launch",
        launch_cooperative_grid="cooperative",
        launch_pdl="pdl",
        global_scratch_size=0,
        profile_scratch_size=0,
    )
    return SimpleNamespace(run=launcher, function="function", packed_metadata="metadata")


OPTIONS = {"grid": (7, 2), "warmup": False, "SIZE": 64, "num_warps": 4}


def direct(kept, options=OPTIONS):
    """Whether the compiled kernel's launcher is called, and not Triton."""
    kernel = Kernel()
    function, arguments = launch.bind(kernel, (1, 2), options, kept)
    if function == "launch":
        expected = 7, 2, 1, STREAM, "function", "cooperative", "pdl", None, None, "metadata", None, None, None
        assert arguments == [*expected, 1, 2, 64]
        return True
    assert (function.func, function.args, function.keywords, arguments) == (Kernel.run, (kernel,), options, [1, 2])
    return False


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.6.0")


def test_the_launcher_is_called(kept):
    assert direct(kept)


@pytest.mark.parametrize("version", ["3.5.1", "3.60.0", "4.0.0"])
def test_an_unknown_version(kept, version, monkeypatch):
    monkeypatch.setattr(triton, "__version__", version)
    assert not direct(kept)


def test_the_interpreter_keeps_nothing():
    assert not direct(None)


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_sees_launches(kept, hook, monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, hook, SimpleNamespace(calls=[print]))
    assert not direct(kept)


def test_another_launcher_or_one_that_allocates(kept):
    kept.run.global_scratch_size = 128
    assert not direct(kept)
    kept.run.global_scratch_size = 0
    del kept.run.launch_pdl
    assert not direct(kept)


def test_an_argument_by_default(kept):
    assert not direct(kept, {name: value for name, value in OPTIONS.items() if name != "SIZE"})


COMPILED = """
import contextlib, json, types
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.driver import driver

given = []

class Launcher:
    launch_cooperative_grid, launch_pdl = False, False
    global_scratch_size = global_scratch_align = profile_scratch_size = profile_scratch_align = 0
    num_ctas = 1
    __call__ = CudaLauncher.__call__
    def __init__(self, *_):
        pass
    def launch(self, *arguments):
        given.append(arguments)

class Driver:
    launcher_cls = Launcher
    utils = types.SimpleNamespace(
        load_binary=lambda *_: (1, 1, 32, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 1 << 20, "warpSize": 32},
    )
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device=None):
        return 3

driver.set_active(Driver())
from lightning_compress import kernels
kernels.compiler = lambda device: "triton"
from lightning_compress.codecs import CODECS
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges.message import encode_by
from lightning_compress.kernels.program import STREAM, Tape, plain, recording

def shown(each):
    return each.data_ptr() if isinstance(each, torch.Tensor) else repr(each)

layout, found = Layout.of([("w", (64, 64))]), {}
for name in ("qsgd", "fft"):
    plan, tape = CODECS[name]().plan(layout, torch.device("cpu")), Tape(5)
    vector, message = torch.zeros(layout.numel), torch.zeros(plan.message_size, dtype=torch.uint8)
    given.clear()
    with recording(tape):
        encode_by(plan, vector, message, tape.step)
    again = [[3 if each is STREAM else plain(each) for each in arguments] for _, arguments in tape.calls]
    hooks = slice(11, 13)  # chains without a hook, and none
    for by_triton, ours in zip(given, again, strict=True):
        by_triton = [*by_triton[:10], None, None, None, *by_triton[13:]]
        assert list(map(shown, by_triton)) == list(map(shown, ours)), (by_triton, ours)
    found[name] = len(again), tape.void
print(json.dumps(found))
"""


@pytest.mark.timeout(300)
def test_as_triton_launches_what_it_compiled():
    if not triton.__version__.startswith("3.6."):
        pytest.skip("another version launches in another way")
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, env=surroundings)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"qsgd": [1, ""], "fft": [3, ""]}
