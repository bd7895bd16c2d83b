"""Choose the error feedback for a method and an optimizer, from a table of measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from lightning_compress.codecs import Method
from lightning_compress.core.registry import build, describe
from lightning_compress.corrections.loco import LoCo
from lightning_compress.settings import parsing

Compensation = Literal["none", "classical"] | LoCo
"""What happens to the part that a method does not send. "none": it is dropped. "classical": it is added to the next
gradient. ``LoCo``: a moving average of it is."""
Optimizer = Literal["muon", "adam", "sgd"]


@dataclass(frozen=True)
class Residual:
    """Keep what was not sent, in full, and add it to the next gradient.

    Args:
        decay: factor for the residual before it is added, in [0, 1]; 1 keeps it, 0 discards it.
        follows_lr: when an optimizer's learning rate changes from a to b, multiply the residual by a / b.
        dtype: of the stored residual, "float32" or "bfloat16" (rounded at random).

    Raises:
        ValueError: a value is not allowed.
    """

    decay: float = 1.0
    follows_lr: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        parsing.share("error_feedback: decay", self.decay)
        parsing.truth("error_feedback: follows_lr", self.follows_lr)
        for dtype in (torch.float32, torch.bfloat16):
            if self.dtype in (dtype, str(dtype).removeprefix("torch.")):
                object.__setattr__(self, "dtype", dtype)  # the class is frozen; a name and its dtype compare equal
                return
        raise ValueError(f"error_feedback: dtype={self.dtype!r} must be 'float32' or 'bfloat16'")

    @property
    def plain(self) -> bool:
        """Whether it is added as it is: in float32, and without a decay."""
        return self.decay == 1 and self.dtype == torch.float32


@dataclass(frozen=True)
class Feedback:
    """The user's ``error_feedback``.

    Args:
        way: the compensation of all methods; None: chosen by method and optimizer.
        needs_optimizer: "auto" was given by name, so the optimizer must be known.
        residual: settings of the residual, where one is kept.
    """

    way: Compensation | None = None
    needs_optimizer: bool = False
    residual: Residual = Residual()

    @property
    def residual_settings(self) -> dict[str, object]:
        """Settings of the residual that are not defaults; if there are any, the user wants a residual."""
        usual = vars(Residual())
        return {name: value for name, value in vars(self.residual).items() if value != usual[name]}

    def __str__(self) -> str:
        return str(self.residual_settings or self.way)


BY_METHOD = Feedback()
"""The default: chosen by method and optimizer."""
_NAMES: dict[str, type] = {"loco": LoCo, "residual": Residual}

KINDS: dict[str, Optimizer] = {"Muon": "muon", "Dion": "muon", "Adam": "adam", "SGD": "sgd"}
"""Measured kinds of optimizers, by a part of the name of a class or of one of its bases: "Adam" covers ``AdamW``,
``PagedAdam8bit`` and their subclasses. The first one counts, so ``MuonWithAuxAdam`` is Muon, and of several optimizers
Muon before Adam before SGD."""
MEASURED: dict[Optimizer, str] = {"muon": "Muon", "adam": "AdamW", "sgd": "SGD"}
"""The optimizer that was measured for each kind."""


LOSS: dict[tuple[str, Optimizer], dict[str, float]] = {
    ("bf16", "adam"): {"none": 0.0},
    ("bf16", "sgd"): {"none": 0.0},
    ("rotated", "adam"): {"none": 0.3},
    ("rotated", "sgd"): {"none": 0.0},
    ("qsgd", "adam"): {"none": 0.3},
    ("qsgd", "sgd"): {"none": -0.1},
    ("qsgd bits=8", "adam"): {"none": 0.0},
    ("qsgd bits=8", "sgd"): {"none": 0.0},
    ("terngrad", "adam"): {"none": 7.1},
    ("terngrad", "sgd"): {"none": 0.3},
    ("onebit", "adam"): {"loco": 2.4, "none": 5.6, "classical": 27.4},
    ("onebit", "sgd"): {"loco": 3.4, "none": 5.9, "classical": 20.2},
    ("efsign", "adam"): {"none": 1.6, "loco": 2.5, "classical": 29.8},
    ("efsign", "sgd"): {"loco": 3.3, "none": 6.0, "classical": 20.0},
    ("topk", "adam"): {"classical": 21.5, "loco": 30.9, "none": 48.0},
    ("topk", "sgd"): {"classical": 14.9, "loco": 23.6, "none": 33.8},
    ("fft", "adam"): {"classical": 13.8},
    ("fft", "sgd"): {"classical": 13.3},
    ("powersgd", "adam"): {"classical": 22.2},
    ("powersgd", "sgd"): {"classical": 19.4},
    ("bf16", "muon"): {"none": 0.3},
    ("qsgd", "muon"): {"none": 1.4},
    ("qsgd bits=2", "muon"): {"none": 6.2},
    ("qsgd bits=5", "muon"): {"none": 0.4},
    ("qsgd bits=8", "muon"): {"none": 0.3},
    ("rotated", "muon"): {"none": 1.4},
    ("rotated bits=2", "muon"): {"none": 6.2},
    ("rotated bits=5", "muon"): {"none": 0.4},
    ("rotated bits=8", "muon"): {"none": 0.3},
    ("onebit", "muon"): {"none": 4.1, "loco": 4.2, "classical": 5.4},
    ("topk", "muon"): {"classical": 13.0},
    ("powersgd rank=4", "muon"): {"classical": 5.5},
}
"""Percent of held-out loss above that of float32, by method with the settings that are not its defaults, optimizer and
compensation. "auto" takes the best; where nothing is listed, classical for biased methods and none for the others.

