"""What the documents name exists, and they use the field's words."""

import re
from pathlib import Path

import pytest

from tests.test_house import PACKAGE, ROOMS, ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/**/*.md"))
PHRASES = (  # what no reader knows, and what to write
    ("made true", "committed"),
    ("stays home", "local residual"),
    ("all ranks come", "collective call"),
    ("all ranks must come", "collective call"),
    ("nobody asks", "unused"),
    ("somebody asks", "used"),
    ("what is owed", "residual"),
    ("said aloud", "warns, logs"),
)
GUEST = "linear8"
"""In the paths of the package that docs/extending.md builds."""
TREE = re.compile(r"^    lightning_compress/\n((?:      .*\n)+)", flags=re.MULTILINE)


def name_of(path):
    return str(path.relative_to(ROOT))


def prose(page):
    """Without blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def current(page):
    """Without commands that a former commit has: a figure that was needed once stands beside them."""
    return re.sub(r"`(?:sudo )?python -m [^`]+`\s+at\s+commit\s+[0-9a-f]{8}\b", "", page.read_text())


def headings(page):
    """Of a page, as GitHub makes anchors of them."""
    found = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not target.startswith(("http:", "https:")):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), target
            assert not anchor or anchor in headings(file), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_modules_that_are_named_exist(page):
    for path in re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|yaml|md))`", prose(page)):
        assert GUEST in path or (ROOT / path).exists() or (PACKAGE / path).exists(), path
    for module in re.findall(r"python -m ((?:benchmarks|recipes|tests)[\w.]*)", current(page)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for target in re.findall(r"(?:^ *|`)make ([a-z-]+)", page.read_text(), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_words_are_the_fields(page):
    text = " ".join(page.read_text().lower().split())
    for phrase, better in PHRASES:
        assert phrase not in text, f"{phrase!r}: say {better}"


def test_the_tree_of_rooms_is_the_package():
    lines = TREE.search((ROOT / "docs" / "architecture.md").read_text())[1].splitlines()
    here, shown, files = [], [], []
    for line in lines:
        indent, name, said = re.fullmatch(r"    ((?:  )+)(\S+) +(\S.*)", line).groups()
        here[len(indent) // 2 - 1 :] = [name.rstrip("/")]
        path = Path(*here)
        (shown if name.endswith("/") else files).append(path)
        files += [path / file for file in re.findall(r"(?<![>\w])[a-z_]+\.py\b", said) if name.endswith("/")]
    assert sorted(shown) == sorted(each.parent.relative_to(PACKAGE) for each in PACKAGE.rglob("*/__init__.py"))
    missing = [str(each) for each in files if not (PACKAGE / each).exists()]
    assert not missing, missing
    assert {str(each) for each in files if len(each.parts) == 1} == {
        each.name for each in PACKAGE.glob("*.py") if each.name != "__init__.py"
    }
    levels = [level for name in dict.fromkeys(each.parts[0] for each in shown) for level in _levels(name)]
    assert levels == sorted(levels)


def _levels(name):
    return [number for number, row in enumerate(ROOMS) if name in row]
