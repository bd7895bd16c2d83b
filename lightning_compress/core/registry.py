"""Classes by name: build what a user chose, and register more names."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

COMPRESSORS = "lightning_compress.compressors"
"""The entry point group by which packages offer compressors; this package offers those of ``contrib``."""
OURS = __name__.partition(".")[0]


class Registry(dict[str, type[T]]):
    """Classes by name: those of the core, those registered, and those that installed packages offer.

    A package's class is imported by ``names[name]`` only, not by ``in`` or by iterating.

    Args:
        own: the classes of the core.
        takes: base classes of what may be registered here.
        group: of the entry points by which packages offer more.
        gone: removed names, each with its successor.
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
        """All names, including those that packages offer in the group, of any kind; nothing is imported."""
        return [*self, *(name for name in _offered(self.group) if name not in self)]

    def complete(self) -> Registry[T]:
        """Import everything that this package offers, and return the table."""
        for name in self.offered:
            if name not in self and _own(self.group, name):
                self.find(name)
        return self

    def find(self, name: str) -> type[T] | None:
        """Return the class of a name, imported if necessary; None if there is none of a kind that is taken here."""
        try:
            return self[name]
        except KeyError:
            return None

    @property
    def choices(self) -> list[str]:
        """The names that a user may choose."""
        return [*self.complete(), *(each for each in self.offered if each not in self and not _own(self.group, each))]


_TABLES: list[Registry] = []  # type: ignore[type-arg]


def named(module: Mapping[str, object], base: type[T]) -> dict[str, type[T]]:
    """Return the classes among a module's globals that derive from ``base``, by their ``name``, in import order."""
    classes = [value for value in module.values() if isinstance(value, type) and issubclass(value, base)]
    return {cls.__dict__["name"]: cls for cls in classes if "name" in cls.__dict__}


def register(name: str, cls: type) -> None:
    """Make your own class known by a name: a compressor, an exchange, or a gossip algorithm.

    ``compressor=``, configs, ``retune``, rules and ``compare`` then accept a compressor's name, ``exchange=`` an
    exchange's, and ``algorithm=`` an algorithm's. Checkpoints save the name. Call it on every rank before the name is
    used, next to the class definition. Registering the same class again is allowed. So is replacing it by a class with
    the same path, as when a notebook cell is run again.

    An installed package need not call it. A class that it offers by an entry point of the groups
    ``lightning_compress.compressors``, ``lightning_compress.exchanges`` or ``lightning_compress.algorithms`` is
    registered when its name is used.

    Args:
        name: letters, digits and underscores.
        cls: derived from ``Codec``, ``Reducer``, ``Corrected``, ``Exchange`` or ``Algorithm``; a frozen dataclass whose
            settings all have defaults.

    Raises:
        ValueError: the class is not of this kind, or the name belongs to another class.
    """
    what = f"register({name!r}, {cls.__name__ if isinstance(cls, type) else repr(cls)})"
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{what}: use letters, digits and underscores in a name, such as 'linear8'")
    tables = [table for table in _TABLES if isinstance(cls, type) and issubclass(cls, table.takes)]
    if not tables:
        raise ValueError(
            f"{what}: pass a class derived from lightning_compress.Codec, lightning_compress.Reducer, Corrected, "
            "Exchange or Algorithm"
        )
    if inspect.isabstract(cls):
        raise ValueError(f"{what}: the class lacks {', '.join(sorted(getattr(cls, '__abstractmethods__', ())))}")
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        raise ValueError(f"{what}: the class must be a frozen dataclass; decorate it with @dataclass(frozen=True)")
    for field in dataclasses.fields(cls):
        if field.name == "name":
            raise ValueError(f"{what}: a setting cannot be called 'name', which is the key of the compressor's name")
        if field.init and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{what}: the setting {field.name!r} needs a default, since users may give the name only")
    group = tables[0].group
    known = (_path(table[name]) for table in _TABLES if table.group == group and name in table)
    taken = next(known, _own(group, name) or _path(cls))
    if taken != _path(cls):
        raise ValueError(f"{what}: {name!r} is already the name of {taken}; choose another one")
    for table in tables:
        table[name] = cls


