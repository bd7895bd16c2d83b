"""Pieces, embedded pairs, files of pairs, and batches of them."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.nmt import tokenizer as tokenizer_module
from recipes.nmt.data import PARTS, Batch, Pairs, TranslationData
from recipes.nmt.numbers import Numbers, drawn
from recipes.nmt.texts import FILES, Multi30k, Parallel, read_lines
from recipes.nmt.tokenizer import BOS, EOS, PAD, UNK, Tokenizer, cached_model, train_model
from tests.helpers.data import public_data

SENTENCES = [sentence for pair in drawn(400, 1) for sentence in pair]
SMALL: dict[str, Any] = {"train_size": 300, "val_size": 20, "test_size": 30, "vocab_size": 150, "tokens": 200}


@pytest.fixture
def numbers(tmp_path: Path) -> Numbers:
    return Numbers(cache=str(tmp_path), **SMALL)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Files as Multi30k has them, of other sentences."""
    pairs = drawn(120, 2)
    cuts = {"train": slice(0, 80), "val": slice(80, 100), "test": slice(100, 120)}
    for part, (*_, name) in FILES.items():
        for language, side in zip(("en", "de"), zip(*pairs[cuts[part]], strict=True), strict=True):
            (tmp_path / f"{name}.{language}.gz").write_bytes(gzip.compress(("\n".join(side) + "\n").encode()))
    return tmp_path


def rewrite(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode()))


def spoil(path: Path) -> None:
    """Damage the middle of an archive."""
    content = bytearray(path.read_bytes())
    content[20:40] = 20 * b"\xff"
    path.write_bytes(content)


def test_pieces_and_back() -> None:
    model = train_model(SENTENCES, 200)
    assert model == train_model(SENTENCES, 200)
    pieces = Tokenizer(model)
    assert (len(pieces), (PAD, UNK, BOS, EOS)) == (200, (0, 1, 2, 3))
    rows = pieces.encode(SENTENCES)
    assert pieces.decode(rows) == SENTENCES
    assert min(map(min, rows)) > EOS
    assert pieces.decode([[*rows[0], EOS, *rows[1], PAD], [], [EOS]]) == [SENTENCES[0], "", ""]
    assert pieces.encode(["日本", ""]) == [[*pieces.encode(["日本"])[0]], []]
    assert UNK in pieces.encode(["日本"])[0]
    assert pieces.decode([]) == []


def test_fewer_pieces_where_there_are_not_so_many() -> None:
    assert 20 < len(Tokenizer(train_model(SENTENCES[:20], 10_000))) < 10_000
    with pytest.raises(ValueError, match=r"data\.vocab_size=20: .*"):
        train_model(SENTENCES, 20)


def test_pieces_are_learnt_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cached_model(SENTENCES, 150, tmp_path)
    monkeypatch.setattr(tokenizer_module, "train_model", None)
    assert cached_model(SENTENCES, 150, tmp_path) == first
    with pytest.raises(TypeError):
        cached_model(SENTENCES[1:], 150, tmp_path)  # other sentences have other pieces
    assert len(list(tmp_path.glob("*.model"))) == 1  # nothing is left of what failed


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"data\.cache: .*file/nmt cannot be written \(.*\); set it elsewhere"):
        _ = Numbers(cache=str(tmp_path / "file"), **SMALL).dims
    with pytest.raises(ValueError, match=r"data\.cache: .* cannot be written"):
        cached_model(SENTENCES, 150, tmp_path / "file")


def test_what_is_kept_may_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        Numbers(cache=str(tmp_path), **SMALL).dims  # noqa: B018
    finally:
        os.umask(before)
    kept = [path for path in (tmp_path / "nmt").iterdir() if path.suffix != ".lock"]
    assert {oct(path.stat().st_mode & 0o777) for path in kept} == {"0o640"}
    assert len(kept) == 2


