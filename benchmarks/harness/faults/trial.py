"""One fault: what the ranks did, and whether training goes on as if nothing had happened."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.harness.faults import ranks
from benchmarks.harness.faults.injection import FILLER
from benchmarks.harness.faults.ranks import Ended
from benchmarks.harness.faults.training import Job
from lightning_compress.strategies import sidecar

PATIENCE = 60.0
AT = 5
CAUSES = {
    "interrupted": ("SystemExit", "SIGTERMException", "KeyboardInterrupt"),
    "did not answer": ("a rank did not answer within",),
    "another died": ("a rank died or stopped with an error of its own",),
    "own error": ("this rank's own error",),
    "another cannot write": ("another rank could not write its part",),
    "cannot write": ("No space left on device",),
    "cannot restore": ("strict_state",),
    # where Lightning talks itself
    "Gloo's own words": ("Connection closed", "Connection reset", "Timed out waiting", "Application timeout"),
}
GONE = {"another died"}
ALLOWED: dict[str, set[str]] = {
    "killed": GONE,
    "stopped": {"did not answer", *GONE},
    "error": GONE,
    "disk": {"cannot write", "another cannot write", *GONE},
    "Ctrl-C": {"interrupted", "Gloo's own words", *GONE},
    "SIGINT": {"interrupted", "Gloo's own words", *GONE},
    "SIGTERM": {"interrupted"},
    "part": {"cannot restore"},
}
"""What may be said of a fault whose name begins so; the victim of an error has an error of its own."""
SAVING = ("writing", "disk full")


@dataclass
class Trial:
    """What became of one fault.

    Attributes:
        seconds: from the fault to the error, of each rank that lived on.
        causes: why, as they said, by the keys of ``CAUSES``.
        said: their errors.
        repeated: steps that had been done and had to be done again.
        problems: what must not be; empty if all is well.
        unreadable: names of checkpoints that were half written, under their final name.
    """

    fault: str
    method: str
    size: int
    seed: int
    victim: int = 0
    seconds: list[float] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    repeated: int = 0
    problems: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


class SkippedError(Exception):
    """The fault cannot be brought about here."""


class Trials:
    """Tries faults, and keeps the runs never disturbed that they are compared with.

    Args:
        timeout: of the process group where ranks have to wait for it, seconds.
    """

    def __init__(self, timeout: float = 5.0) -> None:
        self.timeout = timeout
        self._undisturbed: dict[tuple[str, int], Ended] = {}

    def undisturbed(self, method: str, size: int) -> Ended:
        """How the run ends if nothing happens."""
        if (method, size) not in self._undisturbed:
            with tempfile.TemporaryDirectory() as folder:
                ended = ranks.run(Job(folder, method, size), PATIENCE)
                if any(ended.exits) or ended.hung:
                    raise RuntimeError(f"{method} on {size} ranks does not train:\n{_log(folder, 0)}")
                self._undisturbed[method, size] = ended
        return self._undisturbed[method, size]

    def run(self, fault: str, method: str, size: int, seed: int) -> Trial:
        """Bring the fault about, and go on from the last complete checkpoint.

        Raises:
            SkippedError: it cannot be brought about here.
        """
        trial = Trial(fault, method, size, seed, 0 if "the checkpoint" in fault else seed % size)
        expected = self.undisturbed(method, size)
        with tempfile.TemporaryDirectory() as folder, _disk(folder, fault):
            job = Job(folder, method, size, fault=fault, victim=trial.victim, at=AT, seed=seed)
            job = replace(job, timeout=self.timeout if fault == "stopped" or "SIGTERM" in fault else job.timeout)
            if fault == "disk full" and seed % 4 < 2:  # a temporary file elsewhere is copied to its place, not renamed
                job = replace(job, temporary=f"{folder}/elsewhere")
            if fault.startswith("part "):
                ranks.run(replace(job, fault="", steps=AT + 1), PATIENCE)
                damage(fault, job)
                job = replace(job, resume=f"{job.checkpoints}/last.ckpt")
            ended = ranks.run(job, job.timeout + PATIENCE)
            _judge(trial, job, ended)
            Path(job.checkpoints, FILLER).unlink(missing_ok=True)
            _go_on(trial, replace(job, fault="", resume="", temporary="", timeout=30.0), expected)
        return trial


def damage(fault: str, job: Job) -> None:
    """Do something to the victim's part of the last checkpoint."""
    save = torch.load(f"{job.checkpoints}/last.ckpt", weights_only=True)[sidecar.KEY]["save"]
    part = Path(job.checkpoints, "last.ckpt.lc", f"{save}.rank{job.victim}.pt")
    content = part.read_bytes()
    place = len(content) * (job.seed % 7 + 1) // 9
    if fault == "part missing":
        part.unlink()
    elif fault == "part cut off":
        part.write_bytes(content[:place])
    else:
        part.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])


