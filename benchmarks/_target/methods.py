"""The methods that race, as data: what trains them, and which step time each phase of a run is charged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks._local import AVERAGE, LOCAL, ROTATED
from benchmarks._target.tasks import Task
from lightning_compress.periodic.sync_schedule import Rounds

Run = dict[str, Any]
"""``by``, the module that builds it, and its ``settings``."""
FREE, DENSE = "no communication", "DDP 25 MB"
DDP = "DDP"
"""The run of all caps: they average the same numbers."""
AUTO = "auto"
OF_AUTO = {
    "none": DDP,
    "bf16": "our bf16",
    "qsgd (bits 8)": "qsgd 8",
    "qsgd (bits 4)": "qsgd 4",
    "qsgd (bits 4, coding entropy)": "qsgd 4",
}
"""Whose training ``auto`` repeats, by the name of what it chose for a link."""
NEAR_LOSSLESS = ("DDP 1 MB", DENSE, "our bf16", "qsgd 8", "qsgd 4", "rotated 8", "rotated 4")
"""What ``auto`` is compared with: what a user could have named in its place."""
CAPS, POWERS, ACCUMULATED, POST_LOCAL = (1, 5, 25, 100), (1, 4, 32), (2, 4, 8), (8, 16)
HOOKS = ("fp16 hook", "bf16 hook", *(f"PowerSGD hook {rank}" for rank in POWERS))
"""What PyTorch ships that makes messages smaller."""
FOREVER = 1 << 30


@dataclass(frozen=True)
class Method:
    """A line of the map.

    Args:
        name: for people.
        side: "theirs", what ships elsewhere, or "ours".
        run: the name of its training run.
        phases: pairs of the first batch of a phase, from 0 on, and the row of step times that it is charged.
    """

    name: str
    side: str
    run: str
    phases: tuple[tuple[int, str], ...]


def _shipped(**settings: Any) -> Run:
    return {"by": "shipped", "settings": settings}


def _ours(compressor: Any, **settings: Any) -> Run:
    return {"by": "ours", "settings": {"compressor": compressor, **settings}}


def _onebit(warm: int) -> Run:
    exchange = {"name": "two_shot", "sums": {"name": "rotated", "bits": 3}}
    return _ours("onebit", exchange=exchange, error_feedback="loco", warmup_steps=warm)


def _topk(density: float, **more: Any) -> Run:
    return _ours({"name": "topk", "density": density}, **more)


ALIKE: dict[str, Run] = {
    "fp16 hook": _shipped(hook="fp16"),
    "bf16 hook": _shipped(hook="bf16"),
    **{f"accumulation {every}, fp16": _shipped(hook="fp16", every=every) for every in ACCUMULATED},
    "plain DiLoCo 30": {"by": "ours", "settings": LOCAL["diloco 30"]},
    "our bf16": _ours("bf16"),
    **{f"qsgd {bits}": _ours({"name": "qsgd", "bits": bits}) for bits in (8, 4)},
    **{f"rotated {bits}": _ours({"name": "rotated", "bits": bits}) for bits in (8, 4, 3)},
    "powersgd 4": _ours({"name": "powersgd", "rank": 4}),
    "local SGD 8, rotated 4": {"by": "ours", "settings": {"rounds": Rounds(8), **AVERAGE, "compressor": ROTATED}},
    "DiLoCo 30, rotated 4": {"by": "ours", "settings": LOCAL["diloco 30 rotated 4"]},
    "sparseloco 30": {"by": "ours", "settings": LOCAL["sparseloco 30"]},
}
"""Methods that go on as they begin, so that what is trained is also what is timed."""
FACTORS: dict[str, Run] = {
    "sufficient factors": {"by": "factors", "settings": {"method": "factors"}},
    "sufficient factors, bf16": {"by": "factors", "settings": {"method": "factors bf16"}},
}
"""Methods for linear layers: a task has them if it names them."""


def runs(task: Task) -> dict[str, Run]:
    """Return what is trained for a task's lines, the most important first."""
    tenth, few, fifth = task.budget // 10, task.budget // 50, task.budget // 5
    steps = {0: 0.25, fifth: 0.0625, 2 * fifth: 0.01}
    found = {
        DDP: _shipped(),
        "local SGD 8, rotated 4": ALIKE["local SGD 8, rotated 4"],
        **{f"post-local SGD {every}": _shipped(local=every, start=tenth) for every in POST_LOCAL},
        "fp16 hook": ALIKE["fp16 hook"],
        "rotated 4": ALIKE["rotated 4"],
        **{f"PowerSGD hook {rank}": _shipped(power=rank, start=tenth) for rank in POWERS},
        "onebit": _onebit(few),
        "our bf16": ALIKE["our bf16"],
    }
    found |= ALIKE | {
        "onebit_adam": _ours("onebit_adam", warmup_steps=fifth),
        "topk 1 %": _topk(0.01, schedule={"density": steps}),
    }
    if not task.lines:
        return found
    return {name: run for name, run in (found | FACTORS).items() if name in task.lines or name == DDP}


