"""What makes up for what a method does not send, by method and optimizer: measured, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch

from lightning_compress.codecs import Method
from lightning_compress.core.registry import build, describe
from lightning_compress.corrections import Correction
from lightning_compress.corrections.loco import LoCo
from lightning_compress.settings import validators

Compensation = Literal["none", "classical"] | LoCo
Optimizer = Literal["adam", "sgd"]


@dataclass(frozen=True)
class Residual:
    """What was not sent is kept in full, and added to the next gradient.

    Args:
        decay: what it is multiplied by before it is added, in [0, 1]; 1 keeps it, 0 discards it.
        follows_lr: when an optimizer's learning rate changes from a to b, multiply it by a / b.
        dtype: in which it is kept, "float32" or "bfloat16", which is rounded at random.

    Raises:
        ValueError: a value is none of these.
    """

    decay: float = 1.0
    follows_lr: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        validators.share("error_feedback: decay", self.decay)
        validators.truth("error_feedback: follows_lr", self.follows_lr)
        for dtype in (torch.float32, torch.bfloat16):
            if self.dtype in (dtype, str(dtype).removeprefix("torch.")):
                object.__setattr__(self, "dtype", dtype)  # frozen; equal settings are equal, however they were given
                return
        raise ValueError(f"error_feedback: dtype={self.dtype!r} must be 'float32' or 'bfloat16'")


@dataclass(frozen=True)
class Feedback:
    """What ``error_feedback=`` says.

    Args:
        way: for all methods; None: it follows from the method and the optimizer.
        asks: the latter was asked for by name, and needs an optimizer.
        residual: what one is like, where it is kept.
    """

    way: Compensation | None = None
    asks: bool = False
    residual: Residual = Residual()

    @property
    def shapes(self) -> dict[str, object]:
        """What was said about the residual, which is wanted then."""
        usual = vars(Residual())
        return {name: value for name, value in vars(self.residual).items() if value != usual[name]}

    def __str__(self) -> str:
        return str(self.shapes or self.way)


BY_METHOD = Feedback()
"""Where the user said nothing."""
_NAMES: dict[str, type] = {"loco": LoCo, "residual": Residual}

KINDS: dict[str, Optimizer] = {"Adam": "adam", "SGD": "sgd"}
"""Optimizers of which something was measured, by a part of the name of their class or of one that it is derived from:
``AdamW``, ``PagedAdam8bit``, a subclass of either."""


@dataclass(frozen=True)
class Row:
    """What a method does best with, with one kind of optimizer.

    Args:
        method: its name.
        optimizer: the kind.
        compensation: what "auto" takes.
        measured: what that rests on: held-out loss over dense.
    """

    method: str
    optimizer: Optimizer
    compensation: Compensation
    measured: str


TABLE = (
    Row(
        "onebit",
        "adam",
        LoCo(),
        "character LSTM, AdamW, 4 ranks, 1500 steps, gathered 1.024, after 30 dense steps (warmup_steps) 1.009, by "
        "two_shot with sums in 3 bits 1.010, both 1.006; none, gathered, 1.056; classical, 300 steps, 1.274",
    ),
    Row(
        "efsign",
        "adam",
        "none",
        "character LSTM, AdamW, 4 ranks, gathered, 1500 steps, 1.016; LoCo 1.025; classical, 300 steps, 1.298",
    ),
    Row(
        "onebit",
        "sgd",
        LoCo(),
        "character LSTM, SGD with momentum 0.9, 4 ranks, by two_shot with sums in 4 bits, 1500 steps, 1.010; classical "
        "1.074; gathered, 300 steps, 1.034; none 1.059; classical 1.202",
    ),
    Row(
        "efsign",
        "sgd",
        LoCo(),
        "character LSTM, SGD with momentum 0.9, 4 ranks, gathered, 300 steps, 1.033; none 1.060; classical 1.200",
    ),
)
"""Where "auto" differs from classical error feedback for methods that are biased, and none for the others."""


ESTIMATES = "character LSTM, AdamW, 4 ranks, 300 steps, onebit, 1.217 with eta 0.5 and 1.457 with eta 0.1"
"""What was measured where estimates take the place of a residual (``ef21``)."""


def kind_of(optimizers: Iterable[object]) -> Optimizer | None:
    """The kind of all of them; "adam" if one is; None where nothing was measured."""
    kinds = {_kind(each) for each in optimizers}
    return "adam" if "adam" in kinds else kinds.pop() if len(kinds) == 1 else None


def _kind(optimizer: object) -> Optimizer | None:
    names = [each.__name__ for each in type(optimizer).__mro__]
    return next((kind for name in names for part, kind in KINDS.items() if part in name), None)


def automatic(method: Method, optimizer: Optimizer | None) -> Compensation:
    """What ``error_feedback="auto"`` takes for a method."""
    if row := _measured(method, optimizer):
        return row.compensation
    return "classical" if method.contractive else "none"


def _measured(method: Method, optimizer: Optimizer | None) -> Row | None:
    name = getattr(method, "name", type(method).__name__)
    return next((row for row in TABLE if (row.method, row.optimizer) == (name, optimizer)), None)


def beside_adam(method: Method, way: Compensation, correction: Correction | None = None) -> str:
    """What becomes of a coarse method's errors beside Adam, and what was measured: sentences for a warning."""
    if correction and correction.replaces_residual:
        return f"Estimates go after what is not sent, which arrives late. Loss over dense: {ESTIMATES}."
    if isinstance(way, LoCo):
        said = f"A slow average of what is not sent is fed back ({way}), which makes up for a part of that"
    elif way == "classical":
        said = "What is not sent is added to the next gradient in full (error feedback), which Adam takes for variance"
    else:
        said = "What is not sent is lost (no error feedback)"
    row = _measured(method, "adam")
    if row is None:
        ways = "true and false" if correction else "true, false and 'loco'"  # which is refused beside a correction
        return f"{said}; error_feedback={ways} can be tried, none is measured to be best here."
    other = "" if way == row.compensation else f"; error_feedback='auto' takes {row.compensation}"
    return f"{said}{other}. Loss over dense: {row.measured}."