With Adam and SGD: a character LSTM, from docs/results/accuracy.md and docs/results/below-four-bits.md; qsgd with 8 bits
has the figures of range_float with 8, whose error is as large. With Muon: a
character GPT of 98,000 hidden weights, 4 ranks, 300 and 1,500 steps (docs/choose.md), the middle of all runs, where 4
bits have 0.8 to 2.0, and 2 bits 4.2 to 8.3; 8 bits and bf16 are within 0.3."""
LOCAL_LOSS: dict[tuple[int, Optimizer], float] = {
    (8, "adam"): 1.8,
    (8, "sgd"): 2.1,
    (16, "adam"): 5.7,
    (16, "sgd"): 3.2,
    (4, "muon"): 0.4,
}
"""The same for ``LocalSGDStrategy(sync_every=..., compressor="rotated")``, by ``sync_every`` and optimizer. With Muon
the gradients of what AdamW steps are averaged in each step: five runs had -1.1 to 1.5, the middle 0.4."""


def loss_of(method: Method, optimizer: Optimizer, way: Compensation) -> float | None:
    """Return the percent of loss above float32's that was measured, or None for a method with other settings."""
    return LOSS.get((_label(method), optimizer), {}).get("loco" if isinstance(way, LoCo) else way)


def kind_of(optimizers: Iterable[object]) -> Optimizer | None:
    """Return the kind of these optimizers: Muon or Adam if one is; None if kinds differ or nothing was measured."""
    kinds = {_kind(optimizer) for optimizer in optimizers}
    first: Optimizer | None = "muon" if "muon" in kinds else "adam" if "adam" in kinds else None
    return first or (kinds.pop() if len(kinds) == 1 else None)


def _kind(optimizer: object) -> Optimizer | None:
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    return next((kind for part, kind in KINDS.items() if any(part in name for name in names)), None)


def automatic(method: Method, optimizer: Optimizer | None) -> Compensation:
    """Return what ``error_feedback="auto"`` takes for a method; with unmeasured settings, as with its defaults."""
    labels = (_label(method), _name(method)) if optimizer else ()
    measured = next((LOSS[label, optimizer] for label in labels if optimizer and (label, optimizer) in LOSS), None)
    if measured:
        best = min(measured, key=measured.__getitem__)
        return LoCo() if best == "loco" else cast(Literal["none", "classical"], best)
    return "classical" if method.contractive else "none"


def _name(method: Method) -> str:
    return str(getattr(method, "name", type(method).__name__))


def _label(method: Method) -> str:
    """Return a method's name and those of its settings that are not the defaults, such as "qsgd bits=5"."""
    given: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(method) if dataclasses.is_dataclass(method) else ()
    values = {each.name: getattr(method, each.name) for each in given if each.init}
    changed = [f"{each.name}={values[each.name]}" for each in given if each.init and values[each.name] != _usual(each)]
    return " ".join([_name(method), *changed])


def _usual(field: dataclasses.Field[Any]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def saved_name(method: Method) -> str:
    """Return the name of a method in checkpoints."""
    return type(method).__name__


def described(compensation: Compensation) -> object:
    """Return a compensation as primitives."""
    return describe(compensation, _NAMES) if isinstance(compensation, LoCo) else compensation


def decided_before(running: Mapping[str, object], methods: Iterable[Method]) -> tuple[tuple[str, Compensation], ...]:
    """Return the compensation of each method in an earlier run, by name.

    Args:
        running: the earlier run's ``RunState.running``.
        methods: of this run.

    Raises:
        ValueError: the state is damaged.
    """
    before = running.get("compensations")
    if before is None:  # saved by a version that ignored the optimizer
        return tuple((saved_name(method), automatic(method, None)) for method in methods)
    return tuple((str(name), _restored(each)) for name, each in parsing.mapping("compensations", before).items())


def _restored(given: object) -> Compensation:
    if given == "none" or given == "classical":
        return given
    built = build("compensation", given, _NAMES, (LoCo,))
    assert isinstance(built, LoCo)
    return built


def read_feedback(name: str, given: object) -> Feedback:
    """Read the user's ``error_feedback``; its forms are those of ``CompressedDDPStrategy``.

    Raises:
        ValueError: it has none of these forms.
    """
    if isinstance(given, Feedback):
        return given
    if given is None or given == "auto":
        return Feedback(needs_optimizer=given is not None)
    if isinstance(given, bool):
        return Feedback("classical" if given else "none")
    if isinstance(given, Mapping) and "name" not in given:
        built = build(name, {"name": "residual", **given}, _NAMES, ())
        assert isinstance(built, Residual)
        return Feedback(residual=built)
    if isinstance(given, Mapping | LoCo | Residual) or given in tuple(_NAMES):
        built = build(name, given, _NAMES, (LoCo, Residual))
        return Feedback("classical", residual=built) if isinstance(built, Residual) else Feedback(cast(LoCo, built))
    raise ValueError(
        f"{name}={given!r} must be true, false, 'loco', 'residual', 'auto', null, or a mapping such as {{decay: 0.95}} "
        "or {name: loco, beta: 0.05}. Leave it out for what suits the method and the optimizer"
    )
