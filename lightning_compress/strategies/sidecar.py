"""Files beside a checkpoint with each rank's own state; rank 0 writes the checkpoint itself, which cannot hold them.

    epoch=3.ckpt                          the checkpoint; its manifest names the files that belong to it
    epoch=3.ckpt.lc/<save>.rank0.pt       one file per rank and save, tensors and primitives only
    hpc.lc/<save>.rank0.pt                the same for hpc_ckpt_<n>.ckpt, which Lightning saves on a cluster's signal

The checkpoint may be a folder. Of a model in S shards, rank r has shard r % S. The ranks with the same shard are its
column: their states may be averaged with each other, and with no others.

A file belongs to one save; it is written under a temporary name and renamed. When a checkpoint is overwritten, the
files of the previous save stay until the next one, so at any moment one complete checkpoint exists.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from fsspec.core import url_to_fs

from lightning_compress.collectives import Collective
from lightning_compress.core import state_check, state_dict
from lightning_compress.core.state_dict import StateDict
from lightning_compress.strategies.part_file import Files, content_of

KEY = "lightning_compress"
"""The checkpoint's key of the manifest."""
CHOSEN = "lightning_compress_chosen"
"""The key of what ``compressor="auto"`` picked."""
ATTEMPTS = "lightning_compress_attempts"
"""The key of each optimizer's number of attempted steps, in runs with a model per rank."""
FORMAT = 1
"""Version of the manifest."""
MOST_RANKS = 1 << 20
NAME = re.compile(r"[0-9a-f]{16}-\d{1,18}-\d{1,18}")
"""Pattern of a save's name: run, count, step."""
SavedState = Literal["sidecar", "mean", "none"]
Tree = dict[str, Any]
"""Tensors and primitives, in mappings and lists."""


@dataclass(frozen=True)
class Save:
    """One save of one run.

    Args:
        run: a random number that identifies the fit on all ranks.
        count: number of earlier saves.
        step: optimizer steps so far.
    """

    run: int
    count: int
    step: int

    def __str__(self) -> str:
        return f"{self.run:016x}-{self.count}-{self.step}"


@dataclass(frozen=True)
class Column:
    """The ranks that hold the same shard of a model.

    Args:
        shard: its number.
        shards: of the model; 1 if it is not sharded.
    """

    shard: int = 0
    shards: int = 1

    def rank(self, place: int) -> int:
        """Return the number among all ranks of the one at this place of the column."""
        return place * self.shards + self.shard


ALL = Column()
"""All ranks, where each has the whole model."""


def write(
    files: Files,
    path: str,
    checkpoint: dict[str, Any],
    save: Save,
    method: str,
    tree: Tree,
    ranks: Collective,
    column: Column = ALL,
    once: bool = False,
) -> None:
    """Write this rank's file, add the manifest to the checkpoint, and remove files that no checkpoint needs.

    Args:
        files: writes the file.
        path: of the checkpoint.
        checkpoint: gets the manifest.
        save: the same on all ranks.
        method: name of the method that can resume from it.
        tree: of this rank.
        ranks: the column's; used for their number only, without communication: an exception or signal handler may save.
        column: that these ranks are.
        once: the tree is of the whole column, and its first rank alone writes it.
    """
    folder, ending = folder_for(path), f".rank{column.rank(ranks.rank)}.pt"
    if not once or ranks.rank == 0:
        content = {"save": str(save), "tree": tree, "checksum": state_dict.checksum(tree)}
        files.save_checkpoint(content, f"{folder}/{save}{ending}")
        _drop_older(folder, ending, save)
    checkpoint[KEY] = {
        "format": FORMAT,
        "method": method,
        "world_size": ranks.size * column.shards,
        "save": str(save),
        "folder": os.path.basename(folder),
    }
    if column.shards > 1:
        checkpoint[KEY] |= {"shards": column.shards, "once": once}


def folder_for(path: str) -> str:
    """Return the folder of the ranks' files for a new checkpoint.

    On a cluster's signal, each rank counts the existing ``hpc_ckpt_<n>`` files and folders to name its own. A late rank
    already sees those of the others. So they all share a folder whose name is not counted.
    """
    parent, name = os.path.split(path)
    return os.path.join(parent, "hpc.lc") if name.startswith("hpc_ckpt_") else f"{path}.lc"


def _drop_older(folder: str, ending: str, save: Save) -> None:
    """Keep this rank's files of this save and of the previous one: the checkpoint on disk may still be the previous."""
    fs, place = url_to_fs(folder)
    try:
        paths = [path for path in fs.ls(place, detail=False) if path.endswith(ending)]
    except FileNotFoundError:  # the file is still being written in the background
        return
    ours = {path: _count(path, save.run) for path in paths}
    previous = max((count for count in ours.values() if count is not None and count < save.count), default=-1)
    others = [path for path, count in ours.items() if count is None]
    for path, count in ours.items():
        if count is not None and count < previous:
            fs.rm(path)
    if previous >= 0:  # two saves of this run are complete, so files of earlier runs are not needed
        for path in others:
            fs.rm(path)


