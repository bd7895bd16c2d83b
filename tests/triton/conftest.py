"""Kernels of accelerators run on one where there is one, and elsewhere in Triton's interpreter."""

import threading
from contextlib import ExitStack, contextmanager

import pytest
import torch

from lightning_compress import kernels


@pytest.fixture
def device():
    """Where the kernels run."""
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Tensors on whose devices kernels are launched; one that is launched on whatever is current is an error."""
    pytest.importorskip("triton")
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from lightning_compress.kernels.triton import launch

    seen, within, on_device_of = [], [], launch.on_device_of

    @contextmanager
    def recorded(tensor):
        seen.append(tensor)
        within.append(tensor)
        with on_device_of(tensor):
            yield
        within.pop()

    def checked(run):
        def checked_run(self, *given, **options):
            ours = self.fn.__module__.startswith("lightning_compress.")
            assert within or not ours, f"{self.fn.__name__} is no kernel of kernels/triton/launch.py"
            return run(self, *given, **options)

        return checked_run

    monkeypatch.setattr(launch, "on_device_of", recorded)
    for each in (JITFunction, InterpretedFunction):
        monkeypatch.setattr(each, "run", checked(each.run))
    return seen


@pytest.fixture
def by():
    """Have plans made with kernels of a choice: ``by("triton")``."""
    with ExitStack() as choices:
        yield lambda choice: choices.enter_context(kernels.using(choice))


@pytest.fixture
def one_at_a_time(monkeypatch):
    """Have ranks that are threads take turns: Triton's interpreter is for one thread."""
    if torch.cuda.is_available():
        return
    from triton.runtime.interpreter import GridExecutor

    call, lock = GridExecutor.__call__, threading.Lock()

    def locked(*arguments, **options):
        with lock:
            return call(*arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", locked)
