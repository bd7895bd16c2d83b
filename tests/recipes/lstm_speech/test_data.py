"""Reading, joining and checking the sounds."""

from __future__ import annotations

import wave
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recipes.lstm_speech import speaking
from recipes.lstm_speech.features import read_wav
from recipes.lstm_speech.fsdd import FSDD
from recipes.lstm_speech.spoken import Spoken
from recipes.lstm_speech.text import WORDS
from recipes.lstm_speech.wavdir import WavDir, read_manifest
from tests.helpers.data import public_data
from tests.helpers.sounds import tone, write_fsdd, write_wav, write_wavdir


def test_wavs_of_one_and_two_channels(tmp_path: Path) -> None:
    samples = np.array([0, 16384, -32768, 32767, 5])
    write_wav(tmp_path / "mono.wav", samples)
    write_wav(tmp_path / "stereo.wav", np.stack([samples, np.zeros(5)], 1))
    assert (read_wav(tmp_path / "mono.wav", 8000) * 32768).tolist() == samples.tolist()
    assert (read_wav(tmp_path / "stereo.wav", 8000) * 65536).tolist() == samples.tolist()


def damaged(path: Path, kind: str) -> None:
    """A wav with something wrong."""
    write_wav(path, tone(440, 0.1), 16000 if kind == "rate" else 8000)
    raw = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(raw[:-100])
    elif kind == "header":
        path.write_bytes(raw[:30])
    elif kind == "text":
        path.write_text("RIFF is not here")
    elif kind == "empty":
        write_wav(path, np.zeros(0))
    elif kind == "8 bits":
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 1, 8000, 0, "NONE", ""))
            file.writeframes(bytes(100))
    elif kind == "missing":
        path.unlink()