def _count(path: str, run: int) -> int | None:
    parts = os.path.basename(path).split(".")[0].split("-")
    return int(parts[1]) if parts[0] == f"{run:016x}" else None


def write_inside(checkpoint: dict[str, Any], state: StateDict, ranks: Collective, device: torch.device) -> None:
    """Put the mean of the ranks' states into the checkpoint itself. Collective if the states differ between ranks.

    Args:
        checkpoint: gets the mean.
        state: of this rank.
        ranks: to average over.
        device: for the collective calls.
    """
    state = averaged(state, ranks, ranks.size, device)
    checkpoint[KEY] = {"format": FORMAT, "method": state["method"], "world_size": ranks.size, "tree": state}


def remove(path: str, rank: int) -> None:
    """Remove the files beside a removed checkpoint: rank 0 all that it sees, other ranks their own.

    If another rank still sees the checkpoint, the disk is shared, and rank 0 has not removed it yet or removes another
    one. Then the rank does nothing.
    """
    fs, place = url_to_fs(path)
    folder = f"{place}.lc"
    if rank and fs.exists(place):
        return
    try:
        files = fs.ls(folder, detail=False)
    except FileNotFoundError:
        return
    for file in files:
        if rank == 0 or file.endswith(f".rank{rank}.pt"):
            with contextlib.suppress(FileNotFoundError):  # another rank was faster
                fs.rm(file)
    with contextlib.suppress(OSError):  # another rank was faster, or still has files there
        fs.rmdir(folder)


@dataclass(frozen=True)
class Saved:
    """A checkpoint's manifest, validated.

    Args:
        ranks: number of ranks that saved, of each column.
        inside: the state inside the checkpoint, if there are no files; else None.
        save: name of the save.
        place: path of the ranks' files, up to the rank's number.
        once: there is one file for each column, of its first rank.
    """

    ranks: int
    inside: object = None
    save: str = ""
    place: str = ""
    once: bool = False

    @classmethod
    def of(
        cls,
        path: str,
        manifest: object,
        methods: Sequence[str] | None,
        size: int | None = None,
        shards: int = 1,
    ) -> Saved:
        """Validate a manifest.

        Args:
            path: of the checkpoint.
            manifest: the checkpoint's content under ``KEY``; may be anything.
            methods: names of the methods whose state this run can resume from, its own first; None: any.
            size: required number of ranks; None: any.
            shards: of this run's model.

        Raises:
            ValueError: it is missing or damaged, or of another method or number of ranks or shards.
        """
        if not isinstance(manifest, Mapping) or manifest.get("format") != FORMAT:
            raise ValueError("the checkpoint was saved without compression, or by a version that this one cannot read")
        method, ranks = manifest.get("method"), manifest.get("world_size")
        if not isinstance(method, str) or type(ranks) is not int or not 0 < ranks <= MOST_RANKS:
            raise ValueError("the checkpoint's manifest is damaged")
        ranks = _check_shards(shards_of(manifest), ranks, shards)
        if size not in (None, ranks):
            raise ValueError(f"the checkpoint is of {ranks} ranks, and this run has {size}")
        if methods is not None and method not in methods:
            raise ValueError(f"the checkpoint was trained with {method}, this run compresses with {methods[0]}")
        if (inside := _tree(manifest)) is not None:
            return cls(ranks, inside)
        folder, save = manifest.get("folder"), manifest.get("save")
        if not isinstance(folder, str) or not isinstance(save, str):
            raise ValueError("the checkpoint's manifest is damaged")
        plain = os.path.basename(folder) == folder and folder.endswith(".lc") and "::" not in folder
        if not plain or not NAME.fullmatch(save):
            raise ValueError("the checkpoint's manifest names files outside of its folder")
        return cls(ranks, None, save, f"{_folder(path, folder, save)}/{save}.rank", manifest.get("once") is True)

    def part(self, files: Files, rank: int, check: Callable[[object], Tree]) -> Tree:
        """Return one rank's tree, with its tensors on the CPU.

        Args:
            files: reads the file.
            rank: the number that the rank had when it saved.
            check: returns the tree, or raises ValueError if the file holds something else.

        Raises:
            ValueError: the file is missing, damaged or of another save.
        """
        path = f"{self.place}{rank}.pt"
        content = content_of(files, path, self.save)
        tree = check(_tree(content))
        if "tree" in content and content.get("checksum") != state_dict.checksum(tree):  # torch.load does not check it
            raise ValueError(f"{path} is damaged: its checksum is wrong")
        return tree