def lookup(name: str, base: type) -> type[Any]:
    """Return the class of a name that derives from ``base``; for options whose value stands for a class.

    Raises:
        ValueError: no installed package offers it.
    """
    cls = next((table.find(name) for table in _TABLES if base in table.takes), None)
    if cls is None:
        raise ValueError(f"no installed package offers {name!r}: reinstall {OURS}, which does")
    return cls


@cache
def _offered(group: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of installed packages, by name; nothing is imported."""
    points: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=group):
        points.setdefault(point.name, []).append(point)
    return points


def _own(group: str, name: str) -> str | None:
    """Return the path of the class that this package offers by a name, or None; nothing is imported."""
    points = (point for point in _offered(group).get(name, ()) if point.module.partition(".")[0] == OURS)
    return next((f"{point.module}.{point.attr}" for point in points), None)


def _load(group: str, name: str) -> None:
    """Import and register the class that is offered by a name; this package's own class comes first.

    Raises:
        ValueError: it cannot be imported or registered, or several packages offer it.
    """
    ours, what = _own(group, name), f"the {group.rpartition('.')[2].removesuffix('s')} {name!r}"
    point, *others = (each for each in _offered(group)[name] if ours in (None, f"{each.module}.{each.attr}"))
    if others and not ours:
        packages = " and ".join(sorted(_package(each) for each in (point, *others)))
        raise ValueError(f"{packages} both offer {what}; uninstall one of them")
    where = f"{_package(point)} offers {what} as {point.value!r}"
    repair = f"reinstall {OURS}" if ours else "repair or uninstall that package"
    try:
        cls = point.load()
    except Exception as error:
        raise ValueError(f"{where}, which cannot be imported ({type(error).__name__}: {error}); {repair}") from error
    try:
        register(name, cls)
    except ValueError as error:
        raise ValueError(f"{where}, which cannot be registered: {error}") from error


def _package(point: EntryPoint) -> str:
    return f"the package {point.dist.name!r}" if point.dist else "a package"


def build(kind: str, given: object, known: Mapping[str, type], bases: tuple[type, ...], saved: bool = False) -> object:
    """Return an object by its name, by ``{"name": ..., **settings}``, or as it is.

    Args:
        kind: name of the option, for messages.
        given: the user's choice.
        known: dataclasses by name.
        bases: base classes of objects that are returned as they are.
        saved: ignore removed settings, which an older checkpoint may have.

    Raises:
        ValueError: the name or a setting does not exist, or a value is out of range.
    """
    if isinstance(given, bases):
        return given
    if isinstance(given, type) and issubclass(given, bases):
        raise ValueError(
            f"{kind}={given.__name__} is a class; write {kind}={given.__name__}(), which makes an object of it"
        )
    settings = {"name": given} if isinstance(given, str) else given
    if not isinstance(settings, Mapping) or not isinstance(settings.get("name"), str):
        raise ValueError(
            f"{kind}={given!r} must be a name ({', '.join(known)}), a mapping with a 'name' and settings, "
            f"or a {bases[0].__name__}"
        )
    arguments = {str(key): value for key, value in settings.items()}
    name = arguments.pop("name")
    try:
        cls = known[name]
    except KeyError:
        if isinstance(known, Registry) and name in known.gone:
            raise ValueError(f"{kind}={name!r} is gone: {known.gone[name]}") from None
        choices = list(known.choices if isinstance(known, Registry) else known)
        meant = difflib.get_close_matches(name.lower().replace("-", "_"), choices, n=1)
        hint = f"did you mean {meant[0]!r}? There" if meant else "there"
        raise ValueError(f"unknown {kind} {name!r}; {hint} are: {', '.join(choices)}{_lacks(known)}") from None
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
    """Return what to do if this package's own entry points are not found, which leaves the core only."""
    if not isinstance(known, Registry) or any(_own(known.group, name) for name in _offered(known.group)):
        return ""
    return f"; {OURS} is not installed, or in another version: install it to get more names"


def describe(built: object, known: Mapping[str, type]) -> dict[str, object]:
    """Return a mapping of primitives from which ``rebuild`` makes the object; an unregistered class by its path.

    Settings that are not primitives are left out.
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
    """Return the object that ``describe`` described.

    Args:
        kind: see ``build``.
        described: from a file, which may name any class; only classes of ``given`` are used.
        known: see ``build``.
        bases: see ``build``.
        given: objects that this run was given. Their classes are used for unregistered paths, and their values for
            settings that were not described.

    Raises:
        ValueError: see ``build``; or this run was not given the class, or does not know the name.
    """
    objects = list(given)
    settings = {
        str(key): rebuild(str(key), value, known, bases, objects)
        if isinstance(value, Mapping) and not value.keys().isdisjoint({"class", "name"})
        else value
        for key, value in described.items()
    }
    outside = "class" in settings
    name = settings.pop("class" if outside else "name", None)
    same = [each for each in _inside(objects) if (_path(type(each)) if outside else name_of(type(each), known)) == name]
    base = same[0] if same and name is not None else None
    fields = [field.name for field in dataclasses.fields(base) if field.init] if dataclasses.is_dataclass(base) else []
    if not outside and isinstance(name, str) and name not in known and not _is_given(name, known, objects):
        raise ValueError(
            f"unknown {kind} {name!r} in the state: the run that saved it had registered this name. Call "
            f"lightning_compress.register({name!r}, its class) first, or choose it by name if a package offers it"
        )
    if not outside:
        taken = {field: getattr(base, field) for field in fields}
        return build(kind, {"name": name, **taken, **settings}, known, bases, saved=True)
    if base is None:
        raise ValueError(f"the state is of {kind} {name!r}, which this run was not given")
    if unknown := settings.keys() - set(fields):
        raise ValueError(f"{kind} {name!r} has no setting {', '.join(sorted(map(repr, unknown)))}")
    return dataclasses.replace(base, **settings) if fields else base  # type: ignore[type-var]


def _is_given(name: str, known: Mapping[str, type], given: Iterable[object]) -> bool:
    """Whether ``given`` has an object of the class offered by the name, or the class is this package's own.

    The class is then imported. No other package is imported, because a file may name anything.
    """
    if not isinstance(known, Registry):
        return False
    classes = [_path(type(each)) for each in _inside(given)]
    points = [f"{each.module}.{each.attr}" for each in _offered(known.group).get(name, ())]
    return (_own(known.group, name) is not None or any(each in classes for each in points)) and (
        known.find(name) is not None
    )


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def name_of(cls: type, known: Mapping[str, type]) -> str | None:
    """Return the name of a class among these, or by which this package offers it, or None."""
    if name := next((name for name, each in known.items() if each is cls), None):
        return name
    group = known.group if isinstance(known, Registry) else COMPRESSORS
    return next((name for name in _offered(group) if _own(group, name) == _path(cls)), None)


def _is_primitive(value: object) -> bool:
    if isinstance(value, Mapping):
        return type(value) is dict and all(type(key) is str and _is_primitive(each) for key, each in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_primitive, value))  # type: ignore[call-overload]
    return value is None or type(value) in (bool, int, float, str)


def _inside(given: Iterable[object]) -> Iterator[object]:
    """Yield these objects and, recursively, the objects among their settings."""
    for each in given:
        yield each
        if dataclasses.is_dataclass(each):
            yield from _inside(getattr(each, field.name) for field in dataclasses.fields(each))


def plain(value: Any) -> Any:
    """Return the value with Python numbers and texts instead of NumPy's, also inside mappings and lists."""
    if type(value) is dict:
        return {key: plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value.item() if isinstance(value, np.generic) else value
