"""Save this package's state with a Lightning checkpoint, and resume from it."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_compress.collectives import Collective, consensus
from lightning_compress.core import errors, state_dict
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.delayed import DelayedCompression
from lightning_compress.periodic.synchroniser import differing
from lightning_compress.planning.decide import keep
from lightning_compress.strategies import sidecar
from lightning_compress.strategies.part_file import Files
from lightning_compress.strategies.report import size as readable
from lightning_compress.strategies.sidecar import ALL, Column, Save, Saved, SavedState, Tree


class Resume:
    """Save and restore one tree of tensors and primitives per rank.

    Of a sharded model, the ranks of each column have states of their own, but all ranks save and restore together.

    Args:
        state: where the state goes. "sidecar": each rank writes its own file beside the checkpoint, and the run
            resumes bit for bit. "mean": the mean over ranks goes into the checkpoint itself, and the run resumes
            approximately. "none": nothing is saved, and error feedback begins again from zero.
        strict: True: raise if state cannot be restored. False: warn.

    Attributes:
        path: of the checkpoint that was loaded last; set it when one is loaded.
        everyone, ranks, column, device: of the current fit, set by ``begin``: all ranks, those of this rank's column,
            which it is, and the device for the collective calls.
        saves: number of saves so far in the current fit.

    Raises:
        ValueError: ``state`` or ``strict`` has another value.
    """

    everyone: Collective
    ranks: Collective
    column: Column
    device: torch.device

    def __init__(self, state: SavedState, strict: bool) -> None:
        if state not in get_args(SavedState):
            raise ValueError(f"state={state!r} must be one of {', '.join(map(repr, get_args(SavedState)))}")
        if not isinstance(strict, bool):
            raise ValueError(f"strict_state={strict!r} must be true or false")
        self.state = state
        self.strict = strict
        self.path = ""
        self._run = 0
        self.saves = 0

    def begin(
        self, everyone: Collective, device: torch.device, column: Column = ALL, ranks: Collective | None = None
    ) -> None:
        """Start a fit: all ranks agree on a random number that identifies it. Collective.

        Args:
            everyone: all ranks.
            device: for the collective calls.
            column: this rank's.
            ranks: those of the column; None: all.
        """
        self.everyone, self.ranks, self.column, self.device = everyone, ranks or everyone, column, device
        drawn = torch.tensor(random.SystemRandom().getrandbits(62), dtype=torch.int64, device=device)
        everyone.broadcast(drawn, device)
        self._run, self.saves = int(drawn), 0

    def save(
        self,
        files: Files,
        path: str,
        content: dict[str, Any],
        method: str,
        step: int,
        tree: Tree,
        alone: bool = False,
        once: bool = False,
    ) -> None:
        """Write this rank's file and add the manifest to a checkpoint that is about to be written. Collective.

        No rank continues before all have written their file. So no checkpoint lacks a file, and no checkpoint is
        overwritten before its successor is complete.

        Args:
            files: writes the file.
            path: of the checkpoint.
            content: of the checkpoint; gets the manifest.
            method: name of the method that can resume from this state.
            step: optimizer steps so far.
            tree: tensors and primitives of this rank. ``tree["common"]``, if present, must be the same on all ranks:
                otherwise no rank restores anything.
            alone: do not wait for the other ranks, because training is being aborted and they may be gone.
            once: see ``sidecar.write``.

        Raises:
            Exception: this rank's file cannot be written.
            ExchangeError: another rank could not write its file, or died.
        """
        if self.state == "none" or "optimizer_states" not in content:
            return
        with contextlib.nullcontext() if alone else _together(path, self.everyone, self.device):
            save = Save(self._run, self.saves, step)
            sidecar.write(files, path, content, save, method, tree, self.ranks, self.column, once)
        self.saves += 1

    def restore(self, read: Callable[[], tuple[Tree, object]]) -> Tree:
        """Return this rank's tree if every rank could read its own and the common parts agree. Collective.

        Args:
            read: returns this rank's tree, and the part of it that must be the same on all ranks of the column.

        Raises:
            ValueError: on every rank, with the first problem.
        """
        tree, common, problem = None, 0, None
        try:
            tree, shared = read()
            common = state_dict.checksum(shared)
        except Exception as error:  # the other ranks wait for this rank's answer
            problem = error
        said = {"files (their steps, settings, or what all ranks have in common)": common}
        whole = self.column.shards == 1
        why = consensus.disagreement(said if whole else {}, problem, self.everyone, self.device)
        if why or tree is None:
            raise ValueError(why) from problem
        if not whole:
            with self.together():
                consensus.check(said, None, self.ranks, self.device, "")
        return tree

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raise ValueError on all ranks if the block raises it on all ranks of a column. Collective."""
        if self.column.shards == 1:
            yield
            return
        problem = None
        try:
            yield
        except ValueError as error:  # the other columns wait for this one's answer
            problem = error
        consensus.check({}, problem, self.everyone, self.device, "")

    def differs(self, entries: list[dict[str, Any]]) -> bool:
        """Return whether a state differs between the ranks of a column; of all columns, for a collective answer."""
        own = any(entry["holder"] != "shared" for entry in entries)
        return own if self.column.shards == 1 else consensus.anywhere([own], self.everyone, self.device)[0]

    def read_own(self, files: Files, content: Mapping[str, Any], method: str) -> tuple[Tree, object]:
        """Read this rank's file of a run with a model per rank; for ``restore``.

        Raises:
            ValueError: the file is missing, damaged, or of another save, method or number of ranks.
        """
        saved = Saved.of(self.path, content.get(sidecar.KEY), [method], self.ranks.size)
        tree = saved.part(files, self.ranks.rank, _checked)
        return tree, tree["common"]

    def frozen_alike(self, frozen: Mapping[str, Tensor], saved: Mapping[str, Any]) -> set[str]:
        """Return the names of tensors that are the same on all ranks and in the checkpoint. Collective.

        Args:
            frozen: of this rank, by name.
            saved: the checkpoint's.
        """
        if not frozen:
            return set()
        different = set(differing(frozen, self.ranks, self.device))
        changed = [not _equal(each, saved.get(name)) for name, each in frozen.items()]
        absent = consensus.anywhere(changed, self.ranks, self.device)
        return {name for name, missing in zip(frozen, absent, strict=True) if not missing} - different

    def without(self, problem: ValueError, content: Mapping[str, Any], instead: str) -> str:
        """Return a warning that the run continues without its saved state.

        Args:
            problem: why the state cannot be restored.
            content: of the checkpoint.
            instead: what the run does instead, a sentence without its full stop.

        Raises:
            ValueError: ``strict`` is set, and there should have been or was a saved state.
        """
        if self.strict and (self.state != "none" or content.get(sidecar.KEY) is not None):
            raise ValueError(f"{problem}. Set strict_state=False to continue without it: {instead}") from problem
        return f"{problem}. {instead}"


