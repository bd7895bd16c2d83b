"""The site has every page, its reference has every public name, and what is made from the code is of this code."""

import re

import pytest
import torch
import yaml

import lightning_compress
from lightning_compress.collectives.counting import Meter
from tests.test_house import PACKAGE, ROOT
from tools import pages
from tools.signatures import ARGUMENTS

DOCS = ROOT / "docs"
IGNORED = {"contributing.md"}
"""Made when the site is built."""


def site():
    """What mkdocs.yml says."""
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def paths(nav):
    """The pages of a navigation, in order."""
    for each in nav:
        inner = next(iter(each.values())) if isinstance(each, dict) else each
        yield from [inner] if isinstance(inner, str) else paths(inner)


def test_the_navigation_has_every_page_once_or_twice():
    """A page of results may stand under its own subject, too."""
    listed = list(paths(site()["nav"]))
    there = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | IGNORED
    assert set(listed) == there


@pytest.mark.parametrize("path", [path for path in pages.PAGES if path not in IGNORED])
def test_what_is_made_from_the_code_is_of_this_code(path):
    assert (DOCS / path).read_text() == pages.PAGES[path](), "run python -m tools.pages (make docs does)"


def test_the_reference_has_every_public_name():
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    named = re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE)
    assert len(named) == len(set(named))
    named += [f"lightning_compress.{name}" for name in ARGUMENTS]
    assert {f"lightning_compress.{name}" for name in lightning_compress.__all__} <= set(named)


def test_every_figure_is_described_and_every_described_figure_exists():
    rows = re.findall(r"^\| `(\w+?)(?:<rank>)?` \|", (DOCS / "reference/figures.md").read_text(), flags=re.MULTILINE)
    assert len(rows) == len(set(rows))
    measured = set(Meter(torch.device("cpu")).read())
    assert measured <= set(rows)
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    missing = [
        name
        for name in set(rows) - measured
        if f'"{name.removeprefix("search_")}"' not in code and f'f"{name}{{' not in code
    ]
    assert not missing
