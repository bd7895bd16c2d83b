"""Pictures in class folders: listing, cutting, sharing among ranks, and one training."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from PIL import Image

from recipes.resnet.data import IGNORE
from recipes.resnet.imagefolder import ImageFolder, Pictures, Rows
from recipes.resnet.module import AlexNetModule
from recipes.resnet.pictures import as_tensor, centre, random_part, read
from tests.helpers.processes import Pools
from tests.recipes.test_resnet import QUIET, pytestmark  # noqa: F401

COUNTS = {"train": 8, "val": 3}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Pictures of two classes, red and blue, in several sizes, kinds and modes."""
    rng = np.random.default_rng(0)
    for part, count in COUNTS.items():
        for channel, name in enumerate(("blue", "red")):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 60, (20 + 3 * number, 30, 3), dtype=np.uint8)
                pixels[..., 2 - 2 * channel] += 150
                suffix = ("png", "JPEG", "bmp")[number % 3]
                Image.fromarray(pixels).save(tmp_path / part / name / f"{number}.{suffix}")
    (tmp_path / "train/red/notes.txt").write_text("no picture")
    (tmp_path / "train/red/.hidden.png").write_bytes(b"")
    return tmp_path


def data_of(root: Path, **settings: Any) -> ImageFolder:
    return ImageFolder(**{"root": str(root), "batch_size": 4, "size": 16, "num_workers": 0} | settings)


def test_lists_classes_and_pictures(root: Path) -> None:
    data = data_of(root)
    assert data.dims == {"in_channels": 3, "num_classes": 2, "image_size": 16}
    data.setup("fit")
    paths, labels = data.parts["train"]
    assert labels == [0] * 8 + [1] * 8
    assert [path.name for path in paths[:2]] == ["0.png", "1.JPEG"]
    assert data.parts["test"] is data.parts["val"]
    (root / "test").mkdir()
    Image.new("RGB", (9, 9)).save(root / "test/ILSVRC2012_test_00000001.JPEG")  # as ImageNet's lie there
    data.parts = {}
    data.setup("fit")
    assert data.parts["test"] is data.parts["val"]
    assert data.facts["classes"] == ["blue", "red"]
    assert data.facts["shorter"] == 18
    (root / "test/red").mkdir(parents=True)
    (root / "test/blue").mkdir(parents=True)
    for name in ("red", "blue"):
        (root / "val" / name / "0.png").rename(root / "test" / name / "0.png")
    data = data_of(root)
    data.setup("fit")
    assert [len(data.parts[name][0]) for name in ("train", "val", "test")] == [16, 4, 2]


def test_trains_and_predicts(root: Path) -> None:
    torch.manual_seed(0)
    data = data_of(root)
    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    module = AlexNetModule(hidden=32, dropout=0.0, optimizer=optimizer, batch_size=4, schedule="constant", **data.dims)
    trainer = Trainer(max_epochs=12, **QUIET)
    trainer.fit(module, datamodule=data)
    assert trainer.test(module, datamodule=data, verbose=False)[0]["test/acc"] == 1
    module.facts = data.facts
    assert module.predict_file(str(root / "val/red/0.png")).startswith("red ")


def batches(root: Path, epoch: int, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    data = data_of(root, **settings)
    data.setup("fit")
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)


def test_augmentation_depends_on_seed_epoch_and_picture_alone(root: Path) -> None:
    images, labels = batches(root, epoch=3)
    assert images.shape == (16, 3, 16, 16)
    assert images.dtype == torch.uint8
    assert labels.sum() == 8
    for workers, size in ((2, 4), (0, 2)):
        again, _ = batches(root, epoch=3, num_workers=workers, batch_size=size)
        assert torch.equal(images, again)
    another, _ = batches(root, epoch=4)
    key = {tuple(image.flatten().tolist()) for image in images}
    assert len(key) == 16
    assert not key & {tuple(image.flatten().tolist()) for image in another}
    other_seed, _ = batches(root, epoch=3, seed=1)
    assert not key & {tuple(image.flatten().tolist()) for image in other_seed}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_the_pictures(root: Path, ranks: int) -> None:
    data = data_of(root, batch_size=1, check=False)
    data.trainer = SimpleNamespace(world_size=ranks, global_rank=0)
    data.setup("fit")
    pictures = data.train_dataloader().dataset
    shares = [list(Rows(pictures, ranks, rank, seed=0, drop_last=True)) for rank in range(ranks)]
    assert {len(share) for share in shares} == {16 // ranks}
    assert len({number for share in shares for number in share}) == ranks * (16 // ranks)
    val = data.val_dataloader().dataset
    labels = [val[number][1] for number in range(len(val))]
    assert len(labels) % ranks == 0
    assert labels == [0] * 3 + [1] * 3 + [IGNORE] * (-6 % ranks)


def test_the_middle_is_cut_out() -> None:
    pixels = np.zeros((40, 80, 3), np.uint8)
    pixels[:, 20:60] = 200  # what lies in the middle 40 x 40
    out = np.array(centre(Image.fromarray(pixels), 32, 40))
    assert out.shape == (32, 32, 3)
    assert (out == 200).all()
    tall = centre(Image.fromarray(pixels.transpose(1, 0, 2)), 32, 32)
    assert (np.array(tall)[1:-1] == 200).all()


def test_random_parts_lie_inside() -> None:
    rows, columns = np.mgrid[0:60, 0:90]
    picture = Image.fromarray(np.stack([rows, columns, 0 * rows], 2).astype(np.uint8))
    areas, mirrored = [], 0
    for bits in range(200):
        part = np.array(random_part(picture, 24, bits)).astype(int)
        height, width = np.ptp(part[..., 0]), np.ptp(part[..., 1])
        areas.append(height * width / 5400)
        mirrored += part[0, 0, 1] > part[0, -1, 1]
    assert 70 < mirrored < 130
    assert min(areas) < 0.2
    assert max(areas) > 0.7
    assert 0.35 < np.mean(areas) < 0.6
    assert as_tensor(random_part(Image.new("L", (500, 9)), 8, 0)).shape == (1, 8, 8)  # no draw fits


def test_upright_as_exif_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 10)).save(tmp_path / "turned.jpg", exif=exif)
    assert read(tmp_path / "turned.jpg").size == (10, 20)


