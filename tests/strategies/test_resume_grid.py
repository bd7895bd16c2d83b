"""A resumed run is the run that was never interrupted: for every method, with a scaler, and in DDP's larger buckets."""

import itertools

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from tests.helpers.training import Net
from tests.strategies.test_resume import METHODS, interrupted


class Large(Net):
    """Three buckets of half a MiB."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(144, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10))


def _scaled(folder, compressor):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=2)  # it changes before and after the save
    return interrupted(folder, compressor, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])


def _large(folder, compressor):
    return interrupted(folder, compressor, make=Large, bucket_cap_mb=0.5)


def _both(folder, compressor):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=2)
    precision = [MixedPrecision("16-mixed", "cpu", scaler)]
    return interrupted(folder, compressor, plugins=precision, make=Large, bucket_cap_mb=0.5)


WAYS = {"scaler": _scaled, "large": _large, "both": _both}
IN_CI = {("topk", 3, "both")}


def _marks(case, size, way):
    return () if (case.name, size, way) in IN_CI else pytest.mark.thorough


GRID = [
    pytest.param(case, size, way, id=f"{case.name}-{size}-{way}", marks=_marks(case, size, way))
    for size, case, way in itertools.product((2, 3, 4), METHODS, WAYS)
]


@pytest.mark.parametrize(("case", "size", "way"), GRID)
def test_bit_for_bit(pools, tmp_path, case, size, way):
    for same, said in pools[size].run(WAYS[way], str(tmp_path), case.codec):
        assert same
        assert not said
    parts = [torch.load(path, weights_only=True) for path in tmp_path.glob("epoch=0.ckpt.lc/*")]
    kept = parts or [torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)["lightning_compress"]]
    assert all(len(each["tree"]["groups"]) > 1 for each in kept)
