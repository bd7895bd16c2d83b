"""What a user writes, made into what it means; ``ValueError`` where it means nothing.

The message names the value, what is allowed, and the fix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_compress.codecs import CODECS, Codec, Method
from lightning_compress.core.registry import Registry, build, rebuild
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


def build_compressor(compressor: CompressorLike) -> Compressor | Automatic:
    """A compressor by name, by ``{"name": ..., **settings}``, or as it is.

    Raises:
        ValueError: there is no such compressor or setting, or a value is out of range.
    """
    name = compressor.get("name") if isinstance(compressor, Mapping) else getattr(compressor, "name", compressor)
    if name == "moniqua":
        raise ValueError(
            f"compressor={compressor!r} averages models with neighbours, not gradients: it needs strategy='gossip' "
            "(strategy=gossip in Hydra; GossipStrategy)"
        )
    built = build("compressor", compressor, COMPRESSORS, (Codec, Reducer, Corrected, Automatic))
    assert isinstance(built, Method | Corrected | Automatic)
    return built


def rebuild_compressor(described: object, given: Iterable[object]) -> Compressor:
    """The compressor of an earlier run; one from outside is of a class that this run was given, or refused.

    Args:
        described: from a file.
        given: what this run was given.

    Raises:
        ValueError: it is no compressor, or none that this run knows.
    """
    if not isinstance(described, Mapping):
        raise ValueError(f"the state has no mapping of the compressor, but {type(described).__name__}")
    try:
        built = rebuild("compressor", described, COMPRESSORS, (Codec, Reducer, Corrected), given)
    except RecursionError as error:
        raise ValueError("the state's compressor has too many others inside") from error
    if not isinstance(built, Method | Corrected):
        raise ValueError(f"the state is of {type(built).__name__}, which is no compressor")
    return built


def build_exchange(exchange: ExchangeLike) -> Pattern:
    """An exchange by name, by ``{"name": ..., **settings}``, or as it is.

    Raises:
        ValueError: there is no such exchange or setting.
    """
    built = build("exchange", exchange, EXCHANGES, (Pattern,))
    assert isinstance(built, Pattern)
    return built


def read_rules(given: object) -> tuple[Rule, ...]:
    """Rules as a user writes them: ``[{match: pattern(s), kind: kind, compressor: ...}, ...]``."""
    if given is not None and (not isinstance(given, Iterable) or isinstance(given, str | Mapping)):
        raise ValueError(f"rules={given!r} must be a list, such as [{{kind: embedding, compressor: bf16}}]")
    made = []
    for each in given or ():
        if not isinstance(each, Mapping) or not {"compressor"} <= each.keys() <= {"match", "kind", "compressor"}:
            raise ValueError(f"the rule {each!r} must be a mapping with compressor, and match or kind or both")
        match, kind, method = each.get("match"), each.get("kind"), build_compressor(each["compressor"])
        if kind is not None and kind not in KINDS:
            raise ValueError(f"the rule {each!r}: kind={kind!r} must be one of {', '.join(KINDS)}")
        if isinstance(method, Automatic):
            raise ValueError(f"the rule {each!r}: a rule names its compressor; 'auto' is for what no rule takes")
        if isinstance(method, Corrected):
            raise ValueError(
                f"the rule {each!r}: {method} takes a part of the optimizer's work for all parameters; "
                "give it as compressor= and put the others into rules"
            )
        patterns = read_patterns("match", [match] if isinstance(match, str) else match)
        if not patterns and kind is None:
            raise ValueError(f"the rule {each!r} must say which parameters: match, kind, or both")
        made.append(Rule(method, patterns, None if kind is None else str(kind)))
    return tuple(made)


def read_clipping(name: str, given: object) -> Clipping | None:
    """What a rank clips to: a norm, or a mapping with ``norm`` and ``by``.

    Raises:
        ValueError: it is none of these.
    """
    if given is None or isinstance(given, Clipping):
        return given
    fields: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"norm": given}
    if not {"norm"} <= fields.keys() <= {"norm", "by"}:
        raise ValueError(f"{name}={given!r} must be a norm, or say norm and by, such as {{norm: 1.0, by: bucket}}")
    return Clipping(**fields)


def read_patterns(what: str, given: object) -> tuple[str, ...]:
    """Shell-style patterns of names."""
    if isinstance(given, str):
        raise ValueError(f"{what}={given!r} must be a list of patterns; write {what}=[{given!r}]")
    patterns = [] if given is None else list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"{what}={given!r} must be a list of name patterns, such as ['head.*', '*.bias']")
    return tuple(map(str, patterns))
