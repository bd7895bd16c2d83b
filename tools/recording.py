"""Record a command in a terminal, and draw the recording as an animated SVG.

    python -m tools.recording docs/demo.svg 'make demo'

The second word is what is typed. Without it nothing runs:
the recording beside the picture, in asciinema's format (docs/demo.cast), is drawn again.
"""

from __future__ import annotations

import html
import json
import os
import pty
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

COLUMNS, FONT, LINE = 132, 13, 18
"""Characters of a line, and pixels of a letter's and a line's height."""
LONGEST_S = 1.5
"""A pause of the recording lasts at most so long in the picture."""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STYLE = (
    "rect{fill:#f6f8fa}text{font-family:monospace;white-space:pre;fill:#24292f}.typed{fill:#3f51b5;font-weight:bold}"
    "g{opacity:0;animation:show 0s forwards}@keyframes show{to{opacity:1}}"
    "@media(prefers-color-scheme:dark){rect{fill:#161b22}text{fill:#d0d7de}.typed{fill:#9fa8da}}"
    "@media(prefers-reduced-motion:reduce){g{opacity:1;animation:none}}"
)
Event = tuple[float, str]
"""Seconds since the start, and what was written then."""


def record(typed: str) -> list[Event]:
    """Run what is typed in a terminal of its own, and return what it writes.

    Raises:
        RuntimeError: it fails.
    """
    events: list[Event] = []
    start = time.monotonic()

    def read(terminal: int) -> bytes:
        found = os.read(terminal, 4096)
        events.append((round(time.monotonic() - start, 2), found.decode(errors="replace")))
        return found

    os.environ["COLUMNS"] = str(COLUMNS)
    if pty.spawn(["bash", "-c", typed], read):
        raise RuntimeError(f"{typed} failed")
    return events


def write_cast(path: Path, typed: str, events: list[Event]) -> None:
    """Write a recording in asciinema's format, version 2."""
    head = {"version": 2, "width": COLUMNS, "height": 24, "title": typed}
    path.write_text("".join(f"{json.dumps(each)}\n" for each in [head, *([at, "o", text] for at, text in events)]))


def read_cast(path: Path) -> tuple[str, list[Event]]:
    """Return what was typed, and what was written."""
    head, *events = map(json.loads, path.read_text().splitlines())
    return head["title"], [(at, text) for at, _, text in events]


def lines(events: list[Event]) -> Iterator[Event]:
    """Yield each line with the time of its end, without escape sequences and what was written over."""
    open_line = ""
    for at, text in events:
        *ended, open_line = (open_line + ESCAPES.sub("", text).replace("\r\n", "\n")).split("\n")
        for each in ended:
            yield at, each.rpartition("\r")[2]


def drawn(typed: str, events: list[Event]) -> str:
    """Return a recording as an SVG whose lines appear in turn; light or dark as the reader's page is."""
    top, clock, before = 2 * LINE, 0.6, 0.0
    parts = [f'<text class="typed" x="12" y="{top}" font-size="{FONT}">$ {html.escape(typed)}</text>']
    for at, line in lines(events):
        clock, before = clock + min(at - before, LONGEST_S), at
        top += LINE
        text = f'<text x="12" y="{top}" font-size="{FONT}">{html.escape(line)}</text>'
        parts.append(f'<g style="animation-delay:{clock:.2f}s">{text}</g>')
    width, height = int(COLUMNS * 0.602 * FONT) + 24, top + LINE
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">',
            f"<title>{html.escape(typed)}</title><style>{STYLE}</style>",
            f'<rect width="{width}" height="{height}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def main() -> int:
    """Record and draw, or draw again.

    Returns:
        the exit status.
    """
    if len(sys.argv) not in (2, 3):
        print(__doc__)
        return 2
    picture = Path(sys.argv[1])
    if sys.argv[2:]:
        write_cast(picture.with_suffix(".cast"), sys.argv[2], record(sys.argv[2]))
    picture.write_text(drawn(*read_cast(picture.with_suffix(".cast"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
