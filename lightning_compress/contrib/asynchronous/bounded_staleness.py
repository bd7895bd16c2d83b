"""Bounded staleness: ranks train at their own pace, and none gets more than some steps ahead of the slowest.

After each step a rank sends what its optimizer has changed, encoded by any codec, to all others. Every model is the
common first one plus the sum of all messages that arrived, each decoded and divided by the number of ranks. Step c
begins when the messages of all steps up to c - s - 1 have arrived, for a staleness of s. It may also see later ones, up
to step c + s - 1, which have come in time. With s = 0 that is the synchronous average, bit for bit alike on all ranks.

Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013. Here there
is no server: each rank has all parameters. With the codec "qsgd" it is asynchronous QSGD (Alistarh et al., NeurIPS
2017, arXiv 1610.02132).

    method = BoundedStaleness(parameters, SSP(staleness=4, compressor="qsgd"), rank, size)
    links = Links(ranks, [every other rank], method.answer, method.kinds, timeout, device)
    method.connect(links)
    for batch in batches:
        method.wait()       # until the bound holds; then the parameters have all that arrived
        loss(model, batch).backward()
        method.begin()      # from here on the optimizer may change the parameters
        optimizer.step()
        method.end()        # sends what has changed
    method.pause()          # all ranks meet, and their models agree
    method.close()
    links.close()
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lightning_compress.collectives import Collective, consensus
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.asynchronous.links import FIRST_KIND, GoneError, Links, Message, Reply
from lightning_compress.contrib.asynchronous.senders import Senders
from lightning_compress.contrib.asynchronous.shared_model import SharedModel
from lightning_compress.contrib.asynchronous.ssp import SSP
from lightning_compress.core.random import mix
from lightning_compress.core.workspace import Workspace
from lightning_compress.exchanges.message import MessagePlan, Section

JOIN, UPDATE, PAUSE, PING, TAKEN = range(FIRST_KIND, FIRST_KIND + 5)
"""Kinds of messages: a rank's settings, an update, "I have paused", "are you there?", and the answer to all of them."""
POLL_S, PING_S = 0.05, 1.0
"""While a rank waits: seconds between two looks at the links, and between two questions whether late ranks live."""

Check = Callable[[], object]
"""Called all the time while a rank waits; may raise what ends the wait, or pause and resume."""


