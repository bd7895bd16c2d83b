"""Why nothing of ZipML (Zhang et al., ICML 2017, arXiv:1611.05402) travels here: it quantises samples, not gradients.

The gradient of least squares, ``a (a x - b)``, has the sample twice. One code for both has the square of the noise in
its mean; two independent codes have not.
"""

import torch

from lightning_compress.codecs import QSGD
from lightning_compress.core.layout import Layout

DRAWS, NUMEL = 4000, 64


def test_two_codes_of_a_sample_give_an_unbiased_gradient_and_one_does_not():
    generator = torch.Generator().manual_seed(0)
    sample, model, label = torch.randn(NUMEL, generator=generator), torch.randn(NUMEL, generator=generator), 0.5
    plan = QSGD(2).plan(Layout.of([("sample", (NUMEL,))]), torch.device("cpu"))

    def code(key):
        message, out = torch.empty(plan.message_size, dtype=torch.uint8), torch.empty(NUMEL)
        plan.encode(sample.clone(), message, key)
        plan.decode(message[None], out, 1.0, False)
        return out

    true = sample * (sample @ model - label)
    codes = torch.stack([code(key) for key in range(2 * DRAWS)])
    one = codes * (codes @ model - label)[:, None]
    two = codes[::2] * (codes[1::2] @ model - label)[:, None]
    for each, biased in ((one, True), (two, False)):
        off = (each.mean(dim=0) - true) / (each.std(dim=0) / len(each) ** 0.5)  # in standard errors
        assert (off.square().mean() > 4) == biased
