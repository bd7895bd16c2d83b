"""Law 8: what is sent equals the vector, either together with the residual or on average over keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_compress.codecs import Method
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix
from lightning_compress.testing.laws import law
from lightning_compress.testing.vectors import LARGE, SMALL

KEYS = 32
"""The number of keys over which an unbiased method is averaged."""
ADVICE = "declare contractive = True, or round at random"
PARTS = 8
"""The number of equal parts of a vector, by position and by magnitude."""
BIAS = 0.03
"""The largest relative bias of an unbiased method in any part.

The package's own largest is terngrad's: clipping takes 2.6 % off the largest eighth.
"""
DEVIATIONS = 5.0
"""A bias counts only above this many standard errors."""
LEFT = 0.6
"""The maximum share of a part of a constant gradient that may be missing from the mean of what was sent."""
LARGER = 0.5
"""Elements above this share of the median must be sent at least once."""
LOOKS = (80, 320, 1280, 5120, 20480)
"""Steps at which progress is compared, each four times as many as before.

A method without progress from one to the next will never arrive. Methods that send one random element per parameter
arrive by the fourth.
"""
SCALES = (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5)
"""Scales of that gradient. Methods with fixed step sizes or thresholds suit only one of them."""

STEPS = 40
"""Steps for methods that do not conserve the gradient."""

Send = Callable[[Tensor, int], Tensor]
"""Takes a vector and a key, leaves in the vector what is not sent, and returns what is sent, or the ranks' mean."""
T = TypeVar("T")
Measure = Callable[[Send, Tensor, Tensor], T]
"""Takes a new ``Send``, the vector given to it, and the expected result: the mean over the ranks."""
Measured = Callable[[Layout, Measure[Any]], Any]
"""Runs a ``Measure`` on vectors of a layout."""


def check_sent(method: Method, where: str, measured: Measured) -> None:
    """Check what a method declares about its error.

    Contractive methods must send everything with feedback, unbiased ones on average. For methods that conserve nothing,
    only the direction and the scale are checked.

    Args:
        method: the codec or reducer.
        where: the place, for messages.
        measured: runs a measurement on vectors of a layout.
    """
    if not method.conserves:
        least, factor = measured(SMALL, direction_and_scale)
        figures = f"what is sent of a constant gradient has a cosine to it of {least:.2f} in an eighth of the elements"
        law(8, least > 0.1, f"{where}: {figures}")
        figures = f"what is sent is the mean {factor:.3g} times; divide by that, or leave the rest in the vector"
        law(8, abs(factor - 1) <= BIAS, f"{where}: {figures}")
    elif method.contractive:
        lost = _least_missing(measured, SCALES, feedback=True)
        figures = f"of a constant gradient, sent again and again with what stayed added, {lost}"
        law(8, lost.little, f"{where} is declared contractive, but {figures}: some elements are hardly ever sent")
    else:
        bias = measured(LARGE, largest_bias)
        figures = f"is off by {bias.share:+.1%} in {bias.part}, {bias.deviations:.0f} standard errors"
        fair = abs(bias.share) <= BIAS
        law(8, fair, f"{where} is not declared contractive, but the mean over {KEYS} keys {figures}; {ADVICE}")
        lost = _least_missing(measured, SCALES[:1], feedback=False)  # a bias of few elements disappears among others
        figures = f"of a constant gradient, sent again and again, {lost}: some elements are hardly ever sent"
        law(8, lost.little, f"{where} is not declared contractive, but {figures}")


class Bias(NamedTuple):
    """The relative bias of a part, its standard errors, and the name of the part."""

    share: float
    deviations: float
    part: str


