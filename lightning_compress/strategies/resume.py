"""The compression's part in a trainer's checkpoints: what it adds to them, and how it resumes from them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_compress.collectives import Collective
from lightning_compress.core import failures, snapshot
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.forecast import keep
from lightning_compress.strategies import sidecar
from lightning_compress.strategies.sidecar import Files, Save, SavedState, Tree

_LONGEST = 500
"""Bytes of what one rank tells the others of its problem."""


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
        own = torch.zeros((), dtype=torch.int64, device=device)
        if ranks.rank == 0:
            own.fill_(random.SystemRandom().getrandbits(62))
        ranks.all_reduce(own)
        self._run, self._saves = int(own), 0

    def save(
        self,
        files: Files,
        path: str,
        content: dict[str, Any],
        compression: Compression,
        ranks: Collective,
        alone: bool = False,
    ) -> None:
        """Add to a checkpoint that is about to be written; a collective call.

        No rank goes on before all have written their part, so that no checkpoint is without one, and none is written
        over before its successor is whole.

        Args:
            files: writes.
            path: of the checkpoint.
            content: of the checkpoint.
            compression: what is saved.
            ranks: wait for each other.
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
            save = Save(self._run, self._saves, compression.step)
            with contextlib.nullcontext() if alone else _together(path, ranks, compression.device):
                sidecar.write(files, path, content, save, state, ranks)
            if not self._saves and ranks.rank == 0:
                each = sum(one["numbers"].nbytes for group in state["groups"] for one in group["states"].values())
                rank_zero_info(
                    f"lightning_compress: beside {path}: {each} bytes a rank, {each * ranks.size} of {ranks.size} ranks"
                )
        elif not (own and alone):  # the mean takes all ranks
            sidecar.write_inside(content, state, ranks, compression.device)
        self._saves += 1

    def save_tree(
        self,
        files: Files,
        path: str,
        content: dict[str, Any],
        method: str,
        step: int,
        tree: Tree,
        ranks: Collective,
        device: torch.device,
        alone: bool = False,
    ) -> None:
        """``save`` for ranks that have more of their own than the state of one compression.

        Args:
            files: writes.
            path: of the checkpoint.
            content: of the checkpoint.
            method: what can go on from it.
            step: optimizer steps so far.
            tree: tensors and primitives of this rank; what it has as ``"common"`` is the same on all ranks, or nothing
                of it is restored.
            ranks: wait for each other.
            device: on which they talk.
            alone: do not wait.

        Raises:
            Exception: this rank's part cannot be written.
            ExchangeError: another rank's part cannot, or it died.
        """
        if self.state == "none" or "optimizer_states" not in content:
            return
        with contextlib.nullcontext() if alone else _together(path, ranks, device):
            sidecar.write_tree(files, path, content, Save(self._run, self._saves, step), method, tree, ranks)
        self._saves += 1

    def restore_tree(
        self, files: Files, content: Mapping[str, Any], method: str, ranks: Collective, device: torch.device
    ) -> tuple[Tree | None, str]:
        """This rank's part of the checkpoint that was read last, on all ranks or on none; a collective call.

        Returns:
            it, or None; and why there is none.

        Raises:
            ValueError: there is none, and ``strict`` was asked for; on every rank.
        """
        problem, tree, common = "", None, 0
        try:
            tree = sidecar.read_tree(files, self._path, content.get(sidecar.KEY), method, ranks)
            common = sidecar.checksum(tree.get("common"))
        except Exception as error:  # the other ranks wait for word
            problem = str(error) or type(error).__name__
        differ = "the ranks' files are of different steps, or of models that differ where they have to be the same"
        if not (problem := _agreed(problem, common, differ, ranks, device)):
            return tree, ""
        if self._strict_about(content):
            raise ValueError(f"{problem}; set strict_state=False to begin from the checkpoint's own model")
        return None, f"{problem}. All ranks begin from the checkpoint's own model"

    def remember(self, path: str) -> None:
        """A checkpoint was read; its files are read when the model is ready."""
        self._path = path

    def restore(
        self,
        files: Files,
        content: Mapping[str, Any],
        compression: Compression,
        ranks: Collective,
        device: torch.device,
    ) -> str:
        """Resume from the checkpoint that was read last; a collective call.

        Returns:
            why the compression begins anew instead, or an empty text.

        Raises:
            ValueError: it cannot go on, and ``strict`` was asked for; on every rank.
        """
        compression.reset()
        manifest = content.get(sidecar.KEY)
        if manifest is None and not (compression.active and compression.settings.keeps_state):
            return ""
        problem, state, common = "", None, 0
        try:
            if not compression.active and compression.settings.chosen is None:
                raise ValueError("this run does not compress, on one rank or with 'none': what was not sent is dropped")
            state = sidecar.read(files, self._path, manifest, compression.settings.families, ranks, device)
            common = snapshot.checksum(state, ["shared"])
        except Exception as error:  # the other ranks wait for word
            problem = str(error) or type(error).__name__
        differ = "the ranks' files are of different steps, groups or settings"
        if not (problem := _agreed(problem, common, differ, ranks, device)):
            assert state is not None
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


def _agreed(problem: str, common: int, differ: str, ranks: Collective, device: torch.device) -> str:
    """Why the ranks cannot go on, on all of them, or an empty text; a collective call.

    Args:
        problem: of this rank, or an empty text.
        common: a checksum of what has to be the same on all ranks.
        differ: the text where it is not.
        ranks: that compare.
        device: on which they talk.

    Returns:
        this rank's own problem, else that of the first rank which has one.
    """
    said = torch.tensor([bool(problem), common, -common, -ranks.rank if problem else -ranks.size], device=device)
    ranks.all_reduce_max(said)
    failed, most, least, first = said.tolist()
    if not failed:  # each file is whole, and ranks may still not go on alike
        return differ if most != -least else ""
    text = torch.zeros(_LONGEST, dtype=torch.int32, device=device)
    if ranks.rank == -first:
        told = f"rank {ranks.rank}: {problem}".encode()[:_LONGEST]
        text[: len(told)] = torch.tensor(list(told), dtype=torch.int32)
    ranks.all_reduce_max(text)
    return problem or bytes(text.tolist()).rstrip(b"\0").decode(errors="ignore")


@contextlib.contextmanager
def _together(path: str, ranks: Collective, device: torch.device) -> Iterator[None]:
    """Wait until every rank has done what is inside; what failed on one of them stops all."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # the others wait for word
        problem = error
    failed = torch.tensor([problem is not None], dtype=torch.int32, device=device)
    try:
        with failures.explained(f"saving {path}", ranks.rank):
            ranks.all_reduce_max(failed)
    finally:
        if problem is not None:
            raise problem
    if failed:
        raise failures.ExchangeError(
            f"rank {ranks.rank}, saving {path}: another rank could not write its part, and says why; the checkpoint "
            "was not written"
        )