def _judge(trial: Trial, job: Job, ended: Ended) -> None:
    """Whether everybody stopped, in time, and said why."""
    if ended.hung or ended.orphans:
        trial.problems.append(f"ranks {ended.hung} went on, processes {ended.orphans} were left")
    for rank, outcome in enumerate(ended.outcomes):
        if rank == job.victim and "killed" in job.fault:
            if ended.exits[rank] != -9:
                trial.problems.append(f"rank {rank} was not killed: {ended.exits[rank]}")
            continue
        if outcome is None or "error" not in outcome:
            trial.problems.append(f"rank {rank} gave no error: {outcome or _log(job.folder, rank)}")
            continue
        said = f"{outcome['error']}: {outcome['said']}"
        cause = next((name for name, words in CAUSES.items() if any(word in said for word in words)), said)
        trial.causes.append(cause)
        trial.said.append(said)
        if rank != job.victim or job.fault != "stopped":
            trial.seconds.append(outcome["at"] - max(ended.struck, outcome["started"]))
        allowed = next(causes for begin, causes in ALLOWED.items() if job.fault.startswith(begin))
        if cause not in ({"own error"} if rank == job.victim and job.fault.startswith("error") else allowed):
            trial.problems.append(f"rank {rank} does not name the cause: {said}")
    if any(seconds > job.timeout + 2.0 for seconds in trial.seconds):
        trial.problems.append(f"{max(trial.seconds):.1f} s to the error, with a timeout of {job.timeout} s")


def _go_on(trial: Trial, job: Job, expected: Ended) -> None:
    """Resume from the last complete checkpoint, and compare with the run that was never disturbed."""
    steps = {}
    for path in Path(job.checkpoints).glob("*.ckpt"):
        try:
            steps[path] = torch.load(path, weights_only=True)["global_step"]
        except Exception:
            trial.unreadable.append(path.name)
    if trial.fault.startswith("part "):
        steps.pop(Path(job.checkpoints, "last.ckpt"))
    for path in sorted(steps, key=lambda each: (steps[each], each.name == "last.ckpt"), reverse=True):
        ended = ranks.run(replace(job, resume=str(path)), PATIENCE)
        if any(ended.exits):
            trial.problems.append(f"{path.name} is not complete: {ended.outcomes}")
            continue
        if not trial.fault.startswith("part "):
            trial.repeated = max(0, AT + any(word in trial.fault for word in SAVING) - steps[path])
        for rank, (ours, theirs) in enumerate(zip(ended.outcomes, expected.outcomes, strict=True)):
            for what in ("parameters", "state", "step"):
                if not ours or not theirs or ours.get(what) != theirs.get(what):
                    trial.problems.append(f"{what} of rank {rank} differ from the run never disturbed")
        return
    trial.problems.append("there is no complete checkpoint")


@contextlib.contextmanager
def _disk(folder: str, fault: str) -> Iterator[None]:
    """A small disk for the checkpoints, where the fault is that it is full."""
    if fault != "disk full":
        yield
        return
    place = Job(folder, "", 0).checkpoints
    os.makedirs(place)
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", place]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        raise SkippedError("a small disk of one's own takes root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def _log(folder: str, rank: int) -> str:
    path = Path(folder, f"rank{rank}.log")
    return path.read_text()[-2000:] if path.exists() else "nothing"
