"""EF21 with momentum over ranks that are numbers in a loop, from the paper's rules, in float32."""

import numpy as np


def simulate_ef21(gradients, eta, compress):
    """What the optimizer is given, step by step, and the estimates of the ranks.

    Args:
        gradients: ``gradients[step][rank]``, float32 vectors.
        eta: share of a gradient in the momentum.
        compress: takes a vector, and returns what is sent of it.
    """
    size = len(gradients[0])
    momentum = [each.copy() for each in gradients[0]]
    estimate = [np.zeros_like(each) for each in momentum]
    given = []
    for step, ranks in enumerate(gradients):
        for rank, gradient in enumerate(ranks):
            if step:
                momentum[rank] = np.float32(1 - eta) * momentum[rank] + np.float32(eta) * gradient
            estimate[rank] = estimate[rank] + compress(momentum[rank] - estimate[rank])
        given.append(sum(estimate) / np.float32(size))
    return given, estimate
