"""Run a user's script for a few steps, which a callback measures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from lightning_compress.planning.script_steps import MOST, WARM, ScriptSteps
from lightning_compress_advise import VARIABLE

GROUP = "lightning.pytorch.callbacks_factory"
LEAVING = 5.0
"""Seconds after which the script's processes are killed when the figures are there: a parent may wait for children that
have ended."""


def measured(script: str, args: Sequence[str]) -> ScriptSteps | None:
    """Return what the script's steps showed; None: rank 0 runs on another host, or in another process of torchrun.

    Args:
        script: a file, or a module.
        args: its words.

    Raises:
        ValueError: there is no such script, or it did not train.
    """
    words = _command(script)
    if not any(each.value.startswith("lightning_compress_advise:") for each in entry_points(group=GROUP)):
        raise ValueError(
            "Lightning does not find the callback that measures: install lightning-compress with pip (in a checkout: "
            "pip install -e .)"
        )
    print(
        f"running {script} for about {WARM + MOST} steps, without averaging and without checkpoints; what it prints:",
        file=sys.stderr,
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="lightning_compress_advise") as folder:
        status = _run([*words, *args], Path(folder))
        found = sorted(Path(folder).glob("*.json"), key=lambda each: int(each.stem))
        if not found:
            why = "before a training step ended" if status else "without a fit of Lightning's Trainer"
            raise ValueError(f"{script} ended with status {status} {why}; what it printed stands above")
        first = ScriptSteps(**json.loads(found[0].read_text()))
    return None if first.rank else first


def _command(script: str) -> list[str]:
    """Return how Python starts the script."""
    if Path(script).is_file():
        return [sys.executable, script]
    sys.path.insert(0, os.getcwd())  # as python -m does
    with suppress(ImportError, ValueError):
        if find_spec(script):
            return [sys.executable, "-m", script]
    raise ValueError(f"--script {script} is neither a file nor a module; write such as train.py, or recipes.train")


def _run(words: Sequence[str], folder: Path) -> int:
    """Run the command to its end; what it prints goes to our standard error. Return its status."""
    environment = {"WANDB_MODE": "disabled"} | os.environ | {VARIABLE: str(folder)}
    with _stopped_by_sigterm():
        process = subprocess.Popen(words, stdout=2, env=environment, start_new_session=True)
        try:
            since: float | None = None
            while process.poll() is None:
                time.sleep(0.05)
                if since is None and any(folder.glob("*.json")):
                    since = time.monotonic()
                if since is not None and time.monotonic() - since > LEAVING:
                    break
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also workers that it has left
        return process.wait()


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM, which torchrun sends, end this process as Ctrl-C does, so that the script ends too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
