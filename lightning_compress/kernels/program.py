"""Calls that one step records, and later steps make again without the Python that led to them.

While a ``Tape`` records, a step takes its ordinary path. Whoever starts work on the device adds a call of it to the
tape: kernels are launched by ``triton/launch.py``, collectives start in ``collectives/counting.py``, and operations of
PyTorch that only write to memory are seen here. What differs from step to step is given to them by ``Program.replay``:
integers that follow from the number of the step, the flag, and the device's current stream.

What cannot be made again makes the tape void. Then the step is like any other, and no program comes of it.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Call = tuple[Callable[..., object], list[Any]]
"""A function, and its arguments."""


class _Stream:
    """Stands for the current stream of the device among the arguments of a call."""


STREAM = _Stream()
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operations that allocate without writing: the tape's arguments keep what they return."""
_RESHAPES = {"resize_", "set_", "resize_as_"}
"""Operations that change where a tensor lies, which is not what a step does twice."""


class Varying(int):
    """An integer that differs from step to step, and remembers how it was made of others."""

    made: tuple[Callable[..., int], tuple[Any, ...]] | None = None
    """A function and its arguments; None for the number of the step."""

    __hash__ = int.__hash__


def _remembering(function: Callable[..., int], swapped: bool) -> Callable[[Varying, Any], Any]:
    def operate(number: Varying, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        return varying(function, *((other, number) if swapped else (number, other)))

    return operate


def _deciding(name: str) -> Callable[..., Any]:
    def decide(number: Varying, *other: Any) -> Any:
        _refuse("a decision by a number that differs from step to step")
        return getattr(int, name)(number, *other)

    return decide


for _name in ("add", "sub", "mul", "mod", "floordiv", "rshift", "lshift", "and", "or", "xor"):
    _function = getattr(operator, _name + "_" * (_name in ("and", "or")))
    setattr(Varying, f"__{_name}__", _remembering(_function, False))
    setattr(Varying, f"__r{_name}__", _remembering(_function, True))
for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__"):
    setattr(Varying, _name, _deciding(_name))


def varying(function: Callable[..., int], *parts: int) -> int:
    """Return ``function(*parts)``, which is ``Varying`` because a part is."""
    number = Varying(function(*map(plain, parts)))
    number.made = function, parts
    return number


def plain(value: Any) -> Any:
    """Return a value, without what it remembers if it is ``Varying``."""
    return int(value) if type(value) is Varying else value


def fixed(value: int) -> int:
    """Return an integer for a use that no program can repeat: if it is ``Varying``, what is being recorded is void."""
    if type(value) is Varying:
        _refuse("a number that differs from step to step is not given to a kernel")
        return int(value)
    return value


class _Local(threading.local):
    tape: Tape | None = None


here = _Local()
"""Has the tape that records this thread's calls, or None."""


def _refuse(reason: str) -> None:
    if tape := here.tape:
        tape.refuse(reason)


class Tape:
    """Records the calls of one step.

    Args:
        step: number of the step.

    Attributes:
        step: the same number, by which ``Program.replay`` knows what follows from it.
        flag: float32 scalar that each repetition has a new one of, or None.
        calls: in order.
        void: why no program comes of it; empty if one does.
    """

    def __init__(self, step: int) -> None:
        self.step = Varying(step)
        self.flag: Tensor | None = None
        self.calls: list[Call] = []
        self.void = ""

    def refuse(self, reason: str) -> None:
        """Have no program come of this tape."""
        self.void = self.void or reason

    def give(self, flag: Tensor) -> None:
        """Set the flag, before any call uses it."""
        if self.flag is not None:
            self.refuse("a step has two flags")
        self.flag = flag

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Do not record inside the context: its caller adds a call for all of it."""
        here.tape = None
        try:
            yield
        finally:
            here.tape = self

    def add(self, function: Callable[..., object], arguments: list[Any]) -> None:
        """Record a call; the arguments may be ``Varying``, the flag or ``STREAM``, but not contain them."""
        self._look(arguments)
        self.calls.append((function, arguments))

    def _look(self, arguments: Sequence[object]) -> None:
        """Refuse a view of the flag, and what contains something that differs from step to step."""
        flag = self.flag
        for each in arguments:
            if isinstance(each, Tensor):
                shared = flag is not None and each is not flag
                if shared and each.untyped_storage()._cdata == flag.untyped_storage()._cdata:  # type: ignore[union-attr]
                    self.refuse("a view of the flag is used")
            elif isinstance(each, list | tuple | dict) and _contains(each, flag):
                self.refuse("what differs from step to step is in a list")

    def keep(self, arguments: Sequence[object]) -> None:
        """Take it that a call always uses these, which must not differ from step to step."""
        if _contains(arguments, self.flag):
            self.refuse("what differs from step to step is kept")
        self._look(arguments)

    def operation(self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Record an operation of PyTorch, unless it starts nothing."""
        schema = function._schema
        name, kept = schema.name.removeprefix("aten::"), [each.alias_info for each in schema.returns]
        if name in _EMPTY or (kept and all(each is not None and not each.is_write for each in kept)):
            return
        writes = schema.is_mutable and all(each is not None and each.is_write for each in kept)
        if not writes or name in _RESHAPES or not schema.name.startswith("aten::"):
            self.refuse(f"{schema.name} makes a new tensor, or is not known")
        elif named:
            given = [each.name for each in schema.arguments if each.name in named]
            count, names = len(arguments), tuple(given)
            self.add(_ByName(function._op, count, names), [*arguments, *(named[each] for each in given)])
        else:
            self.add(function._op, list(arguments))  # what the overload calls, without a function of Python between


class _ByName:
    """A call of which the last arguments are given by name."""

    def __init__(self, function: Callable[..., object], count: int, names: tuple[str, ...]) -> None:
        self._function, self._count, self._names = function, count, names

    def __call__(self, *arguments: Any) -> object:
        count = self._count
        return self._function(*arguments[:count], **dict(zip(self._names, arguments[count:], strict=True)))


def _contains(container: Any, flag: Tensor | None) -> bool:
    values = container.values() if isinstance(container, dict) else container
    return any(each is flag or type(each) is Varying for each in values if each is not None)


class _Watch(TorchDispatchMode):
    """Shows PyTorch's operations to the tape of this thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if tape := here.tape:
            tape.operation(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextmanager
def recording(tape: Tape) -> Iterator[None]:
    """Record the calls of this thread inside the context."""
    here.tape = tape
    try:
        with _Watch():  # type: ignore[no-untyped-call]
            yield
    finally:
        here.tape = None


class Program:
    """Makes the calls of a tape again.

    Args:
        tape: not void.
        device: of all tensors.
    """

    def __init__(self, tape: Tape, device: torch.device) -> None:
        self._calls, self._device = tape.calls, device
        self._values: list[int] = [0]  # the number of the step, and what follows from it
        self._makes: list[tuple[Callable[..., int], list[Any], list[tuple[int, int]]]] = []
        self._numbers: dict[int, int] = {id(tape.step): 0}
        self._varying, self._flags, self._streams = (list[tuple[list[Any], int, int]]() for _ in range(3))
        for _, arguments in tape.calls:
            for place, each in enumerate(arguments):
                if type(each) is Varying:
                    self._varying.append((arguments, place, self._number(each)))
                elif each is STREAM:
                    self._streams.append((arguments, place, 0))
                elif each is tape.flag:
                    self._flags.append((arguments, place, 0))
        self._stream: object = None

    def _number(self, value: Varying) -> int:
        """Return the place of a value among all, and have it made if it is not yet."""
        if id(value) not in self._numbers:
            function, parts = cast(tuple[Callable[..., int], tuple[Any, ...]], value.made)
            used = [(place, self._number(part)) for place, part in enumerate(parts) if type(part) is Varying]
            self._makes.append((function, list(parts), used))
            self._values.append(0)
            self._numbers[id(value)] = len(self._values) - 1
        return self._numbers[id(value)]

    def replay(self, step: int, flag: Tensor) -> None:
        """Make the calls.

        Args:
            step: number of the step.
            flag: float32 scalar, 0.0; stands for the tape's.
        """
        values = self._values
        values[0], number = step, 1
        for function, parts, used in self._makes:
            for place, other in used:
                parts[place] = values[other]
            values[number] = function(*parts)
            number += 1
        for arguments, place, number in self._varying:
            arguments[place] = values[number]
        for arguments, place, _ in self._flags:
            arguments[place] = flag
        if self._streams and (stream := torch._C._cuda_getCurrentRawStream(self._device.index)) != self._stream:
            self._stream = stream
            for arguments, place, _ in self._streams:
                arguments[place] = stream
        for call, arguments in self._calls:
            call(*arguments)
