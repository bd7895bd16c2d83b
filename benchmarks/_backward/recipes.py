"""What meProp gains for a whole training step of each recipe: steps with and without it in turns, in one training."""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Iterable
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_compress.backward import enable
from lightning_compress.backward.sparsity import Sparsity
from recipes.config import CONF, build

RECIPES = {
    "ResNet-20, digits": ["recipe=resnet"],
    "AlexNet 2048, digits": ["recipe=alexnet", "recipe.hidden=2048"],
    "LSTM, spoken digits": ["recipe=lstm_speech"],
    "the same, k once": ["recipe=lstm_speech"],
    "Transformer, numbers": ["recipe=nmt"],
}
"""What is shown, and what chooses it."""
WARM = 6
"""Steps that do not count."""


class InTurns(Callback):
    """Every other step has a sparse backward pass.

    Args:
        k: as ``enable`` takes it.
        per_sequence: likewise.
    """

    def __init__(self, k: float, per_sequence: bool) -> None:
        self._k, self._per_sequence = k, per_sequence
        self._begun, self._middle, self._sparse = 0.0, 0.0, False
        self._layers: dict[str, Sparsity] = {}
        self.backward: dict[bool, list[float]] = {False: [], True: []}
        self.step: dict[bool, list[float]] = {False: [], True: []}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Change the layers."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of how well it trains
            self._layers = enable(pl_module, self._k, per_sequence=self._per_sequence)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Choose, and start the clock: of this thread, for which other programs do not count."""
        self._sparse = bool(batch_idx % 2)
        for each in self._layers.values():
            each.resize(self._k if self._sparse else 1.0)
        self._begun = time.thread_time()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Forward is done."""
        self._middle = time.thread_time()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Backward is done."""
        self.backward[self._sparse].append(time.thread_time() - self._middle)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """So is the optimizer."""
        self.step[self._sparse].append(time.thread_time() - self._begun)


def measure(recipe: str, k: float, steps: int) -> list[str]:
    """Train a recipe on one thread for some steps.

    Args:
        recipe: one of ``RECIPES``.
        k: outputs that are kept, a share of them.
        steps: of them, half sparse.

    Returns:
        the recipe; k; milliseconds of the dense and the sparse backward pass (medians) and their ratio; the same of the
        whole step.
    """
    turns, threads = InTurns(k, recipe.endswith("once")), torch.get_num_threads()
    said = logging.getLogger("lightning.pytorch")
    level = said.level
    said.setLevel(logging.ERROR)
    with TemporaryDirectory() as folder, initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        cfg = compose("config", [*RECIPES[recipe], f"output_dir={folder}"])
        seed_everything(0, verbose=False)
        data = build(cfg.data)
        model = build(cfg.recipe, **data.dims)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps + WARM,
            limit_val_batches=0,
            gradient_clip_val=cfg.trainer.gradient_clip_val,
            callbacks=[turns],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, datamodule=data)
    torch.set_num_threads(threads)
    said.setLevel(level)
    return [recipe, f"{100 * k:g} %", *_compared(turns.backward), *_compared(turns.step)]


def _compared(taken: dict[bool, list[float]]) -> Iterable[str]:
    dense, sparse = (1e3 * statistics.median(taken[kind][WARM // 2 :]) for kind in (False, True))
    return f"{dense:.1f}", f"{sparse:.1f}", f"{dense / sparse:.2f}"
