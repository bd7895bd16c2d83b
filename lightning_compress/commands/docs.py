"""Print the documentation, whose pages lie in the package (a wheel) or beside it (a checkout)."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def docs(page: str) -> None:
    """Print a page of the documentation, such as ``choose``; ``list`` prints the names of all pages.

    In a terminal it is laid out; into a file or a pipe it goes as Markdown.

    Args:
        page: its name, such as choose or results/accuracy; the last part is enough.
    """
    found = pages()
    if page == "list":
        print("\n".join(f"{name:28}{title(path)}" for name, path in found.items()))
        return
    text = found[named(page, list(found))].read_text(encoding="utf-8")
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(text))
    else:
        print(text)


def pages() -> dict[str, Path]:
    """Return the file of each page by its name, such as ``results/accuracy``.

    Raises:
        ValueError: they are not there.
    """
    for folder in (PACKAGE / "docs", PACKAGE.parent / "docs"):
        if found := {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.md"))}:
            return dict(sorted(found.items(), key=lambda each: (each[0].count("/"), each[0])))
    raise ValueError("docs: this installation has no pages; reinstall lightning-compress")


def named(page: str, names: list[str]) -> str:
    """Return the page that is meant.

    Args:
        page: its name or the last part of it, with or without ``docs/`` and ``.md``.
        names: of all pages, those of a folder last.

    Raises:
        ValueError: there is none.
    """
    asked = page.removeprefix("docs/").removesuffix(".md")
    for name in names:
        if name == asked:
            return name
    for name in names:
        if name.rpartition("/")[2] == asked:
            return name
    short = [name.rpartition("/")[2] for name in names]
    close = get_close_matches(asked.lower().replace(" ", "-"), [*names, *short], n=1)
    hint = f"did you mean {close[0]}?" if close else "'lightning-compress docs list' prints them"
    raise ValueError(f"docs: there is no page {page!r}; {hint}")


def title(path: Path) -> str:
    """Return a page's heading."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), "")
