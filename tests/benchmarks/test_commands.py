"""The documented commands are such as the benchmarks take, and what cannot be run is refused in a line."""

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks
from benchmarks.harness import lab
from tests.test_docs import PAGES, current
from tests.test_house import ROOT

COMMAND = re.compile(r"python -m (benchmarks(?:\.\w+)+|recipes\.(?:results|sweep))([^`\n]*)")
SOURCES = [
    *(page for page in PAGES if page.name != "CHANGELOG.md"),
    *sorted((ROOT / "benchmarks").glob("*.py")),
]


class ParsedError(Exception):
    """The command line was taken."""


def commands():
    """Module and arguments of every documented command, each once."""
    found = {}
    for page in SOURCES:
        text = current(page).replace("\\\n", " ")
        text = re.sub(r'(--methods "[^"\n]*),\n\s+', r"\1,", text)  # broken inside of quotes
        for module, rest in COMMAND.findall(text):
            words = re.split(r"\s#|[;)]", rest)[0]
            found[module, words.strip()] = page.name
    return found


def main_of(module):
    """The ``main`` of a module, or of what runs as it."""
    found = importlib.import_module(module)
    return (found if hasattr(found, "main") else importlib.import_module(f"{module}.__main__")).main


def test_documented_commands_are_taken(monkeypatch, capsys):
    parse = argparse.ArgumentParser.parse_args

    def parse_args(self, *given):
        parse(self, *given)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_intermixed_args", parse_args)
    known = commands()
    assert len(known) > 80
    for (module, words), page in known.items():
        argv = [module, *shlex.split(words)]
        monkeypatch.setattr("sys.argv", argv)
        with pytest.raises((ParsedError, SystemExit)) as ended:
            main_of(module)()
        assert ended.type is ParsedError, f"{page}: {' '.join(argv)}\n{capsys.readouterr().err}"


REFUSED = [
    ("network", "--plot x.png", "needs two rates"),
    ("choices", "--steps 0", "from 1 on"),
    ("scale", "--node-size 0", "from 1 on"),
    ("scale", "--node-size 3", "powers of two"),
    ("scale", "--node-size 6", "powers of two"),
    ("scale", "--gbit 0", "above 0"),
    ("scale", "--most 1", "two ranks are the fewest"),
    ("codecs", "--repeats 0", "from 1 on"),
    ("codecs", "--numel -5", "from 1 on"),
    ("faults", "--ranks two", "'two' must be a whole number"),
    ("error", "--root /nowhere", "/nowhere"),
    ("gradients", "--root /nowhere --out {folder}/x.pt", "/nowhere"),
    ("error", "--root data --json /nowhere/x.json", "cannot be written"),
    ("gossip", "accuracy --root /nowhere --csv {folder}/x.csv", "/nowhere"),
    ("gossip", "network --steps 10", "must be a multiple of 16"),
    ("gossip", "network", "which only root may do"),
    ("choices", "", "which only root may do"),
    ("time_to_target", "--part steps", "--root: give the folder"),
    ("time_to_target", "--part steps --root /nowhere", "/nowhere"),
    ("time_to_target", "--part table --minutes 3", "change nothing"),
    ("time_to_target", "--part times --root data --folder {folder}", "which only root may do"),
    ("time_to_target", "--part table --folder {folder}", "dense runs, which are missing"),
]


@pytest.mark.parametrize(("module", "words", "said"), REFUSED, ids=[f"{each[0]} {each[1]}" for each in REFUSED])
def test_what_cannot_be_run_is_refused_in_a_line(module, words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lab.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(lab.shutil, "which", lambda name: name)
    monkeypatch.setattr("sys.argv", [f"{module}.py", *words.format(folder=tmp_path).split()])
    with pytest.raises(SystemExit) as ended:
        main_of(f"benchmarks.{module}")()
    assert ended.value.code in (1, 2)
    assert said in capsys.readouterr().err.splitlines()[-1]


def refused(monkeypatch, *words):
    """What a command is told as Python looks for its module; None: it may run."""
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", *words])
    monkeypatch.setattr(sys, "argv", ["-m"])
    try:
        importlib.reload(benchmarks)
    except SystemExit as ended:
        return ended.code


def test_a_retired_benchmark_names_what_is_in_its_place(monkeypatch):
    assert "docs/results/more-ranks.md has its figures. Commit 14d387c5" in refused(monkeypatch, "benchmarks.noise")
    assert "Commit 815420b5" in refused(monkeypatch, "benchmarks.optimizers", "--stage=sgd", "--csv", "x.csv")
    assert "benchmarks.gossip network times" in refused(monkeypatch, "benchmarks.gossip", "pairs", "--rounds", "3")
    assert refused(monkeypatch, "benchmarks.gossip", "network") is None
    ended = subprocess.run([sys.executable, "-m", "benchmarks.delay"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("benchmarks.delay is no longer here: docs/settings.md has its figures")


@pytest.mark.parametrize(
    ("study", "instead"), [each for studies in benchmarks.RETIRED.values() for each in studies.items()]
)
def test_what_stands_in_place_of_a_retired_benchmark_is_there(study, instead):
    for path in re.findall(r"(?:docs|tests)/[\w/.-]+", instead):
        assert (ROOT / path).exists()
    for module in re.findall(r"benchmarks\.\w+", instead):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists()


def test_a_file_is_not_written_over_a_folder(tmp_path):
    from benchmarks._arguments import file_to_write

    assert file_to_write(str(tmp_path / "x.json")) == Path(tmp_path, "x.json")
    for path in (tmp_path, tmp_path / "no" / "x.json"):
        with pytest.raises(argparse.ArgumentTypeError, match="name a file in a folder that is there"):
            file_to_write(str(path))