@pytest.mark.parametrize(("channels", "suffix"), [(1, "png"), (3, "png"), (3, "tif")])
def test_grey_of_16_bits_stays_grey(channels: int, suffix: str, tmp_path: Path) -> None:
    shades = np.arange(256, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(257 * shades).save(tmp_path / f"grey.{suffix}")
    pixels = as_tensor(read(tmp_path / f"grey.{suffix}", channels))
    assert pixels.shape == (channels, 16, 16)
    assert (pixels == torch.from_numpy(shades.astype(np.uint8))).all()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda root: (root / "train").rename(root / "elsewhere"), r"data.root=.*train holds 0 folders.*at least 2"),
        (lambda root: (root / "val").rename(root / "elsewhere"), r"data.root=.*val holds 0 folders"),
        (lambda root: (root / "val/green").mkdir(), "val/green is of no class"),
        (lambda root: (root / "train/green").mkdir(), "train/green holds no picture"),
        (lambda root: (root / "train/red/0.png").write_bytes(b""), r"train/red/0.png is empty"),
    ],
)
def test_folders_that_are_wrong(root: Path, spoil: Any, words: str) -> None:
    spoil(root)
    with pytest.raises(ValueError, match=words):
        data_of(root).setup("fit")


def test_too_few_pictures_for_a_step(root: Path) -> None:
    with pytest.raises(ValueError, match="16 training pictures for 1 ranks of data"):
        data_of(root, batch_size=17).setup("fit")


@pytest.mark.parametrize(("key", "value"), [("batch_size", 0), ("size", 4), ("shorter", 12)])
def test_wrong_settings_are_refused(root: Path, key: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"data.{key}={value}: must be at least"):
        data_of(root, **{key: value})


def _set_up(root: str) -> str:
    data = data_of(Path(root), batch_size=1)
    data.trainer = SimpleNamespace(world_size=dist.get_world_size(), global_rank=dist.get_rank())
    try:
        data.setup("fit")
    except ValueError as error:
        return str(error)
    return ""


def test_all_ranks_hear_of_a_damaged_picture(root: Path, pools: Pools) -> None:
    assert pools[2].run(_set_up, str(root)) == ["", ""]
    for damaged in ("train/blue/0.png", "val/red/1.JPEG"):
        (root / damaged).write_bytes((root / damaged).read_bytes()[:200])
    first, second = pools[2].run(_set_up, str(root))
    assert "train/blue/0.png" in first
    assert first == second


def test_a_damaged_picture_is_named(root: Path) -> None:
    path = root / "train/blue/1.JPEG"
    path.write_bytes(path.read_bytes()[:200])
    pictures = Pictures([path], [0], size=16, shorter=18)
    with pytest.raises(ValueError, match=r"train/blue/1.JPEG: no whole picture that Pillow can read"):
        pictures[0]
    with pytest.raises(ValueError, match=r"train/blue/1.JPEG: the end of the picture is missing"):
        data_of(root).setup("fit")
    data_of(root, check=False).setup("fit")
    for damaged in (root / "train/red/0.png", root / "val/red/2.bmp"):
        path.unlink(missing_ok=True)
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=f"{damaged.name}: .*give another one, or leave it out"):
            data_of(root).setup("fit")
        damaged.write_bytes(whole)
