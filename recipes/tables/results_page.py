"""Tables and plots of what ``recipes.tables.results`` found, from its CSV files alone."""

from __future__ import annotations

import csv
import statistics
import textwrap
from pathlib import Path

from recipes.tables.comparison import Comparison, Run

__all__ = ["write_page"]

HEAD = """# How good are the recipes on public data?

The line under each table says which methods end within the seeds of dense, or better, and which of them sends least.

- In each table all runs have the same number of steps.
- "- dense": the score minus dense's of the same seed, mean over seeds.
- "val. loss": of the last validation, mean over seeds. "Over dense" compares it with dense's of the same seed.
- "bytes a step": what each rank sends. The ratio says how many times as much float32 sends.
- "step, ms": timed on one machine, where sending less gains nothing, and sometimes beside other work.
  [Step time](step-time.md) has networks.
- Add to the commands where the data is (`data.root=...`).

`make results DATA=folder` trains all of these again. It writes this page from the CSV files beside it: do not edit it.
"""


class Line:
    """All seeds of one method.

    Args:
        label: the method.
        rows: its CSV rows, one per seed.
        dense: the first method's row of each seed.
    """

    def __init__(self, label: str, rows: list[dict[str, str]], dense: dict[str, dict[str, str]]) -> None:
        self.label = label
        self.rows = rows
        self.scores = [float(row["score"]) for row in rows]
        self.bytes = statistics.mean(float(row["bytes_per_step"]) for row in rows)
        self.ratio = statistics.mean(float(row["ratio"]) for row in rows)
        self.step_ms = statistics.median(float(row["step_ms"]) for row in rows)
        pairs = [(row, dense[row["seed"]]) for row in rows if row["seed"] in dense]
        self.against = statistics.mean([_of("score", a) - _of("score", b) for a, b in pairs]) if pairs else None
        judged = [(a, b) for a, b in pairs if a["val_loss"] and b["val_loss"]]
        self.losses = [_of("val_loss", row) for row, _ in judged]
        self.loss_against = [100 * (_of("val_loss", a) / _of("val_loss", b) - 1) for a, b in judged]

    def cells(self) -> list[str]:
        """Of a Markdown table's row."""
        scores = ", ".join(f"{score:.2f}" for score in self.scores)
        against = "" if self.against is None else f"{self.against:+.2f}"
        mean = f"{statistics.mean(self.scores):.2f}"
        loss = f"{statistics.mean(self.losses):.4f}" if self.losses else ""
        over = f"{statistics.mean(self.loss_against):+.1f} %" if self.losses else ""
        costs = [f"{self.bytes:,.0f}", f"{self.ratio:.1f} x", f"{self.step_ms:.0f}"]
        return [self.label, scores, mean, against, loss, over, *costs]


def _of(column: str, row: dict[str, str]) -> float:
    return float(row[column])


def lines(out: Path, comparison: Comparison, planned: list[Run]) -> list[Line]:
    """What there is of a comparison, in the table's order; rows of other commands are left out."""
    path = out / f"{comparison.name}.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = {row["command"]: row for row in csv.DictReader(file)}
    by_method: dict[str, list[dict[str, str]]] = {label: [] for label in comparison.methods}
    for run in planned:
        if run.command in rows:
            by_method[run.method].append(rows[run.command])
    dense = {row["seed"]: row for row in by_method[next(iter(comparison.methods))]}
    return [Line(label, found, dense) for label, found in by_method.items() if found]


