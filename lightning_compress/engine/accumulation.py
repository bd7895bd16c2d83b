"""The backward passes of a step, parameter by parameter.

A parameter's step begins with the first pass that averages its gradient. It ends when the optimizer that owns the
parameter steps. Different optimizers may step at different times, and gradients may add up over several passes.

The averaged gradient of an earlier pass counts as long as it is in ``grad``, which is checked before another pass
accumulates. If it is gone, it was discarded, and what was kept of it is discarded too.

A method's output may be a mean, to which the next pass may add its gradient. Or it may be a velocity, a vote or a step
of Adam, to which nothing may be added. Then the old output is set aside first. The method gets the sum of this rank's
gradients, and the state at the start of the step, as if all passes but the last had run under ``no_sync``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_compress.collectives import Collective
from lightning_compress.engine.optimizers import Trained, skip_step
from lightning_compress.settings.run_state import RunState

_PATIENCE = 100
"""Steps of a single pass after which several passes are no longer expected."""

Kept = Mapping[str, bool | Tensor]
"""By parameter: whether the averaged gradient of earlier passes counts; a bool, or a bool scalar on an accelerator."""


class Arrived(NamedTuple):
    """What is known of parameters that are averaged now.

    Attributes:
        kept: whether the result of earlier passes counts, for parameters of open steps.
        left_out: names among these without a gradient on this rank in this pass: DistributedDataParallel sends what
            ``grad`` holds.
        adds_up: the sum over the step's passes is to be averaged; see ``Passes.add_up``.
    """

    kept: Kept
    left_out: frozenset[str]
    adds_up: bool


_FIRST = Arrived({}, frozenset(), adds_up=False)
"""No pass of these steps came before, and no output was other than a mean."""


class Passes:
    """The backward passes of the current steps.

    Args:
        trained: those that several passes may average before a step, which their owner keeps alive. For all others, the
            result of earlier passes always counts.
        sums: keep the sum of each parameter's gradients, in its dtype, for methods whose output is not a mean. Without
            it, these methods raise at a second pass.
        owned: returns the names of all parameters that optimizers own; None if not all optimizers are known.

    Attributes:
        number: earlier passes since the last optimizer step.
        patience: steps for which ``made`` has to be called, since they may have several passes.
        open: names of the parameters whose step is not complete.
    """

    def __init__(
        self,
        trained: Iterable[Trained],
        sums: bool = True,
        owned: Callable[[], Collection[str] | None] = lambda: None,
    ) -> None:
        self._trained = {each.name: weakref.ref(each) for each in trained}  # a cycle through a node is never freed
        self._sums, self._owned = sums, owned
        self.patience = 1
        self._no_means: set[str] = set()  # nothing may be added to their last output
        self._averaged: set[str] = set()  # in this pass
        self.open: set[str] = set()
        self._looked: dict[str, bool | Tensor] = {}  # see ``Kept``; of those that accumulated since they were averaged
        self._zero: dict[str, Tensor] = {}  # whether the last output was all 0, as sparse methods make it
        self._totals: dict[str, Tensor] = {}
        self._hooks: dict[str, tuple[RemovableHandle, object]] = {}  # each with its node, which has to live
        self.number = 0

    def watch(self) -> None:
        """Prepare for a backward pass: hook parameters of open steps, to check ``grad`` before it accumulates."""
        if not self.open:
            self._unhook()
        for name in self.open - self._hooks.keys():
            if (trained := self._found(name)) is not None:
                self.patience = _PATIENCE
                if trained.accumulates:
                    node = node_of(trained.parameter())
                    self._hooks[name] = node.register_prehook(partial(self._look, name)), node

    def _look(self, name: str, _: object) -> None:
        """Check ``grad`` before a gradient is accumulated into it."""
        trained = self._found(name)
        if trained is None or name not in self.open:
            return
        if name in self._looked:  # in a pass that did not synchronise
            self._looked[name] = trained.gradient() is not None and self._looked[name]
            return
        self._looked[name] = self._holds(name)
        if name in self._no_means:
            trained.parameter().grad = None

    def _holds(self, name: str) -> bool | Tensor:
        """Whether ``grad`` is the result of earlier passes."""
        trained = self._found(name)
        if trained is None:
            return True
        if (gradient := trained.gradient()) is None:
            return False
        holds = gradient.any()
        if name in self._zero:  # else it is not known, and zeros are rather from zero_grad() than from a method
            holds = holds | self._zero[name]
        return bool(holds) if holds.device.type == "cpu" else holds

    def _found(self, name: str) -> Trained | None:
        return self._trained[name]() if name in self._trained else None

    def again(self, names: Collection[str]) -> bool:
        """Whether one of these parameters was averaged in this pass already: then another pass has begun."""
        return not self._averaged.isdisjoint(names)

    def goes_on(self, names: Iterable[str]) -> bool:
        """Whether the result of earlier passes counts for any of these parameters."""
        return any(bool(self._looked[name] if name in self._looked else self._holds(name)) for name in names)

    def next(self, goes_on: bool) -> None:
        """Begin another pass; no optimizer stepped since the last one."""
        self._averaged.clear()
        self.number = self.number + 1 if goes_on else 0

    def arrive(self, names: Sequence[str], averages: bool) -> Arrived:
        """Note that these parameters are averaged now.

        Args:
            names: of the parameters.
            averages: whether the method's output is a mean.
        """
        self._averaged.update(names)
        if averages and not self._no_means and self.open.isdisjoint(names):  # ``_looked`` has names of open steps only
            self.open.update(names)
            return _FIRST
        missing = [name for name in names if name in self.open and name not in self._looked]
        kept = {name: self._holds(name) for name in missing}
        kept |= {name: self._looked.pop(name) for name in names if name in self._looked}
        for counts in kept.values():
            if isinstance(counts, Tensor):  # made on the stream of backward
                counts.record_stream(torch.cuda.current_stream(counts.device))
        self.open.update(names)
        left_out = frozenset(name for name in missing if name in self._hooks and kept[name] is not False)
        return Arrived(kept, left_out, self._adds_up(names, averages))

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
        """Replace each gradient of one pass by the sum over the passes of its step, in place.

        Args:
            names: of the parameters.
            gradients: one per name.
            kept: from ``arrive``.
            left_out: from ``arrive``.

        Raises:
            RuntimeError: earlier passes count, but their sum was not kept.
        """
        if not self._sums:
            held = [name for name, counts in kept.items() if counts is not False]
            owned = self._owned() if held else None
            if late := [name for name in held if owned is None or name in owned]:
                raise RuntimeError(
                    f"{late[0]} got a second gradient before its optimizer stepped, and the first is still in grad: "
                    "the compressor's output is not a mean, so no gradient can be added to it. Use "
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
        """Record the averaged gradients.

        Args:
            names: of the parameters.
            outputs: one per name.
            left_out: from ``arrive``; if no rank has a gradient, ``grad`` stays, so the last output is copied to it.
        """
        for name, output in zip(names, outputs, strict=True):
            if self.patience:
                self._zero[name] = ~output.any()
            trained = self._found(name) if name in left_out and name in self._no_means else None
            grad = None if trained is None else trained.gradient()
            if grad is not None and grad.data_ptr() != output.data_ptr():
                _in_memory(grad).copy_(_in_memory(output))

    def end(self, names: set[str], first: bool = True) -> set[str]:
        """End the step of these parameters after their optimizer stepped.

        Args:
            names: of the parameters.
            first: no other optimizer stepped before in this step; the passes are then counted from 0.

        Returns:
            these names, and those of open parameters that no optimizer owns.
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
        """Discard everything that was averaged since the last optimizer step."""
        self._averaged.clear()
        self.number = 0
        self.open.clear()
        self._looked.clear()

    def _unhook(self) -> None:
        for hook, _ in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def close(self) -> None:
        """Remove the hooks and free the memory."""
        self._unhook()
        self._totals.clear()
        self._zero.clear()


