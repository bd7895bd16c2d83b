"""Measure each compressor on given gradients: bytes, error, time."""

from __future__ import annotations

import dataclasses
import pickle
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from lightning_compress.codecs import CODECS, Codec, Dense, OneBit, Plan
from lightning_compress.collectives.counting import least_ms
from lightning_compress.core.layout import Layout
from lightning_compress.core.random import mix
from lightning_compress.core.registry import name_of
from lightning_compress.corrections import Corrected
from lightning_compress.settings.automatic import Automatic
from lightning_compress.settings.parsing import COMPRESSORS, CompressorLike, build_compressor, whole
from lightning_compress.settings.rules import Rules

Gradients = Mapping[str, Tensor]


def read(given: object) -> list[Gradients]:
    """Return gradients as a list of steps, loaded from a file if ``given`` is a path.

    Args:
        given: a mapping of names to tensors, a sequence of such mappings, or the path of a file of either.

    Returns:
        At least one step, each with at least one finite floating-point tensor. Names, shapes and device are the same in
        all steps.

    Raises:
        ValueError: ``given`` is none of these.
    """
    if isinstance(given, str | PathLike):
        given = _load(given)
    steps = [given] if isinstance(given, Mapping) else given
    if not isinstance(steps, Sequence) or not all(isinstance(step, Mapping) for step in steps):
        raise ValueError(
            f"gradients is {type(given).__name__}: use a mapping of names to tensors, such as "
            "{name: p.grad for name, p in model.named_parameters()}, a list of them, or the path of either"
        )
    if not steps or not steps[0]:
        raise ValueError("gradients is empty; use at least one step with at least one tensor")
    for number, step in enumerate(steps):
        which = f" of step {number}" if len(steps) > 1 else ""
        for name, gradient in step.items():
            _check(f"the gradient {name!r}{which}", gradient)
    described = [{name: (g.shape, g.device) for name, g in step.items()} for step in steps]
    if len({device for step in described for _, device in step.values()}) > 1:
        raise ValueError("gradients are on several devices; move them to one")
    for number, step in enumerate(described):
        if step != described[0]:
            names = [name for name in described[0] | step if described[0].get(name) != step.get(name)]
            raise ValueError(
                f"step {number} differs from step 0 in the names or shapes of {', '.join(map(repr, names[:5]))}; "
                "steps are successive gradients of one model"
            )
    return list(steps)


def _check(what: str, gradient: object) -> None:
    if not isinstance(gradient, Tensor):
        raise ValueError(f"{what} is {type(gradient).__name__}, not a tensor; leave out parameters without a gradient")
    if not gradient.is_floating_point() or gradient.layout != torch.strided:
        raise ValueError(
            f"{what} is {gradient.dtype}, {gradient.layout}; only dense floating-point tensors can be compressed"
        )
    if not gradient.float().isfinite().all():
        raise ValueError(f"{what} has NaN, infinity or values beyond float32's range; use a step with finite gradients")


def _load(path: str | PathLike[str]) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is not a file of tensors; write it with torch.save(gradients, path)") from error


REPEATS = 3
"""How often the first step is encoded and decoded. The minimum time counts, so that a busy machine matters little."""


@dataclass(frozen=True)
class Row:
    """One compressor's figures on the gradients.

    Args:
        compressor: its name, and the settings that differ from their defaults.
        bits: measured bits per element: 8 times the messages' bytes over the elements, mean over the steps.
        error: norm of the encoding error over the norm of what was encoded (the gradient, plus the residual with error
            feedback): 0 if everything arrives, 1 if nothing does; mean over the steps.
        sum_error: norm of the sum of all gradients minus the sum of all that was sent, over the norm of the former.
            With error feedback it falls from step to step, without it does not. For one step it equals ``error``.
        cosine: cosine of the angle between a gradient and its decoded message, mean over the steps.
        encode_ms: minimum milliseconds to encode the first step.
        decode_ms: minimum milliseconds to decode one message of it.
        error_feedback: the encoding error was added to the next step.
        safe_with_adam: the method is safe with optimizers with adaptive learning rates.
        contractive: the method is biased and needs error feedback.
    """

    compressor: str
    bits: float
    error: float
    sum_error: float
    cosine: float
    encode_ms: float
    decode_ms: float
    error_feedback: bool
    safe_with_adam: bool
    contractive: bool


