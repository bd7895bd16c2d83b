"""Building what a user chose by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping


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


def describe(built: object, known: Mapping[str, type]) -> dict[str, object]:
    """The mapping that ``rebuild`` makes this of, of primitives; a class from outside is named by its path.

    Settings that are no primitives are left out.
    """
    name = _name(built, known)
    described: dict[str, object] = {"class": path_of(built)} if name is None else {"name": name}
    for field in dataclasses.fields(built) if dataclasses.is_dataclass(built) else ():
        value = getattr(built, field.name)
        value = describe(value, known) if dataclasses.is_dataclass(value) else value
        if field.init and _is_primitive(value):
            described[field.name] = value
    return described


def rebuild(
    kind: str,
    described: Mapping[str, object],
    known: Mapping[str, type],
    bases: tuple[type, ...],
    given: Iterable[object],
) -> object:
    """What ``describe`` described.

    Args:
        kind: see ``build``.
        described: from a file, which may name any class: none is looked for but those of ``given``.
        known: see ``build``.
        bases: see ``build``.
        given: what this run was given; from its classes what is from outside is made again, and what was not described
            is taken.

    Raises:
        ValueError: see ``build``; or it is of a class that this run was not given.
    """
    owned = list(given)
    settings = {
        str(key): rebuild(str(key), value, known, bases, owned)
        if isinstance(value, Mapping) and not value.keys().isdisjoint({"class", "name"})
        else value
        for key, value in described.items()
    }
    outside = "class" in settings
    name = settings.pop("class" if outside else "name", None)
    alike = [each for each in _inside(owned) if (path_of(each) if outside else _name(each, known)) == name]
    own = alike[0] if alike and name is not None else None
    fields = [field.name for field in dataclasses.fields(own) if field.init] if dataclasses.is_dataclass(own) else []
    if not outside:
        return build(kind, {"name": name, **{each: getattr(own, each) for each in fields}, **settings}, known, bases)
    if own is None:
        raise ValueError(f"the state is of {kind} {name!r}, which this run was not given")
    if unknown := settings.keys() - set(fields):
        raise ValueError(f"{kind} {name!r} has no setting {', '.join(sorted(map(repr, unknown)))}")
    return dataclasses.replace(own, **settings) if fields else own  # type: ignore[type-var]


def path_of(built: object) -> str:
    """Where the class of an object is."""
    return f"{type(built).__module__}.{type(built).__qualname__}"


def _name(built: object, known: Mapping[str, type]) -> str | None:
    return next((name for name, each in known.items() if each is type(built)), None)


def _is_primitive(value: object) -> bool:
    if isinstance(value, Mapping):
        return type(value) is dict and all(type(key) is str and _is_primitive(each) for key, each in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_primitive, value))  # type: ignore[call-overload]
    return value is None or type(value) in (bool, int, float, str)


def _inside(given: Iterable[object]) -> Iterator[object]:
    """These objects, and those that are settings of theirs."""
    for each in given:
        yield each
        if dataclasses.is_dataclass(each):
            yield from _inside(getattr(each, field.name) for field in dataclasses.fields(each))
