"""Whatever the files beside a checkpoint hold, all ranks go on alike: from them, or from zero with a word why."""

import copy
import io
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO

from tests.fuzz.decoding import randomness
from tests.fuzz.loading import KINDS, METHODS, Code, Loader, restore, save

SEED = 20
ROUNDS = 10


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", range(len(METHODS)))
@pytest.mark.parametrize("kind", KINDS)
def test_restoring_survives(kind, number):
    loader = Loader(kind, number)
    try:
        for round in range(ROUNDS):
            loader.attempt(randomness(SEED, kind, number, round))
    finally:
        loader.close()


class Trusting(CheckpointIO):
    """A user's own of an older Lightning, which runs what a file holds."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(checkpoint, path)

    def load_checkpoint(self, path, map_location=None):
        return torch.load(path, map_location=map_location, weights_only=False)

    def remove_checkpoint(self, path):
        os.remove(path)


class Own(Trusting):
    """A format of the user's own."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        content = io.BytesIO()
        torch.save(checkpoint, content)
        Path(path).write_bytes(b"own" + content.getvalue()[::-1])

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        return torch.load(io.BytesIO(Path(path).read_bytes()[3:][::-1]), weights_only=weights_only)


READERS = {
    "torch": TorchCheckpointIO,
    "trusting": Trusting,
    "own": Own,
    "background": lambda: AsyncCheckpointIO(TorchCheckpointIO()),
    "trusting_background": lambda: AsyncCheckpointIO(Trusting()),
}


@pytest.fixture
def saved(tmp_path):
    path = f"{tmp_path}/last.ckpt"
    content = save("onebit", path, "sidecar")
    return path, content, sorted(Path(f"{path}.lc").iterdir())


def outcome(saved, reader="torch", size=2):
    path, content, _ = saved
    return restore("onebit", path, lambda: copy.deepcopy(content), size, READERS[reader]())


@pytest.mark.parametrize("reader", READERS)
def test_any_reader_reads_what_it_wrote(saved, reader):
    if reader == "own":
        for file in saved[2]:
            Own().save_checkpoint(torch.load(file, weights_only=True), file)
    assert outcome(saved, reader) == ["", ""]


FORMS = {
    "zip": lambda code, path: torch.save({"state": code}, path),
    "old": lambda code, path: torch.save({"state": code}, path, _use_new_zipfile_serialization=False),
    "pickle": lambda code, path: path.write_bytes(pickle.dumps(code)),
    "oldest": lambda code, path: path.write_bytes(pickle.dumps(code, protocol=0)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reader", READERS)
def test_code_in_a_file_does_not_run(saved, tmp_path, reader, form):
    FORMS[form](Code(tmp_path / "mark"), saved[2][1])
    assert all(outcome(saved, reader))
    assert not (tmp_path / "mark").exists()


def test_what_unpacks_to_more_than_the_file_is_refused(saved):
    content = torch.load(saved[2][1], weights_only=True)
    content["more"] = torch.zeros(1 << 20)
    stored = io.BytesIO()
    torch.save(content, stored)
    with zipfile.ZipFile(stored) as source, zipfile.ZipFile(saved[2][1], "w", zipfile.ZIP_DEFLATED) as packed:
        for name in source.namelist():
            packed.writestr(name, source.read(name))
    assert "not a file that torch.save writes" in "".join(outcome(saved))


def rewrite(file, change):
    """Another content with a checksum that fits."""
    from lightning_compress.core import state_check, state_dict

    content = torch.load(file, weights_only=True)
    change(content["tree"])
    content["checksum"] = state_dict.checksum(state_check.check(content["tree"]))
    torch.save(content, file)


CHANGES = {
    "another step": lambda state: state.update(step=7),
    "another order": lambda state: state["groups"][0]["names"].reverse(),
    "another setting": lambda state: state["running"]["compressor"].update(block=512),
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_do_not_go_together(saved, change):
    rewrite(saved[2][1], CHANGES[change])
    assert all("differ" in said for said in outcome(saved))


def test_what_only_looks_like_another_world_size(saved):
    rewrite(saved[2][1], lambda state: state.update(summands=1))
    assert outcome(saved) == ["", ""]  # where one rank summed alone, all would wait


@pytest.mark.parametrize(
    "manifest",
    [{"folder": ".."}, {"folder": "../last.ckpt.lc"}, {"folder": "x::memory.lc"}, {"save": "../x"}, {"save": ""}],
)
def test_files_elsewhere(saved, manifest):
    saved[1]["lightning_compress"].update(manifest)
    assert all("outside of its folder" in said for said in outcome(saved))


def test_settings_that_do_not_fit_leave_none_behind(saved):
    for file in saved[2]:
        rewrite(file, lambda state: state["running"]["compressor"].update(block=1))
    assert all("block" in said for said in outcome(saved))
