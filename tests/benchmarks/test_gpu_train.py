"""The training for a GPU, here on a CPU: two ranks train, and end in time."""

import json
import math
import sys
import time

import pytest
import torch

from benchmarks._gpu import train


def _images(count):
    labels = torch.arange(count) % 10
    return (labels * 25).to(torch.uint8)[:, None, None, None].expand(-1, 3, 8, 8).contiguous(), labels


def _train(name, folder, seconds):
    train.UNTIMED, train.TIMED = 1, 2
    told = {"device": "cpu", "batch": 4, "epochs": 2, "weight_decay": 5e-4, "folder": folder, "seconds": seconds}
    train.Loop(told | train.METHODS[name], _images(32), _images(20), time.monotonic()).run()


def _said(folder):
    return [json.loads(line) for line in (folder / "said.jsonl").read_text().splitlines()]


def test_two_ranks_train(pools, tmp_path):
    pools[2].run(_train, "fft", str(tmp_path), 1000.0)
    met, speed, *curve, traffic = _said(tmp_path)
    assert met["met"]
    assert speed["epochs"] == 2
    assert [row["epoch"] for row in curve] == [1, 2]
    assert all(math.isfinite(row["loss"]) and 0 <= row["accuracy"] <= 100 for row in curve)
    assert traffic["ratio"] > 5


def test_it_trains_as_long_as_there_is_time(pools, tmp_path):
    pools[2].run(_train, "dense", str(tmp_path), 0.0)
    _, speed, *curve, traffic = _said(tmp_path)
    assert speed["epochs"] == len(curve) == 1
    assert traffic["ratio"] == 1


def test_without_images_it_says_so_and_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train", "--data", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        train.main()
    assert ended.value.code == 2
    assert "no training: there is no data_batch_*.bin" in capsys.readouterr().err


def test_some_of_the_images_will_do(tmp_path):
    for name, count in (("data_batch_2.bin", 3), ("test_batch.bin", 2)):
        records = torch.arange(count * 3073).view(count, 3073) % 251
        records[:, 0] = torch.arange(count)
        records.to(torch.uint8).numpy().tofile(tmp_path / name)
    (images, labels), test = train._images(tmp_path, None)
    assert images.shape == (3, 3, 32, 32)
    assert images[1, 0, 0, 0] == 3074 % 251
    assert labels.tolist() == [0, 1, 2]
    assert len(test[0]) == 2
    (tmp_path / "test_batch.bin").write_bytes(b"1234")
    with pytest.raises(ValueError, match="has 4 bytes"):
        train.files(tmp_path)
