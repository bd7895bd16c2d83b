"""What a user chooses, checked as soon as it is given."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_compress.codecs import CODECS, Codec
from lightning_compress.corrections import CORRECTED, Corrected, Correction
from lightning_compress.exchanges import EXCHANGES, Auto, Exchange
from lightning_compress.reducers import REDUCERS, Reducer
from lightning_compress.rules import Method, Rules

Compressor = Codec | Reducer | Corrected
COMPRESSORS: dict[str, type[Compressor]] = {**CODECS, **REDUCERS, **CORRECTED}
"""What ``compressor=`` takes by name."""

CompressorLike = str | Mapping[str, object] | Compressor
ExchangeLike = str | Mapping[str, object] | Exchange


def _build(kind: str, given: object, known: Mapping[str, type], bases: tuple[type, ...]) -> object:
    if isinstance(given, bases):
        return given
    settings = {"name": given} if isinstance(given, str) else given
    if not isinstance(settings, Mapping) or not isinstance(settings.get("name"), str):
        raise ValueError(
            f"{kind}={given!r}: give a name ({', '.join(known)}), a mapping with a 'name' and settings, "
            f"or a {bases[0].__name__}"
        )
    arguments = {str(key): value for key, value in settings.items()}
    name = arguments.pop("name")
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}; there are: {', '.join(known)}")
    allowed = [field.name for field in dataclasses.fields(known[name])]
    unknown = [key for key in arguments if key not in allowed]
    if unknown:
        raise ValueError(
            f"{kind} {name!r} has no setting {', '.join(map(repr, unknown))}; it has: {', '.join(allowed) or 'none'}"
        )
    return known[name](**arguments)


def build_compressor(compressor: CompressorLike) -> Compressor:
    """A compressor by name, by ``{"name": ..., **settings}``, or as it is.

    Raises:
        ValueError: there is no such compressor or setting, or a value is out of range.
    """
    built = _build("compressor", compressor, COMPRESSORS, (Codec, Reducer, Corrected))
    assert isinstance(built, Codec | Reducer | Corrected)
    return built


def build_exchange(exchange: ExchangeLike) -> Exchange:
    """An exchange by name, by ``{"name": ..., **settings}``, or as it is.

    Raises:
        ValueError: there is no such exchange or setting.
    """
    built = _build("exchange", exchange, EXCHANGES, (Exchange,))
    assert isinstance(built, Exchange)
    return built


@dataclass(frozen=True)
class Settings:
    """Everything that decides what travels; must be equal on all ranks."""

    rules: Rules
    exchange: Exchange
    correction: Correction | None
    error_feedback: bool
    warmup_steps: int
    seed: int

    @property
    def method(self) -> Method:
        """What compresses."""
        return self.rules.method

    @property
    def family(self) -> str:
        """What state is of: it is good for any settings of the same method."""
        parts = (self.correction, self.method)
        return " ".join(type(part).__name__ for part in parts if part is not None)

    @classmethod
    def of(
        cls,
        compressor: CompressorLike,
        exchange: ExchangeLike = "auto",
        error_feedback: bool | None = None,
        warmup_steps: int = 0,
        min_numel: int = 1024,
        exclude: Sequence[str] | None = (),
        seed: int = 0,
    ) -> Settings:
        """Check and complete what the user gave; the arguments are those of ``CompressedDDPStrategy``.

        Raises:
            ValueError: a value is not allowed; the message names it, what is allowed, and the fix.
        """
        given, pattern = build_compressor(compressor), build_exchange(exchange)
        method, correction = (given.codec, given.correction) if isinstance(given, Corrected) else (given, None)
        _check_exchange(pattern, method)
        for name, value in (("warmup_steps", warmup_steps), ("min_numel", min_numel), ("seed", seed)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}={value!r} must be an integer, 0 or more")
        if error_feedback not in (None, True, False):
            raise ValueError(
                f"error_feedback={error_feedback!r} must be true, false, or null (on for methods that need it)"
            )
        if error_feedback and isinstance(method, Reducer) and not method.conserves:
            raise ValueError(f"error_feedback=True: {method} leaves nothing that could be fed back; set it to null")
        return cls(
            rules=Rules(method, min_numel, _patterns(exclude)),
            exchange=pattern,
            correction=correction,
            error_feedback=method.contractive if error_feedback is None else error_feedback,
            warmup_steps=warmup_steps,
            seed=seed,
        )

    def digest(self) -> bytes:
        """32 bytes that are equal where the settings are."""
        return hashlib.sha256(repr(self).encode()).digest()


def _check_exchange(exchange: Exchange, method: Method) -> None:
    if isinstance(method, Codec):
        exchange.check(method)
    elif not isinstance(exchange, Auto):
        raise ValueError(f"exchange={exchange} cannot carry {method}, which exchanges by itself; use exchange='auto'")


def _patterns(exclude: object) -> tuple[str, ...]:
    if isinstance(exclude, str):
        raise ValueError(f"exclude={exclude!r} must be a list of patterns; write exclude=[{exclude!r}]")
    patterns = [] if exclude is None else list(exclude) if isinstance(exclude, Iterable) else [exclude]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"exclude={exclude!r} must be a list of name patterns, such as ['head.*', '*.bias']")
    return tuple(map(str, patterns))
