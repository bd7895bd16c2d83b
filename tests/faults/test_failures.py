"""What is said of an error inside a collective."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy

from lightning_compress import CompressedDDPStrategy, GossipStrategy, LocalSGDStrategy
from lightning_compress.core.errors import ExchangeError, cause, explained
from lightning_compress.strategies.resume import save_compression
from tests.helpers.training import fit

PEER = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:49320."
LATE = "[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError(PEER), "a rank died"),
        (RuntimeError(PEER), "had fewer batches than this rank (give all ranks the same number)"),
        (RuntimeError(LATE), "did not answer within 8 s"),
        (RuntimeError(LATE), "has fewer batches than this rank (give all ranks the same number)"),
        (RuntimeError("Application timeout caused pair closure"), "did not answer within the time limit"),
        (
            RuntimeError("gloo: op.preamble.length <= op.nbytes. 8 vs 4"),
            "issued different collectives, as with different numbers of batches",
        ),
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


@pytest.mark.parametrize("kind", [CompressedDDPStrategy, LocalSGDStrategy, GossipStrategy])
@pytest.mark.parametrize("call", ["broadcast", "reduce", "all_gather", "reduce_boolean_decision"])
def test_what_lightning_waits_for_is_explained_too(monkeypatch, kind, call):
    """ModelCheckpoint asks whether a file exists, loggers for their version: outside of any exchange."""

    def late(*_, **__):
        raise error

    for name in ("broadcast", "reduce", "all_gather"):
        monkeypatch.setattr(DDPStrategy, name, late)
    strategy = kind(accelerator=CPUAccelerator(), parallel_devices=[torch.device("cpu")])
    for error in (RuntimeError(LATE), KeyError("what a user's own object says")):
        with pytest.raises(ExchangeError if isinstance(error, RuntimeError) else KeyError) as raised:
            getattr(strategy, call)(torch.ones(()))
    assert raised.value is error
    error = RuntimeError(PEER)
    with pytest.raises(ExchangeError, match=r"^rank 0, .*Lightning.*: a rank died"):
        getattr(strategy, call)(torch.ones(()))


def save_on_one(path, state, alone):
    """Rank 0 saves; the other one has better things to do."""
    strategy = CompressedDDPStrategy("topk", state=state)
    fit(strategy, steps=2)
    content = {"optimizer_states": []}
    alone = alone or strategy._answers_signal(path)
    if dist.get_rank() == 0:
        save_compression(strategy._resume, TorchCheckpointIO(), path, content, strategy.compression, alone)
    return sorted(content)


@pytest.mark.parametrize(
    ("name", "state", "alone", "kept"),
    [
        ("error.ckpt", "sidecar", True, True),
        ("hpc_ckpt_1.ckpt", "sidecar", False, True),
        ("error.ckpt", "mean", True, False),
        ("hpc_ckpt_1.ckpt", "mean", False, False),
    ],
)
def test_a_save_in_answer_to_an_error_or_a_signal_waits_for_nobody(pools, tmp_path, name, state, alone, kept):
    first, _ = pools[2].run(save_on_one, str(tmp_path / name), state, alone)
    assert ("lightning_compress" in first) == kept
    assert bool(list(tmp_path.glob("*.lc/*.pt"))) == kept


def test_a_save_where_all_ranks_have_met_is_as_any_other():
    """A cluster's signal is heeded between two batches, unless Lightning's handlers are others by now."""
    strategy = CompressedDDPStrategy("topk", state="mean")
    for taken in (True, False):
        strategy._rendezvous = SimpleNamespace(signals=SimpleNamespace(taken=taken))
        assert strategy._answers_signal("runs/hpc_ckpt_3.ckpt") != taken
        assert not strategy._answers_signal("runs/last.ckpt")