@dataclass(frozen=True)
class Comparison:
    """The rows, and what they were measured on; ``print`` shows a table.

    Args:
        rows: one per compressor, in the given order.
        steps: the number of gradients.
        parameters: names of the compressed parameters.
        numel: the number of their elements.
        dense_numel: the number of elements of all others, which travel as float32 with every compressor except casts.
    """

    rows: tuple[Row, ...]
    steps: int
    parameters: tuple[str, ...]
    numel: int
    dense_numel: int

    def __str__(self) -> str:
        """Return a plain-text table with aligned columns."""
        titles = ("compressor", "bits", "error", "of sum", "cosine", "encode ms", "decode ms", "feedback", "with Adam")
        lines = [titles, *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
        count = f"{self.steps} gradients" if self.steps > 1 else "1 gradient"
        summary = f"{count} of {self.numel:,} elements in {len(self.parameters)} parameters"
        rest = f"; {self.dense_numel:,} elements of small and 1-D parameters would travel as float32"
        return "\n".join([*table, summary + rest * bool(self.dense_numel)])


def compare(
    gradients: Gradients | Sequence[Gradients] | str | PathLike[str],
    compressors: Iterable[CompressorLike] | None = None,
    error_feedback: bool | None = None,
    min_numel: int = 1024,
    seed: int = 0,
) -> Comparison:
    """Encode and decode your gradients with each compressor, and measure the result.

    As in training, parameters that are 1-D or have fewer than ``min_numel`` elements are left out, because they travel
    as float32. (Casts would compress them too; they are left out there as well, so that all rows are about the same
    elements.) The other parameters are concatenated into one vector, as in a single DistributedDataParallel bucket.
    Effects of several ranks are not included: averaging reduces the error, and the exchange determines the bytes.

    Args:
        gradients: a mapping of names to tensors; a sequence of such mappings, of successive steps; or the path of
            either, written by ``torch.save``. Floating-point tensors of any shape, all finite, on one device; they are
            not changed.
        compressors: names, mappings with a ``name`` and settings, or codecs; None: all codecs with their defaults. For
            ``dgc``, ``onebit_adam`` and ``ef21``, the codec inside is measured on gradients, without their momentum and
            without their first, dense steps.
        error_feedback: add the whole encoding error to the next step; None: only for contractive methods. (In training,
            the default also depends on the optimizer: see the README.) With one step it makes no difference.
        min_numel: leave out parameters with fewer elements; an integer, 0 or more.
        seed: the random seed; an integer, 0 or more.

    Returns:
        The measured rows.

    Raises:
        ValueError: a compressor is unknown or needs several ranks; ``error_feedback``, ``min_numel`` or ``seed`` is
            invalid; there is no gradient to compress, or one is not a finite floating-point tensor; steps differ in
            names, shapes or devices; or the file holds something else.
    """
    if error_feedback not in (True, False, None):
        raise ValueError(f"error_feedback={error_feedback!r} must be true, false or null; LoCo cannot be compared")
    whole("min_numel", min_numel)
    whole("seed", seed)
    steps = read(gradients)
    codecs = [_codec(each) for each in (CODECS.complete() if compressors is None else _check_list(compressors))]
    if not codecs:
        raise ValueError("compressors=[] is empty; leave it out to compare all")
    rules = Rules(OneBit(), min_numel, ())
    shapes = [(name, tuple(gradient.shape)) for name, gradient in steps[0].items()]
    layout = Layout.of(shape for shape in shapes if not isinstance(rules.method_of(*shape), Dense))
    if not layout.numel:
        raise ValueError(
            f"none of the {len(shapes)} gradients would be compressed: all are 1-D or have fewer than "
            f"min_numel={min_numel} elements; lower min_numel"
        )
    vectors = [torch.cat([step[name].detach().reshape(-1).float() for name in layout.names]) for step in steps]
    if not all(vector.any() for vector in vectors):
        raise ValueError("all gradients of a step are zero; read them after backward() and before zero_grad()")
    rows = tuple(_measure(*codec, layout, vectors, error_feedback, seed) for codec in codecs)
    total = sum(gradient.numel() for gradient in steps[0].values())
    return Comparison(rows, len(steps), layout.names, layout.numel, total - layout.numel)


def _measure(
    label: str, codec: Codec, layout: Layout, gradients: list[Tensor], feedback: bool | None, seed: int
) -> Row:
    feedback = codec.contractive if feedback is None else feedback
    plan = codec.plan(layout, gradients[0].device)
    message = torch.zeros(1, plan.message_size, dtype=torch.uint8, device=gradients[0].device)
    encode_ms, decode_ms = _times(plan, gradients[0], message, mix(seed, 0))
    residual, decoded = torch.zeros_like(gradients[0]), torch.empty_like(gradients[0])
    wanted, sent = torch.zeros_like(residual, dtype=torch.float64), torch.zeros_like(residual, dtype=torch.float64)
    bits, errors, cosines = [], [], []
    for step, gradient in enumerate(gradients):
        vector = residual + gradient if feedback else gradient.clone()
        before = vector.clone()
        _encode(plan, vector, message[0], mix(seed, step))
        plan.decode(message[:, : plan.used], decoded, 1.0, False)
        bits.append(8 * plan.used / layout.numel)
        errors.append(_ratio(before.double() - decoded, before))
        cosines.append(_cosine(gradient, decoded))
        wanted += gradient
        sent += decoded
        residual = vector
    return Row(
        compressor=label,
        bits=statistics.fmean(bits),
        error=statistics.fmean(errors),
        sum_error=_ratio(wanted - sent, wanted),
        cosine=statistics.fmean(cosines),
        encode_ms=encode_ms,
        decode_ms=decode_ms,
        error_feedback=feedback,
        safe_with_adam=codec.safe_with_adam,
        contractive=codec.contractive,
    )


def _encode(plan: Plan, vector: Tensor, message: Tensor, key: int) -> None:
    plan.share(key)
    plan.encode(vector, message, key)


def _times(plan: Plan, gradient: Tensor, message: Tensor, key: int) -> tuple[float, float]:
    """Return minimum milliseconds to encode and to decode."""
    vector, out, device = torch.empty_like(gradient), torch.zeros_like(gradient), gradient.device
    reset = partial(vector.copy_, gradient)
    encoding = least_ms(device, REPEATS, lambda: _encode(plan, vector, message[0], key), reset)
    return encoding, least_ms(device, REPEATS, lambda: plan.decode(message[:, : plan.used], out, 1.0, True), reset)


def _codec(compressor: CompressorLike) -> tuple[str, Codec]:
    """Return the name for the table, and the codec that makes the messages."""
    built = build_compressor(compressor)
    if isinstance(built, Automatic):
        raise ValueError("compressor 'auto' depends on the link and the model; name others, such as 'bf16'")
    if isinstance(built, Corrected):
        return f"{_name(built)}: {_label(built.codec)}", built.codec
    if not isinstance(built, Codec):
        raise ValueError(f"{built} needs several ranks, and cannot be compared on one; name a codec")
    return _label(built), built


def _check_list(compressors: object) -> list[CompressorLike]:
    if isinstance(compressors, str | Mapping | Codec) or not isinstance(compressors, Iterable):
        raise ValueError(f"compressors={compressors!r} must be a list; write compressors=[{compressors!r}]")
    return list(compressors)


def _label(codec: Codec) -> str:
    """Return the codec's name and the settings that differ from their defaults."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(codec) if dataclasses.is_dataclass(codec) else ()
    settings = {field.name: (getattr(codec, field.name), field.default) for field in fields}
    changed = [f"{name}={value}" for name, (value, default) in settings.items() if value != default]
    return " ".join([_name(codec), *changed])


def _name(given: Codec | Corrected) -> str:
    return name_of(type(given), COMPRESSORS) or type(given).__name__


def _cells(row: Row) -> tuple[str, ...]:
    error, sum_error = (f"{100 * share:.3g} %" for share in (row.error, row.sum_error))
    return (
        row.compressor,
        f"{row.bits:.2f}",
        error,
        sum_error,
        f"{row.cosine:.4f}",
        f"{row.encode_ms:.2f}",
        f"{row.decode_ms:.2f}",
        "on" if row.error_feedback else "off",
        "safe" if row.safe_with_adam else "no",
    )


def _ratio(part: Tensor, whole: Tensor) -> float:
    norms = float(part.double().norm()), float(whole.double().norm())
    return norms[0] / norms[1] if norms[1] else float("inf") if norms[0] else 0.0


def _cosine(one: Tensor, other: Tensor) -> float:
    """Return the cosine of the angle between two vectors; 0.0 if one is zero."""
    first, second = one.double(), other.double()
    norms = float(first.norm()) * float(second.norm())
    return float(first @ second) / norms if norms else 0.0
