"""Exchanges of tensors on a GPU give what they give on a CPU, over NCCL and over Gloo."""

import pytest
import torch

from lightning_compress.codecs import BF16, QSGD, Codec, Dense, OneBit, Rotated, TopK
from lightning_compress.collectives import TorchCollective, run_threads
from lightning_compress.contrib.codecs.randomk import RandomK
from lightning_compress.exchanges import AllGather, AllReduce, Hierarchical, SplitGather, TwoShot
from tests.contrib.test_sparse_sums import SPARSE
from tests.exchanges.test_exchanges import check, mean

pytestmark = pytest.mark.gpu
BACKENDS = ["nccl", "gloo"]
QUANTISING = [(exchange, codec) for exchange in (AllGather(), TwoShot()) for codec in (OneBit(), QSGD(), Rotated())]
SELECTING = [(exchange, TopK(0.02)) for exchange in (AllGather(), SplitGather(), *SPARSE.values())]
OTHERS = [
    (AllReduce(), Dense()),
    (AllReduce(), BF16()),
    (Hierarchical(node_size=1), OneBit()),
    (AllGather(), RandomK()),
]


def on_gpu(exchange, codec, flag=0.0):
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    before, after, out, flags, plan = mean(TorchCollective(), exchange, codec, flag=flag, device=device)
    return before.cpu(), after.cpu(), out.cpu(), flags.cpu(), plan.description


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("exchange", "codec"), QUANTISING + SELECTING + OTHERS, ids=repr)
def test_as_on_a_cpu(ranks, backend, exchange, codec: Codec):
    found = ranks(backend).run(on_gpu, exchange, codec)
    check(found, 1e-2 if isinstance(codec, BF16) else 1e-6)
    expected = run_threads(2, lambda collective: mean(collective, exchange, codec))
    for (_, after, out, _, _), (_, kept, wanted, _, _) in zip(found, expected, strict=True):
        assert out.equal(wanted)
        assert after.equal(kept)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flag_reaches_all(ranks, backend):
    found = ranks(backend).run(on_gpu, TwoShot(), OneBit(), float("nan"))
    assert all(flags.isnan() for _, _, _, flags, _ in found)
