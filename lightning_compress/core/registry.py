"""Building what a user chose by name, and making more known by name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

COMPRESSORS = "lightning_compress.compressors"
"""The group of entry points by which packages offer compressors, this one too: those of ``contrib``."""
OURS = __name__.partition(".")[0]


class Names(dict[str, type[T]]):
    """Classes by name: the core's own, what was registered, and what installed packages offer.

    What a package offers is imported when ``names[name]`` asks for it, and neither by ``in`` nor by iterating.

    Args:
        own: the core's own.
        takes: the bases of the classes that may be registered here.
        group: of the entry points by which packages offer more.
        gone: what is no more, with what to use instead.
    """

    def __init__(
        self,
        own: Mapping[str, type[T]],
        takes: tuple[type, ...],
        group: str = COMPRESSORS,
        gone: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(own)
        self.takes, self.group, self.gone = takes, group, gone or {}
        _TABLES.append(self)

    def __missing__(self, name: str) -> type[T]:
        if name in _offered(self.group):
            _load(self.group, name)
        if name in self:
            return self[name]
        raise KeyError(name)

    @property
    def offered(self) -> list[str]:
        """Names that are here, and those that packages offer in the group, of whatever kind; nothing is imported."""
        return [*self, *(name for name in _offered(self.group) if name not in self)]

    def complete(self) -> Names[T]:
        """These names with all that this package offers, which is imported."""
        for name in self.offered:
            if name not in self and _own(self.group, name):
                self.find(name)
        return self

    def find(self, name: str) -> type[T] | None:
        """The class of a name, which is imported; None: there is none of a kind that is taken here."""
        try:
            return self[name]
        except KeyError:
            return None

    @property
    def choices(self) -> list[str]:
        """What may be asked for."""
        return [*self.complete(), *(each for each in self.offered if each not in self and not _own(self.group, each))]


_TABLES: list[Names] = []  # type: ignore[type-arg]


def named(module: Mapping[str, object], base: type[T]) -> dict[str, type[T]]:
    """The classes among a module's globals that derive from ``base``, by their ``name``, in the order of imports."""
    found = [each for each in module.values() if isinstance(each, type) and issubclass(each, base)]
    return {each.__dict__["name"]: each for each in found if "name" in each.__dict__}


def register(name: str, cls: type) -> None:
    """Make a class of one's own known by a name, as ours are: a compressor, an exchange, or an algorithm of gossip.

    ``compressor=``, configs, ``retune``, rules and ``compare`` then take a compressor's name, ``exchange=`` that of an
    exchange, and ``algorithm=`` that of an algorithm; checkpoints have it. Call it on every rank before the name is
    used, where the class is defined. The same class may be registered again, and so may one that replaces it under its
    own path (a cell of a notebook that is run again).

    A package that is installed need not call it: what it offers by entry points of the groups
    ``lightning_compress.compressors``, ``lightning_compress.exchanges`` and ``lightning_compress.algorithms`` is
    registered when it is named.

    Args:
        name: letters, digits and underscores.
        cls: derived from ``Codec``, ``Reducer``, ``Corrected``, ``Exchange`` or ``Algorithm``; a frozen dataclass,
            whose settings all have defaults.

    Raises:
        ValueError: the class is not of this kind, or the name is that of another one.
    """
    what = f"register({name!r}, {cls.__name__ if isinstance(cls, type) else repr(cls)})"
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{what}: a name consists of letters, digits and underscores, such as 'linear8'")
    tables = [table for table in _TABLES if isinstance(cls, type) and issubclass(cls, table.takes)]
    if not tables:
        raise ValueError(
            f"{what}: give a class derived from lightning_compress.Codec or lightning_compress.Reducer, or from "
            "Corrected, Exchange or Algorithm"
        )
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
    group = tables[0].group
    known = (_path(table[name]) for table in _TABLES if table.group == group and name in table)
    taken = next(known, _own(group, name) or _path(cls))
    if taken != _path(cls):
        raise ValueError(f"{what}: {name!r} is the name of {taken} already; choose another one")
    for table in tables:
        table[name] = cls


def lookup(name: str, base: type) -> type[Any]:
    """The class of a name that derives from ``base``; for the word of an option that stands for another class.

    Raises:
        ValueError: no package that is installed offers it.
    """
    found = next((table.find(name) for table in _TABLES if base in table.takes), None)
    if found is None:
        raise ValueError(f"{name!r} is offered by no installed package: install {OURS} again, which has it")
    return found


