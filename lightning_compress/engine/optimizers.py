"""Trained parameters, which optimizer owns which of them, and when an optimizer has stepped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Trained:
    """A trained parameter that every rank holds as a whole; sharded ones are a subclass.

    Args:
        name: as the user knows it.
        parameter: what the optimizer steps.

    Attributes:
        name: as given.
        shape: of the whole parameter, by which rules decide.
        dtype: of the gradients that are averaged.
        accumulates: autograd adds up its gradients.
    """

    accumulates: ClassVar[bool] = True

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.name, self._parameter = name, parameter
        self.shape: tuple[int, ...] = tuple(parameter.shape)
        self.dtype = parameter.dtype

    def parameter(self) -> Tensor:
        """Return what the optimizer steps; its ``id`` is the parameter's identity."""
        return self._parameter

    def held(self) -> Tensor:
        """Return this rank's memory: all of the parameter, or its shard."""
        return self.parameter()

    def gradient(self) -> Tensor | None:
        """Return this rank's part of ``grad``."""
        return self.parameter().grad


def part_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor is returned as it is."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():  # else it would be a new tensor of the graph
        return to_local()


class Listener(Protocol):
    """Gets notified of the steps of every optimizer in the process."""

    def take_over(self, optimizer: Optimizer) -> bool:
        """Called when an optimizer is about to step; returns whether ``before_step`` has to be called."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Called when its gradients are final, if ``take_over`` asked for it."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Called when it has really stepped."""


class Worker(Protocol):
    """Does part of the optimizer's work."""

    counts_steps: ClassVar[bool]

    def take_over(self, optimizer: Optimizer, names: Sequence[str]) -> str | None:
        """See ``Correction.take_over``."""


class Optimizers:
    """The optimizers of one model, found when they first step.

    Args:
        trained: the model's parameters.
        frozen: names of parameters that are not averaged because they did not require a gradient, by their ``id``.

    Attributes:
        rates: the last learning rate of each parameter, by name.
        complete: whether all optimizers were seen.
        stepping: names of the parameters of each optimizer that is about to step.
    """

    def __init__(self, trained: Sequence[Trained], frozen: Mapping[int, str]) -> None:
        self._trained = trained
        self._frozen = frozen
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.stepping: weakref.WeakKeyDictionary[Optimizer, set[str]] = weakref.WeakKeyDictionary()
        self._logged: set[str] = set()
        self.rates: dict[str, float] = {}
        self.complete = False
        self._last: dict[str, int] = {}

    def owned(self, optimizer: Optimizer) -> set[str]:
        """Return the names of the parameters that the optimizer steps."""
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return {each.name for each in self._trained if id(each.parameter()) in owned}

    def all_owned(self) -> set[str] | None:
        """Return the names of the parameters that any optimizer steps; None if there may be other optimizers."""
        return {name for each in self._seen for name in self.owned(each)} if self.complete else None

    def see(self, optimizer: Optimizer) -> None:
        """Remember the optimizer, which is about to step, if it steps any of the model's parameters.

        Raises:
            ValueError: it would step a parameter that is not averaged.
        """
        stepped = [each for group in optimizer.param_groups for each in group["params"]] if self._frozen else ()
        if late := [self._frozen[id(each)] for each in stepped if each.requires_grad and id(each) in self._frozen]:
            raise ValueError(
                f"{', '.join(late[:3])} did not require a gradient when DistributedDataParallel was built, so it never "
                "averages them and every rank would train its own. Freeze them after it was built (with Lightning in "
                "on_fit_start, not in setup) and set find_unused_parameters=True, or start another fit when you "
                "unfreeze them"
            )
        if owned := self.owned(optimizer):
            self._seen.add(optimizer)
            self.stepping[optimizer] = owned

    def take_over(self, optimizer: Optimizer, workers: Sequence[Worker]) -> list[str]:
        """Let each worker check that the optimizer does not repeat its work; return new log lines.

        Raises:
            ValueError: the optimizer does something that a worker cannot be combined with, or there are several
                optimizers and a worker supports one only.
        """
        names = sorted(self.owned(optimizer)) if workers else []
        lines = [worker.take_over(optimizer, names) for worker in workers if names]
        if names and len(self._seen) > 1 and (counting := [worker for worker in workers if worker.counts_steps]):
            raise ValueError(
                f"{counting[0]} counts steps, so it supports one optimizer only; give all parameters to one optimizer"
            )
        new = [line for line in lines if line and line not in self._logged]
        self._logged.update(new)
        return new

    def kept(self) -> list[Tensor]:
        """Return what this rank holds of all tensors of the optimizers' states, in the same order on all ranks."""
        names = self._names()
        named = [
            (name, type(optimizer).__name__, key, value)
            for optimizer in self._seen
            for parameter, state in optimizer.state.items()
            if (name := names.get(id(parameter)))
            for key, value in state.items()
            if isinstance(value, Tensor)
        ]
        return [part_of(value) for *_, value in sorted(named, key=lambda each: each[:3])]

    def rate(self) -> float | None:
        """Return the largest current learning rate; None if no optimizer was seen."""
        rates = [float(group["lr"]) for each in self._seen for group in each.param_groups if "lr" in group]
        return max(rates, default=None)

    def stepped(self, optimizer: Optimizer) -> set[str]:
        """Record a step's learning rates; return the names of parameters that did not move because their rate is 0."""
        rates = self._rates_of(optimizer)
        self._last |= dict.fromkeys(rates, id(optimizer))
        self.rates |= {name: rate for name, rate in rates.items() if rate}
        return {name for name, rate in rates.items() if not rate}

    def changes(self) -> dict[str, float]:
        """Return by parameter the factor of its residual that keeps learning rate times residual unchanged.

        Parameters whose rate is 0 or unchanged are left out. The new rates of the others are recorded.
        """
        factors = {}
        for optimizer in self._seen:
            for name, rate in self._rates_of(optimizer).items():
                before = self.rates.get(name, rate)
                # of two nested optimizers the outer one counts; after a resume, any
                last = self._last.get(name, id(optimizer)) == id(optimizer)
                if last and rate and rate != before:
                    factors[name] = before / rate
                    self.rates[name] = rate
        return factors

    def _rates_of(self, optimizer: Optimizer) -> dict[str, float]:
        groups = [group for group in optimizer.param_groups if "lr" in group]
        # a schedule that ends at 0 may round to below 0
        pairs = [(id(parameter), max(0.0, float(group["lr"]))) for group in groups for parameter in group["params"]]
        names = self._names()
        return {names[parameter]: rate for parameter, rate in pairs if parameter in names}

    def _names(self) -> dict[int, str]:
        return {id(each.parameter()): each.name for each in self._trained}


