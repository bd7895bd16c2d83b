"""Reading, checking, splitting and augmenting the images."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

from recipes.loading import draw
from recipes.resnet import cifar10
from recipes.resnet.cifar10 import FOLDER, TEST_FILES, TRAIN_FILES, Cifar10, fetch
from recipes.resnet.data import IGNORE, Images, Split, crop_and_flip
from recipes.resnet.digits import Digits

ROWS = 40


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Binary batches of 40 random images; row i of file f has label i % 10, and its first pixel is f."""
    monkeypatch.setattr(cifar10, "RECORDS", ROWS)
    (tmp_path / FOLDER).mkdir()
    rng = np.random.default_rng(0)
    for number, name in enumerate(TRAIN_FILES + TEST_FILES):
        records = rng.integers(0, 256, (ROWS, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(ROWS) % 10
        records[:, 1] = number
        records.tofile(tmp_path / FOLDER / name)
    return tmp_path


def test_reads_the_authors_format(root: Path) -> None:
    data = Cifar10(root=str(root), batch_size=8, val_size=30)
    data.setup("fit")
    train, val, test = (data.splits[name] for name in ("train", "val", "test"))
    assert (len(train.labels), len(val.labels), len(test.labels)) == (170, 30, 40)
    assert train.images.shape == (170, 3, 32, 32)
    raw = np.fromfile(root / FOLDER / "data_batch_2.bin", np.uint8).reshape(ROWS, 3073)[3]
    assert train.labels[ROWS + 3] == raw[0] == 3
    red, green, blue = (train.images[ROWS + 3, c].flatten().tolist() for c in range(3))
    assert red + green + blue == raw[1:].tolist()
    assert set(val.images[:, 0, 0, 0].tolist()) == {4}
    assert set(test.images[:, 0, 0, 0].tolist()) == {5}


def test_missing_root_says_both_ways(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.root=.*data_batch_1.*set data\.root.*data\.download=true"):
        Cifar10(root=str(tmp_path / "nowhere")).setup("fit")


@pytest.mark.parametrize("size", [ROWS * 3073 - 1, (ROWS - 1) * 3073, 0])
def test_truncated_file_is_named(root: Path, size: int) -> None:
    with (root / FOLDER / "data_batch_3.bin").open("r+b") as file:
        file.truncate(size)
    with pytest.raises(ValueError, match=rf"data_batch_3.bin has {size:,} bytes, expected {ROWS * 3073:,}"):
        Cifar10(root=str(root)).setup("fit")


def test_impossible_label(root: Path) -> None:
    with (root / FOLDER / "test_batch.bin").open("r+b") as file:
        file.write(b"\x0a")
    with pytest.raises(ValueError, match=r"test_batch\.bin holds a label of 10"):
        Cifar10(root=str(root), batch_size=8).setup("fit")


def test_fetch_checks_the_sum(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "cifar.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(root / FOLDER, FOLDER)
    target = tmp_path / "target"
    with pytest.raises(ValueError, match="md5"):
        fetch(target, archive.as_uri(), "0" * 32)
    assert list(target.iterdir()) == []
    fetch(target, archive.as_uri(), hashlib.md5(archive.read_bytes()).hexdigest())
    assert [path.name for path in target.iterdir()] == [FOLDER]
    assert len(list((target / FOLDER).iterdir())) == 6
    (target / FOLDER / "test_batch.bin").unlink()  # as where unpacking was interrupted
    monkeypatch.setattr(
        cifar10.fetch, "__defaults__", (archive.as_uri(), hashlib.md5(archive.read_bytes()).hexdigest())
    )
    Cifar10(root=str(target), download=True, batch_size=8, val_size=30).prepare_data()
    assert (target / FOLDER / "test_batch.bin").read_bytes() == (root / FOLDER / "test_batch.bin").read_bytes()


def test_an_interrupted_unpacking_leaves_no_part(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "cifar.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(root / FOLDER, FOLDER)
    whole = tarfile.TarFile.extractall

    def interrupted(tar: tarfile.TarFile, path: str, **kwargs: object) -> None:
        whole(tar, path, members=tar.getmembers()[:4], filter="data")
        raise KeyboardInterrupt

    monkeypatch.setattr(tarfile.TarFile, "extractall", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(tmp_path / "target", archive.as_uri(), hashlib.md5(archive.read_bytes()).hexdigest())
    assert list((tmp_path / "target").iterdir()) == []


def test_a_page_that_does_not_answer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.download=true: http://127\.0\.0\.1:9/x cannot be fetched \(.*refused"):
        fetch(tmp_path / "target", "http://127.0.0.1:9/x")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"data\.root=.*cannot be written"):
        fetch(tmp_path / "file/root")


def test_digits_are_split_by_class_and_always_the_same() -> None:
    first, second = Digits(seed=0), Digits(seed=1)
    first.setup("fit")
    second.setup("fit")
    assert [len(split.labels) for split in first.splits.values()] == [1257, 180, 360]
    for name, split in first.splits.items():
        assert torch.equal(split.images, second.splits[name].images)
        share = torch.bincount(split.labels) / len(split.labels)
        assert share.min() > 0.09
        assert share.max() < 0.11
    images = torch.cat([split.images for split in first.splits.values()])
    assert images.shape == (1797, 1, 8, 8)
    normal, _ = first.on_after_batch_transfer(next(iter(_loader_of_everything(first))), 0)
    assert normal.mean().item() == pytest.approx(0, abs=1e-4)
    assert normal.std().item() == pytest.approx(1, abs=1e-3)
    Digits(val_size=0).setup("fit")


def _loader_of_everything(data: Digits) -> list[tuple[torch.Tensor, ...]]:
    return [Images(data.splits["train"]).__getitems__(list(range(1257)))]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_share_an_evaluation_without_repeats(ranks: int) -> None:
    padded = Split(torch.zeros(10, 1, 1, 1, dtype=torch.uint8), torch.arange(10)).pad(ranks)
    shares = [
        padded.labels[list(DistributedSampler(Images(padded), ranks, rank, shuffle=False))] for rank in range(ranks)
    ]
    assert len({len(share) for share in shares}) == 1  # so that every rank takes part in every collective
    assert sorted(label.item() for label in torch.cat(shares) if label != IGNORE) == list(range(10))


def test_too_few_images_for_a_step() -> None:
    with pytest.raises(ValueError, match="20 training images for 1 ranks"):
        Digits(batch_size=32, train_size=20).setup("fit")


def slow_crop_and_flip(image: np.ndarray, bits: int, padding: int) -> np.ndarray:
    places = 2 * padding + 1
    top, left, mirrored = bits % places, bits // places % places, bits // places // places % 2
    height, width = image.shape[1:]
    out = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))[:, top : top + height, left : left + width]
    return out[:, :, ::-1] if mirrored else out


def test_crops_and_flips() -> None:
    images = torch.randint(0, 256, (200, 3, 12, 10), dtype=torch.uint8)
    bits = draw(torch.arange(200), epoch=3, seed=1)
    out = crop_and_flip(images, bits)
    for image, number, got in zip(images.numpy(), bits.tolist(), out.numpy(), strict=True):
        np.testing.assert_array_equal(got, slow_crop_and_flip(image, number, 4))


def test_draws_are_uniform_and_new_in_every_epoch() -> None:
    index = torch.arange(50_000)
    first, other_epoch, other_seed = draw(index, 0, 0), draw(index, 1, 0), draw(index, 0, 1)
    assert (first >= 0).all()
    for bits in (first, other_epoch, other_seed):
        counts = torch.bincount(bits % 162, minlength=162)  # 9 x 9 windows, mirrored or not
        assert ((counts - 50_000 / 162) ** 2 / (50_000 / 162)).sum() < 230  # chi-square, 161 degrees: p < 0.001
    assert not torch.equal(other_epoch, other_seed)
    for another in (other_epoch, other_seed):
        assert (first % 162 == another % 162).float().mean() < 0.01


def test_augmentation_does_not_depend_on_the_company(root: Path) -> None:
    data = Cifar10(root=str(root), batch_size=8, val_size=0, seed=5)
    data.setup("fit")
    images = Images(data.splits["train"])

    def batch(rows: list[int], epoch: int, training: bool = True) -> torch.Tensor:
        data.trainer = SimpleNamespace(training=training, current_epoch=epoch, world_size=1)
        return data.on_after_batch_transfer(images.__getitems__(rows), 0)[0]

    together = batch([3, 1, 4, 15, 9], epoch=2)
    assert torch.equal(together[[4, 0]], batch([9, 3], epoch=2))
    assert not torch.equal(together, batch([3, 1, 4, 15, 9], epoch=3))
    plain = batch([3], epoch=2, training=False)
    torch.testing.assert_close(plain * data.std[:, None, None] + data.mean[:, None, None], images[3][0][None].float())
