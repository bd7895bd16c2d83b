"""Law 8: what is sent adds up to the vector: with what stayed behind, or on average over keys."""

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
"""Over which an unbiased method is averaged."""
ADVICE = "declare contractive = True, or round at random"
PARTS = 8
"""Of a vector, by place and by size."""
BIAS = 0.03
"""Of what is sent, that unbiased methods may have in no part: our own with most is terngrad, whose clipping takes 2.6 %
off the largest eighth."""
DEVIATIONS = 5.0
"""A bias that is no chance is more than this many standard errors."""
LEFT = 0.6
"""Share of a part of a constant gradient, at most, that may still be missing from the mean of what was sent."""
LARGER = 0.5
"""Elements of it above this part of the median are sent at least once."""
LOOKS = (80, 320, 1280, 5120, 20480)
"""Steps; what did not come nearer to that from one to the next, four times as many, never will: methods that send one
random element of each parameter are done by the fourth."""
SCALES = (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5)
"""Of that gradient: methods with steps or thresholds of a fixed size are made for one of them."""

STEPS = 40
"""In which a method that conserves nothing is looked at."""

Send = Callable[[Tensor, int], Tensor]
"""Takes a vector, in which it leaves what it does not send, and a key; returns what is sent, or the ranks' mean."""
T = TypeVar("T")
Measure = Callable[[Send, Tensor, Tensor], T]
"""Takes a new ``Send``, what is given to it, and what should be sent of that: the mean over the ranks."""
Measured = Callable[[Layout, Measure[Any]], Any]
"""Measures on vectors of a layout."""


def check_sent(method: Method, where: str, measured: Measured) -> None:
    """Hold a method to what it declares: all arrives with what stayed added, or on average, or nothing is known."""
    if not method.conserves:
        least, factor = measured(SMALL, likeness)
        figures = f"what is sent of a constant gradient has a cosine to it of {least:.2f} in an eighth of the elements"
        law(8, least > 0.1, f"{where}: {figures}")
        figures = f"what is sent is the mean {factor:.3g} times; divide by that, or leave the rest in the vector"
        law(8, abs(factor - 1) <= BIAS, f"{where}: {figures}")
    elif method.contractive:
        found = _least_missing(measured, SCALES, feedback=True)
        figures = f"of a constant gradient, sent again and again with what stayed added, {found}"
        law(8, found.little, f"{where} is declared contractive, but {figures}: some elements are hardly ever sent")
    else:
        bias = measured(LARGE, largest_bias)
        figures = f"is off by {bias.share:+.1%} in {bias.part}, {bias.deviations:.0f} standard errors"
        fair = abs(bias.share) <= BIAS
        law(8, fair, f"{where} is not declared contractive, but the mean over {KEYS} keys {figures}; {ADVICE}")
        found = _least_missing(measured, SCALES[:1], feedback=False)  # a bias of a few elements is lost among others
        figures = f"of a constant gradient, sent again and again, {found}: some elements are hardly ever sent"
        law(8, found.little, f"{where} is not declared contractive, but {figures}")


class Bias(NamedTuple):
    """By what share a part is sent too large, in how many standard errors, and which part it is."""

    share: float
    deviations: float
    part: str


def largest_bias(send: Send, given: Tensor, target: Tensor) -> Bias:
    """The largest bias, among those that are no chance, of the vector, an eighth by place, or an eighth by size.

    That is the slope by which the error of what is sent depends on what should be.

    Args:
        send: without what stayed behind before.
        given: float32 ``[n]``.
        target: what should be sent on average, ``[n]``.
    """
    parts = {"all elements": torch.arange(len(target))}
    for name, order in (("by place", torch.arange(len(target))), ("by size", target.abs().argsort())):
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
    """What of a constant gradient is missing from the mean of what was sent.

    Attributes:
        never: how many of its larger elements were not sent at all.
        share: of the part, by place, of which most is missing.
    """

    never: int
    share: float

    @property
    def little(self) -> bool:
        """Whether no more is missing than may be."""
        return not self.never and self.share <= LEFT

    def __str__(self) -> str:
        """As the law tells it."""
        return f"{self.never} of the larger elements do not arrive at all, and {self.share:.0%} of an eighth is missing"


def missing(send: Send, given: Tensor, target: Tensor, scale: float, feedback: bool) -> Missing:
    """Of a constant gradient that is sent again and again: what does not arrive.

    Args:
        send: see ``Send``.
        given: float32 ``[n]``.
        target: the mean of the ranks' gradients, ``[n]``.
        scale: of both.
        feedback: what stayed behind is added to the next one.
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
            found = Missing(int(unsent.sum()), float((_norms(total / step - target) / norms).max()))
            if found.little:
                break
            if step in LOOKS:
                if found.never >= earlier.never and not found.share < 0.98 * earlier.share:
                    break
                earlier = found
    return found


def _least_missing(measured: Measured, scales: Sequence[float], feedback: bool) -> Missing:
    """At the first scale at which little is missing, or else at the one at which least is."""
    tried: list[Missing] = []
    for scale in scales:
        tried.append(measured(SMALL, partial(missing, scale=scale, feedback=feedback)))
        if tried[-1].little:
            break
    return min(tried)


def likeness(send: Send, given: Tensor, target: Tensor) -> tuple[float, float]:
    """How what is sent of a constant gradient, over the last half of the steps, points where it should.

    Returns:
        the least cosine of a part by place, and the factor by which all of it is too large, where it is the gradient
        but for a factor; 1.0 where it is another thing.
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
