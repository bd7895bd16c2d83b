"""DoubleSqueeze (Tang, Lian, Yu, Zhang, Liu, ICML 2019, arXiv:1905.05957), over ranks that are numbers in a loop."""

import numpy as np


def double_squeeze(gradients, stripes, compress, owner_encodes):
    """Average ``gradients[step][rank]`` in stripes, of each of which one rank is the server.

    ``v_i = g_i + d_i``, send ``Q(v_i)``, keep ``d_i = v_i - Q(v_i)``; the server takes ``v = sum Q(v_i) + d``, sends
    ``Q(v)``, and keeps ``d = v - Q(v)``. The paper's step is the mean, which is ``Q(v)`` over the number of ranks.

    Args:
        gradients: float32 vectors.
        stripes: where each server's stripe begins and ends.
        compress: returns what is sent of a vector, and what is not.
        owner_encodes: as in the paper, the server's own vector is compressed, too.

    Returns:
        the means, step by step; the workers' errors; the servers'.
    """
    size, numel = len(gradients[0]), len(gradients[0][0])
    workers, servers, means = np.zeros((size, numel), np.float32), np.zeros(numel, np.float32), []
    for ranks in gradients:
        mean = np.empty(numel, np.float32)
        for owner, (start, stop) in enumerate(stripes):
            total = servers[start:stop].copy()
            for rank in range(size):
                sent = ranks[rank][start:stop] + workers[rank][start:stop]
                if rank != owner or owner_encodes:
                    sent, workers[rank][start:stop] = compress(sent)
                total = total + sent
            sent, servers[start:stop] = compress(total)
            mean[start:stop] = sent / np.float32(size)
        means.append(mean)
    return means, workers, servers
