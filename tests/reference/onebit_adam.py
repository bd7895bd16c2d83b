"""1-bit Adam over ranks that are numbers in a loop, from the paper's rules, in float64."""

import numpy as np

from tests.reference.codecs import efsign


def simulate_onebit_adam(gradients, freeze, compressed, block=1024, betas=(0.9, 0.999), eps=1e-8):
    """What the optimizer steps along: ``gradients[step][rank]`` are vectors, of which the first ``compressed``
    elements travel as signs after ``freeze`` steps.

    Returns:
        the directions, step by step, and the residuals of the ranks.
    """
    size = len(gradients[0])
    m = np.zeros(len(gradients[0][0]))
    v = np.zeros_like(m)
    residual = [np.zeros(compressed) for _ in range(size)]
    directions = []
    for t, ranks in enumerate(gradients, 1):
        if t <= freeze:
            mean = sum(ranks) / size
            m = betas[0] * m + (1 - betas[0]) * mean
            v = betas[1] * v + (1 - betas[1]) * mean**2
        else:
            local = [betas[0] * m + (1 - betas[0]) * gradient for gradient in ranks]
            m = sum(local) / size
            m[:compressed] = 0
            for rank, own in enumerate(local):
                vector = (own[:compressed] + residual[rank]).astype(np.float32)
                sent, residual[rank] = efsign(vector, block)
                m[:compressed] += sent / size
        settled = v / (1 - betas[1] ** min(t, freeze))
        direction = m / (1 - betas[0] ** t) / (np.sqrt(settled) + eps)
        directions.append(np.where(v == 0, 0, direction))
    return directions, residual
