"""The compression's part in a trainer's checkpoints: what it adds to them, and how it resumes from them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_compress.collectives import Collective, consensus
from lightning_compress.core import errors, state_dict
from lightning_compress.engine.compression import Compression
from lightning_compress.planning.decide import keep
from lightning_compress.strategies import sidecar
from lightning_compress.strategies.sidecar import Files, Save, Saved, SavedState, Tree


class Resume:
    """Saves and restores the state of a run's compression.

    Args:
        state: "sidecar": every rank writes a file of its own beside the checkpoint, from which the run goes on exactly;
            "mean": the mean over the ranks goes into the checkpoint itself, one file as without compression, from which
            the run goes on nearly; "none": nothing is saved, and error feedback begins again from zero.
        strict: a state that cannot be restored is an error instead of a warning.

    Raises:
        ValueError: ``state`` is none of these.
    """

    def __init__(self, state: SavedState, strict: bool) -> None:
        if state not in get_args(SavedState):
            raise ValueError(f"state={state!r} must be one of {', '.join(map(repr, get_args(SavedState)))}")
        if not isinstance(strict, bool):
            raise ValueError(f"strict_state={strict!r} must be true or false")
        self.state = state
        self.strict = strict
        self._path = ""
        self._run = 0
        self._saves = 0

    def begin(self, ranks: Collective, device: torch.device) -> None:
        """A fit begins; a collective call, in which the ranks agree on a number for it."""
        self._ranks, self._device = ranks, device
        drawn = torch.tensor(random.SystemRandom().getrandbits(62), device=device)
        ranks.broadcast(drawn, device)
        self._run, self._saves = int(drawn), 0

    def save(
        self, files: Files, path: str, content: dict[str, Any], compression: Compression, alone: bool = False
    ) -> None:
        """Add to a checkpoint that is about to be written; a collective call.

        No rank goes on before all have written their part, so that no checkpoint is without one, and none is written
        over before its successor is whole.

        Args:
            files: writes.
            path: of the checkpoint.
            content: of the checkpoint.
            compression: what is saved.
            alone: do not wait for the others: training is being aborted, and they may have ended.

        Raises:
            Exception: this rank's part cannot be written.
            ExchangeError: another rank's part cannot, or it died.
        """
        if "optimizer_states" in content and (chosen := keep(compression.settings)):
            content[sidecar.CHOSEN] = chosen
        if not compression.active or "optimizer_states" not in content:
            return
        if correction := compression.settings.correction:
            for each in content["optimizer_states"]:
                correction.give_back(each)
        if self.state == "none":
            return
        state = compression.state_dict()
        own = any(one["holder"] != "shared" for group in state["groups"] for one in group["states"].values())
        if self.state == "sidecar" and own:
            if not self._saves and self._ranks.rank == 0:
                each = sum(one["numbers"].nbytes for group in state["groups"] for one in group["states"].values())
                size = self._ranks.size
                rank_zero_info(f"lightning_compress: beside {path}: {each} bytes a rank, {each * size} of {size} ranks")
            self.save_tree(files, path, content, state["method"], compression.step, state, alone)
        elif not (own and alone):  # the mean takes all ranks
            sidecar.write_inside(content, state, self._ranks, self._device)

    def save_tree(
        self,
        files: Files,
        path: str,
        content: dict[str, Any],
        method: str,
        step: int,
        tree: Tree,
        alone: bool = False,
    ) -> None:
        """``save`` for whatever ranks have of their own, each in its file.

        Args:
            files: writes.
            path: of the checkpoint.
            content: of the checkpoint.
            method: what can go on from it.
            step: optimizer steps so far.
            tree: tensors and primitives of this rank; what it has as ``"common"`` is the same on all ranks, or nothing
                of it is restored.
            alone: do not wait.

        Raises:
            Exception: this rank's part cannot be written.
            ExchangeError: another rank's part cannot, or it died.
        """
        if self.state == "none" or "optimizer_states" not in content:
            return
        with contextlib.nullcontext() if alone else _together(path, self._ranks, self._device):
            sidecar.write(files, path, content, Save(self._run, self._saves, step), method, tree, self._ranks)
        self._saves += 1

    def restore_tree(self, files: Files, content: Mapping[str, Any], method: str) -> tuple[Tree | None, str]:
        """This rank's part of the checkpoint that was read last, on all ranks or on none; a collective call.

        Returns:
            it, or None; and why there is none.

        Raises:
            ValueError: there is none, and ``strict`` was asked for; on every rank.
        """

        def read() -> tuple[Tree, object]:
            saved = Saved.of(self._path, content.get(sidecar.KEY), [method], self._ranks.size)
            tree = saved.part(files, self._ranks.rank, _checked)
            return tree, tree.get("common")

        tree, problem = _read(read, self._ranks, self._device)
        if tree is None and self._strict_about(content):
            raise ValueError(f"{problem}; set strict_state=False to begin from the checkpoint's own model")
        return tree, "" if tree is not None else f"{problem}. All ranks begin from the checkpoint's own model"

    def remember(self, path: str) -> None:
        """A checkpoint was read; its files are read when the model is ready."""
        self._path = path

    def restore(self, files: Files, content: Mapping[str, Any], compression: Compression) -> str:
        """Resume from the checkpoint that was read last; a collective call.

        Returns:
            why the compression begins anew instead, or an empty text.

        Raises:
            ValueError: it cannot go on, and ``strict`` was asked for; on every rank.
        """
        compression.reset()
        manifest, ranks, device = content.get(sidecar.KEY), self._ranks, self._device
        if manifest is None and not (compression.active and compression.settings.keeps_state):
            return ""

        def read() -> tuple[Tree, object]:
            if not compression.active and compression.settings.chosen is None:
                raise ValueError("this run does not compress, on one rank or with 'none': what was not sent is dropped")
            state = sidecar.read(files, self._path, manifest, compression.settings.families, ranks, device)
            return state, state_dict.common(state)

        state, problem = _read(read, ranks, device)
        if state is not None:
            try:
                compression.load_state_dict(sidecar.redistribute(state, ranks, device))
                return ""
            except ValueError as error:  # on all ranks alike
                compression.reset()
                problem = str(error)
        if self._strict_about(content):
            raise ValueError(f"{problem}; set strict_state=False to begin error feedback again from zero")
        return f"{problem}. Error feedback begins again from zero, and warm-up and schedules at their first step"

    def _strict_about(self, content: Mapping[str, Any]) -> bool:
        """Not where nothing was to be saved, and nothing was."""
        return self.strict and (self.state != "none" or content.get(sidecar.KEY) is not None)

    def remove(self, path: str, rank: int) -> None:
        """A checkpoint was removed; called on all ranks."""
        sidecar.remove(path, rank)


def _read(read: Callable[[], tuple[Tree, object]], ranks: Collective, device: torch.device) -> tuple[Tree | None, str]:
    """What this rank reads, if all of them can and it fits together; and why not. A collective call.

    Args:
        read: this rank's own, and what of that has to be the same on all ranks.
        ranks: that compare.
        device: on which they talk.
    """
    found, common, problem = None, 0, None
    try:
        found, shared = read()
        common = state_dict.checksum(shared)
    except Exception as error:  # the other ranks wait for word
        problem = error
    said = {"files (their steps, settings, or what all ranks have in common)": common}
    why = consensus.disagreement(said, problem, ranks, device)
    return None if why else found, why


def _checked(tree: object) -> Tree:
    if not isinstance(tree, dict):
        raise ValueError("the checkpoint's files do not hold what a rank has of its own")
    if not {"common", "model", "optimizers", "precision", "own"} <= tree.keys() or "own" not in tree["common"]:
        raise ValueError("the checkpoint's files are of an earlier version, which had what a rank has otherwise")
    return tree


@contextlib.contextmanager
def _together(path: str, ranks: Collective, device: torch.device) -> Iterator[None]:
    """Wait until every rank has done what is inside; what failed on one of them stops all."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # the others wait for word
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
