"""Train with a loop of your own, without a Trainer: ``torchrun --nproc-per-node 2 bare_ddp.py``."""

import torch
import torch.distributed as dist
from task import Data, Net
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lightning_compress import attach

if __name__ == "__main__":
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(1)
    model = DistributedDataParallel(Net(), bucket_cap_mb=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    compression = attach(model, "qsgd", optimizer=optimizer)

    data = Data()
    sampler = DistributedSampler(data.training, seed=1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        compression.epoch = epoch  # for compressors that change by epoch, such as dgc
        for inputs, labels in DataLoader(data.training, 32, sampler=sampler):
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    if dist.get_rank() == 0:
        inputs, labels = data.validation.tensors
        loss = torch.nn.functional.cross_entropy(model.module(inputs), labels)
        stats = compression.stats()
        print(f"validation: loss {loss:.6f}")
        print(f"sent: {stats['total_bytes_sent']:,.0f} bytes; float32 would send {stats['total_bytes_dense']:,.0f}")
    compression.close()
    dist.destroy_process_group()
