"""The fragments of one model on this rank: which of them travel, which have arrived, and what is saved of that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_compress.collectives import Collective, CountingCollective
from lightning_compress.engine.hook import Background
from lightning_compress.periodic.fragment import Fragment, Outcome, Outer
from lightning_compress.periodic.module_buffers import BufferRules, Buffers
from lightning_compress.periodic.sync_schedule import Rounds, split
from lightning_compress.periodic.synchroniser import reset_nonfinite
from lightning_compress.settings.rules import kinds_of
from lightning_compress.settings.run_state import RunState


class Fragments:
    """All fragments of a model, and its buffers, which travel with the last fragment.

    With a delay, fragments travel while local steps continue: in one thread on the CPU, on one stream on CUDA, in the
    order in which they were sent. The outer step and the commit happen as soon as a fragment has arrived. Using it (or
    skipping the round) waits for its scheduled step, so that evaluating or saving in between changes nothing.

    Args:
        model: the same on all ranks.
        optimizers: this rank's own; their states are reset where they are not finite.
        settings: of the compression.
        rounds: when fragments are sent and used.
        outer: settings of the optimizer that steps the anchors.
        ranks: one collective a fragment; separate ones unless ``rounds.delay`` is 0.
        rules: which buffers are averaged, and which are copied from rank 0.
        elsewhere: whether the parameter of a name is kept equal by something else, and is in no fragment.

    Attributes:
        parts: in order. Fragments that joined later stand at the end and travel right after the last scheduled one.
        last: index of the last scheduled fragment.
        buffers: of the model.
        replicas: all parameters that are averaged, by name.

    Raises:
        ValueError: there are more fragments than trained parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        settings: RunState,
        rounds: Rounds,
        outer: Outer,
        ranks: Sequence[Collective],
        rules: BufferRules,
        elsewhere: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._model, self._optimizers, self._settings, self._elsewhere = model, optimizers, settings, elsewhere
        self._rounds, self._outer, self._ranks = rounds, outer, ranks
        self.last, self.parts = rounds.fragments - 1, list[Fragment]()
        named = [(name, each) for name, each in model.named_parameters() if not elsewhere(name)]
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        for run in split([parameter.numel() for _, parameter in trained], rounds.fragments):
            self._add([name for name, _ in trained[run]])
        counted = CountingCollective(ranks[-1], self.parts[-1].compression.meter)
        self.buffers = Buffers(lambda: dict(model.named_buffers()), counted, rules)
        device = trained[0][1].device
        self._carry = _on_stream(device) if device.type == "cuda" else _in_thread()
        self._finishing = False

    def _add(self, names: Sequence[str]) -> Fragment:
        named, ranks = dict(self._model.named_parameters()), self._ranks[min(len(self.parts), self.last)]
        replicas = {name: named[name] for name in names}
        settings = self._settings.bound(kinds_of(self._model))  # modules may have been added
        self.parts.append(Fragment(replicas, settings, self._outer, ranks))
        self.replicas = {name: replica for part in self.parts for name, replica in part.replicas.items()}
        return self.parts[-1]

    def join(self, step: int) -> list[str]:
        """Add parameters that are trained from now on, the same on all ranks, as a new fragment.

        Args:
            step: local steps so far, equal on all ranks; call it before an optimizer moves the new parameters.

        Returns:
            the names of the new parameters.

        Raises:
            ValueError: the model has lost or replaced a parameter.
        """
        named = dict(self._model.named_parameters())  # modules may have been added, too
        new = [name for name, each in named.items() if each.requires_grad and name not in self.replicas]
        late = [name for name in new if not self._elsewhere(name)]
        others = [name for name, replica in self.replicas.items() if named.get(name, replica) is not replica]
        if others or (late and (gone := sorted(self.replicas.keys() - named.keys()))):
            was, now = (others[0], "another one") if others else (gone[0], late[0])
            raise ValueError(
                f"the model has no parameter {was} any more, and {now} in its place, as pruning does. Local steps "
                "average the parameters that the model had when the fit began; change the model before the fit"
            )
        if late:
            self.arrive()  # so that an evaluation that made fragments arrive earlier changes nothing
            scheduled, added = self.parts[self.last].compression, self._add(late)
            added.compression.step = scheduled.step  # schedules count the steps of the run
            added.compression.meter.sample_every = scheduled.meter.sample_every
            added.synced = step
        return late

    def of(self, turns: Sequence[int]) -> list[int]:
        """Return the indices of the fragments whose turn in the round is among ``turns``."""
        return [number for number in range(len(self.parts)) if min(number, self.last) in turns]

    def send(self, number: int, step: int, epoch: int, beside: Callable[[], None] = lambda: None) -> None:
        """Send what was learned until this step. Collective: every rank must call it.

        Args:
            number: index of the fragment.
            step: local steps so far, equal on all ranks.
            epoch: of the run, for schedules.
            beside: called with the last scheduled fragment, to send more; in the thread if there is a delay.
        """
        fragment, last = self.parts[number], number == self.last
        fragment.compression.epoch = epoch  # set here: the thread may run when the next epoch has begun
        learned = fragment.collect(step)
        if last:
            self.buffers.collect()

        def travel() -> None:
            fragment.average(learned)
            if last:
                self.buffers.average()
                beside()

        if self._rounds.delay and not self._finishing:
            fragment.wait = self._carry(travel)
        else:
            travel()
            fragment.step(plain=self._finishing)

    def _arrive(self, number: int) -> None:
        """Wait for a fragment, then step its anchors and commit."""
        fragment = self.parts[number]
        if fragment.wait is not None:
            for other in self.of([min(number, self.last)]):  # the drift check uses the process group that they share
                if wait := self.parts[other].wait:
                    wait()
            fragment.wait = None
            fragment.step()

    def _skip_round(self, number: int) -> None:
        """Put all ranks back to the anchors, because a rank's numbers were not finite.

        This rank's other fragments go back too if they are not finite: they would spoil this one in the next step.
        Everything arrives first, so that an evaluation that made fragments arrive earlier changes nothing.
        """
        self.arrive()
        for place, fragment in enumerate(self.parts):
            if place == number or not fragment.finite:
                fragment.use()
        if number == self.last:
            self.buffers.use(0.0)
        reset_nonfinite(self._optimizers)

    def use(self, number: int, alpha: float) -> None:
        """Continue from ``alpha * replica + (1 - alpha) * anchor``, or from the anchors if the round is skipped."""
        self._arrive(number)
        fragment = self.parts[number]
        outcome, fragment.outcome = fragment.outcome, Outcome.PENDING
        if outcome is Outcome.STEPPED:
            fragment.use(alpha)
            if number == self.last:
                self.buffers.use(alpha)
        elif outcome is Outcome.SKIPPED:
            self._skip_round(number)

    def arrive(self) -> None:
        """Wait for all fragments that travel, step their anchors and commit. Replicas do not change.

        Safe in an evaluation under inference mode: momentum is created here, and must not become an inference tensor.
        """
        with torch.inference_mode(False), torch.no_grad():
            for number in sorted(range(len(self.parts)), key=lambda number: self.parts[number].synced):
                self._arrive(number)

    def abandon(self) -> None:
        """Do as ``arrive`` while the fit is aborted: fragments that cannot arrive are rolled back."""
        try:
            self.arrive()
        except Exception:
            for fragment in self.parts:
                fragment.wait = None
                fragment.compression.roll_back()

    def finish(self, step: int, epoch: int) -> None:
        """Use all fragments that travel, then synchronise the remaining steps in a shorter round.

        The shorter round ends on the plain mean. The outer momentum would move as far as after a full round.
        """
        for number, fragment in enumerate(self.parts):
            self.use(number, 0.0 if fragment.synced == step else self._rounds.alpha)
        self._finishing = True
        for number, fragment in enumerate(self.parts):
            if fragment.synced < step:
                self.send(number, step, epoch)
                self.use(number, 0.0)
            fragment.use()
        self._finishing = False

    def rebase(self, step: int) -> None:
        """Start from the current model after ``step`` local steps. Its parameters must be the same on all ranks."""
        for fragment in self.parts:
            fragment.rebase()
            fragment.synced = step
        self.buffers.collect()
        self.buffers.average()
        self.buffers.use(0.0)

    def anchors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that all ranks share, by name."""
        self.arrive()
        shared = {name: anchor.detach() for part in self.parts for name, anchor in part.anchors.items()}
        return shared | self.buffers.common

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and primitives, after all fragments have arrived. ``"common"`` is the same on all ranks."""
        self.arrive()
        states = [part.state_dict() for part in self.parts]
        return {
            "common": {
                "fragments": [state.pop("common") for state in states],
                "back": [number for number, part in enumerate(self.parts) if part.outcome is Outcome.STEPPED],
                "left_out": [number for number, part in enumerate(self.parts) if part.outcome is Outcome.SKIPPED],
                "looked": [part.synced for part in self.parts],
                "buffers": self.buffers.common,
                "sums": [[str(dtype), tensor] for dtype, tensor in self.buffers.sums.items()],
            },
            "compressions": [state["compression"] for state in states],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``. Collective: every rank must call it.

        Raises:
            ValueError: the state has other settings or another model.
        """
        common = state["common"]
        self._divide([list(saved["anchors"]) for saved in common["fragments"]])
        for number, (part, saved) in enumerate(zip(self.parts, common["fragments"], strict=True)):
            part.load_state_dict({"common": saved, "compression": state["compressions"][number]})
            part.wait, part.synced, part.outcome = None, common["looked"][number], Outcome.PENDING
            if number in common["back"]:
                part.outcome = Outcome.STEPPED
            elif number in common["left_out"]:
                part.outcome = Outcome.SKIPPED
        self.buffers.common = dict(common["buffers"])
        self.buffers.sums = {getattr(torch, name.removeprefix("torch.")): each for name, each in common["sums"]}

    def _divide(self, names: list[list[str]]) -> None:
        """Rebuild the fragments with the parameters of a saved state. Parameters that are missing in it join later."""
        if names == [list(part.anchors) for part in self.parts]:
            return
        if unknown := sorted({name for part in names for name in part} - dict(self._model.named_parameters()).keys()):
            raise ValueError(f"the state belongs to another model, which has {', '.join(unknown[:3])}")
        self.close()
        self.parts = []
        for part in names:
            self._add(part)

    def close(self) -> None:
        """Remove the optimizer hooks. States and figures stay readable."""
        for fragment in self.parts:
            fragment.compression.close()


def _in_thread() -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Return a function that starts work in one thread, in order, and returns a wait that raises the work's error."""
    background = Background()

    def carry(work: Callable[[], None]) -> Callable[[], None]:
        done = threading.Event()
        background.submit(work, done.set)

        def wait() -> None:
            done.wait()
            if background.failed:
                background.wait()

        return wait

    return carry


def _on_stream(device: torch.device) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Return a function that starts work on one CUDA stream, and returns a wait for the current stream."""
    stream = torch.cuda.Stream(device, priority=-1)

    def carry(work: Callable[[], None]) -> Callable[[], None]:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), torch.no_grad():
            work()
            event = stream.record_event()
        return lambda: torch.cuda.current_stream(device).wait_event(event)

    return carry
