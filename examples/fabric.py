"""Train with Fabric, in a loop of your own: ``python fabric.py``. Go on after an interruption: ``--resume``."""

import argparse
import os

import torch
from lightning.fabric import Fabric
from task import Data, Net
from torch.utils.data import DataLoader, DistributedSampler

from lightning_compress.fabric import CompressedDDPStrategy

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compressor", default="qsgd", help="a name that `lightning-compress compressors` prints")
    parser.add_argument("--devices", type=int, default=2, help="processes on each machine")
    parser.add_argument("--epochs", type=int, default=3, help="epochs in total")
    parser.add_argument("--checkpoint", default="fabric.ckpt", help="where to save after each epoch")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, if there is one")
    arguments = parser.parse_args()

    strategy = CompressedDDPStrategy(arguments.compressor)
    fabric = Fabric(accelerator="cpu", devices=arguments.devices, strategy=strategy)  # accelerator="gpu" on GPUs
    fabric.launch()
    fabric.seed_everything(1)
    net = Net()
    model, optimizer = fabric.setup(net, net.configure_optimizers())
    data = Data()
    # fabric.setup_dataloaders would count epochs from 0 again after a resume
    sampler = DistributedSampler(data.training, fabric.world_size, fabric.global_rank, seed=1)
    batches = DataLoader(data.training, 32, sampler=sampler)

    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if arguments.resume and os.path.exists(arguments.checkpoint):
        fabric.load(arguments.checkpoint, state)
    for epoch in range(state["epoch"], arguments.epochs):
        sampler.set_epoch(epoch)
        strategy.compression.epoch = epoch  # for compressors that change by epoch, such as dgc
        for number, batch in enumerate(batches):
            inputs, labels = fabric.to_device(batch)
            steps = number % 2 == 1  # two batches for each optimizer step
            with fabric.no_backward_sync(model, enabled=not steps):
                fabric.backward(torch.nn.functional.cross_entropy(model(inputs), labels) / 2)
            if steps:
                fabric.clip_gradients(model, optimizer, max_norm=10.0)
                optimizer.step()
                optimizer.zero_grad()
        state["epoch"] = epoch + 1
        fabric.save(arguments.checkpoint, state)  # and each rank's residual, in the folder fabric.ckpt.lc

    inputs, labels = data.validation.tensors
    fabric.print(f"validation: loss {torch.nn.functional.cross_entropy(net(inputs), labels):.6f}")
    stats = strategy.comm_stats()
    fabric.print(f"sent: {stats['total_bytes_sent']:,.0f} bytes; float32: {stats['total_bytes_dense']:,.0f}")
