"""Who owns which parameters, and when an optimizer has stepped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Listener(Protocol):
    """Is told of every optimizer of the process."""

    @property
    def looks(self) -> bool:
        """It wants to see the gradients before they are used."""

    def take_over(self, optimizer: Optimizer) -> None:
        """It is about to step."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Its gradients are what it will step with; called where ``looks``."""

    def after_step(self, optimizer: Optimizer) -> None:
        """It has really stepped."""


class Worker(Protocol):
    """Does a part of the optimizer's work."""

    counts_steps: ClassVar[bool]

    def take_over(self, optimizer: Optimizer, names: Sequence[str]) -> str | None:
        """See ``Correction.take_over``."""


class Optimizers:
    """The optimizers of one model, found when they first step.

    Args:
        names: of the model's parameters, by their ``id``.
        frozen: likewise, those that are not averaged since they did not require a gradient.

    Attributes:
        rates: at which each parameter was stepped last, by name.
        complete: all were seen.
    """

    def __init__(self, names: Mapping[int, str], frozen: Mapping[int, str]) -> None:
        self._names = names
        self._frozen = frozen
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._told: set[str] = set()
        self.rates: dict[str, float] = {}
        self.complete = False
        self._last: dict[str, int] = {}

    def owned(self, optimizer: Optimizer) -> set[str]:
        """Names of the parameters that the optimizer steps."""
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return {name for parameter, name in self._names.items() if parameter in owned}

    def all_owned(self) -> set[str] | None:
        """Names of the parameters that any of them steps; None as long as there may be others."""
        return {name for each in self._seen for name in self.owned(each)} if self.complete else None

    def see(self, optimizer: Optimizer) -> None:
        """Remember it, if it steps any of the model's parameters.

        Raises:
            ValueError: it would step a parameter that is not averaged.
        """
        if self._frozen and (late := self._unfrozen(optimizer)):
            raise ValueError(
                f"{', '.join(late[:3])} did not require a gradient when DistributedDataParallel was built, which does "
                "not average such parameters later either: every rank would train its own. Freeze them after it was "
                "built (with Lightning in on_fit_start, not in setup) and set find_unused_parameters=True; or begin "
                "another fit when they are unfrozen"
            )
        if optimizer not in self._seen and self.owned(optimizer):
            self._seen.add(optimizer)

    def _unfrozen(self, optimizer: Optimizer) -> list[str]:
        stepped = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        return [self._frozen[id(each)] for each in stepped if id(each) in self._frozen]

    def take_over(self, optimizer: Optimizer, workers: Sequence[Worker]) -> list[str]:
        """Let methods that take over a part of its work check that it is not done twice; returns new log lines.

        Raises:
            ValueError: the optimizer does what they cannot go with, or there are several and a worker takes one only.
        """
        names = sorted(self.owned(optimizer)) if workers else []
        said = [worker.take_over(optimizer, names) for worker in workers if names]
        if names and len(self._seen) > 1 and (alone := [each for each in workers if each.counts_steps]):
            raise ValueError(f"{alone[0]} counts steps, and there are several optimizers; give all parameters to one")
        new = [each for each in said if each and each not in self._told]
        self._told.update(new)
        return new

    def kept(self) -> list[Tensor]:
        """All tensors of their states, in an order that is the same on all ranks."""
        named = [
            (name, type(optimizer).__name__, key, value)
            for optimizer in self._seen
            for parameter, state in optimizer.state.items()
            if (name := self._names.get(id(parameter)))
            for key, value in state.items()
            if isinstance(value, Tensor)
        ]
        return [value for *_, value in sorted(named, key=lambda each: each[:3])]

    def rate(self) -> float | None:
        """The largest learning rate that any of them has now; None as long as none was seen."""
        rates = [float(group["lr"]) for each in self._seen for group in each.param_groups if "lr" in group]
        return max(rates, default=None)

    def stepped(self, optimizer: Optimizer) -> set[str]:
        """Note the learning rates of a step; names of its parameters that it did not move, since their rate is 0."""
        rates = self._rates_of(optimizer)
        self._last |= dict.fromkeys(rates, id(optimizer))
        self.rates |= {name: rate for name, rate in rates.items() if rate}
        return {name for name, rate in rates.items() if not rate}

    def changes(self) -> dict[str, float]:
        """Factors for residuals such that learning rate times residual is unchanged in this step, by parameter.

        Parameters whose rate is 0, or the same as it was, are left out; those of the others count as noted.
        """
        factors = {}
        for optimizer in self._seen:
            for name, rate in self._rates_of(optimizer).items():
                before = self.rates.get(name, rate)
                last = self._last.get(name, id(optimizer)) == id(optimizer)  # the outer one of two; any, after a resume
                if last and rate and rate != before:
                    factors[name] = before / rate
                    self.rates[name] = rate
        return factors

    def forget(self) -> None:
        """Begin again."""
        self.rates.clear()

    def _rates_of(self, optimizer: Optimizer) -> dict[str, float]:
        groups = [group for group in optimizer.param_groups if "lr" in group]
        # a schedule that ends at 0 may round to less
        pairs = [(id(parameter), max(0.0, float(group["lr"]))) for group in groups for parameter in group["params"]]
        return {self._names[parameter]: rate for parameter, rate in pairs if parameter in self._names}


def skip_step(optimizer: Optimizer) -> None:
    """Take the gradients away: every optimizer leaves parameters without one alone, and their state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def watch(listener: Listener) -> None:
    """Tell the listener of every step from now on, as long as it lives."""
    _hook_in()
    _listeners.add(listener)


def unwatch(listener: Listener) -> None:
    """Stop."""
    _listeners.discard(listener)


@cache
def _hook_in() -> None:
    """One hook per process: torch calls it around each ``Optimizer.step``, wherever that happens."""
    register_optimizer_step_pre_hook(_steps)
    register_optimizer_step_post_hook(_stepped)


def _steps(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    for listener in list(_listeners):
        listener.take_over(optimizer)
    looking = [listener for listener in _listeners if listener.looks]
    return _look(looking, optimizer, args, kwargs) if looking else None


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    for listener in list(_listeners):
        listener.after_step(optimizer)


@contextmanager
def telling(optimizer: Any, closure: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Tell listeners of a step of an optimizer that torch's hooks do not see, since its class is not torch's.

    Args:
        optimizer: has ``param_groups`` and ``state``; it steps inside of the context.
        closure: makes the gradients.

    Yields:
        the closure that the step is to be given in its place.
    """
    changed = _steps(optimizer, (), {"closure": closure})
    yield changed[1]["closure"] if changed else closure
    _stepped(optimizer)


def _look(listeners: Sequence[Listener], optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Show them the gradients: now, or when the closure that the step begins with has made them."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)

    def closed() -> Any:
        result = closure() if closure is not None else None
        for listener in listeners:
            listener.before_step(optimizer)
        return result

    if closure is None:
        return closed()
    return (args[:1], kwargs | {"closure": closed})
