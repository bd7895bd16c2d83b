"""What a run will send, before it begins, and the line that says it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lightning_compress.codecs import Dense
from lightning_compress.collectives import World
from lightning_compress.collectives.counting import Meter, all_reduce_bytes
from lightning_compress.core.layout import Layout
from lightning_compress.core.registry import name_of as registered_name
from lightning_compress.exchanges import ExchangePlan, composite
from lightning_compress.exchanges.exchange import META
from lightning_compress.exchanges.message import Section
from lightning_compress.planning.choose import Auto
from lightning_compress.settings.compensation import automatic, name_of
from lightning_compress.settings.options import Options
from lightning_compress.settings.parsing import COMPRESSORS
from lightning_compress.settings.rules import Shape
from lightning_compress.settings.run_state import RunState

MOST = 1 << 28
"""Elements that are planned at once: no group is larger."""

Parameters = Sequence[tuple[str, torch.nn.Parameter]]
"""By name, in the model's order."""

AUTO = "auto chose float32, because this link is as fast as the compressor"
NONE = "compressor='none' sends gradients as they are"
"""Why compression is off."""

_OF_DRIFT = ("on_drift", "check_drift_every")
_OF_COMPRESSION = ("warmup_steps", "on_nonfinite", *_OF_DRIFT, "min_numel", "rules")


