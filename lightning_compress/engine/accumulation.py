"""Several backward passes for one step, for methods whose output is no mean of gradients.

After a backward pass that synchronised, a parameter's ``grad`` holds what the method made: a mean, to which the next
pass may add its gradient, or a velocity, a vote, a step of Adam, to which it may not. There, the output is set aside
before the next pass accumulates, and the method is given the sum of this rank's gradients again, from the state with
which the step began: as if all passes but the last had been under ``no_sync``.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor


class Accumulation:
    """The gradients of this rank in the step under way.

    It costs a copy of them, in their own dtype.

    Args:
        parameters: names and tensors; of those that are not given to ``add`` nothing is kept.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._totals: dict[str, Tensor] = {}
        self._open: set[str] = set()
        self._before: dict[str, Tensor | None] = {}
        self._zero: dict[str, Tensor] = {}
        self._parameters = {name: weakref.ref(parameter) for name, parameter in parameters}
        self._hooks = [
            parameter.register_hook(partial(self._set_aside, name))
            for name, reference in self._parameters.items()
            if (parameter := reference()) is not None
        ]

    def _set_aside(self, name: str, gradient: Tensor) -> None:
        """Called before ``gradient`` is accumulated: ``grad`` since the last ``add`` is an output, and is set aside."""
        parameter = self._parameters[name]()
        if parameter is None or name not in self._open or name in self._before:
            return
        # zeros that are not the method's, or none, say that the user dropped the gradients of the passes before
        self._before[name] = None if parameter.grad is None else parameter.grad.any() | self._zero.get(name, False)
        parameter.grad = None

    def begin_step(self) -> None:
        """Nothing is accumulated."""
        self._open.clear()
        self._before.clear()

    def add(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Make each gradient, of what one pass brought, the sum over the passes of this step, in place."""
        for name, gradient in zip(names, gradients, strict=True):
            total = self._totals.setdefault(name, torch.empty(0))
            if name not in self._open:
                self._open.add(name)
                self._totals[name] = total.copy_(gradient) if total.shape == gradient.shape else gradient.clone()
            elif name in self._before:
                kept = self._before.pop(name)
                total.copy_(gradient) if kept is None else total.masked_fill_(~kept, 0.0).add_(gradient)
            elif (parameter := self._parameters[name]()) is None or parameter.grad is None:
                total.zero_()
            gradient.copy_(self._totals[name])  # a parameter that this pass did not use has its output there

    def made(self, names: Sequence[str], outputs: Sequence[Tensor]) -> None:
        """What the method made of them: all of a parameter may be 0, where it sends few elements of a group."""
        self._zero.update((name, ~output.any()) for name, output in zip(names, outputs, strict=True))

    def close(self) -> None:
        """Stop watching, and give the memory back."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._totals.clear()


class Arrivals:
    """Which parameters a gradient came for since each was averaged last: what DistributedDataParallel goes by.

    A pass of a step that leaves a parameter out brings the mean of the pass before, which is still in ``grad``; where
    no rank used it, DistributedDataParallel throws away what is made of that.

    Args:
        parameters: names and tensors.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._came: set[str] = set()
        self._hooks = [each.register_post_accumulate_grad_hook(partial(self._note, name)) for name, each in parameters]

    def _note(self, name: str, _: Tensor) -> None:
        self._came.add(name)

    def left_out(self, names: Collection[str]) -> frozenset[str]:
        """Those of these parameters, which are averaged now, that none came for."""
        missing = frozenset(names) - self._came
        self._came.difference_update(names)
        return missing

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class Passes:
    """The backward passes of a step that synchronise.

    Args:
        parameters: names and tensors of those that a pass may bring several times in a step; see ``Accumulation``.

    Attributes:
        number: how many came before, in this step.
    """

    def __init__(self, parameters: Sequence[tuple[str, Tensor]]) -> None:
        self._parameters = parameters
        self._sums: Accumulation | None = None
        self._arrivals: Arrivals | None = None
        self._reduced: set[str] = set()  # parameters, in this pass
        self._seen: set[str] = set()  # parameters, in this step
        self.number = 0

    def watch(self) -> None:
        """See from now on that no output is taken for a gradient."""
        if self._sums is None and self._parameters:
            self._sums = Accumulation(self._parameters)

    def expect(self) -> None:
        """See from now on which parameters a pass leaves out; see ``Arrivals``."""
        if self._arrivals is None and self._parameters:
            self._arrivals = Arrivals(self._parameters)

    def left_out(self, names: Collection[str]) -> frozenset[str]:
        """Those of these parameters, which are averaged now, whose gradient on this rank is that of a pass before."""
        missing = self._arrivals.left_out(names) if self._arrivals else frozenset()
        return missing if self.number else frozenset()

    def again(self, names: Collection[str]) -> bool:
        """Whether any of these parameters has come in this pass already, so that another one has begun."""
        return not self._reduced.isdisjoint(names)

    def add(self, names: Iterable[str]) -> None:
        """These parameters have come."""
        self._reduced.update(names)

    def add_up(self, names: Sequence[str], gradients: Sequence[Tensor]) -> bool:
        """Make each gradient the sum of this step's; returns whether any of them came in a pass before."""
        if self._sums:
            self._sums.add(names, gradients)
        before = not self._seen.isdisjoint(names)
        self._seen.update(names)
        return before

    def made(self, names: Sequence[str], outputs: Sequence[Tensor]) -> None:
        """The method made these of them."""
        if self._sums:
            self._sums.made(names, outputs)

    def next(self) -> None:
        """Another pass of the step begins."""
        self._reduced.clear()
        self.number += 1

    def begin_step(self) -> None:
        """Nothing has come."""
        self._reduced.clear()
        self._seen.clear()
        self.number = 0
        if self._sums:
            self._sums.begin_step()

    def close(self) -> None:
        """Stop watching."""
        for each in (self._sums, self._arrivals):
            if each:
                each.close()
