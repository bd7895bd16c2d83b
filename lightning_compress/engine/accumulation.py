"""The backward passes that make a step, parameter by parameter.

A step of a parameter begins with the first pass that averages its gradient, and ends when the optimizer that owns it
steps: optimizers may step at different times, and gradients may add up over several passes. What earlier passes made
counts as long as it is in ``grad``. Before another pass accumulates, it is looked for there; where it is gone, those
gradients were thrown away, and what was kept of them is, too.

What a method makes may be a mean, to which the next pass may add its gradient, or a velocity, a vote, a step of Adam,
to which it may not. There the output is set aside first, and the method is given the sum of this rank's gradients
again, from the state with which the step began: as if all passes but the last had been under ``no_sync``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_compress.engine.optimizers import skip_step
from lightning_compress.settings.run_state import RunState

_PATIENCE = 100
"""Steps of a single pass after which several are not expected any more."""

Kept = Mapping[str, bool | Tensor]
"""By parameter, whether what earlier passes of its step made counts; on an accelerator it may be a bool scalar."""


class Passes:
    """The backward passes of the steps under way.

    Args:
        parameters: names and tensors of those that several passes may bring before a step; of others, what earlier
            passes made always counts.
        sums: keep the sum of each parameter's gradients, in their own dtype, for methods whose output is no mean;
            without it these refuse a second pass.
        owned: returns the parameters that the optimizers have, once all are known; else None.

    Attributes:
        number: how many passes came before this one, since an optimizer stepped last.
        patience: steps for which ``made`` is to be called, since they may have several passes.
        open: names of the parameters in a step that is under way.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        sums: bool = True,
        owned: Callable[[], Collection[str] | None] = lambda: None,
    ) -> None:
        self._tensors = {name: weakref.ref(parameter) for name, parameter in parameters}
        self._sums, self._owned = sums, owned
        self.patience = 1
        self._no_means: set[str] = set()  # what was made of them last may not be added to
        self._averaged: set[str] = set()  # in this pass
        self.open: set[str] = set()
        self._looked: dict[str, bool | Tensor] = {}  # see ``Kept``; of those that accumulated since they were averaged
        self._zero: dict[str, Tensor] = {}  # whether all that was made is 0, as where few elements are sent
        self._totals: dict[str, Tensor] = {}
        self._hooks: dict[str, tuple[RemovableHandle, object]] = {}  # and the node that it is of
        self.number = 0

    def watch(self) -> None:
        """A backward pass may begin: see what is in ``grad`` before it accumulates, where a step is under way."""
        if not self.open:
            self._unhook()
        for name in self.open - self._hooks.keys():
            if (parameter := self._parameter(name)) is not None:
                self.patience = _PATIENCE
                with torch.enable_grad():  # a hook of the tensor would be called by torch.autograd.grad, too
                    node: Any = parameter.view_as(parameter).grad_fn
                accumulates = node.next_functions[0][0]
                self._hooks[name] = accumulates.register_prehook(partial(self._look, name)), accumulates

    def _look(self, name: str, _: object) -> None:
        """Called before a gradient is accumulated."""
        parameter = self._parameter(name)
        if parameter is None or name not in self.open:
            return
        if name in self._looked:  # in a pass that did not synchronise
            self._looked[name] = parameter.grad is not None and self._looked[name]
            return
        self._looked[name] = self._holds(name)
        if name in self._no_means:
            parameter.grad = None

    def _holds(self, name: str) -> bool | Tensor:
        """Whether ``grad`` is what earlier passes made."""
        parameter = self._parameter(name)
        if parameter is None:
            return True
        if parameter.grad is None:
            return False
        if name not in self._zero:
            return True
        found = parameter.grad.any() | self._zero[name]
        return bool(found) if found.device.type == "cpu" else found

    def _parameter(self, name: str) -> Tensor | None:
        return self._tensors[name]() if name in self._tensors else None

    def again(self, names: Collection[str]) -> bool:
        """Whether any of these parameters was averaged in this pass already, so that another one has begun."""
        return not self._averaged.isdisjoint(names)

    def goes_on(self, names: Iterable[str]) -> bool:
        """Whether what earlier passes made of any of these parameters counts."""
        return any(bool(self._looked[name] if name in self._looked else self._holds(name)) for name in names)

    def next(self, goes_on: bool) -> None:
        """Another pass begins, and no optimizer stepped since the last one."""
        self._averaged.clear()
        self.number = self.number + 1 if goes_on else 0

    def arrive(self, names: Sequence[str], averages: bool) -> tuple[Kept, frozenset[str], bool]:
        """These parameters are averaged now.

        Args:
            names: of the parameters.
            averages: a mean is made of them.

        Returns:
            whether what earlier passes made counts, for those whose step is under way; those of them for which this
            pass has no gradient on this rank, so that DistributedDataParallel brings what ``grad`` holds; and whether
            the sum over the passes of a step is to be averaged, see ``add_up``.
        """
        missing = [name for name in names if name in self.open and name not in self._looked]
        kept = {name: self._holds(name) for name in missing}
        kept |= {name: self._looked.pop(name) for name in names if name in self._looked}
        for each in kept.values():
            if isinstance(each, Tensor):  # made on the stream of backward
                each.record_stream(torch.cuda.current_stream(each.device))
        self._averaged.update(names)
        self.open.update(names)
        left_out = frozenset(name for name in missing if name in self._hooks and kept[name] is not False)
        return kept, left_out, self._adds_up(names, averages)

    def _adds_up(self, names: Sequence[str], averages: bool) -> bool:
        before = not self._no_means.isdisjoint(names)
        if averages:
            self._no_means.difference_update(names)
            return before
        for name in set(names) - self._no_means:
            self._totals.pop(name, None)
        self._no_means.update(names)
        return True

    def add_up(self, names: Sequence[str], gradients: Sequence[Tensor], kept: Kept, left_out: Collection[str]) -> None:
        """Make each gradient, of what one pass brought, the sum over the passes of its step, in place.

        Args:
            names: of the parameters.
            gradients: of each.
            kept: from ``arrive``.
            left_out: likewise.

        Raises:
            RuntimeError: earlier passes count, whose sum is not kept.
        """
        if not self._sums:
            held = [name for name, counts in kept.items() if counts is not False]
            owned = self._owned() if held else None
            if late := [name for name in held if owned is None or name in owned]:
                raise RuntimeError(
                    f"{late[0]} got a second gradient before its optimizer stepped, and its first one is still in "
                    "grad: the compressor's output is no mean of gradients, to which another one could be added. Use "
                    "accumulate_grad_batches, or call zero_grad() before each backward"
                )
            return
        for name, gradient in zip(names, gradients, strict=True):
            total, counts = self._totals.get(name), kept.get(name, False)
            if total is None or total.shape != gradient.shape:
                self._totals[name] = gradient.clone()
            elif counts is False:
                total.copy_(gradient)
            else:
                if isinstance(counts, Tensor):
                    total.masked_fill_(~counts, 0.0)
                if name not in left_out:
                    total.add_(gradient)
                gradient.copy_(total)

    def made(self, names: Sequence[str], outputs: Sequence[Tensor], left_out: Collection[str]) -> None:
        """Averaging made these of them.

        Args:
            names: of the parameters.
            outputs: of each.
            left_out: from ``arrive``; where no rank has a gradient, ``grad`` stays, and has to be what was made last.

        """
        for name, output in zip(names, outputs, strict=True):
            if self.patience:
                self._zero[name] = ~output.any()
            kept = self._parameter(name) if name in left_out and name in self._no_means else None
            if kept is not None and kept.grad is not None and kept.grad.data_ptr() != output.data_ptr():
                kept.grad.copy_(output)

    def end(self, names: set[str], first: bool = True) -> set[str]:
        """The optimizer of these parameters stepped, the ``first`` one in this step: passes are counted again.

        Returns:
            these names, and those of parameters that no optimizer will step.
        """
        if first:
            self._averaged.clear()
            self.number = 0
        self.open -= names
        if self.open and (owned := self._owned()) is not None:
            names = names | self.open.difference(owned)
            self.open -= names
        if not self.open and self.patience:
            self.patience -= 1
            if not self.patience:
                self._zero.clear()
        for name in self._looked.keys() & names:
            del self._looked[name]
        return names

    def drop(self) -> None:
        """All that was averaged since optimizers stepped is thrown away."""
        self._averaged.clear()
        self.number = 0
        self.open.clear()
        self._looked.clear()

    def _unhook(self) -> None:
        for hook, _ in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def close(self) -> None:
        """Stop looking, and give memory back."""
        self._unhook()
        self._totals.clear()
        self._zero.clear()


