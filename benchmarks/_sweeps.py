"""Settings that make each method send about 1, 2, 4 and 8 bits per element, and orders to lay gradients out in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_compress.codecs import CODECS

Step = dict[str, Tensor]

SWEEP: dict[str, list[dict[str, Any]]] = {
    "onebit": [{"block": 1024}, {"block": 64}],
    "efsign": [{"block": 1024}, {"block": 64}],
    "qsgd": [{"bits": bits} for bits in (2, 4, 6, 8)],
    "rotated": [{"bits": bits} for bits in (2, 4, 6, 8)],
    "range_float": [{"bits": bits} for bits in (2, 4, 6, 8)],
    "topk": [{"density": bits / 64} for bits in (0.25, 0.5, 1, 2, 4, 8)],
    "topk, 1 bit in Rice codes": [
        {"name": "topk", "density": density, "values": "1bit", "indices": "rice"} for density in (0.01, 0.05, 0.15, 0.3)
    ],
    "qsgd, elias": [
        {"name": "qsgd", "bits": bits, "bucket": 512, "norm": "l2", "coding": "elias"} for bits in (2, 3, 4, 6, 8)
    ],
    "terngrad": [{"packing": "base3"}, {}],
    "adaptive": [{"proportion": proportion} for proportion in (64, 16, 6, 3)],
    "wangni": [{"density": density} for density in (0.01, 0.1, 0.4, 0.8)],
    "randomk": [{"density": bits / 32} for bits in (0.5, 1, 2, 4, 8)],
    "atomo": [{"rank": rank} for rank in (1, 3, 8)],
    "fft": [{"theta": theta} for theta in (0.986, 0.972, 0.944, 0.85, 0.65, 0.25)],
    "fft, coarse": [
        {"name": "fft", "theta": theta, "bits": bits}
        for theta, bits in ((0.979, 4), (0.958, 4), (0.906, 5), (0.706, 5), (0.306, 5), (0.066, 8))
    ],
    "dct, coarse": [
        {"name": "dct", "theta": theta, "bits": bits, "block": 1024}
        for theta, bits in ((0.98, 4), (0.957, 5), (0.819, 5), (0.419, 5), (0.137, 8))
    ],
}
"""By the name of a method, or by a name for a family of its settings, which then say whose they are. Of codecs that are
not here, the defaults are tried; what is no codec is passed over."""
LEFT_OUT = {"none", "threshold", "rows", "qsgd_elias"}
"""What must know how large gradients are, or which of their rows are zero; and another name for what is there."""


def sweep() -> dict[str, list[dict[str, Any]]]:
    """What ``compare`` takes for each family, from the fewest to the most bits."""
    families = {label: [{"name": label} | each for each in settings] for label, settings in SWEEP.items()}
    tried = {settings["name"] for family in families.values() for settings in family} | LEFT_OUT
    families |= {name: [{"name": name}] for name in CODECS.complete() if name not in tried}
    return {label: family for label, family in families.items() if family[0]["name"] in CODECS}


def transposed(step: Step) -> Step:
    """First axis last: what stood side by side belongs to one input, not to one output."""
    return {name: gradient.movedim(0, -1) if gradient.dim() > 1 else gradient for name, gradient in step.items()}


def permuted(step: Step) -> Step:
    """The elements of each parameter in an order drawn once: neighbours have nothing in common."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: gradient.reshape(-1)[torch.randperm(gradient.numel(), generator=generator)].view(gradient.shape)
        for name, gradient in step.items()
    }


ORDERS: dict[str, Callable[[Step], Step]] = {"as is": lambda step: step, "transposed": transposed, "permuted": permuted}
