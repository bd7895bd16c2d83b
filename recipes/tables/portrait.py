"""What compressors make of a run's own gradients: a picture of error against bits, and a table of the layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_compress import AsyncGossipStrategy, GossipStrategy, compare
from lightning_compress.codecs import Codec, Dense
from lightning_compress.collectives import World
from lightning_compress.collectives.counting import Meter, all_reduce_bytes
from lightning_compress.collectives.local import LocalCollective
from lightning_compress.core.layout import Layout
from lightning_compress.core.state import State
from lightning_compress.reducers import Reducer
from recipes.tracking import WandbLogger

__all__ = ["Portrait", "curves", "layers", "picture"]

MOST = 1 << 18
"""Elements that are looked at; of larger models, the first rows of each layer."""
AT = 20
"""The step whose gradient it is, counted from 0; the last one in a shorter run."""
FAMILIES: dict[str, list[dict[str, Any]]] = {
    "onebit": [{"name": "onebit", "block": block} for block in (1024, 64)],
    "qsgd": [{"name": "qsgd", "bits": bits} for bits in (2, 4, 6, 8)],
    "rotated": [{"name": "rotated", "bits": bits} for bits in (2, 4, 6, 8)],
    "range_float": [{"name": "range_float", "bits": bits} for bits in (4, 6, 8)],
    "topk": [{"name": "topk", "density": density} for density in (0.001, 0.01, 0.03, 0.1, 0.2)],
    "fft": [{"name": "fft", "theta": theta} for theta in (0.986, 0.944, 0.85, 0.65, 0.25)],
    "terngrad": [{"name": "terngrad"}],
}
"""What the picture shows beside the run's own compressor."""
COLUMNS = ["parameter", "elements", "compressor", "bits per element", "ratio", "relative error"]


class Portrait(Callback):
    """Keeps rank 0's own gradient of one early step, and logs picture and table to W&B when the training ends.

    Args:
        at: the optimizer step, counted from 0; the last one in a shorter run.
    """

    def __init__(self, at: int = AT) -> None:
        self.at = at
        self.gradients: dict[str, Tensor] = {}
        self._hooks: list[Any] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Settle on the step."""
        self._step = min(trainer.global_step + self.at, int(trainer.estimated_stepping_batches) - 1)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Listen to the backward pass of that step; what a parameter's hook sees was not averaged yet."""
        if not trainer.is_global_zero or trainer.global_step != self._step or self._hooks:
            return
        parameters = {name: each for name, each in pl_module.named_parameters() if each.requires_grad and each.numel()}
        share = min(1.0, MOST / max(1, sum(each.numel() for each in parameters.values())))

        def keep(name: str, gradient: Tensor) -> None:
            rows = gradient if gradient.ndim < 2 else gradient[: math.ceil(share * len(gradient))]
            self.gradients[name] = rows.detach().float().cpu().clone()

        for name, each in parameters.items():
            self._hooks.append(each.register_hook(lambda gradient, name=name: keep(name, gradient)))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop listening."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log both, where there is a finite gradient to show."""
        found = [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
        kept = {name: self.gradients[name] for name, _ in pl_module.named_parameters() if name in self.gradients}
        shown = {name: each for name, each in kept.items() if each.isfinite().all() and each.any()}
        self.gradients = {}
        if not trainer.is_global_zero or not found or not any(each.ndim > 1 for each in shown.values()):
            return
        rules = getattr(getattr(trainer.strategy, "compression", None), "settings", None)
        shapes = {name: tuple(each.shape) for name, each in pl_module.named_parameters()}
        drawn = curves(shown, rules.method if rules is not None else None)
        for logger in found:
            if not isinstance(trainer.strategy, GossipStrategy | AsyncGossipStrategy):  # which sends models
                rows = layers(shown, shapes, rules, trainer.world_size)
                logger.log_table("comm/layers", columns=COLUMNS, data=rows)
            logger.log_image("comm/error_vs_bits", [picture(drawn)], caption=[f"rank 0, step {self._step}"])


def layers(
    gradients: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], settings: Any, ranks: int
) -> list[list[Any]]:
    """Rows of the table: what each parameter's gradient costs, and what it loses.

    Codecs are measured on the gradient, each parameter alone; of methods that talk in their middle (PowerSGD) the row
    has the ratio of what they would send for it alone, and no error.

    Args:
        gradients: float32, by name, possibly the first rows only.
        shapes: of the whole parameters.
        settings: the strategy's; None: nothing is compressed.
        ranks: how many there are.
    """
    rows = []
    for name, gradient in gradients.items():
        method = Dense() if settings is None else settings.rules.method_of(name, shapes[name])
        numel, bits, error = math.prod(shapes[name]), 32.0, None
        if isinstance(method, Reducer):
            bits = 32.0 / _saved(method, name, shapes[name], max(2, ranks))
        elif isinstance(method, Codec) and not isinstance(method, Dense):
            matrix = gradient if gradient.ndim > 1 else gradient[None]
            row = compare({name: matrix}, [method], error_feedback=False, min_numel=0).rows[0]
            bits, error = row.bits, row.error
        rows.append(
            [name, numel, type(method).__name__, bits, 32.0 / bits, 0.0 if isinstance(method, Dense) else error]
        )
    return rows