def node_of(parameter: Tensor) -> Any:
    """Return the node of the graph that adds up a parameter's gradient, also while it is frozen.

    A hook of the node, because torch.autograd.grad would call one of the tensor, too.
    """
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    with torch.enable_grad():
        node: Any = parameter.view_as(parameter).grad_fn
    parameter.requires_grad_(trained)
    return node.next_functions[0][0]


def _in_memory(tensor: Tensor) -> Tensor:
    """Return the elements as they lie in memory: a bucket has them so, whatever the gradient's strides are."""
    return tensor.as_strided((tensor.numel(),), (1,))


class FiniteGuard:
    """Track on the device whether the current step's gradients are finite; the same on all ranks.

    Args:
        device: of the gradients.
        settings: say what to do about non-finite gradients.
        everyone: all ranks, if some of them average other parameters; else None.

    Attributes:
        count: int64 scalar, steps so far with a non-finite gradient.
        flags: for each group of this step, its flag (0.0 or NaN) and the names of its parameters; None: of all.
        checks: whether ``before_step`` has to be called before an optimizer steps.
        refused: optimizers were kept from stepping in this step.
    """

    def __init__(self, device: torch.device, settings: RunState, everyone: Collective | None = None) -> None:
        self.flags: list[tuple[Tensor, Collection[str] | None]] = []
        self._zero = torch.zeros((), dtype=torch.float32, device=device)
        self._policy = settings.options.on_nonfinite
        self._everyone, self._agreed = everyone, False
        self.checks = self._policy != "pass" or everyone is not None
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.refused = False

    def begin_step(self) -> None:
        """Forget the last step's flags."""
        self.refused = self._agreed = False
        self.flags.clear()

    def found(self, names: Collection[str] | None = None) -> Tensor:
        """Bool scalar: a gradient was not finite in a group that has any of these parameters (None: in any group)."""
        wanted = None if names is None else set(names)
        flags = [flag for flag, of in self.flags if wanted is None or of is None or not wanted.isdisjoint(of)]
        return torch.stack([self._zero, *flags]).sum().isnan()

    def rejected(self, optimizer: Optimizer, names: Collection[str], first: bool) -> Tensor:
        """Return whether an optimizer's step does not count, because gradients were not finite.

        Args:
            optimizer: has stepped.
            names: of its parameters.
            first: no other optimizer stepped before in this step.

        Returns:
            bool scalar.
        """
        if first:
            self.note()
        nonfinite, scaled = self.found(names), getattr(optimizer, "found_inf", None)  # a fused optimizer skips alone
        return nonfinite if scaled is None else nonfinite | (scaled > 0).to(nonfinite.device).squeeze()

    def note(self) -> None:
        """Count the step if its gradients were not finite."""
        self.count.add_(self.found())

    def before_step(self, optimizer: Optimizer, problem: str) -> None:
        """Keep the optimizer from stepping with non-finite gradients; waits for the device, unless all are to pass.

        Args:
            optimizer: is about to step.
            problem: beginning of the error message.

        Raises:
            FloatingPointError: a gradient is not finite and the policy is "raise"; on all ranks.
        """
        if self._everyone and not self._agreed:
            self._agreed = True
            votes = torch.stack([self.found().to(torch.int64), self.count])
            self._everyone.all_reduce(votes, "max")
            self.count.copy_(votes[1])
            self.flags.append((torch.where(votes[0] > 0, torch.nan, self._zero), None))
        if self._policy == "pass":
            return
        self.refused = self.refused or bool(self.found())
        if self.refused:
            self.refuse(optimizer, problem)

    def refuse(self, optimizer: Optimizer, problem: str) -> None:
        """Keep the optimizer from stepping.

        Raises:
            FloatingPointError: the policy is "raise".
        """
        if self._policy == "raise":
            raise FloatingPointError(f"{problem}; on_nonfinite='skip' skips such steps")
        skip_step(optimizer)
