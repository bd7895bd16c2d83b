"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def show(
    head: Sequence[str],
    rows: Iterable[Iterable[str]],
    title: str | None = None,
    caption: str | None = None,
    *,
    width: int | None = None,
    firm: Sequence[str] = (),
    words: int | None = None,
) -> None:
    """Print a table.

    Args:
        head: names of the columns; two may have the same.
        rows: cells.
        title: above it.
        caption: below it.
        width: of the page, in letters; None: the terminal's.
        firm: columns that are not folded.
        words: how many columns have words; the others have figures, on the right and not folded. None: all.
    """
    table = Table(title=title, caption=caption)
    for place, name in enumerate(head):
        figures = words is not None and place >= words
        table.add_column(name, no_wrap=figures or name in firm, justify="right" if figures else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=width).print(table)
