"""Gradients of real models at successive steps of training, in a file for ``lightning_compress.compare``.

    python -m benchmarks.gradients --root data --model lstm --out gradients.pt

Plain training in one process: ResNet-20 or AlexNet on CIFAR-10 with SGD, momentum 0.9 and learning rate 0.1 or 0.01,
128 images a step; or a character LSTM on the English captions of Multi30k with Adam and learning rate 0.003, 32
excerpts of 64 characters a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import _language
from benchmarks._arguments import described, file_to_write, natural, plain_errors, positive
from lightning_compress import compare
from recipes.resnet.cifar10 import FOLDER, TRAIN_FILES, read_batches
from recipes.resnet.model import AlexNet, ResNet

Step = dict[str, Tensor]


def images(root: Path, make: Callable[[], nn.Module], rate: float) -> Iterator[Step]:
    """Gradients of a classifier, step after step, for one pass over a fifth of the images."""
    torch.manual_seed(0)
    split = read_batches(root / FOLDER, TRAIN_FILES[:1])
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    for images, labels in zip(split.images.split(128), split.labels.split(128), strict=True):
        loss = nn.functional.cross_entropy(model((images.float() / 255 - 0.47) / 0.25), labels)
        yield _step(model, optimizer, loss)


def lstm(root: Path) -> Iterator[Step]:
    """Gradients of the character LSTM, step after step, without an end."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    text = _language.read_text(root)
    model = _language.CharLSTM(text.vocabulary)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    while True:
        yield _step(model, optimizer, model(_language.excerpts(text.train, 32, 64, generator)))


MODELS: dict[str, Callable[[Path], Iterator[Step]]] = {
    "resnet": partial(images, make=lambda: ResNet(20), rate=0.1),
    "lstm": lstm,
    "alexnet": partial(images, make=lambda: AlexNet(10, image_size=32, hidden=2048), rate=0.01),
}
FOLDERS = {"resnet": FOLDER, "lstm": _language.FOLDER, "alexnet": FOLDER}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> Step:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def captured(model: str, root: Path, after: int, count: int) -> list[Step]:
    """Train for ``after`` steps, and return the gradients of the ``count`` steps that follow.

    Raises:
        ValueError: there are not so many steps.
    """
    steps = []
    for number, step in enumerate(MODELS[model](root)):
        if number >= after:
            steps.append(step)
        if len(steps) == count:
            return steps
    raise ValueError(f"{model} ends before step {after + count}; ask for fewer steps")


@plain_errors()
def main() -> None:
    """Write the file, and print what each compressor makes of it."""
    parser = described(__doc__)
    parser.add_argument("--root", type=Path, required=True, help=f"folder that holds {' or '.join(FOLDERS.values())}")
    parser.add_argument("--model", choices=MODELS, default="resnet")
    parser.add_argument("--after", type=natural, default=60, help="steps before the first gradient is taken")
    parser.add_argument("--count", type=positive, default=10, help="gradients of successive steps")
    parser.add_argument("--out", type=file_to_write, required=True, help="file to write")
    arguments = parser.parse_args()
    torch.save(captured(arguments.model, arguments.root, arguments.after, arguments.count), arguments.out)
    print(compare(arguments.out))


if __name__ == "__main__":
    main()
