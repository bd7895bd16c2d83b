"""Building what a user chose by name, and making more known by name."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from lightning_compress.core.primitives import plain

T = TypeVar("T")

GROUP = "lightning_compress.compressors"
"""The group of entry points by which packages offer compressors."""


class Names(dict[str, type[T]]):
    """Classes by name: the package's own, what was registered, and what installed packages offer.

    What a package offers is imported when ``names[name]`` asks for it, and neither by ``in`` nor by iterating.

    Args:
        own: the package's own.
        takes: the base of the classes that may be registered here.
    """

    def __init__(self, own: Mapping[str, type[T]], takes: type) -> None:
        super().__init__(own)
        self.takes = takes
        _TABLES.append(self)

    def __missing__(self, name: str) -> type[T]:
        if name in _offered():
            _load(name)
        if name in self:
            return self[name]
        raise KeyError(name)

    @property
    def choices(self) -> list[str]:
        """What may be asked for."""
        return [*self, *(name for name in _offered() if name not in self)]


_TABLES: list[Names] = []  # type: ignore[type-arg]


def named(module: Mapping[str, object], base: type[T]) -> dict[str, type[T]]:
    """The classes among a module's globals that derive from ``base``, by their ``name``, in the order of imports."""
    found = [each for each in module.values() if isinstance(each, type) and issubclass(each, base)]
    return {each.__dict__["name"]: each for each in found if "name" in each.__dict__}


def register(name: str, cls: type) -> None:
    """Make a compressor of one's own known by a name, as ours are.

    ``compressor=``, configs, ``retune``, rules and ``compare`` then take the name, and checkpoints have it. Call it on
    every rank before the name is used, where the class is defined. The same class may be registered again, and so may
    one that replaces it under its own path (a cell of a notebook that is run again).

    A package that is installed need not call it: compressors that it offers by entry points of the group
    ``lightning_compress.compressors`` are registered when they are named.

    Args:
        name: letters, digits and underscores.
        cls: derived from ``Codec`` or ``Reducer``; a frozen dataclass, whose settings all have defaults.

    Raises:
        ValueError: the class is not of this kind, or the name is that of another one.
    """
    what = f"register({name!r}, {cls.__name__ if isinstance(cls, type) else repr(cls)})"
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{what}: a name consists of letters, digits and underscores, such as 'linear8'")
    tables = [table for table in _TABLES if isinstance(cls, type) and issubclass(cls, table.takes)]
    if not tables:
        raise ValueError(f"{what}: give a class derived from lightning_compress.Codec or lightning_compress.Reducer")
    if inspect.isabstract(cls):
        raise ValueError(f"{what}: the class lacks {', '.join(sorted(getattr(cls, '__abstractmethods__', ())))}")
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        raise ValueError(f"{what}: settings are the fields of a frozen dataclass; decorate it: @dataclass(frozen=True)")
    for field in dataclasses.fields(cls):
        if field.name == "name":
            raise ValueError(f"{what}: a setting cannot be called 'name', which says whose settings they are")
        if field.init and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(
                f"{what}: the setting {field.name!r} needs a default, since a name may be all that is given"
            )
    taken = next((table[name] for table in _TABLES if name in table), cls)
    if _path(taken) != _path(cls):
        raise ValueError(f"{what}: {name!r} is the name of {_path(taken)} already; choose another one")
    for table in tables:
        table[name] = cls


@cache
def _offered() -> dict[str, list[EntryPoint]]:
    """What installed packages offer, by name; nothing is imported."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


def _load(name: str) -> None:
    """Import what is offered by a name, and register it.

    Raises:
        ValueError: it cannot be imported or registered, or several packages offer it.
    """
    point, *others = _offered()[name]
    if others:
        packages = " and ".join(sorted(_package(each) for each in (point, *others)))
        raise ValueError(f"{packages} both offer a compressor {name!r}; uninstall one of them")
    where = f"{_package(point)} offers the compressor {name!r} as {point.value!r}"
    try:
        cls = point.load()
    except Exception as error:
        raise ValueError(
            f"{where}, which cannot be imported ({type(error).__name__}: {error}); repair or uninstall that package"
        ) from error
    try:
        register(name, cls)
    except ValueError as error:
        raise ValueError(f"{where}, which is none: {error}") from error


def _package(point: EntryPoint) -> str:
    return f"the package {point.dist.name!r}" if point.dist else "a package"


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
    try:
        cls = known[name]
    except KeyError:
        choices = known.choices if isinstance(known, Names) else known
        raise ValueError(f"unknown {kind} {name!r}; there are: {', '.join(choices)}") from None
    allowed = [field.name for field in dataclasses.fields(cls)]
    unknown = [key for key in arguments if key not in allowed]
    if unknown:
        raise ValueError(
            f"{kind} {name!r} has no setting {', '.join(map(repr, unknown))}; it has: {', '.join(allowed) or 'none'}"
        )
    return cls(**arguments)


def describe(built: object, known: Mapping[str, type]) -> dict[str, object]:
    """The mapping that ``rebuild`` makes this of, of primitives; a class that is not registered is named by its path.

    Settings that are no primitives are left out.
    """
    name = _name(built, known)
    described: dict[str, object] = {"class": _path(type(built))} if name is None else {"name": name}
    for field in dataclasses.fields(built) if dataclasses.is_dataclass(built) else ():
        value = getattr(built, field.name)
        value = describe(value, known) if dataclasses.is_dataclass(value) else plain(value)
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
        ValueError: see ``build``; or it is of a class that this run was not given, or of a name that it does not know.
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
    alike = [each for each in _inside(owned) if (_path(type(each)) if outside else _name(each, known)) == name]
    own = alike[0] if alike and name is not None else None
    fields = [field.name for field in dataclasses.fields(own) if field.init] if dataclasses.is_dataclass(own) else []
    if not outside and isinstance(name, str) and name not in known and not _is_given(name, known, owned):
        raise ValueError(
            f"unknown {kind} {name!r} in the state: the run that saved it had it registered, and this one has not; "
            f"call lightning_compress.register({name!r}, its class) first, or name it where a package offers it"
        )
    if not outside:
        return build(kind, {"name": name, **{each: getattr(own, each) for each in fields}, **settings}, known, bases)
    if own is None:
        raise ValueError(f"the state is of {kind} {name!r}, which this run was not given")
    if unknown := settings.keys() - set(fields):
        raise ValueError(f"{kind} {name!r} has no setting {', '.join(sorted(map(repr, unknown)))}")
    return dataclasses.replace(own, **settings) if fields else own  # type: ignore[type-var]


def _is_given(name: str, known: Mapping[str, type], given: Iterable[object]) -> bool:
    """Whether one of these is of the class that is offered by the name, which then is known; nothing is imported."""
    classes = [type(each) for each in _inside(given)]
    for point in _offered().get(name, ()):
        module = sys.modules.get(point.module)
        if module and getattr(module, point.attr, None) in classes:
            return known[name] in classes
    return False


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


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
