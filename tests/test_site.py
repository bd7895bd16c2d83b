"""The site has every page, its reference has every public name, and what is made from the code is of this code."""

import re

import pytest
import torch
import yaml
from PIL import Image

import lightning_compress
from lightning_compress.collectives.counting import Meter
from lightning_compress.commands.uses import USES
from lightning_compress.settings.compensation import LOSS
from lightning_compress.settings.parsing import COMPRESSORS
from tests.test_house import PACKAGE, ROOT
from tools import chooser, dark, pages, recording, tutorial
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


def test_every_picture_is_light_and_dark():
    dark_one = r'<picture><source media="\(prefers-color-scheme: dark\)" srcset="(.*)_dark.png">'
    named = re.compile(rf"^{dark_one}!\[.*\]\(\1.png\)</picture>$")
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for line in page.read_text().splitlines():
            if ".png)" in line and "](" in line:
                assert (match := named.match(line)), f"{page.name}: {line}"
                assert dark.beside(page.parent / f"{match[1]}.png").exists(), match[1]
    for picture in dark.pictures():
        made, there = dark.darkened(picture), Image.open(dark.beside(picture))
        assert made.convert("RGB").tobytes() == there.convert("RGB").tobytes(), "run python -m tools.dark"
    for cast in DOCS.glob("*.cast"):
        assert cast.with_suffix(".svg").read_text() == recording.drawn(*recording.read_cast(cast))


def test_a_recording_is_drawn_line_by_line(tmp_path):
    recording.write_cast(tmp_path / "a.cast", "make <it>", [(0.5, "one"), (9.0, " line\r\nhalf\rwhole\x1b[1m\n")])
    typed, events = recording.read_cast(tmp_path / "a.cast")
    assert list(recording.lines(events)) == [(9.0, "one line"), (9.0, "whole")]
    drawn = recording.drawn(typed, events)
    assert "$ make &lt;it&gt;" in drawn
    assert 'delay:2.10s"><text x="12" y="54" font-size="13">one line<' in drawn  # a long pause is cut short


def test_the_tutorials_picture_joins_what_is_logged_of_a_step(tmp_path):
    runs = {}
    for name, size in (("none", 8), ("qsgd", 1)):
        log = tmp_path / f"{name}.csv"
        rows = [f"{size * step},,{step},\n,{step / 8},{step},{2 - step}\n" for step in (0, 1)]
        log.write_text("".join(["comm/total_bytes_sent,seconds,step,train/loss\n", *rows, "9,,2,\n"]))
        runs[name] = tutorial.read(log)
        assert [(each["comm/total_bytes_sent"], each["train/loss"]) for each in runs[name]] == [(0, 2), (size, 1)]
    tutorial.draw(runs, tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as drawn, Image.open(DOCS / "tutorial.png") as shown:
        assert drawn.size == shown.size


def test_there_is_one_chooser():
    for page in (ROOT / "README.md", DOCS / "choose.md"):
        assert chooser.table() in page.read_text()
    cost = f"{LOSS['qsgd', 'adam']['none']:g} % more loss with AdamW"
    for page in (ROOT / "README.md", DOCS / "index.md"):
        assert cost in " ".join(page.read_text().split())


def test_the_tables_say_when_to_use_each_compressor():
    rows = re.findall(r"^\| `(\w+)`.*$", (DOCS / "compressors.md").read_text(), flags=re.MULTILINE)
    assert set(rows) == set(COMPRESSORS.choices) | {"moniqua"} == set(USES)
    lines = (DOCS / "compressors.md").read_text().splitlines()
    for name, use in USES.items():
        assert any(line.startswith(f"| `{name}`") and f"| {use} |" in line for line in lines), name
        assert not re.search(r"[`*\[\]]", use), name


def test_a_user_has_not_too_much_to_read():
    """Words of all pages but those for maintainers."""
    (apart,) = (set(paths(each["For maintainers"])) for each in site()["nav"] if "For maintainers" in each)
    read = [page for page in DOCS.rglob("*.md") if str(page.relative_to(DOCS)) not in apart | IGNORED]
    assert sum(len(page.read_text().split()) for page in read) <= 60_000