def name_of(method: Method) -> str:
    """By which a checkpoint knows a method."""
    return type(method).__name__


def described(compensation: Compensation) -> object:
    """As primitives."""
    return describe(compensation, _NAMES) if isinstance(compensation, LoCo) else compensation


def decided_before(running: Mapping[str, object], methods: Iterable[Method]) -> tuple[tuple[str, Compensation], ...]:
    """What an earlier run did, by method.

    Raises:
        ValueError: the state says something else.
    """
    before = running.get("compensations")
    if before is None:  # of a version that did not look at the optimizer
        return tuple((name_of(each), automatic(each, None)) for each in methods)
    if not isinstance(before, Mapping):
        raise ValueError(f"the state has no mapping of compensations, but {type(before).__name__}")
    return tuple((str(name), _restored(each)) for name, each in before.items())


def _restored(given: object) -> Compensation:
    if given == "none" or given == "classical":
        return given
    built = build("compensation", given, _NAMES, (LoCo,))
    assert isinstance(built, LoCo)
    return built


def read_feedback(name: str, given: object) -> Feedback:
    """What the user wrote.

    Raises:
        ValueError: it is nothing of the kind.
    """
    if isinstance(given, Feedback):
        return given
    if given is None or given == "auto":
        return Feedback(asks=given is not None)
    if isinstance(given, bool):
        return Feedback("classical" if given else "none")
    if isinstance(given, Mapping) and "name" not in given:
        built = build(name, {"name": "residual", **given}, _NAMES, ())
        assert isinstance(built, Residual)
        return Feedback(residual=built)
    if isinstance(given, Mapping | LoCo | Residual) or given in _NAMES:
        built = build(name, given, _NAMES, (LoCo, Residual))
        return Feedback("classical", residual=built) if isinstance(built, Residual) else Feedback(cast(LoCo, built))
    raise ValueError(
        f"{name}={given!r} must be true, false, 'loco', 'residual', a mapping with settings of either, such as "
        "{decay: 0.95} or {name: loco, beta: 0.05}, 'auto', or null (auto where the optimizer is known, else on for "
        "methods that need it)"
    )


def check_feedback(feedback: Feedback, given: object, correction: Correction | None) -> None:
    """Refuse ways that do not go together.

    Args:
        feedback: what the user chose for errors.
        given: the compressor.
        correction: its own, if it has one.

    Raises:
        ValueError: they do not.
    """
    if correction and correction.replaces_residual and (feedback.way not in (None, "none") or feedback.shapes):
        raise ValueError(f"error_feedback={feedback}: {given} keeps no residual, but estimates; leave it out")
    if isinstance(feedback.way, LoCo) and correction:
        raise ValueError(f"error_feedback={feedback}: {given} counts on a residual; set it to null")