def hyperparameters(optimizers: Iterable[Optimizer]) -> dict[str, list[object]]:
    """Return the values of each hyperparameter by its name, one for each parameter group that has it.

    What is neither a number nor text, such as a function, is left out: nobody can tell whether two of them are equal.
    """
    values: dict[str, list[object]] = {}
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        for name, value in group.items():
            if name != "params" and (scalars := _scalars(value)):
                values.setdefault(name, []).extend(scalars)
    return values


def _scalars(value: object) -> list[object]:
    """Return the numbers and texts of a hyperparameter, which may be a tensor or a pair such as betas."""
    if isinstance(value, (list, tuple)):
        return [part for each in value for part in _scalars(each)]
    if isinstance(value, Tensor):
        return _scalars(value.tolist())
    return [value] if value is None or isinstance(value, (int, float, str)) else []


def skip_step(optimizer: Optimizer) -> None:
    """Remove the gradients: optimizers skip parameters without one, and leave their states unchanged."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def watch(listener: Listener) -> None:
    """Notify the listener of every step from now on, as long as it lives."""
    _hook_in()
    _listeners.add(listener)


def unwatch(listener: Listener) -> None:
    """Stop notifying the listener."""
    _listeners.discard(listener)


@contextmanager
def unwatched(listener: Listener | None) -> Iterator[None]:
    """Do not notify the listener inside the context: of a step that is none, which fills an optimizer's state."""
    listened = listener in _listeners
    if listener is not None:
        unwatch(listener)
    try:
        yield
    finally:
        if listener is not None and listened:
            watch(listener)


@cache
def _hook_in() -> None:
    """Register one hook per process; torch calls it around each ``Optimizer.step``."""
    register_optimizer_step_pre_hook(_steps)
    register_optimizer_step_post_hook(_stepped)


def _steps(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    checking = [listener for listener in list(_listeners) if listener.take_over(optimizer)]
    return _look(checking, optimizer, args, kwargs) if checking else None


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    for listener in list(_listeners):
        listener.after_step(optimizer)


@contextmanager
def notifying(optimizer: Any, closure: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Notify listeners of a step that torch's hooks do not see, because the optimizer's class is not torch's.

    Args:
        optimizer: has ``param_groups`` and ``state``; it steps inside the context.
        closure: computes the gradients; None if they are there.

    Yields:
        the closure to pass to the step instead.
    """
    changed = _steps(optimizer, (), {"closure": closure})
    yield changed[1]["closure"] if changed else closure
    _stepped(optimizer)


def _look(listeners: Sequence[Listener], optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Show the gradients to the listeners: now, or after the step's closure has computed them."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)

    def closed() -> Any:
        result = closure() if closure is not None else None
        for listener in listeners:
            listener.before_step(optimizer)
        return result

    if closure is None:
        return closed()
    return (args[:1], kwargs | {"closure": closed})
