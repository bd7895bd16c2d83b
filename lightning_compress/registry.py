"""Building what a user chose by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


def build(kind: str, given: object, known: Mapping[str, type], bases: tuple[type, ...]) -> object:
    """An object by name, by ``{"name": ..., **settings}``, or as it is.

    Args:
        kind: what it is, for messages.
        given: the user's choice.
        known: dataclasses by name.
        bases: of objects that are taken as they are.

    Raises:
        ValueError: there is no such name or setting, or a value is out of range.
    """
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


def describe(built: object, known: Mapping[str, type]) -> dict[str, object] | None:
    """The mapping that ``build`` makes this of, of primitives; None if it is of no known class."""
    name = next((name for name, each in known.items() if each is type(built)), None)
    if name is None:
        return None
    fields = {field.name: getattr(built, field.name) for field in dataclasses.fields(built)}  # type: ignore[arg-type]
    nested = {key: describe(value, known) for key, value in fields.items() if dataclasses.is_dataclass(value)}
    return {"name": name, **fields, **nested}