def _check_shards(saved: object, ranks: int, shards: int) -> int:
    """Return how many of the ranks that saved are in a column; raise ValueError if it had other shards than these."""
    if type(saved) is not int or saved < 1 or ranks % saved:
        raise ValueError("the checkpoint's manifest is damaged")
    if saved != shards:
        raise ValueError(
            f"the checkpoint is of a model in {_counted(saved)}, and this run has {_counted(shards)}: what a rank has "
            "not sent yet belongs to its shard"
        )
    return ranks // saved


def shards_of(manifest: object) -> object:
    """Return the number of shards of the model whose states a manifest names; anything if it is damaged."""
    return manifest.get("shards", 1) if isinstance(manifest, Mapping) else 1


def _counted(shards: int) -> str:
    return "one shard" if shards == 1 else f"{shards} shards"


def _tree(content: Mapping[str, Any]) -> object:
    """Return what is saved; earlier versions kept it under another key."""
    return content.get("tree", content.get("state"))


def read(
    files: Files,
    path: str,
    manifest: object,
    methods: Sequence[str],
    ranks: Collective,
    device: torch.device,
    column: Column = ALL,
) -> StateDict:
    """Return this rank's state of a compression.

    It is the rank's own, or on another number of ranks a sum over some of the saved states, which ``redistribute``
    turns into their mean.

    Args:
        files: reads the files.
        path: of the checkpoint.
        manifest: the checkpoint's content under ``KEY``.
        methods: names of the methods whose state this run can resume from, its own first.
        ranks: of this run's column, used without communication.
        device: where the state's numbers go.
        column: that these ranks are.

    Raises:
        ValueError: a file is missing, damaged, of another save or of another method; or the model had other shards.
    """
    saved = Saved.of(path, manifest, methods, shards=column.shards)

    def part(rank: int) -> StateDict:
        state: StateDict = state_dict.moved(saved.part(files, column.rank(rank), state_check.check), device)
        return state

    if saved.inside is not None or saved.once:
        share = {"owner": saved.ranks / ranks.size}
        inside = part(0) if saved.once else state_check.check(saved.inside)
        return state_dict.mapped(
            inside, lambda each: each | {"numbers": each["numbers"] * share.get(each["holder"], 1)}
        )
    if saved.ranks == ranks.size:
        return part(ranks.rank)
    earlier = range(ranks.rank, saved.ranks, ranks.size)
    total = state_dict.total(map(part, earlier)) if earlier else state_dict.zeroed(part(0))  # one at a time in memory
    return total | {"summands": saved.ranks}


def read_first(files: Files, path: str, manifest: object) -> StateDict:
    """Return what rank 0 saved of a compression by any method; see ``read``.

    Raises:
        ValueError: its file is missing, damaged or of another save.
    """
    saved = Saved.of(path, manifest, None)
    return state_check.check(saved.inside) if saved.inside is not None else saved.part(files, 0, state_check.check)


def redistribute(state: StateDict, ranks: Collective, device: torch.device) -> StateDict:
    """Finish ``read`` on another number of ranks: return the mean. Call it once all ranks have read. Collective."""
    if "summands" not in state:
        return state
    return averaged(state, ranks, state.pop("summands"), device)


def averaged(state: StateDict, ranks: Collective, summands: int, device: torch.device) -> StateDict:
    """Return the state with means over the ranks for all entries that differ between ranks, on ``device``. Collective.

    Args:
        state: of this rank.
        ranks: to average over.
        summands: number of states whose sum the ranks' states are together.
        device: of the numbers.
    """

    def mean(entry: StateDict) -> StateDict:
        if entry["holder"] == "shared":
            return entry
        entry = state_dict.opened(entry)
        numbers = entry["numbers"].to(device, torch.float32, copy=True)
        ranks.all_reduce(numbers)
        numbers /= summands if entry["holder"] == "rank" else ranks.size  # an owner sums all ranks' numbers again
        return entry | {"numbers": numbers}

    return state_dict.mapped(state_dict.of_all(state), mean)


def _folder(path: str, named: str, save: str) -> str:
    """Return the folder of the files: beside the checkpoint, named after it or as it was named when it was saved.

    ``last.ckpt`` may be a link to the checkpoint.
    """
    real = path if "://" in path else os.path.realpath(path)
    places = [f"{real}.lc", f"{os.path.dirname(real)}/{named}"]
    for place in places:
        fs, folder = url_to_fs(place)
        if fs.exists(folder) and any(os.path.basename(file).startswith(f"{save}.") for file in fs.ls(folder, False)):
            return place
    return places[0]
