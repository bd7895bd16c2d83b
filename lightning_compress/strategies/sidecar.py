"""Files beside a checkpoint: every rank's own state, which the checkpoint itself, written by rank 0, cannot hold.

    epoch=3.ckpt                          the checkpoint; a manifest in it names the files that belong to it
    epoch=3.ckpt.lc/<save>.rank0.pt       one file a rank and save, tensors and primitives only
    hpc.lc/<save>.rank0.pt                the same for hpc_ckpt_1.ckpt and the others that a cluster's signal makes

A file is written under a temporary name and renamed, and belongs to one save: a checkpoint that is written again keeps
the files of the save before until the one after, so that at any moment some checkpoint is whole.
"""

from __future__ import annotations

import contextlib
import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from fsspec.core import url_to_fs

from lightning_compress.collectives import Collective
from lightning_compress.core import state_dict
from lightning_compress.core.state_dict import StateDict

KEY = "lightning_compress"
"""Where a checkpoint has the manifest."""
CHOSEN = "lightning_compress_chosen"
"""Where it has what ``compressor="auto"`` became."""
ATTEMPTS = "lightning_compress_attempts"
"""Where it has how often each optimizer's step was tried, where ranks train models of their own."""
FORMAT = 1
MOST_RANKS = 1 << 20
NAME = re.compile(r"[0-9a-f]{16}-\d{1,18}-\d{1,18}")
"""Of a save."""
SavedState = Literal["sidecar", "mean", "none"]
Tree = dict[str, Any]
"""Tensors and primitives, in mappings and lists."""


