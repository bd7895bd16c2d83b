"""What was written once can be read for ever."""

import pytest
import torch

from lightning_compress.codecs import Rotated
from lightning_compress.codecs.spectral.spectrum import Spectral
from lightning_compress.contrib.codecs.atomo import ATOMO
from tests.codecs.helpers import CODECS, CPU, layout
from tests.golden.messages import KEY, NUMEL, codec_of, saved, unpack


@pytest.mark.parametrize("entry", saved(), ids=lambda entry: str(entry["compressor"]))
def test_an_old_message_is_read_as_it_was(entry):
    message, expected = unpack(entry["message"], torch.uint8), unpack(entry["decoded"], torch.float32)
    codec = codec_of(entry)
    plan = codec.plan(layout(NUMEL), CPU)
    plan.share(KEY)
    decoded = torch.full((NUMEL,), torch.nan)
    plan.decode(message[None], decoded, 1.0, False)
    if isinstance(codec, Spectral | Rotated | ATOMO):  # their sums may be in another order
        assert (decoded - expected).abs().max() <= 1e-6 * expected.abs().max()
    else:
        assert torch.equal(decoded, expected)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_every_method_has_one(codec):
    assert codec in [codec_of(entry) for entry in saved()], "run python -m tests.golden"
