"""``two_shot`` with equal codes both ways and a residual is DoubleSqueeze, but for the owner's own part."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from lightning_compress.codecs import EFSign, OneBit
from tests.corrections.helpers import COMPRESSED, gradient, named, walk
from tests.reference.codecs import efsign, onebit
from tests.reference.double_squeeze import double_squeeze

STEPS, BLOCK = 12, 1024
METHODS = {
    "onebit": (OneBit(BLOCK), partial(onebit, block=BLOCK)),
    "efsign": (EFSign(BLOCK), partial(efsign, block=BLOCK)),
}


def flat(vector):
    return torch.cat([named(vector)[name] for name in COMPRESSED]).numpy()


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("method", METHODS)
def test_it_is_double_squeeze(method, size):
    codec, compress = METHODS[method]
    exchange = {"name": "two_shot", "sums": "same"}
    out, walkers = walk(size, codec, STEPS, exchange=exchange, error_feedback=True)
    gradients = [[flat(gradient(rank, step)) for rank in range(size)] for step in range(STEPS)]
    blocks = -(-len(gradients[0][0]) // BLOCK)
    ends = [min(blocks * rank // size * BLOCK, len(gradients[0][0])) for rank in range(size + 1)]
    means, workers, servers = double_squeeze(gradients, [*pairwise(ends)], compress, owner_encodes=False)
    for mine, theirs in zip(out, means, strict=True):
        assert np.quantile(np.abs(flat(mine) - theirs), 0.999) <= 1e-5
    # one residual holds both errors: that of its own messages, and in the own shard that of the sums
    for rank, (walker, (start, stop)) in enumerate(zip(walkers, pairwise(ends), strict=True)):
        both = workers[rank].copy()
        both[start:stop] += servers[start:stop]
        mine = torch.cat([walker.state("residual")[name] for name in COMPRESSED]).numpy()
        assert np.quantile(np.abs(mine - both), 0.999) <= 1e-4
        assert np.abs(servers[start:stop]).max() > 0.1
    theirs, *_ = double_squeeze(gradients, [*pairwise(ends)], compress, owner_encodes=True)
    assert np.abs(flat(out[0]) - theirs[0]).max() > 0.1  # the paper's server loses a part of its own vector, too
