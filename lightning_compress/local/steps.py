"""The local steps of one rank: which fragments travel, which have come back, and what is saved of that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_compress.collectives import Collective
from lightning_compress.engine.hook import Background
from lightning_compress.local.fragment import Fragment
from lightning_compress.local.means import mean_of
from lightning_compress.local.outer import Outer
from lightning_compress.local.statistics import BufferRules, Buffers
from lightning_compress.local.timetable import Rounds, split
from lightning_compress.settings.rules import kinds_of
from lightning_compress.settings.run_state import RunState


class LocalSteps:
    """One model's fragments, and the rounds in which they are averaged over the ranks.

    Fragments that travel while local steps go on are sent from one thread on the CPU, and on one stream on CUDA, in the
    order of their steps. Outer step and commit happen when a fragment is back; only its use, or that it is left out,
    waits for its step, so that what is evaluated or saved before depends on steps alone.

    Args:
        module: the model, the same on all ranks.
        settings: of the compression.
        rounds: when.
        outer: steps the anchors.
        ranks: for each fragment, of process groups apart where ``rounds.delay`` is not 0.
        rules: which buffers are averaged, and which are rank 0's.

    Attributes:
        fragments: of the model, in order; after them, those that joined later, which travel behind the last.
        buffers: of the model.
        skipped: steps by averaged gradients, before the first round, that were left out, since these were not finite.
        epoch: of the run, for schedules; what is sent has that of its own step.
        on_left_out: called when a round was left out, since a rank's numbers were not finite.

    Raises:
        ValueError: there are more fragments than trained parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: RunState,
        rounds: Rounds,
        outer: Outer,
        ranks: Sequence[Collective],
        rules: BufferRules | None = None,
    ) -> None:
        self.rounds, self.epoch = rounds, 0
        self._module, self._settings, self._outer, self._ranks = module, settings, outer, ranks
        trained = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        runs = split([each.numel() for _, each in trained], rounds.fragments)
        self._last = rounds.fragments - 1
        self.fragments: list[Fragment] = []
        for run in runs:
            self._add([name for name, _ in trained[run]])
        self._rules = BufferRules() if rules is None else rules
        self.buffers = Buffers(lambda: dict(module.named_buffers()), ranks[-1], self._rules)
        self._device = trained[0][1].device
        self._carrier: _Now = _Stream(self._device) if self._device.type == "cuda" else _Thread()
        self._travels: dict[int, Callable[[], None]] = {}
        self._back: set[int] = set()
        self._left_out: set[int] = set()
        self._looked = [0] * rounds.fragments
        self._finishing, self.skipped = False, 0
        self.on_left_out: Callable[[], None] = lambda: None

    def _add(self, names: Sequence[str]) -> None:
        """Make the next fragment, of these parameters."""
        named, ranks = dict(self._module.named_parameters()), self._ranks[min(len(self.fragments), self._last)]
        replicas = {name: named[name] for name in names}
        self.fragments.append(Fragment(replicas, kinds_of(self._module), self._settings, self._outer, ranks))
        self._known = {name: own for each in self.fragments for name, own in each.replicas.items()}

    @property
    def averages(self) -> bool:
        """Whether the anchors are the mean of what the ranks have trained, all of it, as it is at a round's end."""
        plain = self._outer == Outer() and not self._settings.error_feedback
        return plain and self.rounds.fragments == 1 and not self.rounds.delay

    def join(self, step: int) -> list[str]:
        """Take in parameters that are trained from now on, the same on all ranks.

        Args:
            step: after which they are, and before any optimizer moves them; equal on all ranks.

        Returns:
            their names.

        Raises:
            ValueError: others are not in the model any more.
        """
        named = dict(self._module.named_parameters())  # modules may be added, too
        late = [name for name, each in named.items() if each.requires_grad and name not in self._known]
        others = [name for name, own in self._known.items() if named.get(name, own) is not own]
        if others or (late and (gone := sorted(self._known.keys() - named.keys()))):
            was, now = (others[0], "another one") if others else (gone[0], late[0])
            raise ValueError(
                f"the model has no parameter {was} any more, and {now} in its place, as pruning does; local "
                "steps average what there was when the fit began: change the model before it"
            )
        if late:
            self.arrive()  # whether an evaluation had it come back before must not matter
            self._add(late)
            run, new = self.fragments[self._last].compression, self.fragments[-1].compression
            new.step = run.step  # schedules count those of the run
            new.meter.sample_every = run.meter.sample_every
            self._looked.append(step)
        return late

    def begin_after(self, step: int) -> None:
        """So many steps were made by a run that goes on from here, without its state."""
        self._looked = [step] * len(self.fragments)

    def _of(self, turns: Sequence[int]) -> list[int]:
        """Numbers of the fragments that are sent in these turns of a round."""
        return [number for number in range(len(self.fragments)) if min(number, self._last) in turns]

    def after(self, step: int, beside: Callable[[], None] = lambda: None) -> bool:
        """A local step was made, the ``step``-th from 1 on: use what is due, send what is to be sent.

        Args:
            step: equal on all ranks.
            beside: communicates once a round, with the last fragment; from a thread, if there is a delay.

        Returns:
            whether the last fragment, and what was ``beside``, is back.
        """
        due = self._of(self.rounds.due(step)) if self.rounds.delay else []
        for number in due:
            self._use(number, self.rounds.alpha)
        sent = self._of(self.rounds.sent(step))
        for number in sent:
            self._send(number, step, beside)
            if not self.rounds.delay:
                self._use(number, 0.0)
        return self._last in (due if self.rounds.delay else sent)

    def _send(self, number: int, step: int, beside: Callable[[], None] = lambda: None) -> None:
        fragment, last = self.fragments[number], number == self._last
        fragment.look()
        fragment.compression.epoch = self.epoch  # which may have changed before a thread comes to it
        learned, self._looked[number] = step - self._looked[number], step
        if last:
            self.buffers.look()

        def travel() -> None:
            fragment.average(learned)
            if last:
                self.buffers.average()
                fragment.compression.meter.bytes_sent += self.buffers.nbytes
                beside()

        if self.rounds.delay:
            self._travels[number] = self._carrier.carry(travel)
        else:
            travel()
            self._travels[number] = lambda: None

    def _arrive(self, number: int) -> None:
        """Wait for a fragment; step its anchors, and commit."""
        if number in self._travels:
            for other in self._of([min(number, self._last)]):  # in whose process group anchors are compared
                self._travels.get(other, lambda: None)()
            del self._travels[number]
            stepped = self.fragments[number].step(plain=self._finishing)
            (self._back if stepped else self._left_out).add(number)

    def _leave_out(self, number: int) -> None:
        """A rank's numbers were not finite: all ranks go back to what they had in common.

        With them go a rank's other fragments that are not finite, which would make this one so in the next step. What
        these go back to must not depend on whether an evaluation had them come back before.
        """
        self.arrive()
        for place, fragment in enumerate(self.fragments):
            if place == number or not fragment.finite:
                fragment.use()
        if number == self._last:
            self.buffers.use(0.0)
        self.on_left_out()

    def _use(self, number: int, alpha: float) -> None:
        self._arrive(number)
        if number in self._left_out:
            self._left_out.discard(number)
            self._leave_out(number)
        elif number in self._back:
            self._back.discard(number)
            self.fragments[number].use(alpha)
            if number == self._last:
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
            for fragment in self.fragments:
                fragment.compression.roll_back()

    def finish(self, step: int) -> None:
        """The last step was made: use what is due, and synchronise what was learned since, in a shorter round.

        It ends on the mean of what the ranks have learned: an outer optimizer with momentum would go as far as after a
        whole round, and so beyond what the last steps have shown.
        """
        for number in range(len(self.fragments)):
            self._use(number, 0.0 if self._looked[number] == step else self.rounds.alpha)
        carrier, self._carrier, self._finishing = self._carrier, _Now(), True
        for number in range(len(self.fragments)):
            if self._looked[number] < step:
                self._send(number, step)
                self._use(number, 0.0)
            self.fragments[number].use()
        self._carrier, self._finishing = carrier, False

    def rebase(self) -> None:
        """Begin from the model as it is, the same on all ranks but for its buffers."""
        for fragment in self.fragments:
            fragment.rebase()
        self.average_buffers()

    def average_buffers(self) -> None:
        """A collective call, out of turn."""
        self.buffers.look()
        self.buffers.average()
        self.buffers.use(0.0)

    def anchors(self) -> dict[str, Tensor]:
        """Parameters that the ranks have in common, and buffers, by name."""
        self.arrive()
        shared = {name: each.detach() for fragment in self.fragments for name, each in fragment.anchors.items()}
        return shared | self.buffers.common

    def mean(self, own: Mapping[str, Tensor], ranks: Collective) -> dict[str, Tensor]:
        """The mean of the ranks' models as they are, by name; a collective call.

        Args:
            own: this rank's parameters and buffers.
            ranks: in which nothing else is sent at the same time.

        Raises:
            ExchangeError: a rank is gone or silent.
        """
        self.arrive()
        found = self.mean_buffers(own, ranks)
        return found | mean_of({name: own[name] for each in self.fragments for name in each.anchors}, ranks)

    def mean_buffers(self, own: Mapping[str, Tensor], ranks: Collective) -> dict[str, Tensor]:
        """As ``mean``, of buffers alone: means, or rank 0's."""
        copies = {name: own[name].detach().clone() for name in self.buffers.common}
        buffers = Buffers(lambda: copies, ranks, self._rules)
        buffers.look()
        buffers.average()
        buffers.use(0.0)
        return buffers.common

    def finite(self, model: Mapping[str, Tensor]) -> bool:
        """Whether the parameters that are averaged are; buffers may hold what masks."""
        return all(bool(model[name].isfinite().all()) for each in self.fragments for name in each.anchors)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and primitives, once all that travels is back; what is ``common`` is the same on all ranks."""
        self.arrive()
        states = [fragment.state_dict() for fragment in self.fragments]
        return {
            "common": {
                "fragments": [each.pop("common") for each in states],
                "back": sorted(self._back),
                "left_out": sorted(self._left_out),
                "looked": list(self._looked),
                "buffers": self.buffers.common,
                "sums": [[str(dtype), each] for dtype, each in self.buffers.sums.items()],
            },
            "compressions": [each["compression"] for each in states],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``; a collective call.

        Raises:
            ValueError: it is of other settings, or of another model.
        """
        common = state["common"]
        self._divide([list(each["anchors"]) for each in common["fragments"]])
        for fragment, own, compression in zip(self.fragments, common["fragments"], state["compressions"], strict=True):
            fragment.load_state_dict({"common": own, "compression": compression})
        self._back, self._left_out = set(common["back"]), set(common.get("left_out", ()))
        self._looked = list(common["looked"])
        self._travels.clear()
        self.buffers.common = dict(common["buffers"])
        self.buffers.sums = {getattr(torch, name.removeprefix("torch.")): each for name, each in common["sums"]}

    def _divide(self, names: list[list[str]]) -> None:
        """Have fragments of these parameters, as there were when a state was taken; others join later."""
        if names == [list(each.anchors) for each in self.fragments]:
            return
        if unknown := sorted({name for each in names for name in each} - dict(self._module.named_parameters()).keys()):
            raise ValueError(f"the state is of another model, which has {', '.join(unknown[:3])}")
        self.close()
        self.fragments = []
        for each in names:
            self._add(each)

    def stats(self) -> dict[str, float]:
        """``Compression.stats`` over all fragments; ``bytes_dense`` is what stock DDP sends in as many steps."""
        each = [fragment.compression.stats() for fragment in self.fragments]
        found = {name: sum(stats[name] for stats in each) for name in each[0]}
        found["ratio"] = found["bytes_dense"] / found["bytes_sent"] if found["bytes_sent"] else 1.0
        found["residual_norm"] = sum(stats["residual_norm"] ** 2 for stats in each) ** 0.5
        found["relative_error"] /= len(each)
        found["nonfinite_steps"] += self.skipped
        return found | {"steps": each[self._last]["steps"]}

    def close(self) -> None:
        """Stop watching optimizers; states and figures stay readable."""
        for fragment in self.fragments:
            fragment.compression.close()


class _Now:
    """Does what is to be carried at once."""

    def carry(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do it; returns what waits for its end."""
        work()
        return lambda: None


class _Thread(_Now):
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


class _Stream(_Now):
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
