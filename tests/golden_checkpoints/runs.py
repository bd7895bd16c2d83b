"""The runs of which checkpoints are kept; as little as may be in them is rounded otherwise on another machine.

Parameters get their gradients element by element, the learning rate is a power of two, so that no fused multiplication
shows there, and the data are drawn by an algorithm that NumPy promises not to change.
"""

import hashlib
import json
import os
import warnings
from importlib.util import find_spec
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_compress import CompressedDDPStrategy

FOLDER = Path(__file__).parent
NAME = "epoch=0.ckpt"
BATCHES = 3
RANKS = (2, 3)
TOPK = {"name": "topk", "density": 0.05}
METHODS = {
    "topk": {"compressor": TOPK, "exchange": "all_gather"},
    "onebit": {"compressor": {"name": "onebit", "block": 64}, "exchange": "two_shot"},
    "dgc": {"compressor": {"name": "dgc", "density": 0.05}, "exchange": "all_gather"},
    "powersgd": {"compressor": {"name": "powersgd", "rank": 2}},
    "rotated": {
        "compressor": {"name": "rotated", "bits": 8, "block": 64},
        "exchange": "all_gather",
        "schedule": {"bits": {0: 8, BATCHES + 1: 4}},
        "rules": [{"match": "layers.1.*", "compressor": TOPK}],
    },
}
ROUNDED_BY = {
    "topk": ["sums"],
    "onebit": ["sums"],
    "dgc": ["sums"],
    "powersgd": ["sums", "torch", "cpu", "products"],
    "rotated": ["sums", "kernels"],
}
"""What of a machine decides which bits a method leads to."""
CASES = [(method, size) for method in METHODS for size in RANKS]


def folder_of(method, size):
    """Where the files of a case are."""
    return FOLDER / f"{method}-{size}"


def expected_of(method, size):
    """``machine``, ``weights`` and what each rank has ``kept`` after the second epoch."""
    return json.loads((folder_of(method, size) / "expected.json").read_text())


def drawn(*seed, shape):
    """Numbers of very different size in (-1, 1), the same everywhere."""
    words = np.random.PCG64(seed).random_raw(int(np.prod(shape)))
    uniform = ((words >> 40).astype(np.float64) + 0.5) / 2**23 - 1
    return torch.from_numpy((uniform * uniform * uniform).astype(np.float32).reshape(shape))


class Pulled(pl.LightningModule):
    """Every parameter is pulled towards numbers that change from rank to rank and from step to step."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(18, 16), nn.Linear(16, 18), nn.Linear(18, 16)])

    def training_step(self, batch, batch_idx):
        seed = self.global_rank, self.global_step
        pairs = [(each, drawn(*seed, place, shape=each.shape)) for place, each in enumerate(self.parameters())]
        return sum(0.5 * (each - target).square().sum() for each, target in pairs)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.125, momentum=0.9)


class Keep(pl.Callback):
    """Saves after every epoch; a ``ModelCheckpoint`` would put the machine's paths into the file."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, _):
        trainer.save_checkpoint(f"{self.folder}/epoch={trainer.current_epoch}.ckpt")


def fit(folder, method, resume=None):
    """Two epochs, or the second one alone: weights, what this rank keeps, and what was said of beginning anew."""
    torch.manual_seed(1)
    model = Pulled()
    strategy = CompressedDDPStrategy(bucket_cap_mb=0.001, min_numel=256, **METHODS[method])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=strategy,
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Keep(folder)],
        )
        trainer.fit(model, DataLoader(range(BATCHES * dist.get_world_size())), ckpt_path=resume)
    said = [str(each.message) for each in caught if "begins again from zero" in str(each.message)]
    weights = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    return weights.numpy(), kept(strategy.compression.state_dict()["groups"]), said


def kept(groups):
    """SHA-256 of the residual and of everything else that this rank goes on from, by its kind."""
    parts = {}
    for group in groups:
        for kind, one in group["states"].items():
            parts.setdefault(kind, {}).update(zip(one["names"], one["numbers"].split(one["numels"]), strict=True))
    return {kind: digest([named[name] for name in sorted(named)]) for kind, named in sorted(parts.items())}


def machine():
    """What decides how sums, of what is multiplied too, and products of matrices are rounded; and how some were."""
    compiled = find_spec("numba") and os.environ.get("LIGHTNING_COMPRESS_KERNELS", "auto") == "auto"
    matrices = torch.stack([drawn(1, place, shape=(16, 18)) for place in range(3)])
    left = torch.linalg.qr(torch.bmm(matrices, matrices[:, :2].mT)).Q
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "kernels": "numba" if compiled else "torch",
        "sums": digest([torch.add(matrices[0], matrices[1], alpha=1 / 3)]),
        "products": digest([torch.bmm(left.mT, matrices)]),
    }


def digest(tensors):
    """SHA-256 of numbers."""
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest()