def section(comparison: Comparison, found: list[Line], planned: list[Run]) -> str:
    """One comparison in Markdown: what was run, its table, its plot."""
    rows = [row for line in found for row in line.rows]
    some = rows[0]
    dates = sorted({row["date"] for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    metric, unit = some["metric"], some["unit"].strip()
    head = [
        "",
        f"{metric}{' ' + unit if unit else ''}, by seed",
        "mean",
        "- dense",
        "val. loss",
        "over dense",
        "bytes a step",
        "ratio",
        "step, ms",
    ]
    table = [head, ["---"] * len(head), *(line.cells() for line in found)]
    missing = len(planned) - len(rows)
    first = next(run for run in planned if run.command == some["command"])
    shared = some["command"].removesuffix(f" seed={first.seed}")
    dense, losses = found[0].scores, found[0].losses
    spread = f"{max(dense) - min(dense):.2f}"
    spread += f", and their validation losses by {100 * (max(losses) / min(losses) - 1):.1f} %" if losses else ""
    said = [
        f"## {comparison.title}",
        wrapped(comparison.note),
        wrapped(
            f"{_seeds(comparison, found)}; {some['ranks']} ranks; {some['steps']} steps; "
            f"{'the higher the better' if some['goal'] == 'maximize' else 'the lower the better'}. {when}; "
            f"{_versions(rows)}."
        ),
        f"{missing} of {len(planned)} runs are still missing." if missing else "",
        f"The seeds of {found[0].label} differ by {spread}: smaller differences say nothing."
        if dense[1:] and found[0].label == next(iter(comparison.methods))
        else "",
        f"    {shared}",
        "and for the other rows, in place of the compressor:" if found[1:] else "",
        "\n".join(f"- {line.label}: `{line.rows[0]['settings']}`" for line in found[1:]),
        "\n".join("| " + " | ".join(cells) + " |" for cells in table),
        f"{point(comparison, found)}{'' if dense[1:] else ' (one seed)'}." if found[1:] else "",
        picture(f"{metric} against bytes", comparison.name) if found[1:] else "",
    ]
    return "\n\n".join(part for part in said if part) + "\n"


def picture(said: str, name: str) -> str:
    """Return a picture, with its dark variant, which ``python -m tools.dark`` writes."""
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{name}_dark.png">'
    return f"<picture>{dark}![{said}]({name}.png)</picture>"


def wrapped(text: str) -> str:
    """Break prose at 100 columns."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _seeds(comparison: Comparison, found: list[Line]) -> str:
    """Of all methods, and further ones of some."""
    by_line = {line.label: [row["seed"] for row in line.rows] for line in found}
    common = [seed for seed in map(str, comparison.seeds) if any(seed in each for each in by_line.values())]
    more: dict[str, list[str]] = {}
    for label, seeds in by_line.items():
        if rest := ", ".join(seed for seed in seeds if seed not in common):
            more.setdefault(rest, []).append(label)
    further = "".join(f", and {seeds} of {' and '.join(labels)}" for seeds, labels in more.items())
    return f"Seed{'s' if common[1:] else ''} {', '.join(common)}{further}"


def _versions(rows: list[dict[str, str]]) -> str:
    """Of all rows; commits of the same release side by side."""
    commits: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        before, _, rest = row["versions"].partition(" (")
        commit, _, after = rest.partition(")")
        commits.setdefault((before, after) if rest else (row["versions"], ""), {})[commit] = None
    return "; ".join(
        f"{before} ({', '.join(found)}){after}" if any(found) else before for (before, after), found in commits.items()
    )


def write_page(out: Path, comparisons: list[tuple[Comparison, list[Run]]]) -> None:
    """Write ``recipes.md``, and a plot for each comparison that has several methods.

    Args:
        out: folder of the CSV files.
        comparisons: each with its planned runs, whose rows alone are shown.
    """
    parts, absent = [HEAD], []
    for comparison, planned in comparisons:
        if found := lines(out, comparison, planned):
            parts.append(section(comparison, found, planned))
            if found[1:]:
                plot(out / f"{comparison.name}.png", comparison, found)
        else:
            absent.append(f"{comparison.title} (`--only {comparison.name}`)")
    if absent:
        parts.append(f"Not run yet: {'; '.join(absent)}.\n")
    (out / "recipes.md").write_text("\n".join(parts))


def plot(path: Path, comparison: Comparison, found: list[Line]) -> None:
    """Score against bytes per step, a point per seed; a PNG."""
    from recipes.tables.drawing import amounts, canvas, caption, legend, save, styles

    some = found[0].rows[0]
    figure, (axes,) = canvas(point(comparison, found), (8.4, 4.2))
    for line, style in zip(found, styles(line.label for line in found).values(), strict=True):
        sizes = [float(row["bytes_per_step"]) for row in line.rows]
        axes.plot(sizes, line.scores, ms=7, lw=1, label=line.label, **style)
    dense = found[0].scores
    axes.axhspan(min(dense), max(dense), color="#eeeeee", zorder=0, label=f"seeds of {found[0].label}")
    axes.set_xscale("log")
    axes.set_xlabel("sent by a rank in a step")
    amounts(axes.xaxis)
    better = "higher" if some["goal"] == "maximize" else "lower"
    axes.set_ylabel(
        f"{some['metric']}{', ' if some['unit'].strip() else ''}{some['unit'].strip()} ({better} is better)"
    )
    caption(axes, comparison.title)
    legend(figure, axes)
    save(figure, path)


def point(comparison: Comparison, found: list[Line]) -> str:
    """What a comparison shows: the method of fewest bytes that is as good as dense, and the worst."""
    dense, *others = found
    sign = 1.0 if dense.rows[0]["goal"] == "maximize" else -1.0
    least = min(sign * score for score in dense.scores)
    good = [line for line in others if statistics.mean(sign * score for score in line.scores) >= least]
    subject = comparison.title.partition(",")[0]
    if not good:
        return f"{subject}: no method is as good as {dense.label}"
    few = max(good, key=lambda line: line.ratio)
    count = "all" if len(good) == len(others) else f"{len(good)} of {len(others)}"
    return f"{subject}: {count} methods are as good as {dense.label}, {few.label} in {few.ratio:.0f} x fewer bytes"
