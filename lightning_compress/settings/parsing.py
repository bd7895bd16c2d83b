"""Turn what a user writes into objects, or raise a ``ValueError`` with the value, what is allowed, and the fix.

A *reader* takes an argument's name and value, and returns what the value means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from lightning_compress.codecs import CODECS, Codec, Method
from lightning_compress.core.registry import Registry, build, describe, name_of, rebuild
from lightning_compress.corrections import CORRECTED, Corrected
from lightning_compress.corrections.clipping import Clipping
from lightning_compress.exchanges import EXCHANGES, Pattern
from lightning_compress.reducers import REDUCERS, Reducer
from lightning_compress.settings.automatic import Automatic
from lightning_compress.settings.rules import KINDS, Compressor, Rule
from lightning_compress.settings.schedule import Schedule

COMPRESSORS: Registry[Compressor | Automatic] = Registry(
    {"auto": Automatic, **CODECS, **REDUCERS, **CORRECTED},
    (Method, Corrected),
)
"""What ``compressor=`` takes by name."""

CompressorLike = str | Mapping[str, object] | Compressor | Automatic
ExchangeLike = str | Mapping[str, object] | Pattern
ScheduleLike = str | Mapping[str, object] | Schedule | None


def must(fits: Callable[[Any], bool], be: str) -> Callable[[str, object], object]:
    """Return a reader that raises unless ``fits(value)``; ``be`` says what the value must be."""

    def read(name: str, value: object) -> object:
        if not fits(value):
            raise ValueError(f"{name}={value!r} must be {be}")
        return value

    return read


def count(be: str) -> Callable[[str, object], object]:
    """Return a reader of integers from 0; ``be`` says what the value must be."""
    return must(lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0, be)


def one_of(*allowed: str | int) -> Callable[[str, object], object]:
    """Return a reader of these values."""

    def fits(value: object) -> bool:
        return (isinstance(value, str) or type(value) is int) and value in allowed  # True and 1.0 equal 1

    return must(fits, f"one of {', '.join(map(repr, allowed))}")


whole = count("an integer, 0 or more")
warmup = must(lambda value: value is None or (type(value) is int and value >= 0), "a number of steps, or null")
truth = must(lambda value: isinstance(value, bool), "true or false")


def read_seed(name: str, value: object) -> int:
    """Read an integer from 0; None, which configs give for a run without a seed, is 0: ranks need the same one."""
    return 0 if value is None else cast(int, whole(name, value))


def share(name: str, value: object) -> float:
    """Read a number in [0, 1]."""
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r} must be in [0, 1]; 1 keeps all of it")
    return float(value)


def mapping(what: str, value: object) -> Mapping[str, Any]:
    """Read a mapping from a saved state; ``what`` names it."""
    if not isinstance(value, Mapping):
        raise ValueError(f"the state's {what} must be a mapping, not {type(value).__name__}: the checkpoint is damaged")
    return value


def written(built: object) -> str:
    """Return a compressor or exchange as a user would write it, for messages: its name and changed settings."""
    return repr(_as_given(built))


def _as_given(value: object) -> object:
    if not isinstance(value, Method | Corrected | Automatic | Pattern):
        return value
    name = name_of(type(value), EXCHANGES if isinstance(value, Pattern) else COMPRESSORS) or type(value).__name__
    settings = {
        field.name: _as_given(getattr(value, field.name))
        for field in (dataclasses.fields(value) if dataclasses.is_dataclass(value) else ())
        if field.init
        and getattr(value, field.name)
        != (field.default if field.default_factory is dataclasses.MISSING else field.default_factory())
    }
    return {"name": name, **settings} if settings else name


def build_compressor(compressor: CompressorLike) -> Compressor | Automatic:
    """Return a compressor, given by name, by ``{"name": ..., **settings}``, or as an object.

    Raises:
        ValueError: there is no such compressor or setting, or a value is out of range.
    """
    name = compressor.get("name") if isinstance(compressor, Mapping) else getattr(compressor, "name", compressor)
    if name == "moniqua":
        raise ValueError(
            "compressor='moniqua' averages models with neighbours, not gradients: it needs strategy='gossip' "
            "(GossipStrategy; in Hydra, strategy=gossip)"
        )
    built = build("compressor", compressor, COMPRESSORS, (Codec, Reducer, Corrected, Automatic))
    assert isinstance(built, Method | Corrected | Automatic)
    return built


def rebuild_compressor(described: object, given: Iterable[object]) -> Compressor:
    """Return the compressor of an earlier run.

    A class from outside this package must be among the classes that this run was given: a file imports nothing.

    Args:
        described: what the file says.
        given: the compressors of this run.

    Raises:
        ValueError: it describes no compressor, or none that this run knows.
    """
    try:
        bases = (Codec, Reducer, Corrected)
        built = rebuild("compressor", mapping("compressor", described), COMPRESSORS, bases, given)
    except RecursionError as error:
        raise ValueError("the state's compressor is nested too deeply: the checkpoint is damaged") from error
    if not isinstance(built, Method | Corrected):
        raise ValueError(f"the state's compressor is of {type(built).__name__}, which is not a compressor")
    return built


def as_primitives(values: Mapping[str, object]) -> dict[str, object]:
    """Return settings with their compressors described, for a state."""
    return {
        name: describe(each, COMPRESSORS) if dataclasses.is_dataclass(each) else each for name, each in values.items()
    }


def build_exchange(exchange: ExchangeLike) -> Pattern:
    """Return an exchange, given by name, by ``{"name": ..., **settings}``, or as an object.

    Raises:
        ValueError: there is no such exchange or setting.
    """
    built = build("exchange", exchange, EXCHANGES, (Pattern,))
    assert isinstance(built, Pattern)
    return built


def read_rules(given: object) -> tuple[Rule, ...]:
    """Read rules: ``[{match: pattern(s), kind: kind, compressor: ...}, ...]``, or None for no rules.

    Raises:
        ValueError: it is not a list of such mappings, or a compressor is unknown or not allowed in a rule.
    """
    if given is not None and (not isinstance(given, Iterable) or isinstance(given, str | Mapping)):
        raise ValueError(f"rules={given!r} must be a list, such as [{{kind: embedding, compressor: bf16}}]")
    rules = []
    for rule in given or ():
        if not isinstance(rule, Mapping) or not {"compressor"} <= rule.keys() <= {"match", "kind", "compressor"}:
            raise ValueError(f"the rule {rule!r} must be a mapping with compressor, and match or kind or both")
        match, kind, method = rule.get("match"), rule.get("kind"), build_compressor(rule["compressor"])
        if kind is not None and not (isinstance(kind, str) and kind in KINDS):
            raise ValueError(f"the rule {rule!r}: kind={kind!r} must be one of {', '.join(KINDS)}")
        if isinstance(method, Automatic):
            raise ValueError(f"the rule {rule!r}: a rule names its compressor. 'auto' is possible as compressor= only")
        if isinstance(method, Corrected):
            raise ValueError(
                f"the rule {rule!r}: this compressor does a part of the optimizer's work, for all parameters. Give it "
                "as compressor=, and the other compressors in rules"
            )
        patterns = _patterns(match)
        if not patterns and kind is None:
            raise ValueError(f"the rule {rule!r} must say which parameters it takes: add match, kind, or both")
        rules.append(Rule(method, patterns, None if kind is None else str(kind)))
    return tuple(rules)


def read_clipping(name: str, given: object) -> Clipping | None:
    """Read a norm, or a mapping with ``norm`` and ``by``, or None for no clipping.

    Raises:
        ValueError: it is none of these.
    """
    if given is None or isinstance(given, Clipping):
        return given
    fields: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"norm": given}
    if not {"norm"} <= fields.keys() <= {"norm", "by"}:
        raise ValueError(
            f"{name}={given!r} must be a norm, or a mapping of norm and by, such as {{norm: 1.0, by: bucket}}"
        )
    return Clipping(**fields)


def _patterns(match: object) -> tuple[str, ...]:
    if isinstance(match, str):
        return (match,)
    patterns = [] if match is None else list(match) if isinstance(match, Iterable) else [match]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"match={match!r} must be a list of name patterns, such as ['head.*', '*.bias']")
    return tuple(map(str, patterns))
