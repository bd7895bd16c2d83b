"""Train a translator, with label smoothing and the inverse square root of the step as the learning rate."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_only
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from ..task import Schedule, Score, Task
from .data import Batch, padded
from .model import LSTM, Transformer
from .search import beam_search
from .tokenizer import EOS, PAD, Tokenizer

__all__ = ["TranslationModule", "corpus_scores"]

Translated = tuple[int, str, str]
"""A row number, the model's translation and the reference."""


class Rating(NamedTuple):
    """A corpus score in points of 100, and how it was counted."""

    score: float
    signature: str


def corpus_scores(rows: list[Translated]) -> tuple[Rating, Rating]:
    """BLEU (Papineni et al. 2002) and chrF (Popovic 2015) of all sentences together, by sacrebleu (Post 2018)."""
    translations, references = [row[1] for row in rows], [[row[2] for row in rows]]
    bleu, chrf = BLEU(), CHRF()
    scores = [metric.corpus_score(translations, references).score for metric in (bleu, chrf)]
    return Rating(scores[0], str(bleu.get_signature())), Rating(scores[1], str(chrf.get_signature()))


class TranslationModule(Task):
    """An encoder-decoder with its loss and BLEU.

    Args:
        vocab_size: pieces of the data.
        model: ``transformer``, or ``lstm`` with attention.
        width: size of the embedding, and of the Transformer's vectors.
        hidden: width of the Transformer's feed-forward networks, or of the LSTMs.
        layers: of the encoder, and as many of the decoder.
        heads: of the Transformer's attentions; the LSTM has one.
        dropout: share of what each part gives that is dropped, in [0, 1).
        label_smoothing: probability that the loss spreads over all pieces, in [0, 1) (Szegedy et al. 2016).
        beam: continuations that the test's and predictions' search keeps; validation is greedy.
        alpha: reward of length in that search.
        val_sentences: how many sentences validation translates, the first ones; its loss is over all.
        optimizer: see :class:`~recipes.task.Task`, as all that is not named here.
        schedule: ``inverse_sqrt``, ``linear``, ``cosine``, ``step`` or ``constant``.
        warmup_steps: length of the warm-up in steps, from ``warmup_start`` times the optimizer's rate to all of it.
        warmup_epochs: the same in epochs, where ``warmup_steps`` is None.
        warmup_start: factor on the optimizer's rate at the first step.

    Raises:
        ValueError: a value is out of its range.
    """

    recipe = "nmt"
    score = Score("test/bleu", "BLEU", "maximize", scale=1.0, unit="")

    def __init__(
        self,
        vocab_size: int,
        *,
        model: Literal["transformer", "lstm"] = "transformer",
        width: int = 384,
        hidden: int = 1536,
        layers: int = 3,
        heads: int = 6,
        dropout: float = 0.1,
        label_smoothing: float = 0.1,
        beam: int = 5,
        alpha: float = 1.0,
        val_sentences: int = 1000,
        optimizer: Callable[..., Optimizer] | None = None,
        schedule: Schedule = "inverse_sqrt",
        warmup_steps: int | None = 400,
        warmup_epochs: float = 0.0,
        warmup_start: float | None = 0.01,
    ) -> None:
        super().__init__(
            optimizer=optimizer,
            schedule=schedule,
            warmup_epochs=warmup_epochs,
            warmup_steps=warmup_steps,
            warmup_start=warmup_start,
        )
        for name, share in (("dropout", dropout), ("label_smoothing", label_smoothing)):
            if not 0 <= share < 1:
                raise ValueError(f"recipe.{name}={share}: must be at least 0 and below 1")
        for name, number in (("width", width), ("hidden", hidden), ("layers", layers), ("heads", heads)):
            if number < 1:
                raise ValueError(f"recipe.{name}={number}: must be at least 1")
        if beam < 1 or alpha < 0:
            raise ValueError(f"recipe.beam={beam}, recipe.alpha={alpha}: beam must be at least 1, alpha at least 0")
        self.save_hyperparameters(ignore=["optimizer"], logger=False)
        self.model: Transformer | LSTM
        if model == "transformer":
            self.model = Transformer(
                vocab_size, width=width, hidden=hidden, layers=layers, heads=heads, dropout=dropout
            )
        elif model == "lstm":
            self.model = LSTM(vocab_size, width=width, hidden=hidden, layers=layers, dropout=dropout)
        else:
            raise ValueError(f"recipe.model={model}: choose from transformer, lstm")
        self.label_smoothing = label_smoothing
        self.beam, self.alpha = beam, alpha
        self.val_sentences = val_sentences
        self.val_loss, self.test_loss = MeanMetric(nan_strategy=math.inf), MeanMetric(nan_strategy=math.inf)
        self.translated: list[Translated] = []
        self._tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The data's, or the checkpoint's.

        Raises:
            ValueError: there is neither.
        """
        if self._tokenizer is None:
            data = getattr(self._trainer, "datamodule", None)
            facts = getattr(data, "facts", self.facts)
            if "tokenizer" not in facts:
                raise ValueError("this model knows no vocabulary: load it from a checkpoint, or train it first")
            self._tokenizer = Tokenizer(facts["tokenizer"])
        return self._tokenizer

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Source [N, S] and target so far [N, T] -> logits of the next pieces [N, T, vocab_size]."""
        return self.model.logits(self.model(source, target))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean smoothed cross-entropy of this rank's target pieces.

        DDP takes the mean over ranks; their batches are neighbours in length and about as large, so this is the mean
        over all pieces but for a few per cent of weight.
        """
        loss = self._loss(batch, self.label_smoothing)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def _loss(self, batch: Batch, smoothing: float) -> Tensor:
        """Only real pieces reach the output layer, the largest of all."""
        expected = batch.target[:, 1:]
        real = expected != PAD
        features = self.model(batch.source, batch.target[:, :-1])
        return F.cross_entropy(self.model.logits(features[real]), expected[real], label_smoothing=smoothing)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``val/loss``, without smoothing, over the pieces of all ranks; translate the first sentences."""
        self._evaluate("val", self.val_loss, batch)
        self._translate(batch, batch.rows < self.val_sentences, beam=1, alpha=0.0)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``test/loss``, and translate all sentences."""
        self._evaluate("test", self.test_loss, batch)
        self._translate(batch, batch.rows >= 0, beam=self.beam, alpha=self.alpha)

    def _evaluate(self, stage: str, loss: MeanMetric, batch: Batch) -> None:
        if len(batch.rows):  # other ranks may have one batch more
            loss.update(self._loss(batch, 0.0), weight=(batch.target[:, 1:] != PAD).sum())
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True, batch_size=len(batch.rows))

    def _translate(self, batch: Batch, which: Tensor, *, beam: int, alpha: float) -> None:
        if not which.any():
            return
        sentences = self.translate(batch.source[which], beam=beam, alpha=alpha)
        references = [text for text, wanted in zip(batch.references, which.tolist(), strict=True) if wanted]
        self.translated += zip(batch.rows[which].tolist(), sentences, references, strict=True)

    def translate(self, source: Tensor, *, beam: int, alpha: float) -> list[str]:
        """Pieces [N, S] -> sentences of at most twice as many pieces and twenty."""
        longest = 2 * (source != PAD).sum(1) + 20  # whatever else is in the batch
        return self.tokenizer.decode(beam_search(self.model, source, beam=beam, longest=longest, alpha=alpha))

    def on_validation_epoch_end(self) -> None:
        """Log ``val/bleu``, of greedy translations."""
        if rows := self._gathered():
            bleu, _ = corpus_scores(rows)
            self.log("val/bleu", bleu.score, prog_bar=True, sync_dist=True, batch_size=1)

    def on_test_epoch_end(self) -> None:
        """Log ``test/bleu`` and ``test/chrf``, and print how they were counted."""
        if rows := self._gathered():
            bleu, chrf = corpus_scores(rows)
            self.log_dict({"test/bleu": bleu.score, "test/chrf": chrf.score}, sync_dist=True, batch_size=1)
            self._say_how(bleu.signature, f"{chrf.score:.2f}, {chrf.signature}")

    @rank_zero_only
    def _say_how(self, bleu: str, chrf: str) -> None:
        print(f"BLEU {bleu}|beam:{self.beam}|alpha:{self.alpha}; chrF {chrf}")

    def _gathered(self) -> list[Translated]:
        """What all ranks translated, each sentence once, in the order of the set; the same on every rank."""
        rows, self.translated = self.translated, []
        if self.trainer.world_size > 1:
            shares: list[Any] = [None] * self.trainer.world_size
            dist.all_gather_object(shares, rows)
            rows = [row for share in shares for row in share]
        return sorted({row[0]: row for row in rows}.values())

    def predict_file(self, source: str) -> str:
        """The translation of a sentence.

        Raises:
            ValueError: there is no sentence.
        """
        sentence = " ".join(source.split())
        if not sentence:
            raise ValueError("the sentence is empty; give one, such as 'A man rides a horse.'")
        if os.path.isfile(source):
            raise ValueError(f"{source} is a file, and this model translates sentences: give them in quotes")
        pieces = padded([[*self.tokenizer.encode([sentence])[0], EOS]]).to(self.device)
        training = self.training
        self.eval()
        translation = self.translate(pieces, beam=self.beam, alpha=self.alpha)[0]
        self.train(training)
        return translation
