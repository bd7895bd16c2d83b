"""TernGrad, RandomK and signSGD as their papers have them, slowly."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import torch

from lightning_compress.core.random import mix
from tests.reference.codecs import Array, random16

Doubles = npt.NDArray[np.float64]


def terngrad_limits(vector: Array, clip: float | None, ranges: list[tuple[int, int]]) -> list[float]:
    """Where each parameter is clipped, or its largest magnitude if that is less."""
    limits = []
    for start, stop in ranges:
        part = [float(value) for value in vector[start:stop]]
        mean = math.fsum(part) / len(part)
        sigma = math.sqrt(math.fsum((value - mean) ** 2 for value in part) / len(part))
        largest = max(abs(value) for value in part)
        clips = clip is not None and len(part) >= 64 and min(part) < max(part)
        limits.append(min(largest, clip * sigma) if clips and clip else largest)
    return limits


def terngrad_chances(
    vector: Array,
    limits: list[float],
    scales: list[float],
    ranges: list[tuple[int, int]],
    key: int,
    share: float = 0.0,
) -> Doubles:
    """Numbers whose floor is -1, 0 or 1: the clipped gradient over its scale, plus a random number below 1."""
    chances = (np.array(random16(key, len(vector), share), np.float64) + 32768.5) / 65536
    for (start, stop), limit, scale in zip(ranges, limits, scales, strict=True):
        clipped = np.clip(vector[start:stop].astype(np.float64), -limit, limit)
        chances[start:stop] += clipped / scale if scale >= 2.0**-111 else 0.0
    return chances


def parse_terngrad(message: torch.Tensor, parameters: int, numel: int, packing: str) -> tuple[Array, list[int]]:
    """Read a TernGrad message as its docstring describes it: scales, and numbers from -1 to 1."""
    raw = bytes(message.tolist())
    scales = np.frombuffer(raw[: 4 * parameters], np.float32)
    body = raw[-(-4 * parameters // 16) * 16 :]
    if packing == "2bit":
        return scales, [(body[i // 4] >> 2 * (i % 4) & 3) - 1 for i in range(numel)]
    numbers: list[int] = []
    while len(numbers) < numel:
        count = min(163_840, numel - len(numbers))
        width = -(-count // 5)
        numbers += [body[i % width] // 3 ** (i // width) % 3 - 1 for i in range(count)]
        body = body[width:]
    assert not body
    return scales, numbers


def randomk_places(ranges: list[tuple[int, int]], density: float, key: int) -> list[list[int]]:
    """One element of each of k stretches of a parameter, all moved on by the same number, around the end."""
    counts = [max(1, math.ceil(density * (stop - start))) for start, stop in ranges]
    lanes = [number % 65536 for number in random16(key, 4 * sum(counts))]
    words = iter([sum(lanes[4 * i + lane] << 16 * lane for lane in range(4)) for i in range(sum(counts))])
    places = []
    for number, ((start, stop), k) in enumerate(zip(ranges, counts, strict=True)):
        numel, shift = stop - start, mix(key, number) % (stop - start)
        edges = [i * numel // k for i in range(k + 1)]
        drawn = [low + ((next(words) >> 33) * (high - low) >> 31) for low, high in itertools.pairwise(edges)]
        places.append([start + (place + shift) % numel for place in drawn])
    return places


def signsgd(gradients: list[list[Array]], momentum: float, tally: bool, keys: list[int]) -> list[list[float]]:
    """The outcome of every step, by counting in Python's integers.

    Args:
        gradients: of every rank in every step.
        momentum: beta of ``m = beta m + (1 - beta) g``, in float32 as the state is; 0: the gradient itself.
        tally: the mean of the signs instead of their majority.
        keys: the shared key of every step; ties are settled by the owner's random bits.
    """
    ranks, numel = len(gradients), len(gradients[0][0])
    share = math.ceil(math.ceil(numel / 8) / ranks)  # bytes of packed signs that a rank owns
    moments = [np.zeros(numel, np.float32) for _ in range(ranks)]
    outcomes = []
    for step, key in enumerate(keys):
        for rank in range(ranks):
            gradient = gradients[rank][step]
            decayed = moments[rank] * np.float32(momentum) + np.float32(1 - momentum) * gradient
            moments[rank] = decayed if momentum else gradient
        sums = [sum(1 if moment[i] >= 0 else -1 for moment in moments) for i in range(numel)]
        if tally:
            outcomes.append([float(total) / ranks for total in sums])
            continue
        lanes = [random16(mix(key, owner), share // 2 + 1) for owner in range(ranks)]
        outcome = []
        for i, total in enumerate(sums):
            owner, byte = divmod(i // 8, share)
            tie = lanes[owner][byte // 2] >> 8 * (byte % 2) + i % 8 & 1
            outcome.append(1.0 if total > 0 or (total == 0 and tie) else -1.0)
        outcomes.append(outcome)
    return outcomes