def test_numbers_are_translations() -> None:
    drawn_pairs = drawn(3000, 0)
    pairs = dict(drawn_pairs)
    assert len(set(pairs.values())) == len(drawn_pairs)  # years can be read in two ways, and be written in one
    known = {
        "twenty-one": "einundzwanzig",
        "Monday, March 25, 2002": "Montag, 25. März 2002",
        "eight hundred and fourth": "achthundertvierte",
    }
    assert known.items() <= pairs.items()
    assert sum("," in each and each[-1].isdigit() for each in pairs) > 1000  # dates


def test_numbers_are_the_same_for_all_and_in_one_part_each(numbers: Numbers, tmp_path: Path) -> None:
    parts = numbers.parts
    assert {part: len(pairs) for part, pairs in parts.items()} == {"train": 300, "val": 20, "test": 30}
    for sentences in zip(*(pair for part in PARTS for pair in parts[part]), strict=True):
        assert len(set(sentences)) == len(sentences)
    assert Numbers(cache=str(tmp_path / "other"), seed=5, **SMALL).parts == parts
    assert Numbers(cache=str(tmp_path), draw=1, **SMALL).parts["train"] != parts["train"]
    (path,) = (tmp_path / "nmt").glob("numbers*-350-0.tsv")
    path.write_text("a\tb\n" * 350)
    assert set(Numbers(cache=str(tmp_path), **SMALL).parts["train"]) == {("a", "b")}  # read, not made again


def test_reads_what_is_published(root: Path) -> None:
    pairs = drawn(120, 2)
    data = Multi30k(root=str(root), cache=str(root), vocab_size=150)
    assert [data.parts[part] for part in PARTS] == [pairs[:80], pairs[80:100], pairs[100:]]
    turned = Multi30k(root=str(root), cache=str(root), source="de", target="en", vocab_size=150)
    assert turned.parts["val"] == [pair[::-1] for pair in pairs[80:100]]
    (root / "val.en").write_text("\n".join(pair.source for pair in pairs[80:100]))
    (root / "val.en.gz").unlink()
    assert Multi30k(root=str(root)).parts == data.parts  # unpacked, and without an end of the last line
    assert len(Multi30k(root=str(root), train_size=7).parts["train"]) == 7
    for language in ("en", "de"):  # by its published name, in a folder of its own
        (root / f"test2016.{language}.gz").rename(root / f"test_2016_flickr.{language}.gz")
    files = list(root.glob("*.*"))
    (root / "multi30k").mkdir(exist_ok=True)
    for each in files:
        each.rename(root / "multi30k" / each.name)
    assert Multi30k(root=str(root)).parts == data.parts


def test_multi30k_as_it_is(tmp_path: Path) -> None:
    data = Multi30k(root=str(public_data("multi30k", tmp_path) / "multi30k"))
    assert [len(data.parts[part]) for part in PARTS] == [29_000, 1014, 1000]
    assert data.parts["train"][0].source == "Two young, White males are outside near many bushes."


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.en").write_bytes("\ufeffone\ntwo\n".encode())
    assert read_lines(tmp_path / "a.en", "data.train[0]") == ["one", "two"]


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda root: (root / "val.de.gz").unlink(), r"data\.root=.*no val\.de\.gz; set data\.root"),
        (lambda root: rewrite(root / "val.de.gz", "eins\nzwei\n"), r"val\.en\.gz has 20 lines, .*val\.de\.gz has 2;"),
        (lambda root: rewrite(root / "train.en.gz", "a\nb\n\nc\n"), r"line 3 of .*train\.en\.gz is empty"),
        (lambda root: rewrite(root / "train.en.gz", "a\n \t\n"), r"line 2 of .*train\.en\.gz is empty"),
        (lambda root: rewrite(root / "train.en.gz", ""), r"line 1 of .*train\.en\.gz is empty"),
        (lambda root: (root / "test2016.en.gz").write_bytes(b"no gzip"), r"test2016\.en\.gz cannot be read"),
        (lambda root: spoil(root / "test2016.en.gz"), r"test2016\.en\.gz cannot be read"),
        (lambda root: (root / "test2016.en.gz").write_bytes(gzip.compress(b"a\xff")), r"cannot be read as UTF-8"),
        (
            lambda root: (root / "val.en.gz").write_bytes((root / "val.en.gz").read_bytes()[:-9]),
            r"val\.en\.gz cannot be read.*fetch it anew",
        ),
    ],
)
def test_damaged_files_are_named(root: Path, break_it: Any, words: str) -> None:
    break_it(root)
    with pytest.raises(ValueError, match=words) as info:
        _ = Multi30k(root=str(root), cache=str(root)).dims
    assert "\n" not in str(info.value)


