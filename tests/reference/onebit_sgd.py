"""1-bit SGD's double quantisation with the paper's two residuals, over ranks that are numbers in a loop."""

import numpy as np

from tests.reference.codecs import onebit


def onebit_sgd(gradients, stripes, block, adagrad=None):
    """Average ``gradients[step][rank]`` in stripes that rank 0, 1, ... own.

    Args:
        gradients: float32 vectors.
        stripes: where each owner's stripe begins and ends.
        block: elements that share two means, from each stripe's beginning.
        adagrad: what is added to the root of the history, or None.

    Returns:
        what the optimizer gets in each step; every rank's residual; the owners' residual; the sum of what the owners
        summed up, and of what they made of it, over all steps; the last two in float64.
    """
    size, numel = len(gradients[0]), len(gradients[0][0])
    own = [np.zeros(numel, np.float32) for _ in range(size)]
    owner = np.zeros(numel, np.float32)
    history = np.zeros(numel, np.float32)
    means, summed, made = [], np.zeros(numel), np.zeros(numel)
    for ranks in gradients:
        mean = np.empty(numel, np.float32)
        for rank, (start, stop) in enumerate(stripes):
            total = ranks[rank][start:stop].copy()  # the owner's own enters as it is
            for other in range(size):
                if other != rank:
                    sent, own[other][start:stop] = onebit(ranks[other][start:stop] + own[other][start:stop], block)
                    total += sent
            summed[start:stop] += total
            if adagrad is not None:
                total /= size
                history[start:stop] += total**2
                total /= np.sqrt(history[start:stop]) + np.float32(adagrad)
            made[start:stop] += total
            sent, owner[start:stop] = onebit(total + owner[start:stop], block)
            mean[start:stop] = sent if adagrad is not None else sent / size
        means.append(mean)
    return means, own, owner, summed, made
