"""The MLP of meProp's paper (two hidden layers of 500, Adam) with and without a sparse backward pass."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_compress.backward import enable

HIDDEN, BATCH = 500, 100
EPOCHS = {"digits": 60, "cifar10": 8}


@dataclass(frozen=True)
class Data:
    """Images as rows, and their labels."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def digits(_: Path | None) -> Data:
    """scikit-learn's handwritten digits, 64 pixels from 0 to 1; every fifth is for testing."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)
    test = torch.arange(len(y)) % 5 == 0
    return Data(x[~test], y[~test], x[test], y[test])


def cifar10(root: Path | None) -> Data:
    """CIFAR-10's 3,072 raw pixels, less their mean and over their deviation.

    Raises:
        ValueError: ``root`` does not hold the authors' binary files.
    """
    from recipes.resnet.cifar10 import FOLDER, TEST_FILES, TRAIN_FILES, read_batches

    if root is None:
        raise ValueError(f"--data: give the folder that holds {FOLDER}/")
    train, test = (read_batches(root / FOLDER, names) for names in (TRAIN_FILES, TEST_FILES))
    x, test_x = (each.images.flatten(1).float() for each in (train, test))
    mean, deviation = x.mean(0), x.std(0)
    return Data((x - mean) / deviation, train.labels, (test_x - mean) / deviation, test.labels)


SETS: Mapping[str, Callable[[Path | None], Data]] = {"digits": digits, "cifar10": cifar10}


def mlp(inputs: int, hidden: int = HIDDEN, classes: int = 10) -> nn.Sequential:
    """Two hidden layers and an output layer."""
    widths = [nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes)]
    return nn.Sequential(*widths)


def train(data: Data, epochs: int, seed: int, k: int | None, memory: float = 0.0, per_example: bool = False) -> float:
    """Train anew.

    Args:
        data: what it learns and is tested on.
        epochs: with Adam at 0.001, minibatches of 100, dropout none, as the paper has it.
        seed: of weights and order.
        k: hidden outputs that are kept; None: dense.
        memory: see ``enable``.
        per_example: see ``enable``.

    Returns:
        percent of the test set that is right at the end.
    """
    torch.manual_seed(seed)
    model = mlp(data.x.shape[1])
    if k is not None:
        enable(model, k, memory=memory, per_example=per_example)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(data.y)).split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(model(data.x[batch]), data.y[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return 100 * float((model(data.test_x).argmax(1) == data.test_y).float().mean())


def compare(name: str, root: Path | None, counts: list[int], seeds: int, memories: list[float]) -> list[list[str]]:
    """Rows of a table: what is kept, mean accuracy, its spread, and the difference to dense in points."""
    data, rows = SETS[name](root), []
    cases: list[tuple[str, int | None, float]] = [("dense", None, 0.0)]
    for count in counts:
        share = f"k {count} ({100 * count / HIDDEN:.3g} %)"
        cases += [(f"{share}, memory {each:g}" if each else share, count, each) for each in memories]
    base = 0.0
    for label, k, memory in cases:
        scores = [train(data, EPOCHS[name], seed, k, memory) for seed in range(seeds)]
        mean = statistics.mean(scores)
        base = mean if k is None else base
        rows.append([name, label, f"{mean:.2f}", f"{min(scores):.2f} to {max(scores):.2f}", f"{mean - base:+.2f}"])
        print(*rows[-1], sep="  ", flush=True)
    return rows