def save_compression(
    resume: Resume, files: Files, path: str, content: dict[str, Any], compression: Compression, alone: bool = False
) -> None:
    """Save the state of a gradient compression with a checkpoint; see ``Resume.save``. Collective.

    With ``state="mean"`` the mean over the ranks goes into ``content``; of a sharded model, one file per shard goes
    beside it. It needs all ranks, so ``alone`` saves nothing unless the state is the same on every rank.
    """
    if "optimizer_states" in content and (chosen := keep(compression.settings)):
        content[sidecar.CHOSEN] = chosen
    if not compression.active or "optimizer_states" not in content:
        return
    if correction := compression.settings.correction:
        for optimizer in filter(None, content["optimizer_states"]):  # rank 0 alone may have them
            correction.restore_optimizer(optimizer)
    if resume.state == "none":
        return
    state, ranks = compression.state_dict(), resume.ranks
    entries = [entry for group in state["groups"] for entry in group["states"].values()]
    differs = resume.differs(entries)
    if resume.state == "sidecar" and differs:
        if not resume.saves and resume.everyone.rank == 0:
            size = sum(entry["numbers"].nbytes for entry in entries) + state_dict.bytes_in_flight(state)
            where = os.path.basename(sidecar.folder_for(path))
            rank_zero_info(f"lightning_compress: residuals saved in {where}, {readable(size)} a rank")
        resume.save(files, path, content, state["method"], compression.step, state, alone)
    elif resume.column.shards > 1:
        state = sidecar.averaged(state, ranks, ranks.size, resume.device)
        resume.save(files, path, content, state["method"], compression.step, state, once=True)
    elif not (differs and alone):
        sidecar.write_inside(content, state, ranks, resume.device)


