"""LoCo over ranks that are numbers in a loop, from its rules, with the 8-bit format of our own."""

import numpy as np

from tests.reference.codecs import onebit


def rounded(values):
    """To the nearest of codes from -127 to 127 times a power of two, for each 64 numbers."""
    out = np.zeros_like(values)
    for start in range(0, len(values), 64):
        block = values[start : start + 64]
        largest = float(np.abs(block).max())
        if largest < 2.0**-120:
            continue
        step = 2.0 ** (np.floor(np.log2(largest)) - 6)
        out[start : start + 64] = np.clip(np.rint(block / step), -127, 127) * step
    return out


def simulate_ecq(gradients, alpha, beta, block=1024):
    """Average by ECQ-SGD's own rules (arXiv 1806.08054, algorithm 1), in one bit, with errors in float64.

    ``q = Q(g + alpha h)``, then ``h <- beta h + (g - q)``.

    Returns:
        the means, step by step, and what is fed back at the end, ``alpha h``, by rank.
    """
    size, numel = len(gradients[0]), len(gradients[0][0])
    kept, means = [np.zeros(numel) for _ in range(size)], []
    for ranks in gradients:
        mean = np.zeros(numel)
        for rank, gradient in enumerate(ranks):
            sent, _ = onebit((gradient + alpha * kept[rank]).astype(np.float32), block)
            kept[rank] = beta * kept[rank] + (gradient.astype(np.float64) - sent)
            mean += sent / size
        means.append(mean)
    return means, [alpha * each for each in kept]


def simulate_loco(gradients, lengths, beta, reset_every, decay=1.0, block=1024):
    """Average ``gradients[step][rank]``, float32 vectors of parameters of these lengths, in one bit.

    Returns:
        the means, step by step, and the errors of the ranks.
    """
    size, numel = len(gradients[0]), len(gradients[0][0])
    errors = [np.zeros(numel, np.float32) for _ in range(size)]
    means = []
    for step, ranks in enumerate(gradients):
        if step % reset_every == 0:
            errors = [np.zeros(numel, np.float32) for _ in range(size)]
        mean = np.zeros(numel, np.float32)
        for rank, gradient in enumerate(ranks):
            h = gradient + errors[rank]
            sent, left = onebit(h, block)
            new = np.float32(decay - beta) * errors[rank] + np.float32(beta) * left
            errors[rank] = np.concatenate([rounded(part) for part in np.split(new, np.cumsum(lengths)[:-1])])
            mean += sent / np.float32(size)
        means.append(mean)
    return means, errors
