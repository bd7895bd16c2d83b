"""The chooser: four questions, as a picture and as a table, with losses of ``settings.compensation``."""

from __future__ import annotations

import html
from dataclasses import dataclass

from lightning_compress.settings.compensation import LOCAL_LOSS, LOSS, Optimizer

WIDTH, LEFT, BOX, HIGH, GAP = 560, 16, 528, 44, 34
"""Pixels: of the picture, its margin, a box, its height, and what lies between a question and its answer."""


@dataclass(frozen=True)
class Answer:
    """What to write.

    Args:
        question: that leads here; empty: what is left after all questions.
        yes: the answer to it that leads here.
        when: the row's first cell.
        write: the argument ``strategy=``.
        fewer: bytes, and for how many ranks.
        loss: percent above float32's, by optimizer.
    """

    question: str
    yes: str
    when: str
    write: str
    fewer: str
    loss: dict[Optimizer, float]


def _lost(method: str, *optimizers: Optimizer) -> dict[Optimizer, float]:
    return {each: min(LOSS[method, each].values()) for each in optimizers}


ANSWERS = (
    Answer(
        "Do you know how fast the link is?",
        "no",
        "unknown link",
        'CompressedDDPStrategy("auto")',
        "1 to 7.5 x on 2 ranks",
        _lost("qsgd", "adam", "sgd"),
    ),
    Answer(
        "Is the optimizer Muon?",
        "yes",
        "Muon",
        'CompressedDDPStrategy({"name": "qsgd", "bits": 5})',
        "6.2 x on 2 ranks",
        _lost("qsgd bits=5", "muon"),
    ),
    Answer(
        "Is the link slow, and may the loss rise by 2 %?",
        "yes",
        "SGD or AdamW, at most 100 Mbit/s",
        'LocalSGDStrategy(sync_every=8, compressor="rotated")',
        "53 x on 4 ranks",
        {"adam": LOCAL_LOSS[8, "adam"], "sgd": LOCAL_LOSS[8, "sgd"]},
    ),
    Answer(
        "Must the loss be float32's?",
        "yes",
        "as near to float32 as can be",
        'CompressedDDPStrategy("bf16")',
        "2 x on any number",
        _lost("bf16", "adam", "sgd"),
    ),
    Answer(
        "",
        "no",
        "SGD, Adam or AdamW",
        'CompressedDDPStrategy("qsgd")',
        "7.5 x on 2 ranks, 6.8 x on 4",
        _lost("qsgd", "adam", "sgd"),
    ),
)
NAMES: dict[Optimizer, str] = {"adam": "AdamW", "sgd": "SGD", "muon": "Muon"}


def loss_of(answer: Answer) -> str:
    """Return what an answer costs, such as "0.3 % (AdamW), 0 % (SGD)"; a gain counts as 0."""
    return ", ".join(f"{max(0.0, lost):g} % ({NAMES[optimizer]})" for optimizer, lost in answer.loss.items())


def table() -> str:
    """Return the answers as a table, Markdown."""
    rows = [f"| {each.when} | `{each.write}` | {each.fewer} | {loss_of(each)} |" for each in reversed(ANSWERS)]
    head = "| optimizer and link | write `strategy=` | fewer bytes than DDP | more loss |"
    return "\n".join([head, "| --- | --- | --- | --- |", *rows])


def picture() -> str:
    """Return the questions and answers as a picture, SVG, light or dark as the reader's page is."""
    parts, top = [], 12
    for number, each in enumerate(ANSWERS):
        if each.question:
            parts.append(_box(LEFT, top, BOX, "question", f"{number + 1}. {each.question}", 17))
            parts.append(_word(LEFT + 34, top + HIGH + 22, each.yes))
            top += HIGH + GAP
            parts.append(_arrow(LEFT + 20, top - GAP, top))
        parts.append(_box(LEFT, top, BOX - 26 * bool(each.question), "answer", each.write, 15))
        top += HIGH + 8
        if each.question:
            other = "no" if each.yes == "yes" else "yes"
            parts += [_word(WIDTH - 66, top + 16, other), _arrow(WIDTH - 28, top - HIGH - GAP - 8, top + GAP - 10)]
            top += GAP - 10
    said = "; ".join(f"{each.question or 'Else'} {each.yes}: {each.write}" for each in ANSWERS)
    style = (
        ".question{fill:#fff;stroke:#3f51b5}.answer{fill:#e8eaf6;stroke:none}text{fill:#222;font-family:sans-serif}"
        ".code{font-family:monospace}path{stroke:#3f51b5;fill:none;stroke-width:2}"
        "@media(prefers-color-scheme:dark){.question{fill:#0d1117;stroke:#9fa8da}.answer{fill:#303650}"
        "text{fill:#e6e6e6}path{stroke:#9fa8da}}"
    )
    size = f'width="{WIDTH}" height="{top + 4}" viewBox="0 0 {WIDTH} {top + 4}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<title>{html.escape(said)}</title>"]
    return "\n".join([*lines, f"<style>{style}</style>", *parts, "</svg>", ""])


def _box(left: int, top: int, width: int, kind: str, text: str, size: int) -> str:
    box = f'<rect class="{kind}" x="{left}" y="{top}" width="{width}" height="{HIGH}" rx="6" stroke-width="2"/>'
    font = ' class="code"' if kind == "answer" else ""
    return f'{box}<text{font} x="{left + 14}" y="{top + 28}" font-size="{size}">{html.escape(text)}</text>'


def _word(left: int, top: int, text: str) -> str:
    return f'<text x="{left}" y="{top}" font-size="15">{text}</text>'


def _arrow(left: int, top: int, end: int) -> str:
    return f'<path d="M{left} {top}V{end - 3}m-5-5 5 6 5-6"/>'