def largest_bias(send: Send, given: Tensor, target: Tensor) -> Bias:
    """Return the largest significant bias of the whole vector, an eighth by position, or an eighth by magnitude.

    The bias is the slope of the error of what is sent over what should be sent.

    Args:
        send: called without residuals of earlier calls.
        given: float32 ``[n]``.
        target: the expected mean of what is sent, ``[n]``.
    """
    places = torch.arange(len(target), dtype=torch.int64)
    parts = {"all elements": places}
    for name, order in (("by place", places), ("by size", target.abs().argsort())):
        parts |= {f"eighth {number + 1} {name}": part for number, part in enumerate(order.chunk(PARTS))}
    right = target.double()
    slopes = torch.zeros(KEYS, len(parts), dtype=torch.float64)
    for key in range(KEYS):
        error = (send(given.clone(), mix(key, 7)).double() - right) * right
        slopes[key] = torch.stack([error[part].sum() / right[part].square().sum() for part in parts.values()])
    mean, deviation = slopes.mean(0), slopes.std(0) / math.sqrt(KEYS)
    sure = mean.abs() > DEVIATIONS * deviation
    worst = int((mean.abs() * sure).argmax())
    return Bias(float(mean[worst] * sure[worst]), float(mean[worst].abs() / deviation[worst]), list(parts)[worst])


class Missing(NamedTuple):
    """What is missing of a constant gradient in the mean of what was sent.

    Attributes:
        never: how many of its larger elements were never sent.
        share: the missing share of the worst part, by position.
    """

    never: int
    share: float

    @property
    def little(self) -> bool:
        """Whether no more is missing than allowed."""
        return not self.never and self.share <= LEFT

    def __str__(self) -> str:
        """Return the figures for a law's message."""
        return f"{self.never} of the larger elements do not arrive at all, and {self.share:.0%} of an eighth is missing"


def missing(send: Send, given: Tensor, target: Tensor, scale: float, feedback: bool) -> Missing:
    """Send a constant gradient again and again, and return what does not arrive.

    Args:
        send: see ``Send``.
        given: float32 ``[n]``.
        target: the mean of the ranks' gradients, ``[n]``.
        scale: a factor for both.
        feedback: add the residual to the next gradient.
    """
    given, target = scale * given, scale * target
    vector, total, norms = torch.zeros_like(given), torch.zeros(len(given), dtype=torch.float64), _norms(target)
    unsent = target.abs() > LARGER * target.abs().median()
    earlier = Missing(len(given), math.inf)
    for step in range(1, LOOKS[-1] + 1):
        vector = vector.add_(given) if feedback else given.clone()
        sent = send(vector, mix(step, 7))
        total += sent
        unsent &= sent == 0
        if step % 20 == 0:
            now = Missing(int(unsent.sum()), float((_norms(total / step - target) / norms).max()))
            if now.little:
                break
            if step in LOOKS:
                if now.never >= earlier.never and not now.share < 0.98 * earlier.share:
                    break
                earlier = now
    return now


def _least_missing(measured: Measured, scales: Sequence[float], feedback: bool) -> Missing:
    """Return the result at the first scale at which little is missing, or else the best result."""
    tried: list[Missing] = []
    for scale in scales:
        tried.append(measured(SMALL, partial(missing, scale=scale, feedback=feedback)))
        if tried[-1].little:
            break
    return min(tried)


def direction_and_scale(send: Send, given: Tensor, target: Tensor) -> tuple[float, float]:
    """Return how well a sent constant gradient keeps its direction and scale, over the last half of the steps.

    Returns:
        The lowest cosine of a part by position, and the factor by which the result exceeds the gradient. The factor is
        1.0 if the result is not a multiple of the gradient.
    """
    total = torch.zeros(len(given), dtype=torch.float64)
    for step in range(1, STEPS + 1):
        sent = send(given.clone(), mix(step, 7))
        if step > STEPS // 2:
            total += sent
    mean, right = total / (STEPS - STEPS // 2), target.double()
    parts = zip(mean.chunk(PARTS), right.chunk(PARTS), strict=True)
    least = min(float(part @ wanted / (part.norm() * wanted.norm()).clamp_min(1e-30)) for part, wanted in parts)
    factor = float(mean @ right / right.square().sum())
    same = float((mean - factor * right).norm()) <= 0.1 * float(mean.norm())
    return least, factor if same else 1.0


def _norms(vector: Tensor) -> Tensor:
    return torch.stack([part.double().norm() for part in vector.chunk(PARTS)])