class FiniteGuard:
    """Whether the current step's gradients are finite, on the device; equal on all ranks.

    Args:
        device: where gradients are.
        settings: what is done about it.

    Attributes:
        count: int64 scalar, steps so far with gradients that were not finite.
        flags: what groups found in this step, and the names of their parameters.
        refused: the optimizers of this step were kept from stepping.
    """

    def __init__(self, device: torch.device, settings: RunState) -> None:
        self.flags: list[tuple[Tensor, frozenset[str]]] = []
        self._zero = torch.zeros((), device=device)
        self._policy = settings.options.on_nonfinite
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.refused = False

    @property
    def looks(self) -> bool:
        """Whether something is done about it before an optimizer steps."""
        return self._policy != "pass"

    def begin_step(self) -> None:
        """Nothing is known."""
        self.refused = False
        self.flags.clear()

    def add(self, flag: Tensor, names: Iterable[str]) -> None:
        """Note what a group of these parameters found: 0.0, or NaN."""
        self.flags.append((flag, frozenset(names)))

    def found(self, names: Collection[str] | None = None) -> Tensor:
        """Bool scalar: a gradient was not finite, of a group that has any of these parameters."""
        flags = [flag for flag, own in self.flags if names is None or not own.isdisjoint(names)]
        return torch.stack([self._zero, *flags]).sum().isnan()

    def rejected(self, optimizer: Optimizer, names: Collection[str], first: bool) -> Tensor:
        """Bool scalar: a step that the optimizer of these parameters made does not count: gradients were not finite.

        Args:
            optimizer: has stepped.
            names: of its parameters.
            first: no other one has stepped before in this step.
        """
        if first:
            self.note()
        found, scaled = self.found(names), getattr(optimizer, "found_inf", None)  # a fused optimizer skips by itself
        return found if scaled is None else found | (scaled > 0).to(found.device).squeeze()

    def note(self) -> None:
        """Count the step if its gradients were not finite."""
        self.count.add_(self.found())

    def forget(self) -> None:
        """Begin again."""
        self.begin_step()

    def before_step(self, optimizer: Optimizer, problem: str) -> None:
        """Keep the optimizer from stepping with gradients that are not finite; waits for the device.

        Args:
            optimizer: is about to step.
            problem: what to say then.

        Raises:
            FloatingPointError: they are not, and the policy is "raise"; on all ranks.
        """
        self.refused = self.refused or bool(self.found())
        if not self.refused:
            return
        if self._policy == "raise":
            raise FloatingPointError(f"{problem}; on_nonfinite='skip' leaves such steps out")
        skip_step(optimizer)
