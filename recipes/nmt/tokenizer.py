"""Pieces of words: byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909) by the sentencepiece library."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from ..loading import made_once

__all__ = ["BOS", "EOS", "PAD", "UNK", "Tokenizer", "cached_model", "train_model"]

PAD, UNK, BOS, EOS = range(4)
"""Numbers of the pieces that stand for nothing, for what is not known, for the beginning and for the end."""


class Tokenizer:
    """Sentences to pieces and back.

    Args:
        model: a serialised sentencepiece model, as from :func:`train_model`.
    """

    def __init__(self, model: bytes) -> None:
        self.model = model
        self.pieces = SentencePieceProcessor(model_proto=model)

    def __len__(self) -> int:
        """Size of the vocabulary."""
        return int(self.pieces.get_piece_size())

    def encode(self, sentences: list[str]) -> list[list[int]]:
        """Sentences -> their pieces' numbers, without beginning or end."""
        return list(self.pieces.encode(sentences, num_threads=1))

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Numbers -> sentences; what follows the first end is left out."""
        cut = [list(row[: row.index(EOS)] if EOS in row else row) for row in map(list, rows)]
        return list(self.pieces.decode(cut, num_threads=1)) if cut else []


def train_model(sentences: Iterable[str], vocab_size: int) -> bytes:
    """Learn pieces from sentences: one thread and no sampling, so the same sentences give the same bytes.

    Args:
        sentences: of both languages together.
        vocab_size: most pieces there may be; fewer where the sentences do not have so many.

    Raises:
        ValueError: ``vocab_size`` is less than the characters of the sentences need.
    """
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=1.0,
            hard_vocab_limit=False,
            num_threads=1,
            input_sentence_size=0,
            shuffle_input_sentence=False,
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(f"data.vocab_size={vocab_size}: {str(error).strip().splitlines()[-1]}; raise it") from None
    return model.getvalue()


def cached_model(sentences: list[str], vocab_size: int, cache: Path) -> bytes:
    """:func:`train_model`, kept in ``cache``: one process learns it, the others wait and read it.

    Args:
        sentences: of both languages together.
        vocab_size: see there.
        cache: folder for such files, made when it is not there.

    Raises:
        ValueError: see there, or the folder cannot be written.
    """
    digest = hashlib.sha256(f"bpe {vocab_size}\n".encode())
    for sentence in sentences:
        digest.update(f"{sentence}\n".encode())
    path = cache / f"bpe-{vocab_size}-{digest.hexdigest()[:16]}.model"

    def learn(draft: Path) -> None:
        rank_zero_info(f"learning {vocab_size:,} pieces of words from {len(sentences):,} sentences into {path}")
        draft.write_bytes(train_model(sentences, vocab_size))

    return made_once(path, learn).read_bytes()
