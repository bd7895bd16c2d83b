"""Train with Hugging Face Accelerate: ``torchrun --nproc-per-node 2 accelerate_train.py``. Go on: ``--resume``."""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from task import Data, Net
from torch.utils.data import DataLoader

from lightning_compress import attach

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compressor", default="qsgd", help="a name that `lightning-compress compressors` prints")
    parser.add_argument("--epochs", type=int, default=3, help="epochs in total")
    parser.add_argument("--checkpoint", default="accelerate_checkpoint", help="folder to save to after each epoch")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, if there is one")
    arguments = parser.parse_args()

    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1)  # or a resumed run shuffles otherwise
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=order)  # no cpu=True on GPUs
    torch.manual_seed(1)
    net, data = Net(), Data()
    batches = DataLoader(data.training, 32, shuffle=True)
    model, optimizer, batches = accelerator.prepare(net, net.configure_optimizers(), batches)
    compression = attach(model, arguments.compressor, optimizer=optimizer)

    # Accelerate saves registered objects on rank 0 alone, but each rank has its own residual
    own = os.path.join(arguments.checkpoint, f"compression.rank{accelerator.process_index}.pt")
    first = 0
    if arguments.resume and os.path.exists(own):
        accelerator.load_state(arguments.checkpoint)
        kept = torch.load(own, weights_only=True)
        compression.load_state_dict(kept["compression"])
        first = kept["epoch"]
    for epoch in range(first, arguments.epochs):
        batches.set_epoch(epoch)
        compression.epoch = epoch  # for compressors that change by epoch, such as dgc
        for inputs, labels in batches:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(arguments.checkpoint)
        torch.save({"compression": compression.state_dict(), "epoch": epoch + 1}, own)
        accelerator.wait_for_everyone()

    inputs, labels = data.validation.tensors
    accelerator.print(f"validation: loss {torch.nn.functional.cross_entropy(net(inputs), labels):.6f}")
    stats = compression.stats()
    accelerator.print(f"sent: {stats['total_bytes_sent']:,.0f} bytes; float32: {stats['total_bytes_dense']:,.0f}")
    accelerator.end_training()