class Files(Protocol):
    """What is needed of a Lightning ``CheckpointIO``."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any) -> None:
        """Write."""

    def load_checkpoint(self, path: Any, *, weights_only: bool | None = None) -> dict[str, Any]:
        """Read; tensors and primitives only."""


@dataclass(frozen=True)
class Save:
    """One save of one run.

    Args:
        run: a number that the ranks of a run have in common.
        count: how many saves were before it.
        step: optimizer steps that it holds.
    """

    run: int
    count: int
    step: int

    def __str__(self) -> str:
        return f"{self.run:016x}-{self.count}-{self.step}"


def write(
    files: Files, path: str, checkpoint: dict[str, Any], save: Save, method: str, tree: Tree, ranks: Collective
) -> None:
    """Write this rank's file, put the manifest into the checkpoint, and drop files that no checkpoint needs.

    Args:
        files: writes.
        path: of the checkpoint.
        checkpoint: gets the manifest.
        save: which one, the same on all ranks.
        method: what can go on from it.
        tree: of this rank.
        ranks: not communicated with: a save may happen in an exception or signal handler.
    """
    folder, ending = _beside(path), f".rank{ranks.rank}.pt"
    content = {"save": str(save), "tree": tree, "checksum": state_dict.checksum(tree)}
    files.save_checkpoint(content, f"{folder}/{save}{ending}")
    _drop_older(folder, ending, save)
    place = {"save": str(save), "folder": os.path.basename(folder)}
    checkpoint[KEY] = {"format": FORMAT, "method": method, "world_size": ranks.size, **place}


def _beside(path: str) -> str:
    """The folder of the ranks' files.

    When a cluster's signal arrives, every rank counts the ``hpc_ckpt_<n>`` that are there to name its own: one that is
    late sees what the others wrote, and folders too. So those have one folder, which is not counted.
    """
    parent, name = os.path.split(path)
    return os.path.join(parent, "hpc.lc") if name.startswith("hpc_ckpt_") else f"{path}.lc"


def _drop_older(folder: str, ending: str, save: Save) -> None:
    """Keep the files of this save and of the one before it: the checkpoint on disk may still be the earlier one."""
    fs, place = url_to_fs(folder)
    try:
        paths = [path for path in fs.ls(place, detail=False) if path.endswith(ending)]
    except FileNotFoundError:  # it is being written in the background
        return
    ours = {path: _count(path, save.run) for path in paths}
    previous = max((count for count in ours.values() if count is not None and count < save.count), default=-1)
    others = [path for path, count in ours.items() if count is None]
    for path, count in ours.items():
        if count is not None and count < previous:
            fs.rm(path)
    if previous >= 0:  # two saves of this run are whole: what an earlier run left is not needed
        for path in others:
            fs.rm(path)


def _count(path: str, run: int) -> int | None:
    parts = os.path.basename(path).split(".")[0].split("-")
    return int(parts[1]) if parts[0] == f"{run:016x}" else None


def write_inside(checkpoint: dict[str, Any], state: StateDict, ranks: Collective, device: torch.device) -> None:
    """Put the mean over the ranks into the checkpoint itself; where ranks differ, all of them must save.

    Args:
        checkpoint: gets it.
        state: of this rank.
        ranks: that sum.
        device: on which they talk.
    """
    state = _averaged(state, ranks, ranks.size, device)
    checkpoint[KEY] = {"format": FORMAT, "method": state["method"], "world_size": ranks.size, "tree": state}


def remove(path: str, rank: int) -> None:
    """Remove the files beside a checkpoint that was removed: rank 0 all that it sees, others their own.

    Where the checkpoint is still there, rank 0 has not removed it yet, or removes another one, and the disk is shared.
    """
    fs, place = url_to_fs(path)
    folder = f"{place}.lc"
    if rank and fs.exists(place):
        return
    try:
        files = fs.ls(folder, detail=False)
    except FileNotFoundError:
        return
    for each in files:
        if rank == 0 or each.endswith(f".rank{rank}.pt"):
            with contextlib.suppress(FileNotFoundError):  # another rank was faster
                fs.rm(each)
    with contextlib.suppress(OSError):  # likewise, or others still have files there
        fs.rmdir(folder)


@dataclass(frozen=True)
class Saved:
    """What a checkpoint's manifest says.

    Args:
        ranks: that saved.
        inside: the state that the checkpoint holds in place of files, or None.
        save: which one.
        place: of the ranks' files, up to the rank's number.
    """

    ranks: int
    inside: object = None
    save: str = ""
    place: str = ""

    @classmethod
    def of(cls, path: str, manifest: object, methods: Sequence[str], size: int | None = None) -> Saved:
        """Read a manifest, of which nothing is taken for granted.

        Args:
            path: of the checkpoint.
            manifest: what it has under ``KEY``.
            methods: whose state this run can go on from, its own first.
            size: ranks that must have saved; None: any number.

        Raises:
            ValueError: there is none, or it is damaged, or of another method or number of ranks.
        """
        if not isinstance(manifest, Mapping) or manifest.get("format") != FORMAT:
            raise ValueError("the checkpoint was saved without compression, or by a version that this one cannot read")
        theirs, before = manifest.get("method"), manifest.get("world_size")
        if not isinstance(theirs, str) or type(before) is not int or not 0 < before <= MOST_RANKS:
            raise ValueError("the checkpoint's manifest is damaged")
        if size not in (None, before):
            raise ValueError(f"the checkpoint is of {before} ranks, and this run has {size}")
        if theirs not in methods:
            raise ValueError(f"the checkpoint was trained with {theirs}, this run compresses with {methods[0]}")
        if (inside := _tree(manifest)) is not None:
            return cls(before, inside)
        folder, save = manifest.get("folder"), manifest.get("save")
        if not isinstance(folder, str) or not isinstance(save, str):
            raise ValueError("the checkpoint's manifest is damaged")
        plain = os.path.basename(folder) == folder and folder.endswith(".lc") and "::" not in folder
        if not plain or not NAME.fullmatch(save):
            raise ValueError("the checkpoint's manifest names files elsewhere")
        return cls(before, None, save, f"{_folder(path, folder, save)}/{save}.rank")

    def part(self, files: Files, rank: int, check: Callable[[object], Tree]) -> Tree:
        """One rank's own, with its tensors on the CPU.

        Args:
            files: reads.
            rank: of those that saved.
            check: refuses what else a file may hold.

        Raises:
            ValueError: it is missing, damaged or of another save.
        """
        path = f"{self.place}{rank}.pt"
        content = _content(files, path, self.save)
        tree = check(_tree(content))
        if "tree" in content and content.get("checksum") != state_dict.checksum(tree):  # torch.load does not notice
            raise ValueError(f"{path} is damaged: its checksum is wrong")
        return tree


def _tree(content: Mapping[str, Any]) -> object:
    """What is saved of ranks, which earlier versions had under another name."""
    return content.get("tree", content.get("state"))


def read(
    files: Files, path: str, manifest: object, methods: Sequence[str], ranks: Collective, device: torch.device
) -> StateDict:
    """This rank's state of a compression: its own, or at another world size its part of the mean over those that were.

    Args:
        files: reads.
        path: of the checkpoint.
        manifest: what the checkpoint has under ``KEY``.
        methods: whose state this run can go on from, its own first.
        ranks: of this run; not communicated with: see ``redistribute``.
        device: on which they talk, and where numbers go.

    Raises:
        ValueError: a part is missing, damaged, of another save or of another method.
    """
    saved = Saved.of(path, manifest, methods)
    if saved.inside is not None:
        share = {"owner": saved.ranks / ranks.size}
        inside = state_dict.check(saved.inside)
        return state_dict.mapped(inside, lambda one: one | {"numbers": one["numbers"] * share.get(one["holder"], 1)})

    def part(rank: int) -> StateDict:
        made: StateDict = state_dict.moved(saved.part(files, rank, state_dict.check), device)
        return made

    if saved.ranks == ranks.size:
        return part(ranks.rank)
    numbers = range(ranks.rank, saved.ranks, ranks.size)
    own = state_dict.total(map(part, numbers)) if numbers else state_dict.zeroed(part(0))  # one at a time in memory
    return own | {"summands": saved.ranks}


def redistribute(state: StateDict, ranks: Collective, device: torch.device) -> StateDict:
    """Finish ``read`` at another world size, where all ranks read well: every rank goes on from the mean."""
    if "summands" not in state:
        return state
    return _averaged(state, ranks, state.pop("summands"), device)


def _averaged(state: StateDict, ranks: Collective, summands: int, device: torch.device) -> StateDict:
    """The same with means over the ranks for what each has for itself, on the device where the ranks talk."""

    def mean(one: StateDict) -> StateDict:
        if one["holder"] == "shared":
            return one
        one = state_dict.opened(one)
        numbers = one["numbers"].to(device, torch.float32, copy=True)
        ranks.all_reduce(numbers)
        numbers /= summands if one["holder"] == "rank" else ranks.size  # owners add all ranks' up again
        return one | {"numbers": numbers}

    return state_dict.mapped(state, mean)


def _folder(path: str, named: str, save: str) -> str:
    """Where the files are: beside the checkpoint, under its name now or then; ``last.ckpt`` may be a link to it."""
    real = path if "://" in path else os.path.realpath(path)
    places = [f"{real}.lc", f"{os.path.dirname(real)}/{named}"]
    for place in places:
        fs, folder = url_to_fs(place)
        if fs.exists(folder) and any(os.path.basename(each).startswith(f"{save}.") for each in fs.ls(folder, False)):
            return place
    return places[0]


def _content(files: Files, path: str, save: str) -> Mapping[str, Any]:
    fs, place = url_to_fs(path)
    if not fs.exists(place):
        raise ValueError(f"{path} is missing: the ranks' own state was not copied along, or not written to its end")
    try:
        content = _load(files, path)
    except Exception as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        if foreign := re.search(r"Unsupported global: GLOBAL (\S+)", str(error)):  # torch advises what runs any code
            said = f"it holds a {foreign[1]}, and only tensors, numbers, texts, lists and mappings are read"
        raise ValueError(f"{path} cannot be read: {said}") from error
    if not isinstance(content, Mapping) or content.get("save") != save:
        raise ValueError(f"{path} is of another save than the checkpoint")
    return content


def _load(files: Files, path: str) -> object:
    """Read tensors and primitives, so that no code in a file runs, and no more of them than there are bytes.

    What torch.save wrote is read here, since a CheckpointIO of the user's own, or of an older Lightning, need not take
    ``weights_only``. One that writes another format must.
    """
    fs, place = url_to_fs(path)
    with fs.open(place, "rb") as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                records = archive.infolist()
                size = file.seek(0, os.SEEK_END)
                stored = all(record.compress_type == zipfile.ZIP_STORED for record in records)
                if not stored or sum(record.file_size for record in records) > size:
                    raise ValueError("it is no file that torch.save writes")
                file.seek(0)
                content = torch.load(file, map_location="cpu", weights_only=True)
                # earlier versions had a checksum by another rule; the archive has its own
                if isinstance(content, dict) and "state" in content and archive.testzip():
                    raise ValueError("it is damaged: its checksum is wrong")
                return content
    return files.load_checkpoint(path, weights_only=True)