class _Ranks(LocalCollective):
    """A world in which nothing is sent, to ask for prices."""

    def __init__(self, size: int) -> None:
        self.size = size


def _saved(method: Reducer, name: str, shape: tuple[int, ...], ranks: int) -> float:
    """How many times fewer bytes a reducer sends for a parameter alone than float32."""
    layout, device = Layout.of([(name, shape)]), torch.device("meta")
    states = {
        key: State(each.layout, device, each.initial, each.holder, each.dtype)
        for key, each in method.state(layout).items()
    }
    plan = method.plan(layout, 0, World(_Ranks(ranks), device, Meter(device)), states)
    return all_reduce_bytes(4 * layout.numel, ranks) / max(1, plan.bytes_sent)


def curves(gradients: Mapping[str, Tensor], own: object = None) -> dict[str, list[tuple[float, float]]]:
    """Bits per element and relative error of each family of settings on these gradients, and of the run's own codec.

    Args:
        gradients: float32, by name; at least one of two dimensions.
        own: what the run compresses with; what is no codec is left out.
    """
    matrices = {name: each for name, each in gradients.items() if each.ndim > 1}
    families: dict[str, list[Any]] = dict(FAMILIES)
    if isinstance(own, Codec) and not isinstance(own, Dense):
        families["this run"] = [own]
    return {
        label: [(row.bits, row.error) for row in compare(matrices, family, error_feedback=False, min_numel=0).rows]
        for label, family in families.items()
    }


def picture(drawn: Mapping[str, list[tuple[float, float]]]) -> Any:
    """Draw error against bits; returns a PIL image.

    Args:
        drawn: what ``curves`` returns.
    """
    from recipes.tables.drawing import canvas, image, legend, styles

    figure, (axes,) = canvas("Error of one gradient of this run, by compressor and bits", (7.4, 4.4))
    bits = [2.0**each for each in range(-5, 4)]
    axes.plot(
        bits, [2.0**-each for each in bits], color="#cccccc", lw=4, zorder=0, label="$2^{-bits}$, normal data's least"
    )
    for label, style in styles(drawn).items():
        own = {"marker": "*", "ms": 16, "color": "black", "ls": ""} if label == "this run" else {}
        axes.plot(*zip(*drawn[label], strict=True), **({"ms": 4, "lw": 1.2, "label": label} | style | own))
    axes.set(xscale="log", yscale="log", xlabel="measured bits per element", ylabel="relative error of one gradient")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    legend(figure, axes)
    return image(figure)