def restore_compression(resume: Resume, files: Files, content: Mapping[str, Any], compression: Compression) -> str:
    """Restore the state of a gradient compression from the checkpoint that was loaded last. Collective.

    Returns:
        An empty text, or a warning that says why the compression starts without its saved state.

    Raises:
        ValueError: on every rank: it cannot be restored, and ``strict_state`` is set.
    """
    compression.reset()
    manifest, ranks, device = content.get(sidecar.KEY), resume.ranks, resume.device
    keeps, shards = compression.settings.keeps_state, resume.column.shards
    absent, apart = manifest is None, sidecar.shards_of(manifest) != shards
    if (absent and not (compression.active and keeps)) or (apart and not keeps):
        return ""

    def read() -> tuple[Tree, object]:
        if not compression.active and compression.settings.chosen is None:
            raise ValueError(
                "this run does not compress (one rank or replica, or 'none'): the saved residual is dropped"
            )
        families = compression.settings.families
        state = sidecar.read(files, resume.path, manifest, families, ranks, device, resume.column)
        return state, state_dict.common(state)

    try:
        saved = resume.restore(read)
        if "summands" in saved:
            unit = "ranks" if shards == 1 else "replicas"
            rank_zero_info(
                f"lightning_compress: {resume.path} was saved by {saved['summands']} {unit}; each of these "
                f"{ranks.size} {unit} starts from the mean of their residuals"
            )
        with resume.together():
            compression.load_state_dict(sidecar.redistribute(saved, ranks, device))
    except ValueError as error:  # the same on all ranks
        compression.reset()
        instead = "Error feedback begins again from zero, and warm-up and schedules at their first step"
        return resume.without(error, content, instead + _keep_in_flight(resume, files, manifest, compression))
    return ""


def _keep_in_flight(resume: Resume, files: Files, manifest: object, compression: Compression) -> str:
    """Keep the average that was in flight (``delay=1``), although the rest of the state cannot be restored. Collective.

    Returns:
        a sentence if it is lost: this run applies no average late, or a method makes steps of gradients.
    """
    ranks = resume.ranks
    try:
        state = resume.restore(lambda: ({} if ranks.rank else sidecar.read_first(files, resume.path, manifest), None))
    except ValueError:  # the same on all ranks
        return ""
    flying = state.get(state_dict.IN_FLIGHT, {})
    found = [bool(flying), flying.get("gradients", False)]
    there, gradients = consensus.anywhere(found, ranks, resume.device)
    if there and gradients and compression.settings.steps_by is None and isinstance(compression, DelayedCompression):
        with contextlib.suppress(ValueError):
            compression.load_in_flight(state)
            if compression.in_flight:  # else it is of other parameters
                return ""
    return ". The average in flight is lost; only delay=1 and the compressor that made it can apply it" if there else ""


def _equal(own: Tensor, other: object) -> bool:
    if not isinstance(other, Tensor) or (own.dtype, own.shape, own.device) != (other.dtype, other.shape, other.device):
        return False
    return own.equal(other)


def _checked(tree: object) -> Tree:
    if not isinstance(tree, dict):
        raise ValueError("the checkpoint's files do not hold the state of a rank")
    if not {"common", "model", "optimizers", "precision", "own"} <= tree.keys() or "own" not in tree["common"]:
        raise ValueError("the checkpoint's files are of an earlier version, whose format this version cannot read")
    return tree


@contextlib.contextmanager
def _together(path: str, ranks: Collective, device: torch.device) -> Iterator[None]:
    """Wait until every rank has run the block; if it fails on one rank, all ranks raise."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # the other ranks wait for this rank's answer
        problem = error
    try:
        with errors.explained(f"saving {path}", ranks.rank):
            why = consensus.disagreement({}, problem, ranks, device)
    finally:
        if problem is not None:
            raise problem
    if why:
        raise errors.ExchangeError(
            f"rank {ranks.rank}, saving {path}: another rank could not write its part ({why}); the checkpoint was not "
            "written"
        )
