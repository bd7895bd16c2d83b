"""What each compressor leaves behind of a real gradient, at several sizes of it.

    python -m benchmarks.error --root data

The gradient is ResNet-20's on CIFAR-10 after some steps of SGD. Gradients of larger models are smaller, and Adam does
not care how small they are: so the same gradient is tried at a thousandth and a hundred-thousandth of its size.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_compress.codecs import CODECS
from lightning_compress.layout import Layout
from recipes.resnet.cifar10 import FOLDER, TRAIN_FILES, read_batches
from recipes.resnet.model import ResNet

SCALES = (1.0, 1e-3, 1e-5)


def captured(root: Path, steps: int, batch: int = 128) -> tuple[Layout, Tensor]:
    """Train for some steps and return the last gradient, ``[269722]``, and what it is made of."""
    torch.manual_seed(0)
    split = read_batches(root / FOLDER, TRAIN_FILES[:1])
    model = ResNet(20)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for start in range(0, steps * batch, batch):
        images = (split.images[start : start + batch].float() / 255 - 0.47) / 0.25
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), split.labels[start : start + batch]).backward()
        optimizer.step()
    layout = Layout.of((name, tuple(parameter.shape)) for name, parameter in model.named_parameters())
    return layout, torch.cat(
        [parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.grad is not None]
    )


def left_behind(layout: Layout, gradient: Tensor) -> dict[str, tuple[float, list[float]]]:
    """Of each method with its defaults: bits per element; norm of what stays over the gradient's, by scale."""
    figures = {}
    for name, codec in CODECS.items():
        plan = codec().plan(layout, torch.device("cpu"))
        message = torch.empty(plan.message_size, dtype=torch.uint8)
        errors = []
        for scale in SCALES:
            vector = gradient * scale
            plan.encode(vector, message, 0)
            errors.append(float(vector.double().norm() / (gradient * scale).double().norm()))
        figures[name] = (8 * plan.message_size / layout.numel, errors)
    return figures


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help=f"folder that holds {FOLDER}")
    parser.add_argument("--steps", type=int, default=60, help="steps before the gradient is taken (at most 78)")
    arguments = parser.parse_args()
    table = Table("compressor", "bits", *(f"gradient x {scale:g}" for scale in SCALES), title="relative error")
    for name, (bits, errors) in left_behind(*captured(arguments.root, arguments.steps)).items():
        table.add_row(name, f"{bits:.2f}", *(f"{100 * error:.2g} %" for error in errors))
    Console().print(table)


if __name__ == "__main__":
    main()
