"""Sparse averages by the largest moment, over ranks that are numbers in a loop; what chance draws is given."""

import numpy as np


def simulate_adam_mask(gradients, count, beta, drawn, rest):
    """Average ``gradients[step][rank]``.

    Args:
        gradients: float32 vectors.
        count: elements a step.
        beta: of the moment.
        drawn: ``drawn(step)``: elements that are chosen anyway.
        rest: "residual" or "moment".

    Returns:
        the means, and the residuals of the ranks.
    """
    numel = len(gradients[0][0])
    moment = np.zeros(numel, np.float32)
    residual = [np.zeros(numel, np.float32) for _ in gradients[0]]
    means = []
    for step, ranks in enumerate(gradients):
        chosen = np.ones(numel, bool)
        if step:
            order = np.argsort(-np.abs(moment), kind="stable")
            taken = list(drawn(step))
            taken += [each for each in order if each not in set(taken)][: count - len(taken)]
            chosen[:] = False
            chosen[taken] = True
        mean = moment.copy() if rest == "moment" else np.zeros(numel, np.float32)
        vectors = [own + left for own, left in zip(ranks, residual, strict=True)]
        mean[chosen] = (sum(vectors) / np.float32(len(ranks)))[chosen]
        if rest == "residual":
            residual = [np.where(chosen, np.float32(0), each) for each in vectors]
        moment = np.float32(beta) * moment + np.float32(1 - beta) * mean
        means.append(mean)
    return means, residual