BROKEN = {
    "truncated": r"truncated, 1,500 bytes of sound where its header says 1,600; copy it again",
    "header": r"not a PCM wav \(.*\); convert it",
    "text": r"not a PCM wav \(.*\); convert it",
    "empty": r"no sound at all; record it again",
    "8 bits": r"8 bits per sample, expected 16; convert it",
    "rate": r"16,000 samples per second, expected 8,000; convert it: sox in\.wav -r 8000",
    "missing": r"no such file; give the path of a wav, or correct the manifest",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_damaged_wav_is_named_before_training(kind: str, tmp_path: Path) -> None:
    root = write_wavdir(tmp_path)
    damaged(root / "2.wav", kind)
    with pytest.raises(ValueError, match=rf"2\.wav: {BROKEN[kind]}"):
        WavDir(root=str(root), batch_size=1).setup("fit")


@pytest.mark.parametrize(
    ("part", "line", "words"),
    [
        ("train", "\n", r"train\.tsv:5: an empty line, expected path<TAB>transcript; correct or delete"),
        ("val", "0.wav one\n", r"val\.tsv:5: '0\.wav one', expected path<TAB>transcript"),
        ("test", "0.wav\t \n", r"test\.tsv:5: '0\.wav\\t ', expected"),
        ("test", "0.wav\tone seven\n", r"test text 5, 'one seven': 'sv' is not among the characters .*' enotw'"),
    ],
)
def test_a_wrong_line_is_named_before_training(part: str, line: str, words: str, tmp_path: Path) -> None:
    root = write_wavdir(tmp_path)
    with (root / f"{part}.tsv").open("a") as file:
        file.write(line)
    with pytest.raises(ValueError, match=words):
        WavDir(root=str(root), batch_size=1).setup("fit")


def test_missing_manifests(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.tsv: the manifest cannot be read \(No such file.*set data\.root"):
        WavDir(root=str(tmp_path)).dims  # noqa: B018
    root = write_wavdir(tmp_path)
    for content, words in (
        (b"", r"train\.tsv: no lines"),
        (b"path\ttranscript\n0.wav\tone\n", r"train\.tsv:1: a heading.* delete the line"),
        ("0.wav\tön\n".encode("latin-1"), r"train\.tsv: the manifest is no UTF-8 \(.*, byte 6\); convert it"),
    ):
        (root / "train.tsv").write_bytes(content)
        with pytest.raises(ValueError, match=words):
            WavDir(root=str(root)).setup("fit")


def test_manifests_as_editors_write_them(tmp_path: Path) -> None:
    """With a byte order mark and Windows' ends of lines, and with Unicode's own kind of line break in a text."""
    path = tmp_path / "train.tsv"
    path.write_bytes("\ufeff0.wav\tone two\r\n1.wav\ttwo\u2028three\r\n".encode())
    assert read_manifest(path) == [(tmp_path / "0.wav", "one two"), (tmp_path / "1.wav", "two three")]


def test_wavdir(tmp_path: Path) -> None:
    data = WavDir(root=str(write_wavdir(tmp_path)), val=None, train_size=3, batch_size=2)
    assert data.dims == {"features": 120, "alphabet": " enotw"}
    data.setup("fit")
    assert data.val_dataloader() == []
    assert [len(part) for part in data.parts.values()] == [3, 0, 4]
    batch = next(iter(data.test_dataloader()))
    assert batch.features.shape == (2, 17, 120)
    with pytest.raises(ValueError, match=r"4 training utterances for 1 ranks of data\.batch_size=5"):
        WavDir(root=str(tmp_path), batch_size=5).setup("fit")


def test_ranks_have_equally_many_batches_and_every_utterance_once(tmp_path: Path) -> None:
    root = str(write_wavdir(tmp_path, tuple(["one", "two"] * 7)))
    seen: list[int] = []
    lengths = set()
    for rank in range(4):
        data = WavDir(root=root, batch_size=4)
        data.trainer = SimpleNamespace(world_size=4, global_rank=rank)
        with pytest.raises(ValueError, match="4 ranks"):
            data.setup("fit")
        data = WavDir(root=root, batch_size=3)
        data.trainer = SimpleNamespace(world_size=4, global_rank=rank)
        data.setup("fit")
        batches = list(data.test_dataloader())
        lengths.add((len(batches), len(list(data.train_dataloader()))))
        seen += [row for batch in batches for row in batch.rows.tolist()]
    assert lengths == {(2, 1)}
    assert sorted(seen) == list(range(14))


def test_masks_only_in_training(tmp_path: Path) -> None:
    data = WavDir(root=str(write_wavdir(tmp_path)), batch_size=2, augment={"steps": 9, "share": 0.9}, seed=3)
    data.setup("fit")
    batch = data.parts["train"][[1, 3]]

    def heard(**trainer: Any) -> torch.Tensor:
        data.trainer = SimpleNamespace(world_size=1, global_rank=0, **trainer)
        return data.on_after_batch_transfer(batch, 0).features

    assert torch.equal(heard(training=False, current_epoch=1), batch.features)
    first = heard(training=True, current_epoch=1)
    assert not torch.equal(first, batch.features)
    assert torch.equal(first, heard(training=True, current_epoch=1))
    assert not torch.equal(first, heard(training=True, current_epoch=2))


def test_utterances_shorter_than_their_text_are_counted(tmp_path: Path) -> None:
    root = write_wavdir(tmp_path, ("one two" * 5, "two", "one", "three"))
    data = WavDir(root=str(root), batch_size=1)
    with pytest.warns(UserWarning, match="1 of 4 (train|val|test) utterances are shorter than their text"):
        data.setup("fit")


def recordings_of(data: FSDD, part: str) -> list[list[tuple[str, int, int]]]:
    """Speaker, digit and take of each recording of each string, as its first samples tell; checks the texts."""
    strings = []
    for sound, text in data.parts[part].utterances:
        marks = sound.view(-1, 1600)[:, 0].tolist()
        assert text == " ".join(WORDS[mark // 100 % 10] for mark in marks)
        strings.append([("ab"[mark // 1000], mark // 100 % 10, mark % 100) for mark in marks])
    return strings


def test_fsdd_official_split(tmp_path: Path) -> None:
    root = str(write_fsdd(tmp_path))
    data = FSDD(root=root, train_size=60, val_size=7, test_size=50, batch_size=4)
    data.setup("fit")
    takes = {}
    for part, size in (("train", 60), ("val", 7), ("test", 50)):
        strings = recordings_of(data, part)
        assert len(strings) == size
        assert {len(each) for each in strings} == {3, 4, 5}
        assert all(len({speaker for speaker, _, _ in each}) == 1 for each in strings)
        assert {speaker for each in strings for speaker, _, _ in each} == {"a", "b"}
        takes[part] = {take for each in strings for _, _, take in each}
        if part == "test":  # 100 recordings, 200 places or so
            uses = Counter(recording for each in strings for recording in each)
            assert len(uses) == 100
            for speaker in "ab":
                counts = [count for recording, count in uses.items() if recording[0] == speaker]
                assert max(counts) - min(counts) <= 1
    assert takes == {"train": {8, 9}, "val": {5, 6, 7}, "test": {0, 1, 2, 3, 4}}
    again = FSDD(root=root, train_size=60, val_size=7, test_size=50, batch_size=4, seed=9)
    again.setup("fit")
    assert recordings_of(again, "test") == recordings_of(data, "test")
    other = FSDD(root=root, train_size=60, val_size=0, test_size=50, batch_size=4, corpus_seed=1)
    other.setup("fit")
    assert recordings_of(other, "test") != recordings_of(data, "test")
    assert {take for each in recordings_of(other, "train") for _, _, take in each} == {5, 6, 7, 8, 9}


def test_fsdd_without_a_speaker(tmp_path: Path) -> None:
    data = FSDD(root=str(write_fsdd(tmp_path) / "recordings"), leave_out="bob", train_size=60, val_size=7, batch_size=4)
    data.setup("fit")
    heard = {part: {each for string in recordings_of(data, part) for each in string} for part in data.parts}
    assert {speaker for speaker, _, _ in heard["test"]} == {"b"}
    assert len(heard["test"]) == 100  # all takes
    assert {speaker for speaker, _, _ in heard["train"] | heard["val"]} == {"a"}
    assert {take for _, _, take in heard["train"]} == {0, 1, 2, 3, 4, 8, 9}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"leave_out": "eve"}, r"data\.leave_out='eve': choose one of ada, or null"),
        ({"root": "nowhere"}, r"data\.root='nowhere': no wav in nowhere; set data\.root .*data=spoken"),
        ({"test_size": 0}, r"data\.test_size=0"),
        ({"batch_size": 0}, r"data\.batch_size=0"),
        ({"rate": 16000}, r"8,000 samples per second, expected 16,000"),
    ],
)
def test_wrong_settings_of_fsdd(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    root = str(write_fsdd(tmp_path, ("ada",), 9))
    with pytest.raises(ValueError, match=words):
        FSDD(**{"root": root, "train_size": 8, "batch_size": 2} | change).setup("fit")


def test_fsdd_with_a_strange_name(tmp_path: Path) -> None:
    root = write_fsdd(tmp_path, ("ada",), 6)
    write_wav(root / "recordings" / "hello.wav", tone(440, 0.1))
    with pytest.raises(ValueError, match=r"hello\.wav: expected a name such as 7_jackson_32\.wav"):
        FSDD(root=str(root)).setup("fit")


def test_real_fsdd(tmp_path: Path) -> None:
    root = public_data("fsdd", tmp_path)
    data = FSDD(root=str(root))
    data.setup("fit")
    assert [len(part) for part in data.parts.values()] == [1800, 90, 300]
    assert not data.parts["train"].too_short()


SMALL: dict[str, Any] = {"train_size": 6, "val_size": 2, "test_size": 3, "batch_size": 2}


def test_spoken_is_the_same_for_the_same_seed_and_named_if_damaged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = Spoken(cache=str(tmp_path / "a"), **SMALL), Spoken(cache=str(tmp_path / "b"), seed=5, **SMALL)
    first.setup("fit")
    assert "speaking digits: 11 of 11" in capfd.readouterr().err
    second.setup("fit")
    for part in ("train", "val", "test"):
        for one, other in zip(first.parts[part].utterances, second.parts[part].utterances, strict=True):
            assert one.text == other.text
            assert torch.equal(one.sound, other.sound)
            assert 3 <= len(one.text.split()) <= 5
            assert set(one.text.split()) <= set(WORDS)
            assert 0.7 < len(one.sound) / 8000 < 5
            assert one.sound.abs().max() > 3000
    capfd.readouterr()
    again = Spoken(cache=str(tmp_path / "a"), **SMALL)
    again.setup("fit")
    assert not capfd.readouterr().err  # from the cache
    assert torch.equal(again.parts["test"].utterances[2].sound, first.parts["test"].utterances[2].sound)
    assert {path.suffix for path in (tmp_path / "a").iterdir()} <= {".npz", ".lock"}
    (path,) = (tmp_path / "a").glob("*.npz")
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ValueError, match=r"\.npz: damaged .*delete it"):
        Spoken(cache=str(tmp_path / "a"), **SMALL).setup("fit")


def test_without_the_synthesiser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "espeakng_loader.py").write_text("get_library_path = lambda: '/nowhere/libespeak-ng.so'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"data=spoken: the synthesiser cannot be used \(/nowhere.*data=fsdd"):
        Spoken(cache=str(tmp_path / "cache"), **SMALL).setup("fit")
    assert not list((tmp_path / "cache").glob("*.npz"))


def test_an_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"data\.cache: .*file cannot be written"):
        Spoken(cache=str(tmp_path / "file"), **SMALL).setup("fit")


def test_an_unknown_voice_is_an_error() -> None:
    with pytest.raises(OSError, match="no voice 'xx-nowhere'"):
        speaking.Speaker().say("xx-nowhere", "one", 150, 50)
