"""What is said of an error inside a collective."""

import pytest
import torch.distributed as dist

from lightning_compress.failures import ExchangeError, cause, explained

PEER = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:49320."
LATE = "[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError(PEER), "a rank died"),
        (RuntimeError(LATE), "did not answer within 8 s"),
        (RuntimeError("Application timeout caused pair closure"), "did not answer within the time limit"),
        (RuntimeError("gloo: op.preamble.length <= op.nbytes. 8 vs 4"), "did not do the same"),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), "a rank died"),
        (dist.DistBackendError("Watchdog caught collective operation timeout: Timeout(ms)=600000"), "within 600 s"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "own error"),
        (KeyError("connection closed by peer"), "own error"),
    ],
)
def test_the_cause_in_plain_words(error, words):
    with (
        pytest.raises(ExchangeError, match=r"^rank 2, step 7, averaging a\.weight: ") as raised,
        explained("step 7, averaging a.weight", 2),
    ):
        raise error
    assert words in str(raised.value)
    assert str(error) in str(raised.value)
    assert raised.value.__cause__ is error
    assert words in cause(error)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), ExchangeError("said already")])
def test_what_passes_through(error):
    with pytest.raises(type(error)) as raised, explained("step 7", 2):
        raise error
    assert raised.value is error
