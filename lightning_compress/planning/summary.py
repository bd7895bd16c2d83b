"""What a run will send, computed before it begins, and the line that says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lightning_compress.codecs import Dense
from lightning_compress.collectives import World
from lightning_compress.collectives.counting import Meter, all_reduce_bytes
from lightning_compress.core.layout import Layout
from lightning_compress.core.registry import name_of
from lightning_compress.exchanges import ExchangePlan, composite
from lightning_compress.exchanges.exchange import META
from lightning_compress.exchanges.message import Section
from lightning_compress.planning.choose import Auto
from lightning_compress.settings.compensation import automatic, saved_name
from lightning_compress.settings.options import Options
from lightning_compress.settings.parsing import COMPRESSORS
from lightning_compress.settings.rules import Shape
from lightning_compress.settings.run_state import RunState

MOST = 1 << 28
"""The maximum number of elements planned at once. No group is larger."""

Parameters = Sequence[tuple[str, torch.nn.Parameter]]
"""Named parameters, in the model's order."""

NONE = "compressor='none' sends gradients as they are"
"""A reason why compression is off."""

_LOGGED = ("compressor", "exchange", "ratio", "summary")
_OF_DRIFT = ("on_drift", "check_drift_every")
_OF_COMPRESSION = ("warmup_steps", "on_nonfinite", *_OF_DRIFT, "min_numel", "rules")


@dataclass(frozen=True)
class RunSummary:
    """What runs, in words.

    Args:
        compressor: its name and main settings; ``none`` if compression is off.
        exchange: the names of the exchanges.
        ratio: bytes that float32 DDP would send over bytes that a rank sends, in the same number of steps, by the
            plans' formulas.
        summary: all of it in one line.
        why: the figures behind a choice, or empty.
        warning: what the user should know, or empty.
    """

    compressor: str = ""
    exchange: str = ""
    ratio: float = 1.0
    summary: str = ""
    why: str = ""
    warning: str = ""

    @property
    def line(self) -> str:
        """The line that rank 0 logs at the start."""
        return f"lightning_compress: {self.summary}{self.why and f' ({self.why})'}"

    def hyperparameters(self) -> dict[str, str | float]:
        """Return the entries for loggers, without measured times, so that equal runs log the same."""
        return {f"lightning_compress/{name}": getattr(self, name) for name in _LOGGED}


def run_summary(
    settings: RunState, parameters: Parameters, world: World, steps: int = 1, unit: str = "rank"
) -> RunSummary:
    """Return the summary of what these settings will send. Collective.

    Args:
        settings: bound to the model, with ``compressor="auto"`` already decided.
        parameters: the trained parameters.
        world: the ranks.
        steps: local steps per round, if this is sent once per round; 1: it is sent in each step.
        unit: what ``world`` consists of.
    """
    found = _summary(settings, parameters, world, steps, unit)
    late = settings.options.delay and world.collective.size > 1
    return dataclasses.replace(found, summary=f"{found.summary}, applied one step later") if late else found


def _summary(settings: RunState, parameters: Parameters, world: World, steps: int, unit: str) -> RunSummary:
    collective, _, _ = world
    why = settings.chosen.why if settings.chosen else ""
    chosen = f"auto chose float32, because {settings.chosen.reason}" if settings.chosen else NONE
    if collective.size == 1:
        idle = ", ".join(_set(settings.options, ["on_nonfinite", "delay"]))
        works = "; what clips or corrects gradients still works" if settings.works_alone else ""
        return _off(f"there is one {unit}{works}", warning=idle and f"{idle} has no effect on one {unit}")
    if settings.plain:
        if settings.chosen:
            idle = ", ".join(_set(settings.options, _OF_DRIFT))
            return _off(chosen, why, idle and f"{chosen}: {idle} has no effect without compression")
        idle = ", ".join(_idle(settings))
        return _off(NONE, warning=f"{NONE}, and {idle} has no effect; leave it out" if idle else "")
    plans = list(_plans(settings, parameters, world))
    coarse = [(each, plan) for sections, plan in plans for each in sections if not isinstance(each.method, Dense)]
    if not coarse:
        small = f"no parameter has {settings.rules.min_numel} elements and two dimensions, or rules keep all in float32"
        return _off(chosen if isinstance(settings.method, Dense) else small, why)
    if all(plan.is_dense(each.span) for each, plan in coarse):
        return _off(f"exchange='auto' falls back to {coarse[0][1].description}", why)
    return _on(settings, [plan for _, plan in plans], parameters, collective.size, why, steps)


def _off(reason: str, why: str = "", warning: str = "") -> RunSummary:
    return RunSummary("none", "all_reduce", 1.0, f"compression is off: {reason}", why, warning)


def _idle(settings: RunState) -> Iterator[str]:
    """Yield compression settings that have no effect, because there is no compression.

    This is a warning and not an error, because a sweep over compressors, ``none`` among them, passes the same settings
    to all.
    """
    if not isinstance(settings.exchange, Auto):
        yield f"exchange={settings.exchange}"
    feedback = settings.options.error_feedback
    if feedback.way not in (None, "none") or feedback.residual_settings:
        yield f"error_feedback={feedback}"
    yield from _set(settings.options, _OF_COMPRESSION)


