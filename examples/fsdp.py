"""Train a small GPT in replicas of shards, with FSDP2 and compression between the replicas: ``python fsdp.py``.

Four processes on this machine stand for two machines of two GPUs.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from lightning_compress import CommunicationMonitor, CompressedFSDPStrategy

LETTERS, LENGTH = "\n abcdefghijklmnopqrstuvwxyz0123456789+=", 24


class Sums(Dataset[Tensor]):
    """Lines such as ``12+34=46``, as numbers of letters; ``[24]`` each."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> Tensor:
        line, generator = "", torch.Generator().manual_seed(number)
        while len(line) <= LENGTH:
            first, second = torch.randint(100, (2,), generator=generator).tolist()
            line += f"{first}+{second}={first + second}\n"
        return torch.tensor([LETTERS.index(letter) for letter in line[: LENGTH + 1]])


class GPT(LightningModule):
    """A decoder of 100,000 parameters that predicts the next letter."""

    def __init__(self, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), width), nn.Embedding(LENGTH, width)
        layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(blocks)]
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(width, len(LETTERS))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def configure_model(self) -> None:
        """Shard each block, and what is left, over the ranks of a machine. The strategy does the rest."""
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        for module in (self.letters, self.places, self.head):
            fully_shard(module, mesh=mesh)

    def training_step(self, lines: Tensor, _: int) -> Tensor:
        """Return the loss of a batch ``[batch, 25]``."""
        hidden = self.letters(lines[:, :-1]) + self.places(torch.arange(LENGTH, device=self.device))
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        loss = cross_entropy(self.head(hidden).flatten(0, 1), lines[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), 3e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compressor", default="qsgd", help="a name that `lightning-compress compressors` prints")
    parser.add_argument("--steps", type=int, default=100, help="of the optimizer")
    arguments = parser.parse_args()

    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",  # leave it out to train on GPUs
        devices=4,  # on two machines: devices=2, num_nodes=2, and no replicate_size
        strategy=CompressedFSDPStrategy(arguments.compressor, replicate_size=2),
        callbacks=[CommunicationMonitor()],
        max_steps=arguments.steps,
    )
    trainer.fit(GPT(), DataLoader(Sums(), batch_size=16, shuffle=True))
    if trainer.is_global_zero:
        print(f"loss {float(trainer.callback_metrics['loss']):.4f}")
