"""A run goes on from an earlier version's checkpoint as that version did."""

import base64
import shutil
import zipfile

import numpy as np
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_compress.core import state_check
from lightning_compress.strategies import sidecar
from tests.golden_checkpoints.runs import CASES, NAME, ROUNDED_BY, expected_of, fit, folder_of, machine

IDS = [f"{method}-{size}" for method, size in CASES]


def resumed(pool, tmp_path, method, size, parts=True):
    """The second epoch, from a copy, with or without the ranks' own parts."""
    copy = tmp_path / "copy"
    shutil.copytree(folder_of(method, size), copy)
    if not parts:
        shutil.rmtree(copy / f"{NAME}.lc")
    return pool.run(fit, str(tmp_path / "again"), method, str(copy / NAME))


def weights_of(expected):
    return np.frombuffer(base64.b64decode(expected["weights"]), np.float32)


def near(found, weights):
    return np.abs(found - weights).max() <= 1e-5 * np.abs(weights).max()


@pytest.mark.parametrize(("method", "size"), CASES, ids=IDS)
def test_it_goes_on_bit_for_bit(pools, tmp_path, method, size):
    expected = expected_of(method, size)
    weights, here = weights_of(expected), pools[size].run(machine)[0]
    rounds_alike = all(here[each] == expected["machine"][each] for each in ROUNDED_BY[method])
    answers = resumed(pools[size], tmp_path, method, size)
    for (found, kept, said), kept_then in zip(answers, expected["kept"], strict=True):
        assert not said
        assert near(found, weights)
        assert kept.keys() == kept_then.keys()
        if rounds_alike:
            np.testing.assert_array_equal(found, weights)
            assert kept == kept_then


@pytest.mark.parametrize(("method", "size"), CASES, ids=IDS)
def test_without_the_ranks_parts_it_goes_elsewhere(pools, tmp_path, method, size):
    answers = resumed(pools[size], tmp_path, method, size, parts=False)
    assert any(said for _, _, said in answers)
    assert not any(near(found, weights_of(expected_of(method, size))) for found, _, _ in answers)


def test_a_damaged_part_is_refused(tmp_path):
    (part, _) = sorted(folder_of("topk", 2).glob("*.lc/*"))
    content = bytearray(part.read_bytes())
    numbers = max(zipfile.ZipFile(part).infolist(), key=lambda each: each.file_size)
    content[content.index(numbers.filename.encode()) + len(numbers.filename) + numbers.file_size // 2] ^= 1
    (tmp_path / part.name).write_bytes(content)
    saved = sidecar.Saved(2, None, part.name.partition(".")[0], str(tmp_path / part.name).removesuffix("0.pt"))
    with pytest.raises(ValueError, match="damaged"):
        saved.part(TorchCheckpointIO(), 0, state_check.check)


def texts(content):
    """All text in what a file holds."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        yield from texts([*content.keys(), *content.values()])
    elif isinstance(content, list | tuple):
        for each in content:
            yield from texts(each)


@pytest.mark.parametrize(("method", "size"), CASES, ids=IDS)
def test_files_hold_tensors_and_primitives_and_no_paths(method, size):
    folder = folder_of(method, size)
    parts = sorted(folder.glob(f"{NAME}.lc/*.pt"))
    assert len(parts) == size
    for path in [folder / NAME, *parts]:
        found = list(texts(torch.load(path, weights_only=True)))
        assert found
        assert not [text for text in found if "/" in text or "\\" in text]
    groups = torch.load(parts[0], weights_only=True)["state"]["groups"]
    assert len(groups) > 1
    assert any(one["numbers"].count_nonzero() for group in groups for one in group["states"].values())


def test_they_are_small():
    sizes = [sum(path.stat().st_size for path in folder_of(*case).rglob("*.*")) for case in CASES]
    assert max(sizes) < 60_000
