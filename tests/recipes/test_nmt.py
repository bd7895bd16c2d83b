"""Training, measuring and using a translator."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Trainer, seed_everything

from lightning_compress import CompressedDDPStrategy
from recipes.loading import BucketSampler
from recipes.nmt.data import padded
from recipes.nmt.module import TranslationModule, corpus_scores
from recipes.nmt.numbers import Numbers
from recipes.nmt.tokenizer import BOS, EOS, PAD

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
TINY: dict[str, Any] = {"width": 32, "hidden": 64, "layers": 1, "heads": 2, "dropout": 0.0, "warmup_steps": 10}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]


def tiny_data(cache: Path | str, **settings: Any) -> Numbers:
    sizes = {"train_size": 200, "val_size": 11, "test_size": 21, "vocab_size": 150, "tokens": 150, "max_length": 100}
    return Numbers(cache=str(cache), **sizes | settings)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 5e-3)


def tiny_model(data: Numbers, **settings: Any) -> TranslationModule:
    seed_everything(0, verbose=False)
    return TranslationModule(optimizer=adam, **data.dims, **TINY | settings)


def scores_by_hand(model: TranslationModule, data: Numbers, part: str, **search: Any) -> dict[str, float]:
    """Loss, BLEU and chrF of a part, sentence by sentence."""
    model.eval()
    rows = data.sets[part]
    with torch.no_grad():
        pairs = [(torch.tensor([rows.source[i]]), torch.tensor([rows.target[i]])) for i in range(len(rows))]
        loss = [
            F.cross_entropy(model(source, target[:, :-1])[0], target[0, 1:], reduction="sum").item()
            for source, target in pairs
        ]
        texts = [model.translate(source, **search)[0] for source, _ in pairs]
    references = [[pair.target for pair in rows.pairs]]
    return {
        "loss": sum(loss) / sum(target.numel() - 1 for _, target in pairs),
        "bleu": sacrebleu.corpus_bleu(texts, references).score,
        "chrf": sacrebleu.corpus_chrf(texts, references).score,
    }


@pytest.mark.parametrize("kind", ["transformer", "lstm"])
def test_what_is_logged(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tiny_data(tmp_path)
    model = tiny_model(data, model=kind, beam=2, alpha=0.5)
    trainer = Trainer(max_epochs=2, **QUIET)
    trainer.fit(model, datamodule=data)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
    expected = scores_by_hand(model, data, "val", beam=1, alpha=0.0)
    assert logged["val/loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert logged["val/bleu"] == pytest.approx(expected["bleu"], rel=1e-4)
    assert logged["train/loss"] < 6
    trainer.test(model, datamodule=data, verbose=False)
    expected = scores_by_hand(model, data, "test", beam=2, alpha=0.5)
    for name in ("loss", "bleu", "chrf"):
        assert trainer.callback_metrics[f"test/{name}"].item() == pytest.approx(expected[name], rel=1e-4), name
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("BLEU nrefs:1|case:mixed")]
    assert len(said) == 1
    assert "tok:13a|smooth:exp" in said[0]
    assert "|beam:2|alpha:0.5; chrF" in said[0]


def test_validation_translates_no_more_than_it_is_told(tmp_path: Path) -> None:
    data = tiny_data(tmp_path)
    model = tiny_model(data, val_sentences=4)
    calls: list[int] = []
    translate = model.translate
    model.translate = lambda source, **search: calls.append(len(source)) or translate(source, **search)  # type: ignore
    Trainer(**QUIET).validate(model, datamodule=data, verbose=False)
    assert sum(calls) == 4


def fit_and_test(cache: str) -> tuple[dict[str, float], list[str], list[torch.Tensor]]:
    """Train a step and test on this rank's share."""
    data = tiny_data(cache)
    model = tiny_model(data)
    gathered: list[str] = []
    whole = model._gathered
    model._gathered = lambda: gathered.append(rows := whole()) or rows  # type: ignore
    trainer = Trainer(
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        strategy=CompressedDDPStrategy("topk") if dist.is_initialized() else "auto",
        max_steps=1,
        limit_val_batches=0,
        **QUIET,
    )
    trainer.test(model, datamodule=data, verbose=False)
    scores = {key: float(value) for key, value in trainer.callback_metrics.items()}
    trainer.fit(model, datamodule=data)
    return scores, gathered[0], [p.detach().numpy() for p in model.model.parameters()]


