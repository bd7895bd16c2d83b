"""The fragments of one model on this rank: which of them travel, which have come back, and what is saved of that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_compress.collectives import Collective, CountingCollective
from lightning_compress.engine.hook import Background
from lightning_compress.periodic.fragment import Fragment, Outer, forget_nonfinite
from lightning_compress.periodic.module_buffers import BufferRules, Buffers
from lightning_compress.periodic.sync_schedule import Rounds, split
from lightning_compress.settings.rules import kinds_of
from lightning_compress.settings.run_state import RunState


class Fragments:
    """A model's fragments, and its buffers, which travel with the last of them.

    Fragments that travel while local steps go on are sent from one thread on the CPU, and on one stream on CUDA, in the
    order of their steps. Outer step and commit happen when a fragment is back; only its use, or that it is left out,
    waits for its step, so that what is evaluated or saved before depends on steps alone.

    Args:
        model: the same on all ranks.
        optimizers: of the rank's own, which begin anew where they are not finite.
        settings: of the compression.
        rounds: when.
        outer: steps the anchors.
        ranks: for each fragment, apart where ``rounds.delay`` is not 0.
        rules: which buffers are averaged, and which are rank 0's.

    Attributes:
        each: in order; after those of the rounds those that joined later, which travel behind the last.
        buffers: of the model.
        replicas: the parameters that are averaged, by name.

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
    ) -> None:
        self._model, self._optimizers, self._settings = model, optimizers, settings
        self._rounds, self._outer, self._ranks = rounds, outer, ranks
        self.last, self.each = rounds.fragments - 1, list[Fragment]()
        trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        for run in split([each.numel() for _, each in trained], rounds.fragments):
            self._add([name for name, _ in trained[run]])
        counted = CountingCollective(ranks[-1], self.each[-1].compression.meter)
        self.buffers = Buffers(lambda: dict(model.named_buffers()), counted, rules)
        device = trained[0][1].device
        self._carrier = _Stream(device) if device.type == "cuda" else _Thread()
        self._travels: dict[int, Callable[[], None]] = {}
        self._back: set[int] = set()
        self._left_out: set[int] = set()
        self._looked, self._finishing = [0] * rounds.fragments, False

    def _add(self, names: Sequence[str]) -> None:
        """Make the next fragment, of these parameters."""
        named, ranks = dict(self._model.named_parameters()), self._ranks[min(len(self.each), self.last)]
        replicas = {name: named[name] for name in names}
        self.each.append(Fragment(replicas, kinds_of(self._model), self._settings, self._outer, ranks))
        self.replicas = {name: own for each in self.each for name, own in each.replicas.items()}

    def join(self, step: int) -> list[str]:
        """Take in parameters that are trained from now on, the same on all ranks.

        Args:
            step: after which they are, and before any optimizer moves them; equal on all ranks.

        Returns:
            their names.

        Raises:
            ValueError: others are not in the model any more.
        """
        named = dict(self._model.named_parameters())  # modules may be added, too
        late = [name for name, each in named.items() if each.requires_grad and name not in self.replicas]
        others = [name for name, own in self.replicas.items() if named.get(name, own) is not own]
        if others or (late and (gone := sorted(self.replicas.keys() - named.keys()))):
            was, now = (others[0], "another one") if others else (gone[0], late[0])
            raise ValueError(
                f"the model has no parameter {was} any more, and {now} in its place, as pruning does; local "
                "steps average what there was when the fit began: change the model before it"
            )
        if late:
            self.arrive()  # whether an evaluation had it come back before must not matter
            self._add(late)
            run, new = self.each[self.last].compression, self.each[-1].compression
            new.step = run.step  # schedules count those of the run
            new.meter.sample_every = run.meter.sample_every
            self._looked.append(step)
        return late

    def of(self, turns: Sequence[int]) -> list[int]:
        """Numbers of those that are sent in these turns of a round."""
        return [number for number in range(len(self.each)) if min(number, self.last) in turns]

    def send(self, number: int, step: int, epoch: int, beside: Callable[[], None] = lambda: None) -> None:
        """Send what was learned until this step; a collective call.

        Args:
            number: of the fragment.
            step: local steps so far, equal on all ranks.
            epoch: of the run, for schedules.
            beside: communicates with the last one; from a thread, if there is a delay.
        """
        fragment, last = self.each[number], number == self.last
        fragment.look()
        fragment.compression.epoch = epoch  # which may have changed before a thread comes to it
        learned, self._looked[number] = step - self._looked[number], step
        if last:
            self.buffers.look()

        def travel() -> None:
            fragment.average(learned)
            if last:
                self.buffers.average()
                beside()

        if self._rounds.delay and not self._finishing:
            self._travels[number] = self._carrier.carry(travel)
        else:
            travel()
            self._travels[number] = lambda: None

    def _arrive(self, number: int) -> None:
        """Wait for a fragment; step its anchors, and commit."""
        if number in self._travels:
            for other in self.of([min(number, self.last)]):  # in whose process group anchors are compared
                self._travels.get(other, lambda: None)()
            del self._travels[number]
            stepped = self.each[number].step(plain=self._finishing)
            (self._back if stepped else self._left_out).add(number)

    def _leave_out(self, number: int) -> None:
        """A rank's numbers were not finite: all ranks go back to what they had in common.

        With them go a rank's other fragments that are not finite, which would make this one so in the next step. What
        these go back to must not depend on whether an evaluation had them come back before.
        """
        self.arrive()
        for place, fragment in enumerate(self.each):
            if place == number or not fragment.finite:
                fragment.use()
        if number == self.last:
            self.buffers.use(0.0)
        forget_nonfinite(self._optimizers)

    def use(self, number: int, alpha: float) -> None:
        """Go on from its anchors, and a share ``alpha`` of what the rank has by now; or leave the round out."""
        self._arrive(number)
        if number in self._left_out:
            self._left_out.discard(number)
            self._leave_out(number)
        elif number in self._back:
            self._back.discard(number)
            self.each[number].use(alpha)
            if number == self.last:
                self.buffers.use(alpha)

    def arrive(self) -> None:
        """Wait for all that travels; step the anchors, and commit. What is learned goes on as if nothing had been.

        Also in an evaluation in inference mode, whose tensors could not be changed after it: momentum is made here.
        """
        with torch.inference_mode(False), torch.no_grad():
            for number in sorted(self._travels, key=lambda each: self._looked[each]):
                self._arrive(number)

    def abandon(self) -> None:
        """As ``arrive``, while the fit is aborted: what cannot come any more is as if it had not been sent."""
        try:
            self.arrive()
        except Exception:
            self._travels.clear()
            for fragment in self.each:
                fragment.compression.roll_back()

    def finish(self, step: int, epoch: int) -> None:
        """The last step was made: use what is due, and synchronise what was learned since, in a shorter round.

        It ends on the mean of what the ranks have learned: an outer optimizer with momentum would go as far as after a
        whole round, and so beyond what the last steps have shown.
        """
        for number in range(len(self.each)):
            self.use(number, 0.0 if self._looked[number] == step else self._rounds.alpha)
        self._finishing = True
        for number in range(len(self.each)):
            if self._looked[number] < step:
                self.send(number, step, epoch)
                self.use(number, 0.0)
            self.each[number].use()
        self._finishing = False

    def rebase(self, step: int) -> None:
        """Begin from the model as it is, the same on all ranks but for its buffers, after so many local steps."""
        for fragment in self.each:
            fragment.rebase()
        self.buffers.look()
        self.buffers.average()
        self.buffers.use(0.0)
        self._looked = [step] * len(self.each)

    def anchors(self) -> dict[str, Tensor]:
        """Parameters that the ranks have in common, and buffers, by name."""
        self.arrive()
        shared = {name: own.detach() for fragment in self.each for name, own in fragment.anchors.items()}
        return shared | self.buffers.common

    def state_dict(self) -> dict[str, Any]:
        """Tensors and primitives, once all that travels is back; what is ``common`` is the same on all ranks."""
        self.arrive()
        states = [fragment.state_dict() for fragment in self.each]
        return {
            "common": {
                "fragments": [own.pop("common") for own in states],
                "back": sorted(self._back),
                "left_out": sorted(self._left_out),
                "looked": list(self._looked),
                "buffers": self.buffers.common,
                "sums": [[str(dtype), own] for dtype, own in self.buffers.sums.items()],
            },
            "compressions": [own["compression"] for own in states],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``; a collective call.

        Raises:
            ValueError: it is of other settings, or of another model.
        """
        common = state["common"]
        self._divide([list(each["anchors"]) for each in common["fragments"]])
        for fragment, own, compression in zip(self.each, common["fragments"], state["compressions"], strict=True):
            fragment.load_state_dict({"common": own, "compression": compression})
        self._back, self._left_out = set(common["back"]), set(common["left_out"])
        self._looked = list(common["looked"])
        self._travels.clear()
        self.buffers.common = dict(common["buffers"])
        self.buffers.sums = {getattr(torch, name.removeprefix("torch.")): each for name, each in common["sums"]}

    def _divide(self, names: list[list[str]]) -> None:
        """Have fragments of these parameters, as there were when a state was taken; others join later."""
        if names == [list(each.anchors) for each in self.each]:
            return
        if unknown := sorted({name for each in names for name in each} - dict(self._model.named_parameters()).keys()):
            raise ValueError(f"the state is of another model, which has {', '.join(unknown[:3])}")
        self.close()
        self.each = []
        for each in names:
            self._add(each)

    def close(self) -> None:
        """Stop watching optimizers; states and figures stay readable."""
        for fragment in self.each:
            fragment.compression.close()


class _Thread:
    """Does it in one thread, in order."""

    def __init__(self) -> None:
        self._background = Background()

    def carry(self, work: Callable[[], None]) -> Callable[[], None]:
        """Have it done; what waits for its end raises its error."""
        done = threading.Event()
        self._background.submit(work, done.set)

        def wait() -> None:
            done.wait()
            if self._background.failed:
                self._background.wait()

        return wait


class _Stream:
    """Does it on one stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device, priority=-1)

    def carry(self, work: Callable[[], None]) -> Callable[[], None]:
        """Have it done; what waits for its end lets the current stream wait."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            work()
            event = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(event)
