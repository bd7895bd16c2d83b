"""The pages that messages name are there, by the names that they use."""

import re

import pytest

from lightning_compress.__main__ import main
from lightning_compress.commands import docs
from tests.test_house import PACKAGE, ROOT

SAID = re.compile(r"lightning-compress docs ([\w/-]+)")


def test_messages_name_pages_that_are_printed(capsys):
    named = {name for path in PACKAGE.rglob("*.py") for name in SAID.findall(path.read_text())}
    assert named > {"choose", "accuracy", "unsupported"}
    for name in named:
        main(["docs", name])
        assert capsys.readouterr().out.startswith("# ") or name == "list"


def test_all_pages_have_a_name(capsys):
    main(["docs", "list"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len({line.split()[0] for line in lines}) == len(list((ROOT / "docs").rglob("*.md")))
    assert docs.named("docs/results/accuracy.md", [*docs.pages()]) == "results/accuracy"


@pytest.mark.parametrize(("page", "hint"), [("acuracy", "did you mean accuracy?"), ("xyz", "docs list' prints them")])
def test_a_wrong_name_is_refused_in_a_line(page, hint):
    with pytest.raises(SystemExit, match=re.escape(hint)):
        main(["docs", page])


def test_no_message_names_a_file_of_the_repository():
    strings = re.compile(r'^\s*(?:f|return f|return )?"[^"]*\bdocs/\w+', flags=re.MULTILINE)
    found = {path.name: strings.findall(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert not {name: each for name, each in found.items() if each}
