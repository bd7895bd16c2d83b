"""The file of results, and what follows from it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from benchmarks._optimizers.stages import LIMITS, SETTINGS, STAGES, Stage

Row = dict[str, str]


def over_dense(rows: Sequence[Row], stage: str) -> dict[str, list[float]]:
    """Held-out loss over that of dense averaging with the same seed, by setting."""
    mine = [row for row in rows if row["stage"] == stage]
    dense = {row["seed"]: float(row["held_out"]) for row in mine if row["setting"] == "dense"}
    found: dict[str, list[float]] = {}
    for row in mine:
        if row["seed"] in dense:
            found.setdefault(row["setting"], []).append(float(row["held_out"]) / dense[row["seed"]])
    return found


def bits(rows: Sequence[Row], stage: str, setting: str, field: str = "bits") -> float:
    """Bits an element and step, of the first run."""
    return next(float(row[field]) for row in rows if (row["stage"], row["setting"]) == (stage, setting))


def chosen(rows: Sequence[Row], stage: Stage) -> list[str]:
    """The settings of a stage: dense, and those that were best in the one before, some of them within each limit."""
    if stage.best is None:
        return list(SETTINGS)
    losses = over_dense(rows, stage.after)
    order = sorted((name for name in losses if name != "dense"), key=lambda name: statistics.mean(losses[name]))
    within = [[name for name in order if bits(rows, stage.after, name) <= limit] for limit in (32.0, *LIMITS)]
    taken = list(dict.fromkeys(each[place] for place in range(len(order)) for each in within if place < len(each)))
    return ["dense", *taken[: stage.best]]


def pareto(points: dict[str, tuple[float, float]]) -> set[str]:
    """Those (bits, loss) than which no other one has less of both."""
    return {
        name
        for name, (x, y) in points.items()
        if not any((a, b) != (x, y) and a <= x and b <= y for a, b in points.values())
    }


def table(rows: Sequence[Row], stage: str) -> Table:
    """Of a stage, from few bits to many; those of the Pareto front have a star."""
    losses, title = over_dense(rows, stage), f"{stage}: {STAGES[stage].title}"
    shown = Table("setting", "message", "bits", "of the run", "/ dense, by seed", "mean", "", title=title)
    points = {name: (bits(rows, stage, name), statistics.mean(each)) for name, each in losses.items()}
    front = pareto(points)
    for name, (few, mean) in sorted(points.items(), key=lambda item: item[1]):
        seeds = " ".join(f"{each:.3f}" for each in losses[name])
        whole = bits(rows, stage, name, "run_bits")
        message = bits(rows, stage, name, "message_bits")
        shown.add_row(name, f"{message:.2f}", f"{few:.2f}", f"{whole:.2f}", seeds, f"{mean:.3f}", "*" * (name in front))
    return shown


def markdown(rows: Sequence[Row]) -> str:
    """All stages side by side, from few bits to many: percent of loss over dense, by seed."""
    losses = {stage: found for stage in STAGES if (found := over_dense(rows, stage))}
    first = {name: stage for stage in reversed(losses) for name in losses[stage] if name != "dense"}
    heads = ["", "bits of a message", "on the wire", *(f"{STAGES[stage].title}, %" for stage in losses)]
    lines = [heads, ["---"] * len(heads)]
    for name in sorted(first, key=lambda name: bits(rows, first[name], name)):
        message, wire = (bits(rows, first[name], name, field) for field in ("message_bits", "bits"))
        cells = [", ".join(f"{100 * (each - 1):+.1f}" for each in found.get(name, [])) for found in losses.values()]
        lines.append([name, "" if message == 32 else f"{message:.2f}", f"{wire:.2f}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def picture(rows: Sequence[Row], stage: str, path: Path) -> None:
    """Loss over dense against bits, a colour for each method; those of the Pareto front have a number and a name.

    What is within 0.1 % of dense, or better, is drawn there.
    """
    from recipes.tables.drawing import canvas, caption, legend, number, plain, save, styles

    losses = {name: each for name, each in over_dense(rows, stage).items() if name != "dense"}
    points = {
        name: (bits(rows, stage, name), max(100 * (statistics.mean(each) - 1), 0.1)) for name, each in losses.items()
    }
    front = sorted(pareto(points), key=lambda name: points[name])
    methods: dict[str, list[tuple[float, float]]] = {}
    for name, point in points.items():
        methods.setdefault(name.split()[0].rstrip(","), []).append(point)
    some = dict.fromkeys((front[0], front[len(front) // 2], front[-1]))
    title = f"Least loss for their bits: {'; '.join(f'{name} at {points[name][0]:.2g} bits' for name in some)}"
    figure, (axes,) = canvas(title, (9.6, 6.0))
    for method, style in styles(methods).items():
        axes.plot(*zip(*methods[method], strict=True), ls="", label=method, **style)
    axes.plot(*zip(*(points[name] for name in front), strict=True), color="black", lw=0.8, zorder=0)
    for place, name in enumerate(front, 1):
        axes.plot([], [], ls="", label=f"{place}  {name}")
    axes.set(xscale="log", yscale="log")
    caption(axes, STAGES[stage].title)
    axes.set(xlabel="bits per element and step, as of an all-reduce", ylabel="held-out loss above that of dense")
    plain(axes.xaxis, (0.25, 0.5, 1, 2, 4, 8))
    plain(axes.yaxis, (0.1, 0.3, 1, 3, 10, 30, 100), " %")
    legend(figure, axes)
    number(axes, [points[name] for name in front], points.values())
    save(figure, path)