@dataclass(frozen=True)
class Forecast:
    """What runs, in words.

    Args:
        compressor: its name and main settings; ``none`` where compression is off.
        exchange: the pattern in which messages travel.
        ratio: how many times fewer bytes than DDP in float32 a rank sends in as many steps, by the plans' formulas.
        summary: all of it in a line.
        why: the figures behind a choice; or an empty text.
        warning: what the user should know; or an empty text.
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
        """For loggers; no measured times, so that equal runs log alike."""
        return {
            "lightning_compress/compressor": self.compressor,
            "lightning_compress/exchange": self.exchange,
            "lightning_compress/ratio": self.ratio,
            "lightning_compress/summary": self.summary,
        }


def forecast(settings: RunState, parameters: Parameters, world: World, steps: int = 1) -> Forecast:
    """What these settings will send; a collective call.

    Args:
        settings: bound to the model, and decided.
        parameters: that are trained.
        world: the ranks.
        steps: in a round of local steps, in which this is sent once; 1: it is sent in each step.
    """
    collective, _, _ = world
    why = settings.chosen.why if settings.chosen else ""
    if collective.size == 1:
        idle = ", ".join(_set(settings.options, ["on_nonfinite"]))
        return _off("there is one rank", warning=idle and f"{idle} has no effect on one rank")
    if settings.plain:
        if settings.chosen:
            idle = ", ".join(_set(settings.options, _OF_DRIFT))
            return _off(AUTO, why, idle and f"{AUTO}: {idle} has no effect without compression")
        idle = ", ".join(_idle(settings))
        return _off(NONE, warning=f"{NONE}, and {idle} has no effect; leave it out" if idle else "")
    plans = [(sections, _plan(settings, made, sections, world)) for made, sections in _sections(settings, parameters)]
    coarse = [(each, plan) for sections, plan in plans for each in sections if not isinstance(each.method, Dense)]
    if not coarse:
        small = f"no parameter has {settings.rules.min_numel} elements and two dimensions, or rules keep all of it"
        chosen = AUTO if settings.chosen else NONE
        return _off(chosen if isinstance(settings.method, Dense) else small, why)
    if all(plan.is_dense(each.span) for each, plan in coarse):
        return _off(f"exchange='auto' falls back to {coarse[0][1].description}", why)
    return _on(settings, [plan for _, plan in plans], parameters, collective.size, why, steps)


def _off(reason: str, why: str = "", warning: str = "") -> Forecast:
    return Forecast("none", "all_reduce", 1.0, f"compression is off: {reason}", why, warning)


def _idle(settings: RunState) -> Iterator[str]:
    """What was set of compression where there is none.

    A warning and no error: a sweep over compressors, ``none`` among them, gives all the same settings.
    """
    if not isinstance(settings.exchange, Auto):
        yield f"exchange={settings.exchange}"
    feedback = settings.options.error_feedback
    if feedback.way not in (None, "none") or feedback.residual_settings:
        yield f"error_feedback={feedback}"
    yield from _set(settings.options, _OF_COMPRESSION)


def _set(options: Options, names: Sequence[str]) -> Iterator[str]:
    """Those that are not as usual, with their values."""
    for name in names:
        if (value := getattr(options, name)) != getattr(_USUAL, name) and (value or name != "warmup_steps"):
            yield f"{name}={[*map(str, value)] if isinstance(value, tuple) else value}"


def _on(
    settings: RunState, plans: Sequence[ExchangePlan], parameters: Parameters, ranks: int, why: str, steps: int
) -> Forecast:
    """Compression is on; where some of the bytes stay within a node, those that leave it count."""
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
    warning = "".join(
        f"The rule {each} has no effect: what it takes has one dimension or fewer than "
        f"min_numel={settings.rules.min_numel} elements, and stays float32. "
        for each in settings.rules.idle([(name, tuple(each.shape)) for name, each in parameters])
    )
    if not settings.error_feedback and settings.options.error_feedback.residual_settings:
        idle = f"error_feedback={settings.options.error_feedback}"
        warning += f"{name} keeps no residual here, so {idle} has no effect; leave it out. "
    if ratio < 1:
        warning += (
            f"{name} by {way} sends {sent:,} bytes a rank and {unit}, where float32 would send {dense:,}. What is "
            "named runs all the same: name a coarser setting, or compressor='auto', which takes float32 where that is "
            "faster, or exchange={'name': 'auto', 'fallback': 'dense'}"
        )
    return Forecast(name, way, steps * ratio, f"{name} by {way}, {less}{_compensation(settings)}{later}", why, warning)


def _compensation(settings: RunState) -> str:
    """What makes up for errors, where the optimizer decides, or in another way than in full."""
    way = settings.compensation(settings.method)
    estimated = settings.correction is not None and settings.correction.replaces_residual
    if estimated or way == automatic(settings.method, None):
        return ""
    said = f", error_feedback {way if isinstance(way, str) else label(way)}"
    if settings.options.error_feedback.way is not None:
        return said
    before = name_of(settings.method) in dict(settings.decided)
    return f"{said} as the run began" if before else f"{said} since the optimizer is {settings.optimizer}"


def label(compressor: object) -> str:
    """Its name, its first setting where that is a number, and those that are not the defaults."""
    kind = type(compressor)
    name = registered_name(kind, COMPRESSORS) or str(getattr(kind, "name", kind.__name__))
    fields = dataclasses.fields(compressor) if dataclasses.is_dataclass(compressor) else ()
    said = []
    for number, field in enumerate(fields):
        value = getattr(compressor, field.name)
        main = number == 0 and isinstance(value, int | float) and not isinstance(value, bool)
        if main or value != field.default:
            said.append(f"{field.name} {value}")
    return f"{name} ({', '.join(said)})" if said else name


def _number(ratio: float) -> str:
    return f"{ratio:.2g}" if ratio < 99.5 else f"{ratio:.0f}"


_USUAL = Options.of("none")


def parts(parameters: Parameters) -> Iterator[list[tuple[str, Shape]]]:
    """Names and shapes, in parts that can be planned at once."""
    part: list[tuple[str, Shape]] = []
    numel = 0
    for name, parameter in parameters:
        if part and numel + parameter.numel() > MOST:
            yield part
            part, numel = [], 0
        part.append((name, tuple(parameter.shape)))
        numel += parameter.numel()
    yield part


def _sections(settings: RunState, parameters: Parameters) -> Iterator[tuple[Layout, Sequence[Section]]]:
    for part in parts(parameters):
        _, sections = settings.rules.sections(part)
        yield Layout.of(part), [settings.fed(each) for each in sections]


def _plan(settings: RunState, layout: Layout, sections: Sequence[Section], world: World) -> ExchangePlan:
    """What a group of them will be, without its memory."""
    exchange, messages = settings.exchange, composite.encoded(sections)
    if messages and isinstance(exchange, Auto):
        exchange.measure(messages, world)
    dry = world if exchange.talks else World(world.collective, META, Meter(META))
    return composite.plan_alone(sections, exchange, layout, dry)[0]