@cache
def _offered(group: str) -> dict[str, list[EntryPoint]]:
    """What installed packages offer, by name; nothing is imported."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=group):
        found.setdefault(point.name, []).append(point)
    return found


def _own(group: str, name: str) -> str | None:
    """The path of the class that this package itself offers by a name, whatever others offer; nothing is imported."""
    own = (each for each in _offered(group).get(name, ()) if each.module.partition(".")[0] == OURS)
    return next((f"{each.module}.{each.attr}" for each in own), None)


def _load(group: str, name: str) -> None:
    """Import what is offered by a name, and register it; what is our own first, as are the names of the core.

    Raises:
        ValueError: it cannot be imported or registered, or several packages offer it.
    """
    own, what = _own(group, name), f"the {group.rpartition('.')[2].removesuffix('s')} {name!r}"
    point, *others = (each for each in _offered(group)[name] if own in (None, f"{each.module}.{each.attr}"))
    if others and not own:
        packages = " and ".join(sorted(_package(each) for each in (point, *others)))
        raise ValueError(f"{packages} both offer {what}; uninstall one of them")
    where = f"{_package(point)} offers {what} as {point.value!r}"
    repair = f"install {OURS} again" if own else "repair or uninstall that package"
    try:
        cls = point.load()
    except Exception as error:
        raise ValueError(f"{where}, which cannot be imported ({type(error).__name__}: {error}); {repair}") from error
    try:
        register(name, cls)
    except ValueError as error:
        raise ValueError(f"{where}, which is none: {error}") from error


def _package(point: EntryPoint) -> str:
    return f"the package {point.dist.name!r}" if point.dist else "a package"


def build(kind: str, given: object, known: Mapping[str, type], bases: tuple[type, ...], saved: bool = False) -> object:
    """An object by name, by ``{"name": ..., **settings}``, or as it is.

    Args:
        kind: what it is, for messages.
        given: the user's choice.
        known: dataclasses by name.
        bases: of objects that are taken as they are.
        saved: settings that are gone are left out, as in a checkpoint of before.

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
        if isinstance(known, Names) and name in known.gone:
            raise ValueError(f"{kind}={name!r} is gone: {known.gone[name]}") from None
        choices = known.choices if isinstance(known, Names) else known
        raise ValueError(f"unknown {kind} {name!r}; there are: {', '.join(choices)}{_lacks(known)}") from None
    allowed = [field.name for field in dataclasses.fields(cls) if field.init]
    gone = getattr(cls, "gone", {})
    if saved:
        arguments = {key: value for key, value in arguments.items() if key not in gone}
    if moved := [key for key in arguments if key in gone]:
        raise ValueError(f"{kind} {name!r} has no setting {moved[0]!r} any more: {gone[moved[0]]}")
    unknown = [key for key in arguments if key not in allowed]
    if unknown:
        raise ValueError(
            f"{kind} {name!r} has no setting {', '.join(map(repr, unknown))}; it has: {', '.join(allowed) or 'none'}"
        )
    return cls(**arguments)


def _lacks(known: Mapping[str, type]) -> str:
    """What to do where this package's own entry points are not found: there is more than the core."""
    if not isinstance(known, Names) or any(_own(known.group, name) for name in _offered(known.group)):
        return ""
    return f"; {OURS} is not installed, or not this version of it: install it, and there are more"


def describe(built: object, known: Mapping[str, type]) -> dict[str, object]:
    """The mapping that ``rebuild`` makes this of, of primitives; a class that is not registered is named by its path.

    Settings that are no primitives are left out.
    """
    name = name_of(type(built), known)
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
    alike = [each for each in _inside(owned) if (_path(type(each)) if outside else name_of(type(each), known)) == name]
    own = alike[0] if alike and name is not None else None
    fields = [field.name for field in dataclasses.fields(own) if field.init] if dataclasses.is_dataclass(own) else []
    if not outside and isinstance(name, str) and name not in known and not _is_given(name, known, owned):
        raise ValueError(
            f"unknown {kind} {name!r} in the state: the run that saved it had it registered, and this one has not; "
            f"call lightning_compress.register({name!r}, its class) first, or name it where a package offers it"
        )
    if not outside:
        taken = {each: getattr(own, each) for each in fields}
        return build(kind, {"name": name, **taken, **settings}, known, bases, saved=True)
    if own is None:
        raise ValueError(f"the state is of {kind} {name!r}, which this run was not given")
    if unknown := settings.keys() - set(fields):
        raise ValueError(f"{kind} {name!r} has no setting {', '.join(sorted(map(repr, unknown)))}")
    return dataclasses.replace(own, **settings) if fields else own  # type: ignore[type-var]


def _is_given(name: str, known: Mapping[str, type], given: Iterable[object]) -> bool:
    """Whether one of these is of the class that is offered by the name, or that is our own; then it is known.

    Nothing of another package is imported: a file may name anything.
    """
    if not isinstance(known, Names):
        return False
    classes = [_path(type(each)) for each in _inside(given)]
    points = [f"{each.module}.{each.attr}" for each in _offered(known.group).get(name, ())]
    return (_own(known.group, name) is not None or any(each in classes for each in points)) and (
        known.find(name) is not None
    )


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def name_of(cls: type, known: Mapping[str, type]) -> str | None:
    """The name of a class among these, or by which this package offers it; None: it has none."""
    if name := next((name for name, each in known.items() if each is cls), None):
        return name
    group = known.group if isinstance(known, Names) else COMPRESSORS
    return next((name for name in _offered(group) if _own(group, name) == _path(cls)), None)


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


def plain(value: Any) -> Any:
    """The same, in mappings and lists too, of Python's own numbers and texts where they are NumPy's."""
    if type(value) is dict:
        return {key: plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value.item() if isinstance(value, np.generic) else value