class BoundedStaleness:
    """Bounded staleness at work on one rank.

    Threads of other ranks' questions add what arrives to ``SharedModel.moved``; the parameters change in ``wait``,
    ``end`` and ``pause`` alone, which the training thread calls. Besides the parameters it keeps 12 bytes for each: the
    model before the step, what has moved it, and what was not sent. Up to ``2 s + 2`` messages of this rank are on
    their way to a neighbour behind a slow link; of each other rank at most 2 wait here until a step may see them, or
    ``s + 1`` while this rank has not left a meeting.

    Args:
        parameters: that are trained, by name: float32, on the CPU, equal on all ranks.
        settings: equal on all ranks.
        rank: of this process.
        size: number of ranks.
        kinds: of the parameters, by name, for rules; see ``kinds_of``.

    Attributes:
        model: the parameters, in the order of the messages.
        clock: steps of this rank so far; after a meeting, the most that any rank has made.
        paused: ``pause`` was called, and not yet ``resume``.
        leads: number of steps by how far ahead of the slowest this rank was, as it knew when they began.
        waits: number of steps before which it had to wait, by the ranks that it waited for.
        waited: seconds that it waited in all, meetings included.

    Raises:
        ValueError: the parameters are of another dtype or device, or a rule takes none of them.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        settings: SSP,
        rank: int,
        size: int,
        kinds: Mapping[str, str] | None = None,
    ) -> None:
        for name, each in parameters.items():
            if each.dtype != torch.float32 or each.device.type != "cpu":
                raise ValueError(
                    f"parameter {name!r} is {each.dtype} on {each.device}, and bounded staleness moves float32 "
                    "parameters on the CPU only; use precision='32-true', '16-mixed' or 'bf16-mixed' and "
                    "accelerator='cpu'"
                )
        order, sections = settings.sections(parameters, kinds or {})
        names = list(parameters)
        self._names = [names[place] for place in order]
        self.model = SharedModel(parameters[name] for name in self._names)
        self._staleness, self._seed, self._rank, self._size = settings.staleness, settings.seed, rank, size
        self._digest = consensus.digest(repr((settings.staleness, settings.seed, size, sections)).encode())
        # answering threads decode while the training thread encodes, so each side has its own plan and scratch memory
        self._encoding, self._decoding = Workspace(), Workspace()
        self._encoder, self._decoder = _planned(sections, self._encoding), _planned(sections, self._decoding)
        self._dropped = [each.span for each in sections if not each.fed_back]
        self._before = torch.zeros(self.model.numel, dtype=torch.float32)
        self._residual = torch.zeros_like(self._before)
        others = [other for other in range(size) if other != rank]
        self._arrived = threading.Condition()  # of the five below
        self._received = dict.fromkeys(others, 0)
        self._stops: dict[int, deque[int]] = {other: deque() for other in others}  # clocks at which others have paused
        self._held: list[tuple[int, int, Tensor]] = []  # clock, rank and message
        self._reach: float = settings.staleness - 1  # a message of an earlier clock moves the model as it comes
        self.clock = 0
        self.paused, self._stepping = False, False
        self._links: Links | None = None
        self.leads, self.waits, self.waited = Counter[int](), Counter[int](), 0.0

    @property
    def kinds(self) -> Mapping[int, int]:
        """The messages that ``Links`` has to know."""
        return {JOIN: 0, UPDATE: self._encoder.size, PAUSE: 0, PING: 0, TAKEN: 0}

    def connect(self, links: Links) -> None:
        """Begin to send, to all other ranks.

        Args:
            links: with all of them, made with ``answer`` and ``kinds``.
        """
        self._links, self._senders = links, Senders(links)
        self._senders.send(JOIN, self._digest)

    def answer(self, rank: int, message: Message) -> Reply:
        """See ``Answer``.

        Raises:
            ValueError: the rank has another model, other settings, or another saved state.
        """
        if message.kind == JOIN and message.clock != self._digest:
            raise ValueError(
                f"rank {rank} trains another model than rank {self._rank}, or has other settings of bounded "
                f"staleness{consensus.SAME_ARGUMENTS}"
            )
        if message.kind == UPDATE:
            self._take(rank, message)
        elif message.kind == PAUSE:
            with self._arrived:
                self._stops[rank].append(message.clock)
                self._arrived.notify_all()
        return Reply(TAKEN)

    def _take(self, rank: int, message: Message) -> None:
        clock = message.clock
        with self._arrived:
            if clock < self._received[rank]:
                raise ValueError(
                    f"rank {rank} is at step {clock}, and rank {self._rank} has had its first {self._received[rank]} "
                    "steps; resume all ranks from the same checkpoint"
                )
            # one that comes after its rank has paused belongs behind a meeting which this rank has yet to end
            early = clock >= self._reach or bool(self._stops[rank])
        if early:
            message = message._replace(body=message.body.clone())  # the connection's next message overwrites it
        else:
            with self.model.moving() as moved:
                self._decode(clock, message.body, moved)
        with self._arrived:
            if early:
                self._held.append((clock, rank, message.body))
            self._received[rank] = clock + 1
            self._arrived.notify_all()

    def _decode(self, clock: int, message: Tensor, moved: Tensor) -> None:
        """Add a message to ``moved``; whoever calls it is the only one who moves the model now."""
        with self._decoding.used():
            self._decoder.share(mix(self._seed, clock))
            self._decoder.decode(message[None], moved, 1 / self._size, accumulate=True)

    @torch.no_grad()
    def wait(self, check: Check = lambda: None) -> None:
        """Wait until the next step may begin, and bring into the parameters what it is to see.

        Call it before the forward pass, or when the step before has ended. A rank that has paused is not waited for.

        Args:
            check: see ``Check``.

        Raises:
            GoneError: a rank is gone, or does not answer.
        """
        assert not self.paused, "call resume first"
        needed = self.clock - self._staleness

        def late() -> list[int]:
            return [rank for rank, number in self._received.items() if number < needed and not self._stops[rank]]

        self.waits.update(self._wait(late, check))
        with self._arrived:
            going = [number for rank, number in self._received.items() if not self._stops[rank]]
            self._reach = self.clock + self._staleness
            held = self._release(self._reach)
        self.leads[max(0, self.clock - min(going, default=self.clock))] += 1
        self._apply(held)

    @torch.no_grad()
    def begin(self) -> None:
        """Note the parameters before an optimizer's step, once the backward pass is over. Repeated calls do nothing."""
        if not self._stepping:
            self.model.begin()
            for parameter, before in self.model.parts(self._before):
                before.copy_(parameter)
            self._stepping = True

    @torch.no_grad()
    def end(self) -> None:
        """Take the optimizer's change off the parameters, and send it. It is back, as others see it, after ``wait``.

        A step that a GradScaler has skipped sends what is left of earlier ones. Without ``begin`` it does nothing.

        Raises:
            FloatingPointError: the change is not finite; nothing was sent.
        """
        if not self._stepping:
            return
        for parameter, before, residual in self.model.parts(self._before, self._residual):
            residual.add_(parameter.sub_(before))
            parameter.copy_(before)
        self.model.end()
        self._stepping = False
        clock, message = self.clock, self._encoded()
        with self._arrived:
            self._held.append((clock, self._rank, message))
            self.clock += 1
        if self._links is not None:
            self._senders.send(UPDATE, clock, [message])

    def _encoded(self) -> Tensor:
        """Move the residual into a message, which is returned."""
        vector, key = self._residual, mix(self._seed, self.clock)
        if len(vector) and not all(math.isfinite(float(each)) for each in torch.aminmax(vector)):
            raise FloatingPointError(
                f"the change of step {self.clock} is not finite, and was not sent to other ranks; lower the learning "
                "rate, or clip the gradients"
            )
        message = torch.zeros(self._encoder.size, dtype=torch.uint8)
        with self._encoding.used():
            self._encoder.agree(key, self._rank, self._size)
            flag = torch.zeros((), dtype=torch.float32)
            used = self._encoder.encode(vector, message, mix(key, self._rank), flag, keep=False)
        for span in self._dropped:
            vector[span].zero_()
        return message[:used].clone() if self._encoder.variable else message

    def _release(self, reach: int) -> list[tuple[int, int, Tensor]]:
        """Return messages of clocks before ``reach`` that were held, in an order that is the same on all ranks."""
        free = [each for each in self._held if each[0] < reach]
        self._held = [each for each in self._held if each[0] >= reach]
        return sorted(free, key=itemgetter(0, 1))

    def _apply(self, held: Sequence[tuple[int, int, Tensor]]) -> None:
        with self.model.moving() as moved:
            for clock, _, message in held:
                self._decode(clock, message, moved)
        self.model.begin()
        self.model.end()

    def _wait(self, late: Callable[[], list[int]], check: Check) -> list[int]:
        """Wait until no rank is late; return those that were at first."""
        began = pinged = time.monotonic()
        first: list[int] | None = None
        while True:
            left = set() if self._links is None else self._links.left
            self.look()
            with self._arrived:
                ranks = late()
                first = ranks if first is None else first
                if ranks and not left.intersection(ranks):
                    self._arrived.wait(POLL_S)
            if not ranks:
                self.waited += time.monotonic() - began if first else 0.0
                return first
            for rank in left.intersection(ranks):
                raise GoneError(rank, f"has left after {self._received[rank]} steps, before all ranks had paused")
            check()
            if time.monotonic() - pinged > PING_S:  # a rank that is stopped keeps its connections
                self._senders.ping(PING, ranks)
                pinged = time.monotonic()

    def figures(self) -> dict[str, float]:
        """Return the mean lead over the slowest rank, and the number of steps that had to wait."""
        steps = max(1, self.leads.total())
        leads = sum(lead * count for lead, count in self.leads.items())
        return {"staleness": leads / steps, "waits": float(self.waits.total()), "waited_s": self.waited}

    def look(self) -> None:
        """Raise what has happened to other ranks, or in other threads."""
        if self._links is not None:
            self._links.check()
            if self._senders.error is not None:
                raise self._senders.error

    def stop(self) -> None:
        """Tell the others that this rank pauses, so that none waits for its next steps; does nothing if it was told."""
        with self._arrived:
            if self.paused:
                return
            self.paused, self._reach = True, math.inf
        if self._links is not None:
            self._senders.send(PAUSE, self.clock)

    @torch.no_grad()
    def settle(self, check: Check = lambda: None) -> None:
        """Wait until all ranks have stopped, and bring all that they have sent into the parameters.

        Then every model is the first one plus all decoded messages over the number of ranks, to rounding; ``agree``
        removes that. What was not sent stays in each rank's residual: it is in no model, and travels with the updates
        after ``resume``. Ranks may have made different numbers of steps; from here on they count from the most of them.
        Until ``resume``, no parameters change. Every rank must call ``stop`` and this as often as the others.

        Args:
            check: see ``Check``.

        Raises:
            GoneError: a rank is gone, or does not answer.
        """
        self._wait(lambda: [rank for rank, stops in self._stops.items() if not stops], check)
        with self._arrived:
            self.clock = max([self.clock, *(stops.popleft() for stops in self._stops.values())])
            self._received = {rank: max(number, self.clock) for rank, number in self._received.items()}
            self._reach = self.clock + self._staleness - 1
            held = self._release(self.clock)
        self._apply(held)

    def pause(self, check: Check = lambda: None) -> None:
        """Meet all ranks: ``stop`` and ``settle``, unless this rank is paused already."""
        if not self.paused:
            self.stop()
            self.settle(check)

    @torch.no_grad()
    def agree(self, ranks: Collective) -> None:
        """Make all models bit-equal while they are paused: their mean. Collective: every rank must call it."""
        for parameter, mean in self.model.parts(self._before):
            mean.copy_(parameter)
        ranks.all_reduce(self._before)
        for parameter, mean in self.model.parts(self._before.div_(self._size)):
            parameter.copy_(mean)

    def resume(self) -> None:
        """Go on after a meeting."""
        self.paused = False

    def close(self) -> None:
        """End the threads when all that was sent is answered, or a rank is gone. Call it before ``Links.close``."""
        if self._links is not None:
            self._senders.close()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state besides the parameters, at a meeting or before the first step.

        Returns:
            ``clock``, which is equal on all ranks; and ``residual``, float32 by the parameter's name, which is this
            rank's own and shares its memory.
        """
        shaped = [part for _, part in self.model.parts(self._residual)]
        return {"clock": self.clock, "residual": dict(zip(self._names, shaped, strict=True))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``, before the first step; the parameters are restored apart.

        Raises:
            ValueError: the state has other parameters.
        """
        residual, own = state["residual"], self.state_dict()["residual"]
        if wrong := [name for name in {**own, **residual} if _shape(residual, name) != _shape(own, name)]:
            raise ValueError(
                f"the state of bounded staleness has another {wrong[0]!r} than the model, or only one of them has it: "
                "it was saved with another model"
            )
        for name, part in own.items():
            part.copy_(residual[name])
        with self._arrived:
            self.clock = int(state["clock"])
            self._received = {rank: max(number, self.clock) for rank, number in self._received.items()}
            self._reach = self.clock + self._staleness - 1


def _planned(sections: Sequence[Section], workspace: Workspace) -> MessagePlan:
    device = torch.device("cpu")
    with workspace.used():
        return MessagePlan(sections, device, Meter(device))


def _shape(named: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(named[name].shape) if name in named else None