def lengths(cache: Path) -> list[int]:
    """Of the test's sentences."""
    data = tiny_data(cache)
    data.setup("test")
    return data.sets["test"].lengths


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_score_each_sentence_once(pools: Any, tmp_path: Path) -> None:
    alone, rows, _ = fit_and_test(str(tmp_path))
    assert [row[0] for row in rows] == list(range(21))
    assert [] in BucketSampler(lengths(tmp_path), budget=150, shuffle=False, num_replicas=2, rank=1)  # some wait
    results = pools[2].run(fit_and_test, str(tmp_path))
    for scores, everything, parameters in results:
        assert everything == rows
        assert scores == pytest.approx(alone, rel=1e-4)
        assert all((mine == first).all() for mine, first in zip(parameters, results[0][2], strict=True))
    assert len(list((tmp_path / "nmt").glob("*.model"))) == 1


def test_scores_are_of_the_corpus() -> None:
    rows = [(0, "the cat sat on the mat", "the cat sat on a mat"), (1, "yes", "no"), (2, "a b c d e", "a b c d e")]
    bleu, chrf = corpus_scores(rows)
    assert bleu.score == sacrebleu.corpus_bleu([row[1] for row in rows], [[row[2] for row in rows]]).score
    assert bleu.signature == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"
    assert chrf.signature.startswith("nrefs:1|case:mixed|eff:yes|nc:6")


def test_loss_is_the_mean_over_real_pieces(tmp_path: Path) -> None:
    data = tiny_data(tmp_path)
    data.setup("fit")
    model = tiny_model(data, label_smoothing=0.2)
    batch = data.sets["train"][[0, 3, 5, 9]]
    logits = model(batch.source, batch.target[:, :-1]).log_softmax(-1)
    terms = []
    for row, target in enumerate(batch.target[:, 1:]):
        for place, piece in enumerate(target.tolist()):
            if piece != PAD:
                terms.append(-0.8 * logits[row, place, piece] - 0.2 * logits[row, place].mean())
    assert model._loss(batch, 0.2).item() == pytest.approx(torch.stack(terms).mean().item(), rel=1e-5)


def test_a_checkpoint_needs_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tiny_data(tmp_path / "cache")
    model = tiny_model(data)
    trainer = Trainer(max_steps=11, limit_val_batches=0, **QUIET)
    trainer.fit(model, datamodule=data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    (tmp_path / "cache").rename(tmp_path / "gone")
    again = TranslationModule.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    sentence = data.parts["test"][0].source
    expected = model.eval().predict_file(sentence)
    assert again.predict_file(f"  {sentence}\n") == expected
    assert again.training  # as it was
    pieces = padded([[*data.tokenizer.encode([sentence])[0], EOS]])
    assert expected == model.translate(pieces, beam=5, alpha=1.0)[0]
    with pytest.raises(ValueError, match="the sentence is empty"):
        again.predict_file(" \n")
    with pytest.raises(ValueError, match="is a file, and this model translates sentences"):
        again.predict_file(__file__)
    assert again.predict_file(30 * "two hundred ") is not None  # longer than a file's name may be
    with pytest.raises(ValueError, match="knows no vocabulary"):
        TranslationModule(150, **TINY).predict_file("one")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"model": "gru"}, "recipe.model=gru: choose from transformer, lstm"),
        ({"dropout": 1.0}, "recipe.dropout=1.0"),
        ({"label_smoothing": -0.1}, "recipe.label_smoothing=-0.1"),
        ({"layers": 0}, "recipe.layers=0"),
        ({"beam": 0}, "recipe.beam=0"),
        ({"schedule": "noam"}, "recipe.schedule='noam'"),
        ({"warmup_epochs": 2.0}, "recipe.warmup_steps=10, recipe.warmup_epochs=2.0: both"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TranslationModule(150, **TINY | wrong)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["transformer", "lstm"])
def test_it_learns(kind: str, tmp_path: Path) -> None:
    data = tiny_data(tmp_path, train_size=2000, tokens=400)
    model = tiny_model(data, model=kind, width=64, hidden=128)
    trainer = Trainer(max_epochs=12, limit_val_batches=0, **QUIET)
    trainer.fit(model, datamodule=data)
    assert trainer.test(model, datamodule=data, verbose=False)[0]["test/bleu"] > 60
    assert os.listdir(tmp_path) == ["nmt"]
    assert BOS != EOS