def rows() -> dict[str, Run]:
    """Return what is timed: every phase of every method, as if it lasted for ever."""
    return {
        FREE: _shipped(hook="nothing"),
        **{f"DDP {cap} MB": _shipped(cap=cap) for cap in CAPS},
        **ALIKE,
        **{f"PowerSGD hook {rank}": _shipped(power=rank, start=2) for rank in POWERS},
        **{f"post-local SGD {every}": _shipped(local=every, start=0) for every in POST_LOCAL},
        "onebit": _onebit(0),
        "onebit, warm-up": _onebit(FOREVER),
        "onebit_adam": _ours("onebit_adam", warmup_steps=1),
        "onebit_adam, warm-up": _ours("onebit_adam", warmup_steps=FOREVER),
        **{f"topk {100 * density:g} %": _topk(density) for density in (0.25, 0.0625, 0.01)},
        AUTO: _ours("auto", exchange="auto"),
        **FACTORS,
    }


def rows_of(task: Task) -> dict[str, Run]:
    """Return those of ``rows`` that a task's lines are charged, and computing alone."""
    charged = {row for method in methods(task) for _, row in method.phases}
    charged |= {FREE} if task.lines else {FREE, AUTO}
    return {name: run for name, run in rows().items() if name in charged}


def methods(task: Task) -> list[Method]:
    """Return a task's lines of the map but for ``auto``, whose run depends on the link."""
    tenth, few, fifth = task.budget // 10, task.budget // 50, task.budget // 5
    phases = {
        **{f"PowerSGD hook {rank}": ((0, DENSE), (tenth, f"PowerSGD hook {rank}")) for rank in POWERS},
        **{f"post-local SGD {every}": ((0, DENSE), (tenth, f"post-local SGD {every}")) for every in POST_LOCAL},
        "onebit": ((0, "onebit, warm-up"), (few, "onebit")),
        "onebit_adam": ((0, "onebit_adam, warm-up"), (fifth, "onebit_adam")),
        "topk 1 %": ((0, "topk 25 %"), (fifth, "topk 6.25 %"), (2 * fifth, "topk 1 %")),
    }
    found = [Method(f"DDP {cap} MB", "theirs", DDP, ((0, f"DDP {cap} MB"),)) for cap in CAPS]
    for name, run in runs(task).items():
        if name != DDP:
            # DiLoCo without compression ships elsewhere, and is run by our code for want of theirs in PyTorch
            side = "theirs" if run["by"] == "shipped" or name == "plain DiLoCo 30" else "ours"
            found.append(Method(name, side, name, phases.get(name, ((0, name),))))
    return [method for method in found if not task.lines or method.name in task.lines]


def auto_method(chosen: str) -> Method:
    """Return the line of ``auto`` on a link.

    Args:
        chosen: what it said to have taken there.

    Raises:
        ValueError: none of its candidates has this name.
    """
    if chosen not in OF_AUTO:
        raise ValueError(f"auto chose {chosen!r}, which is none of {', '.join(OF_AUTO)}")
    return Method(AUTO, "ours", OF_AUTO[chosen], ((0, AUTO),))
