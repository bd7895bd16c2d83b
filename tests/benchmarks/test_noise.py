"""The benchmark of noise says what exchanges leave."""

import pytest

from benchmarks import noise
from lightning_compress.codecs import FFT, QSGD
from lightning_compress.exchanges import AllGather, TwoShot


def test_figures():
    gathered, refined, same = (noise.variance(QSGD(), way, 4) for way in (AllGather(), TwoShot(), TwoShot(sums="same")))
    assert float(gathered.split()[0]) < float(refined.split()[0]) < float(same.split()[0])
    error, owed, bits = noise.errors(FFT(theta=0.5, block=64), AllGather(), 2).replace(",", "").split()
    assert 0 < float(error) < float(owed) < 1
    assert float(bits.strip("()")) == pytest.approx(7.6, abs=1)


def test_gradients_have_a_common_half():
    first, second = (noise.gradient(rank, 3, 1 << 14) for rank in range(2))
    assert float((first @ second) / (first.norm() * second.norm())) == pytest.approx(0.5, abs=0.1)
    assert float(first.square().mean()) == pytest.approx(1, abs=0.1)
