"""The network, its loss and its error rates."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import nn

from recipes.lstm_speech.fsdd import FSDD
from recipes.lstm_speech.model import SpeechLSTM, ctc_loss
from recipes.lstm_speech.module import SpeechModule
from recipes.lstm_speech.wavdir import WavDir
from tests.helpers.processor import needs_lstm_in_bfloat16
from tests.helpers.sounds import tone, write_fsdd, write_wav, write_wavdir
from tests.recipes.lstm_speech.test_decode import all_texts

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders"),
]


def test_company_and_padding_change_nothing() -> None:
    torch.manual_seed(0)
    model = SpeechLSTM(6, 5, layers=2, hidden=8).eval()
    batch, lengths = torch.randn(3, 9, 6), torch.tensor([4, 9, 7])
    together = model(batch, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = model(batch[row : row + 1, :length], torch.tensor([length]))
        torch.testing.assert_close(together[row, :length], alone[0])
    torch.testing.assert_close(together.exp().sum(-1), torch.ones(3, 9))
    noise = batch.clone()
    noise[0, 4:] = math.nan
    assert torch.equal(model(noise, lengths)[0, :4], together[0, :4])


def test_every_step_hears_the_whole_utterance() -> None:
    model = SpeechLSTM(6, 5, layers=3, hidden=8).eval()
    batch = torch.randn(1, 9, 6, requires_grad=True)
    model(batch, torch.tensor([9]))[0, 4, 1].backward()
    assert batch.grad is not None
    assert (batch.grad.abs().sum(-1) > 0).all()


def test_size_of_the_default() -> None:
    module = SpeechModule()
    assert sum(p.numel() for p in module.parameters()) == 1_052_433
    gates = module.model.layers[0].bias_ih_l0 + module.model.layers[0].bias_hh_l0
    assert gates.view(4, 128)[1].eq(1).all()  # the forget gate is open
    assert gates.view(4, 128)[[0, 2, 3]].eq(0).all()


def test_loss_by_all_paths() -> None:
    torch.manual_seed(0)
    output = torch.randn(2, 4, 3).log_softmax(-1)
    lengths, targets = torch.tensor([4, 3]), torch.tensor([[1, 1], [2, 0]])
    loss = ctc_loss(output, lengths, targets, torch.tensor([2, 1]))
    first, second = all_texts(output[0])[(1, 1)], all_texts(output[1, :3])[(2,)]
    assert loss.item() == pytest.approx((-math.log(first) / 2 - math.log(second)) / 2, rel=1e-5)


def test_an_utterance_too_short_for_its_text_teaches_nothing() -> None:
    output = torch.randn(1, 2, 3, requires_grad=True)
    loss = ctc_loss(output.log_softmax(-1), torch.tensor([2]), torch.tensor([[1, 1]]), torch.tensor([2]))
    loss.backward()
    assert loss == 0
    assert output.grad is not None
    assert not output.grad.any()


def test_loss_is_float32_under_autocast() -> None:
    needs_lstm_in_bfloat16()
    model = SpeechLSTM(6, 5, layers=1, hidden=8)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.randn(1, 9, 6), torch.tensor([9]))
        loss = ctc_loss(output, torch.tensor([9]), torch.tensor([[1, 2]]), torch.tensor([2]))
    assert output.dtype == loss.dtype == torch.float32


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_precision_without_an_lstm_is_refused_before_the_first_step(
    precision: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forward = nn.LSTM.forward

    def without_bfloat16(self: nn.LSTM, *given: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("could not create a primitive descriptor for the LSTM. Run workload with ONEDNN_VERBOSE")
        return forward(self, *given)

    monkeypatch.setattr(nn.LSTM, "forward", without_bfloat16)
    data = WavDir(root=str(write_wavdir(tmp_path)), batch_size=2)
    module = SpeechModule(**data.dims, layers=1, hidden=4, warmup_epochs=0.0, warmup_start=None)
    trainer = Trainer(max_steps=1, precision=precision, enable_checkpointing=False, **QUIET)
    refused = pytest.raises(ValueError, match=r"precision=bf16-mixed: .*for the LSTM\). Use trainer.precision=32-true")
    with nullcontext() if precision == "32-true" else refused:
        trainer.fit(module, data)
    assert trainer.global_step == (precision == "32-true")


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"hidden": 0}, {"dropout": 1.0}, {"beam": 0}, {"schedule": "poly"}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    ((key, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"recipe.{key}='?{value}"):
        SpeechModule(**wrong)


def slow_error_rate(written: list[list[str]], said: list[list[str]]) -> float:
    """Edits over the length of what was said, by dynamic programming."""
    edits = 0
    for one, other in zip(written, said, strict=True):
        table = {(i, 0): i for i in range(len(one) + 1)} | {(0, j): j for j in range(len(other) + 1)}
        for i, j in itertools.product(range(1, len(one) + 1), range(1, len(other) + 1)):
            change = table[i - 1, j - 1] + (one[i - 1] != other[j - 1])
            table[i, j] = min(table[i - 1, j] + 1, table[i, j - 1] + 1, change)
        edits += table[len(one), len(other)]
    return edits / sum(map(len, said))


def test_error_rates_count_every_utterance_once(tmp_path: Path) -> None:
    seed_everything(0, verbose=False)
    data = FSDD(root=str(write_fsdd(tmp_path)), train_size=8, val_size=4, test_size=11, batch_size=4)
    module = SpeechModule(layers=1, hidden=16, beam=1, dropout=0.0)
    result = Trainer(**QUIET, enable_checkpointing=False).test(module, datamodule=data, verbose=False)[0]
    module.eval()
    written, said, losses = [], [], []
    for row, (_, text) in enumerate(data.parts["test"].utterances):
        batch = data.parts["test"][[row]]
        with torch.no_grad():
            output = module(batch.features, batch.lengths)
        written += module.transcribe(output, batch.lengths)
        losses.append(ctc_loss(output, batch.lengths, batch.targets, batch.target_lengths).item())
        said.append(text)
    words, wanted = [text.split() for text in written], [text.split() for text in said]
    assert result["test/wer"] == pytest.approx(slow_error_rate(words, wanted))
    assert result["test/cer"] == pytest.approx(slow_error_rate(list(map(list, written)), list(map(list, said))))
    assert result["test/loss"] == pytest.approx(np.mean(losses), rel=1e-4)


def scored(root: str) -> dict[str, float]:
    """Test two utterances in batches of four: only one rank gets any."""
    seed_everything(0, verbose=False)
    data = WavDir(root=root, test="few.tsv", batch_size=1)
    data.setup("test")
    data.batch_size = 4
    trainer = Trainer(**QUIET, devices=torch.distributed.get_world_size(), strategy="ddp", enable_checkpointing=False)
    return dict(trainer.test(SpeechModule(**data.dims, layers=1, hidden=8), datamodule=data, verbose=False)[0])


def test_a_rank_without_utterances_takes_part(tmp_path: Path, pools: Any) -> None:
    root = write_wavdir(tmp_path)
    (root / "few.tsv").write_text("0.wav\tone two\n1.wav\ttwo\n")
    first, second = pools[2].run(scored, str(root))
    assert first == second
    assert first["test/loss"] > 0
    assert first["test/wer"] >= 1


def test_learns_four_words_and_predicts_from_its_checkpoint(tmp_path: Path) -> None:
    seed_everything(0, verbose=False)
    root = write_wavdir(tmp_path / "own", ("do", "re", "mi", "do re"))
    data = WavDir(root=str(root), batch_size=2, mels=20, frames=2)
    module = SpeechModule(**data.dims, layers=1, hidden=32, dropout=0.0, warmup_epochs=0.0)
    trainer = Trainer(
        max_epochs=40, gradient_clip_val=1.0, check_val_every_n_epoch=40, default_root_dir=tmp_path, **QUIET
    )
    trainer.fit(module, datamodule=data)
    assert trainer.callback_metrics["val/wer"] == 0
    saved = tmp_path / "model.ckpt"
    trainer.save_checkpoint(saved)
    other = SpeechModule.load_from_checkpoint(saved, weights_only=False)
    assert [other.predict_file(str(root / f"{number}.wav")) for number in range(4)] == ["do", "re", "mi", "do re"]
    write_wav(root / "fast.wav", tone(300, 0.5, 16000), 16000)
    with pytest.raises(ValueError, match=r"fast\.wav: 16,000 samples per second, expected 8,000; convert it: sox"):
        other.predict_file(str(root / "fast.wav"))
    with pytest.raises(ValueError, match="predict with one from a checkpoint"):
        SpeechModule().predict_file(str(root / "0.wav"))