def test_ones_own_files(tmp_path: Path) -> None:
    for name, text in {"a.en": "one\ntwo\n", "a.de": "eins\nzwei\n", "b.de": "drei\n"}.items():
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / "a.en"), str(tmp_path / "a.de")]
    assert Parallel(train=files, test=files).parts == {part: [] if part == "val" else TWO for part in PARTS}
    with pytest.raises(ValueError, match=r"data\.val\[0\]: .*a\.en has 2 lines, .*b\.de has 1"):
        _ = Parallel(train=files, test=files, val=[files[0], str(tmp_path / "b.de")]).parts
    with pytest.raises(ValueError, match=r"data\.test\[1\]: there is no .*c\.de"):
        _ = Parallel(train=files, test=[files[0], str(tmp_path / "c.de")]).parts
    for wrong in ({"train": None, "test": files}, {"train": files, "test": files[:1]}):
        with pytest.raises(ValueError, match=r"data\.(train|test)=.*: must be two files, as in"):
            Parallel(**wrong)


TWO = [("one", "eins"), ("two", "zwei")]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tokens": 0}, r"data\.tokens=0"),
        ({"vocab_size": 4}, r"data\.vocab_size=4"),
        ({"train_size": 0}, r"data\.train_size=0"),
        ({"max_length": 300}, r"data\.max_length=300.*data\.tokens=200"),
        ({"test_size": 0}, r"data\.test_size=0"),
        ({"train_size": 10**6}, "100,000 together"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Numbers(**SMALL | wrong)
    with pytest.raises(ValueError, match="must be two languages"):
        Multi30k(source="de", target="de")


def test_not_one_full_step(tmp_path: Path) -> None:
    data = Numbers(cache=str(tmp_path), **SMALL | {"max_length": 2})
    with pytest.raises(ValueError, match=r"0 training pairs for 1 ranks of data\.tokens=200: not one full step"):
        data.setup("fit")


def test_batches(numbers: Numbers) -> None:
    numbers.setup("fit")
    assert numbers.dims == {"vocab_size": 150}
    for loader, part in ((numbers.val_dataloader(), "val"), (numbers.test_dataloader(), "test")):
        batches: list[Batch] = list(loader)
        assert sorted(row for batch in batches for row in batch.rows.tolist()) == list(range(SMALL[f"{part}_size"]))
        for batch in batches:
            for row, source, target, text in zip(*batch, strict=True):
                pair = numbers.parts[part][int(row)]
                assert numbers.tokenizer.decode([source.tolist(), target.tolist()[1:]]) == [*pair]
                assert text == pair.target
                assert target[0] == BOS
                assert {int((each == EOS).sum()) for each in (source, target)} == {1}
            assert max(batch.source.numel(), batch.target[:, 1:].numel()) <= SMALL["tokens"]
            assert batch.rows.dtype == batch.source.dtype == batch.target.dtype == torch.int64


def test_an_empty_batch_is_empty(numbers: Numbers) -> None:
    numbers.setup("fit")
    batch = numbers.sets["val"][[]]
    assert (len(batch.rows), len(batch.source), len(batch.target), batch.references) == (0, 0, 0, [])


def test_what_is_too_long_is_left_out_of_training_alone(tmp_path: Path) -> None:
    data = Numbers(cache=str(tmp_path), **SMALL | {"max_length": 10})
    data.setup("fit")
    kept: Pairs = data.sets["train"]
    assert 50 < len(kept) < 300
    assert max(kept.lengths) <= 10
    assert len(data.sets["test"]) == 30
    assert isinstance(data, TranslationData)
