"""One run on ranks that are threads, by the engine that DistributedDataParallel's hook calls."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._language import CharLSTM, CharTransformer, excerpts, read_text
from benchmarks._local import Local
from benchmarks._optimizers.stages import DENSE, RATES, SETTINGS, Stage
from benchmarks.harness.training import descend
from lightning_compress.codecs import Codec, Dense
from lightning_compress.collectives import Collective, run_threads
from lightning_compress.engine.compression import Compression
from lightning_compress.settings.run_state import RunState

BATCH, LENGTH, LAST = 16, 64, 20
LINK = {"latency_s": 1e-4, "bytes_per_s": 1.25e8}
"""1 Gbit/s: for which ``auto`` chooses, so that a run is the same wherever it is repeated."""
MODELS: dict[str, tuple[type[nn.Module], int]] = {"lstm": (CharLSTM, 128), "transformer": (CharTransformer, LENGTH)}
"""With the length of excerpts of held-out text; a Transformer knows no places beyond those of training."""


def run(name: str, stage: Stage, seed: int, root: Path) -> dict[str, float]:
    """Train once.

    Returns:
        loss on held-out text; bits an element of a message, and of those sent in the last step and in the whole run,
        of which an all-reduce of float32 has 32; seconds.
    """
    start, text = time.perf_counter(), read_text(root)
    torch.manual_seed(seed)
    kind, length = MODELS[stage.model]
    model = kind(text.vocabulary)

    def train(collective: Collective) -> dict[str, Any]:
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(1000 * seed + collective.rank)
        return _train(copy.deepcopy(model), SETTINGS[name], stage, seed, collective, text.train, generator)

    ranks = run_threads(stage.ranks, train, timeout=3600)
    trained = ranks[0].pop("model")
    loss = held_out_loss(trained, text.held_out, length)
    return {"held_out": loss, **ranks[0], "seconds": time.perf_counter() - start}


class _Gradients:
    """The ranks' gradients are averaged in every step."""

    every = 1

    def __init__(self, model: nn.Module, given: dict[str, Any], collective: Collective) -> None:
        self.settings, self._parameters = RunState.of(**given), list(model.parameters())
        self._compression = Compression(model, self.settings, collective, accumulates=False)
        self._compression.active = True

    def stepped_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Know what is committed when."""
        self._compression.stepped_by([optimizer])

    def before(self) -> None:
        """Backward is over."""
        self._compression.reduce(self._parameters, [each.grad for each in self._parameters if each.grad is not None])

    def after(self) -> None:
        """The optimizer stepped."""

    def end(self) -> tuple[float, float]:
        """Of float32's bytes, which share was sent in the last step, and in the run."""
        stats = self._compression.stats()
        self._compression.close()
        return stats["bytes_sent"] / stats["bytes_dense"], stats["total_bytes_sent"] / stats["total_bytes_dense"]


class _Changes(Local):
    """What the ranks' own optimizers change is averaged, after every so many steps."""

    def stepped_by(self, optimizer: torch.optim.Optimizer) -> None:
        """It is each rank's own."""

    def before(self) -> None:
        """Nothing is averaged."""

    def end(self) -> tuple[float, float]:
        """Likewise; all rounds cost the same."""
        self.finish()
        share = self.bytes_sent / self.bytes_dense
        self.close()
        return share, share


def _train(
    model: nn.Module,
    setting: dict[str, Any],
    stage: Stage,
    seed: int,
    collective: Collective,
    text: Tensor,
    generator: torch.Generator,
) -> dict[str, Any]:
    """A rank's part of it; the learning rate falls linearly to 0."""
    given = given_of(setting, seed)
    averaging = (_Changes if "rounds" in given else _Gradients)(model, given, collective)
    optimizer = _optimizer(model, setting, stage)
    averaging.stepped_by(optimizer)
    losses = descend(
        lambda: model(excerpts(text, BATCH, LENGTH, generator)),
        optimizer,
        stage.steps,
        before=averaging.before,
        after=averaging.after,
    )
    last, run = averaging.end()
    return {
        "model": model,
        "training": sum(map(float, losses[-LAST:])) / LAST,
        "message_bits": message_bits(averaging.settings, model) / averaging.every,
        "bits": 32.0 if setting == DENSE else 32 * last,
        "run_bits": 32.0 if setting == DENSE else 32 * run,
    }


def given_of(setting: dict[str, Any], seed: int) -> dict[str, Any]:
    """A setting, with what all of them have in common."""
    return {"exchange": {"name": "auto", "link": LINK}, "seed": seed, "check_drift_every": 0} | setting


def _optimizer(model: nn.Module, setting: dict[str, Any], stage: Stage) -> torch.optim.Optimizer:
    rate = RATES[stage.model, stage.optimizer]
    if "onebit_adam" in str(setting["compressor"]):  # which is Adam itself
        return torch.optim.SGD(model.parameters(), rate, weight_decay=0.01)
    if stage.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), rate)


def message_bits(settings: RunState, model: nn.Module) -> float:
    """Bits an element of what is encoded, of one rank's message; 32 for methods that have none."""
    named = [(name, tuple(each.shape)) for name, each in model.named_parameters()]
    _, sections = settings.rules.sections(named)
    coarse = [each for each in sections if isinstance(each.method, Codec) and not isinstance(each.method, Dense)]
    size = sum(each.codec.plan(each.layout, torch.device("cpu")).expected_size for each in coarse)
    return 8 * size / sum(each.layout.numel for each in coarse) if coarse else 32.0


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, length: int) -> float:
    """Mean loss on half of the held-out text, cut into excerpts of so many characters."""
    rows = text[: len(text) // (length + 1) * (length + 1)].view(-1, length + 1)[::2]
    return float(model(rows))