def _set(options: Options, names: Sequence[str]) -> Iterator[str]:
    """Yield those settings that differ from their defaults, with their values."""
    for name in names:
        if (value := getattr(options, name)) != getattr(_USUAL, name) and (value or name != "warmup_steps"):
            yield f"{name}={[*map(str, value)] if isinstance(value, tuple) else value}"


def _on(
    settings: RunState, plans: Sequence[ExchangePlan], parameters: Parameters, ranks: int, why: str, steps: int
) -> RunSummary:
    """Return the summary of a run with compression.

    If some bytes stay within a node, only those that leave it count.
    """
    inner = sum(plan.cost.inner_bytes for plan in plans)
    sent = sum(plan.cost.bytes_sent for plan in plans) - inner
    dense = all_reduce_bytes(sum(parameter.nbytes for _, parameter in parameters), ranks)
    name = label(settings.compressor)
    rules = len(settings.rules.rules)
    name += f" and {rules} rule{'s' * (rules > 1)}" if rules else ""
    way = ", ".join(dict.fromkeys(plan.description for plan in plans))
    way = way.replace("reducer", "exchanges of its own")
    ratio = dense / max(1, sent)
    less = f"{_number(ratio)} x fewer bytes" if ratio >= 1 else f"{_number(1 / ratio)} x as many bytes as float32"
    less += " between nodes" if inner else ""
    unit = "round" if steps > 1 else "step"
    if steps > 1:
        less += f" a round than float32, {_number(steps * ratio)} x fewer than DDP in its {steps} steps"
    later = f", after {settings.dense_steps} dense {unit}s" if settings.dense_steps else ""
    changing = sorted({setting for setting, _ in settings.options.schedule.courses})
    later += f", {' and '.join(changing)} by schedule" if changing else ""
    warning = "".join(
        f"The rule {each} has no effect: its parameters have one dimension or fewer than "
        f"min_numel={settings.rules.min_numel} elements, and stay float32. "
        for each in settings.rules.idle([(name, tuple(each.shape)) for name, each in parameters])
    )
    if not settings.error_feedback and settings.options.error_feedback.residual_settings:
        idle = f"error_feedback={settings.options.error_feedback}"
        warning += f"{name} keeps no residual here, so {idle} has no effect; leave it out. "
    if ratio < 1:
        warning += (
            f"{name} by {way} sends {sent:,} bytes per rank and {unit}, more than float32 ({dense:,}). To send less, "
            "use a coarser setting, compressor='auto' (float32 where that is faster), or exchange={'name': "
            "'auto', 'fallback': 'dense'}"
        )
    return RunSummary(
        name, way, steps * ratio, f"{name} by {way}, {less}{_compensation(settings)}{later}", why, warning
    )


def _compensation(settings: RunState) -> str:
    """Return a note on error feedback, unless it is what the method uses with an unknown optimizer."""
    way = settings.compensation(settings.method)
    estimated = settings.correction is not None and settings.correction.replaces_residual
    if estimated or way == automatic(settings.method, None):
        return ""
    note = f", error_feedback {way if isinstance(way, str) else label(way)}"
    if settings.options.error_feedback.way is not None:
        return note
    before = saved_name(settings.method) in dict(settings.decided)
    return f"{note} as the run began" if before else f"{note} since the optimizer is {settings.optimizer}"


def label(compressor: object) -> str:
    """Return a compressor's name, its first setting if that is a number, and the settings that differ from defaults."""
    kind = type(compressor)
    name = name_of(kind, COMPRESSORS) or str(getattr(kind, "name", kind.__name__))
    fields = dataclasses.fields(compressor) if dataclasses.is_dataclass(compressor) else ()
    shown = []
    for number, field in enumerate(fields):
        value = getattr(compressor, field.name)
        main = number == 0 and isinstance(value, int | float) and not isinstance(value, bool)
        if main or value != field.default:
            shown.append(f"{field.name} {value}")
    return f"{name} ({', '.join(shown)})" if shown else name


def _number(ratio: float) -> str:
    return f"{ratio:.2g}" if ratio < 99.5 else f"{ratio:.0f}"


_USUAL = Options.of("none")


def parts(parameters: Parameters) -> Iterator[list[tuple[str, Shape]]]:
    """Yield names and shapes, in parts that can be planned at once."""
    part: list[tuple[str, Shape]] = []
    numel = 0
    for name, parameter in parameters:
        if part and numel + parameter.numel() > MOST:
            yield part
            part, numel = [], 0
        part.append((name, tuple(parameter.shape)))
        numel += parameter.numel()
    yield part


def _plans(
    settings: RunState, parameters: Parameters, world: World
) -> Iterator[tuple[Sequence[Section], ExchangePlan]]:
    """Yield each group's sections and plan, without allocating memory if planning allows that."""
    exchange = settings.exchange
    dry = world if exchange.plans_collectively else World(world.collective, META, Meter(META))
    for part in parts(parameters):
        sections = [settings.fed(section) for section in settings.rules.sections(part)[1]]
        messages = composite.codec_sections(sections)
        if messages and isinstance(exchange, Auto):
            exchange.measure(messages, world)
        yield sections, composite.plan_with_states(sections, exchange, Layout.of(part), dry)[0]
