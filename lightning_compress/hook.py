"""Where compression meets DistributedDataParallel: its buckets in, our groups out."""

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_compress import checks, snapshot
from lightning_compress.collectives import Collective, CountingCollective
from lightning_compress.collectives.counting import all_reduce_bytes
from lightning_compress.group import Group, Scratch
from lightning_compress.meter import Meter
from lightning_compress.reducers import Reducer
from lightning_compress.settings import Settings
from lightning_compress.state import State

# No `from __future__ import annotations` here: DistributedDataParallel looks at the hook's annotations.

ScaleSource = Callable[[], Tensor | None]


class Compression:
    """The compression of one DistributedDataParallel model, from ``attach`` to ``close``.

    A step begins with the first bucket after an optimizer stepped, and ends when an optimizer that owns any of the
    model's parameters has really stepped: then the residuals of its parameters are committed. A step that an optimizer
    skipped is rolled back by ``roll_back``, or by itself where a rank's gradient was not finite.

    Args:
        ddp: the model.
        settings: what the user chose, equal on all ranks.
        collective: the ranks to average over.
        scale: returns what the loss is multiplied by (a GradScaler's scale), or None.

    Attributes:
        active: it does the averaging; otherwise DistributedDataParallel does.
        step: optimizer steps that were made.
        meter: counts.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        settings: Settings,
        collective: Collective,
        scale: ScaleSource = lambda: None,
    ) -> None:
        parameters = checks.trained_parameters(ddp.module, ddp.parameters_to_ignore)
        self.settings = settings
        self.device = parameters[0][1].device
        self.meter = Meter(self.device)
        self.step = 0
        self.groups: list[Group] = []
        self._collective = CountingCollective(collective, self.meter)
        self._scale = scale
        self._names = {id(parameter): name for name, parameter in parameters}
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
        self._by_bucket: dict[tuple[int, ...], list[tuple[Group, list[int]]]] = {}
        self._owner: dict[str, Group] = {}
        self._scratch = Scratch(self.device)
        self._flag = torch.zeros((), device=self.device)
        self._nonfinite_steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self._reduced: set[int] = set()
        self._stepped = True
        self.active = False
        self._stream = torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None
        self._handles: list[Any] = []
        _watch_optimizers()
        _live.add(self)

    def register(self, ddp: DistributedDataParallel) -> None:
        """Take the averaging over from ``ddp``."""
        self.active = True
        self._handles.append(ddp.register_forward_pre_hook(lambda module, _: checks.check_running(module)))
        ddp.register_comm_hook(None, self.hook)

    def leave_to(self, ddp: DistributedDataParallel) -> None:
        """Let ``ddp`` average by itself, and only count what it sends."""
        parameters = checks.trained_parameters(ddp.module, ddp.parameters_to_ignore)
        size = sum(parameter.numel() * parameter.element_size() for _, parameter in parameters)
        sent = all_reduce_bytes(size, self._collective.size)

        def count(module: nn.Module, _: object) -> None:
            if self._stepped and module.training and torch.is_grad_enabled():
                self._begin_step()
                self.meter.bytes_sent += sent
                self.meter.bytes_dense += sent

        self._handles.append(ddp.register_forward_pre_hook(count))

    def hook(self, state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        """Replace a bucket's gradients by their mean; synchronous, in the order of DistributedDataParallel."""
        buffer = bucket.buffer()
        if self._stream is None:
            self._reduce(bucket)
            future: Future[Tensor] = Future()
            future.set_result(buffer)
            return future
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._reduce(bucket)
            buffer.record_stream(self._stream)
            future = Future(devices=[self.device])
            future.set_result(buffer)
        return future

    def _reduce(self, bucket: Any) -> None:
        buffer = bucket.buffer()
        parts = self._parts(bucket.parameters())
        if self._stepped:
            self._begin_step()
        elif any(id(group) in self._reduced for group, _ in parts):  # a second backward in the same step
            self._drop_unsound()
        self._reduced.update(id(group) for group, _ in parts)
        self.meter.bytes_dense += all_reduce_bytes(buffer.numel() * buffer.element_size(), self._collective.size)
        gradients = bucket.gradients()
        for group, places in parts:
            self._flag.add_(group.reduce([gradients[place] for place in places], self.step, self._scale()))

    def _begin_step(self) -> None:
        """The first bucket of a step: what no optimizer made true in the last one was thrown away."""
        self._stepped = False
        self._reduced.clear()
        self._flag.zero_()
        for state in self._states():
            state.roll_back()
        self.meter.begin_step()

    def _drop_unsound(self) -> None:
        """Forget a backward that was not finite, which a GradScaler skipped."""
        rejected = self._flag.isnan()
        self._nonfinite_steps.add_(rejected)
        for state in self._states():
            state.reject(rejected)
        self._flag.zero_()
        self._reduced.clear()

    def _parts(self, parameters: Sequence[Tensor]) -> list[tuple[Group, list[int]]]:
        """The groups of a bucket, and where in the bucket each one's parameters are.

        A bucket is one new group, unless it is made up of groups that there are, as the first bucket of a resumed run.
        """
        bucket = tuple(map(id, parameters))
        if bucket not in self._by_bucket:
            names = [self._names[each] for each in bucket]
            owners = [group for group in self.groups if not set(names).isdisjoint(group.names)]
            if sorted(name for group in owners for name in group.names) != sorted(names):
                owners = [self._add_group(names)]
            places = {name: place for place, name in enumerate(names)}
            self._by_bucket[bucket] = [(group, [places[name] for name in group.given]) for group in owners]
        return self._by_bucket[bucket]

    def _add_group(self, names: Sequence[str]) -> Group:
        """A new group, with the state that its parameters have so far; groups that have none left go."""
        shaped = [(name, self._shapes[name]) for name in names]
        self._scratch.clear()
        group = Group(shaped, self.settings, self._collective, self.device, self.meter, self._scratch)
        for old in self.groups:
            moving = {name for name in group.names if self._owner.get(name) is old}
            for kind in old.states.keys() & group.states.keys() if moving else ():
                group.states[kind].adopt(old.states[kind], moving)
        self._owner.update(dict.fromkeys(group.names, group))
        self.groups = [each for each in [*self.groups, group] if each in self._owner.values()]
        self._by_bucket = {
            bucket: parts for bucket, parts in self._by_bucket.items() if all(part in self.groups for part, _ in parts)
        }
        return group

    @property
    def keeps_state(self) -> bool:
        """Whether anything is lost if it begins anew."""
        declared = isinstance(self.settings.method, Reducer) or self.settings.correction is not None
        return self.settings.error_feedback or declared

    def state_dict(self) -> snapshot.Snapshot:
        """What the optimizer steps have made true so far, on this rank: tensors and primitives.

        Every rank has its own. It refers to memory that later steps replace or reuse: save or copy it at once.
        """
        return snapshot.take(self.settings.family, self.step, [(group.given, group.states) for group in self.groups])

    def load_state_dict(self, state: snapshot.Snapshot) -> None:
        """Go on from a ``state_dict``, in its groups; parameters that it does not know begin anew.

        Raises:
            ValueError: it is none, or of another method.
        """
        snapshot.check(state)
        if state["method"] != self.settings.family:
            raise ValueError(f"the state is of {state['method']}; this run compresses with {self.settings.family}")
        self.reset()
        for saved in state["groups"]:
            if names := [name for name in saved["names"] if name in self._shapes]:
                snapshot.fill(self._add_group(names).states, saved, names)
        self.step = state["step"]

    def _states(self) -> list[State]:
        return [state for group in self.groups for state in group.states.values()]

    def take_over(self, optimizer: Optimizer) -> None:
        """Let a method that does a part of the optimizer's work see that it is not done twice.

        Raises:
            ValueError: the optimizer does what the method cannot go with.
        """
        if self.settings.correction and self.active and (names := self._owned(optimizer)):
            self.settings.correction.take_over(optimizer, sorted(names))

    def _owned(self, optimizer: Optimizer) -> set[str]:
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return {name for parameter, name in self._names.items() if parameter in owned}

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer stepped: the residuals of its parameters become true, unless a gradient was not finite."""
        names = self._owned(optimizer)
        if not names:
            return
        rejected = self._flag.isnan()
        if (found := getattr(optimizer, "found_inf", None)) is not None:  # a fused optimizer skips by itself
            rejected = rejected | (found > 0).to(rejected.device)
        for state in self._states():
            state.commit(rejected, names)
        if not self._stepped:  # the first of several optimizers, or an optimizer inside another one
            self._stepped = True
            self._nonfinite_steps.add_(rejected.squeeze())
            self.step += 1
            self.meter.end_step()

    def roll_back(self) -> None:
        """The optimizer did not step: residuals stay as they were. Nothing happens where it did."""
        if not self._stepped:
            self._nonfinite_steps.add_(self._flag.isnan())
            self._begin_step()
            self._stepped = True

    def reset(self) -> None:
        """Begin again: no residuals, no steps."""
        for state in self._states():
            state.reset()
        self._flag.zero_()
        self._stepped = True
        self.step = 0

    def stats(self) -> dict[str, float]:
        """Traffic of the last step and in total, time and error of the last sampled step; waits for the device.

        Returns:
            ``bytes_sent``, ``bytes_dense`` (what stock DDP sends), ``ratio`` of the last step; ``encode_ms``,
            ``exchange_ms``, ``decode_ms``, ``relative_error`` (norm of what was not sent over that of gradient plus
            residual) of the last of the steps that are sampled: the first, and each ``meter.sample_every``-th;
            ``residual_norm`` now; ``total_bytes_sent``, ``total_bytes_dense``, ``steps``, ``nonfinite_steps``.
        """
        norms = [group.residual.committed.norm() for group in self.groups if group.residual]
        return self.meter.read() | {
            "residual_norm": float(torch.stack(norms).norm()) if norms else 0.0,
            "nonfinite_steps": float(self._nonfinite_steps),
        }

    def close(self) -> None:
        """Stop watching the optimizers and give memory back, when the model will not be trained any more."""
        _live.discard(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.groups.clear()
        self._by_bucket.clear()
        self._owner.clear()
        self._scratch.clear()


_live: "weakref.WeakSet[Compression]" = weakref.WeakSet()


@cache
def _watch_optimizers() -> None:
    """Tell every compression when an optimizer has stepped; one hook per process."""

    def steps(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for compression in list(_live):
            compression.take_over(optimizer)

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for compression in list(_live):
            compression.after_step(optimizer)

    register_optimizer_step_pre_hook(steps)
    register_optimizer_step_post_hook(stepped)
