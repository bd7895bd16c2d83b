"""Results in a file, written after every run: what is there already is not run again."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.tables.rows import read_rows


class Results(dict[str, Any]):
    """Results by the name of a run, in a JSON file.

    Args:
        path: of the file, which need not be there; None: nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        super().__init__(json.loads(path.read_text()) if path and path.exists() else {})
        self._path = path

    def __setitem__(self, name: str, found: Any) -> None:
        super().__setitem__(name, found)
        write(self._path, self)


def write(path: Path | None, found: Any) -> None:
    """Write JSON to a file, if there is to be one."""
    if path is not None:
        path.write_text(json.dumps(found, indent=2) + "\n")


def write_table(path: Path, head: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    """Write a CSV file: the names of its columns, and rows."""
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows((head, *rows))


def row_of(path: Path, key: Mapping[str, object], run: Callable[[], Mapping[str, object]]) -> dict[str, str]:
    """The row of a CSV file that begins with a key; it is run, and added, if it is not there.

    Args:
        path: of the file, which need not be there.
        key: values by column.
        run: returns those of the other columns.
    """
    own = {name: str(value) for name, value in key.items()}
    for row in read_rows(path):
        if own.items() <= row.items():
            return row
    row = own | {name: str(value) for name, value in run().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)
    return row
