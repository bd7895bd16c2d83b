"""Train LSTMs with CTC to write what is said."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import MeanMetric, Metric
from torchmetrics.text import CharErrorRate, WordErrorRate

from ..task import Schedule, Score, Task
from .data import Batch
from .features import Features, read_wav
from .model import SpeechLSTM, beam_search, ctc_loss, greedy
from .text import Alphabet

__all__ = ["SpeechModule"]


class SpeechModule(Task):
    """Bidirectional LSTMs with their CTC loss, word and character error rates.

    Args:
        features: numbers per step, as the data says.
        alphabet: the characters that can be written, as the data says.
        layers: LSTM layers.
        hidden: units per direction and layer.
        dropout: after each layer, the last one too, in [0, 1).
        beam: prefixes that the search keeps in tests and predictions; 1: the likeliest path, as in validation.
        optimizer: see :class:`~recipes.task.Task`, as all that is not named here.
        batch_size: utterances per rank and step.
        reference_batch: minibatch over all ranks that the optimizer's rate is meant for; None: do not scale.
        schedule: ``step``, ``linear``, ``cosine``, ``constant`` or ``inverse_sqrt``.
        warmup_epochs: length of the warm-up in epochs, at least 0.
        warmup_start: factor on the optimizer's rate at the first step.

    Raises:
        ValueError: a value is out of its range.
    """

    recipe = "lstm_speech"
    score = Score("test/wer", "WER", "minimize")

    def __init__(
        self,
        features: int = 120,
        alphabet: str = " efghinorstuvwxz",
        *,
        layers: int = 3,
        hidden: int = 128,
        dropout: float = 0.1,
        beam: int = 8,
        optimizer: Callable[..., Optimizer] | None = None,
        batch_size: int = 16,
        reference_batch: int | None = None,
        schedule: Schedule = "linear",
        warmup_epochs: float = 1.0,
        warmup_start: float | None = 0.1,
    ) -> None:
        super().__init__(
            optimizer=optimizer,
            schedule=schedule,
            warmup_epochs=warmup_epochs,
            warmup_start=warmup_start,
            batch_size=batch_size,
            reference_batch=reference_batch,
        )
        self.save_hyperparameters(ignore=["optimizer"], logger=False)
        if beam < 1:
            raise ValueError(f"recipe.beam={beam}: must be at least 1; 1 takes the likeliest path")
        self.alphabet = Alphabet(alphabet)
        self.beam = beam
        self.model = SpeechLSTM(features, len(self.alphabet), layers=layers, hidden=hidden, dropout=dropout)
        self.val_loss, self.test_loss = MeanMetric(nan_strategy=math.inf), MeanMetric(nan_strategy=math.inf)
        self.val_wer, self.test_wer = WordErrorRate(), WordErrorRate()
        self.val_cer, self.test_cer = CharErrorRate(), CharErrorRate()

    def setup(self, stage: str) -> None:
        """Refuse a precision in which this processor cannot run an LSTM, before the first step.

        Raises:
            ValueError: PyTorch has no such LSTM for this processor.
        """
        if self.trainer.strategy.root_device.type != "cpu":
            return
        first: Any = self.model.get_submodule("layers.0")
        try:
            with torch.no_grad(), self.trainer.precision_plugin.forward_context():
                first(torch.zeros(1, 1, first.input_size, dtype=first.weight_ih_l0.dtype))
        except RuntimeError as error:  # oneDNN has no LSTM in bfloat16 without AVX-512, and none in float16 without AMX
            raise ValueError(
                f"trainer.precision={self.trainer.precision}: PyTorch cannot run an LSTM so on this processor "
                f"({str(error).split('. ')[0]}). Use trainer.precision=32-true, or another processor"
            ) from error

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Features [N, T, size] and lengths [N] -> log-probabilities float32 [N, T, symbols]."""
        log_probabilities: Tensor = self.model(features, lengths)
        return log_probabilities

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean CTC loss of this rank's utterances; ranks have equally many, so DDP's mean is the minibatch's."""
        loss = ctc_loss(self(batch.features, batch.lengths), batch.lengths, batch.targets, batch.target_lengths)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch.lengths))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``val/loss``, ``val/wer`` and ``val/cer`` over the utterances of all ranks."""
        self._evaluate("val", (self.val_loss, self.val_wer, self.val_cer), batch, beam=1)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``test/loss``, ``test/wer`` and ``test/cer`` over the utterances of all ranks."""
        self._evaluate("test", (self.test_loss, self.test_wer, self.test_cer), batch, self.beam)

    def _evaluate(self, stage: str, metrics: tuple[MeanMetric, Metric, Metric], batch: Batch, beam: int) -> None:
        loss, said, written = torch.zeros(()), [], []
        count = len(batch.lengths)
        if count:  # else this rank has run out of utterances, and only takes part in the metrics' sums
            log_probabilities = self(batch.features, batch.lengths)
            loss = ctc_loss(log_probabilities, batch.lengths, batch.targets, batch.target_lengths)
            texts = zip(batch.targets, batch.target_lengths, strict=True)
            said = [self.alphabet.decode(symbols[:length].tolist()) for symbols, length in texts]
            written = self.transcribe(log_probabilities, batch.lengths, beam)
        for name, metric in zip(("loss", "wer", "cer"), metrics, strict=True):
            metric.update(*((loss, count) if name == "loss" else (written, said)))
            self.log(f"{stage}/{name}", metric, on_step=False, on_epoch=True, prog_bar=name == "wer", batch_size=count)

    def transcribe(self, log_probabilities: Tensor, lengths: Tensor, beam: int = 1) -> list[str]:
        """The text of every utterance.

        Args:
            log_probabilities: float32 [N, T, symbols].
            lengths: int64 [N], steps of each.
            beam: prefixes that the search keeps; 1: the likeliest path.
        """
        utterances = [rows[:length] for rows, length in zip(log_probabilities.cpu(), lengths.tolist(), strict=True)]
        return [self.alphabet.decode(greedy(rows) if beam == 1 else beam_search(rows, beam)) for rows in utterances]

    @torch.no_grad()
    def predict_file(self, source: str) -> str:
        """What is said in a wav.

        Args:
            source: path of a 16-bit PCM wav of the training data's sample rate.

        Raises:
            ValueError: it is no such wav, or this model comes from no checkpoint.
        """
        if not self.facts:
            raise ValueError("this model does not know its data's sample rate: predict with one from a checkpoint")
        features = Features(**self.facts)
        frames = features(read_wav(Path(source), features.rate)).to(self.device)[None]
        lengths = torch.tensor([frames.shape[1]])
        training = self.training
        self.eval()
        log_probabilities: Any = self(frames, lengths)
        self.train(training)
        return self.transcribe(log_probabilities, lengths, self.beam)[0]
