"""Training without waiting: ranks are at different steps, and bring their models together in the background."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_compress.collectives import Collective, CountingCollective
from lightning_compress.collectives.coalesced import mean_of
from lightning_compress.collectives.counting import Meter, all_reduce_bytes
from lightning_compress.contrib.asynchronous.board import FIRST, Board
from lightning_compress.contrib.asynchronous.bounded_staleness import BoundedStaleness
from lightning_compress.contrib.asynchronous.links import GoneError, Links
from lightning_compress.contrib.asynchronous.pair_gossip import ADPSGD, PairGossip
from lightning_compress.contrib.asynchronous.ssp import SSP
from lightning_compress.core import errors
from lightning_compress.core.errors import ExchangeError
from lightning_compress.engine.checks import check_initialized
from lightning_compress.gossip.topology import Topology, build_topology
from lightning_compress.periodic.gossip import mixed_parameters
from lightning_compress.periodic.synchroniser import Synchroniser
from lightning_compress.settings.automatic import Automatic
from lightning_compress.settings.parsing import must, read_seed, truth
from lightning_compress.settings.rules import kinds_of

ALGORITHMS: dict[str, type[ADPSGD] | type[SSP]] = {"adpsgd": ADPSGD, "ssp": SSP}
BATCHES = FIRST
"""The counter of batches that ranks have taken in an epoch."""
_patience = must(
    lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf,
    "a number of seconds above 0, such as 30",
)
_NAMED_S = 1.0
"""Seconds in which the links can name a rank whose death has broken a collective."""


class AsyncGossip(Synchroniser):
    """Training without waiting: a rank that is slow, or behind a slow link, holds up nobody.

    With "adpsgd" a rank asks a neighbour at random after each step, in a thread, and goes on; a thread of the neighbour
    answers, and both move towards each other by the same numbers, so that the mean of all models stays as it is. With
    "ssp" a rank sends what its optimizer has changed to all others, encoded, and waits only where it is too far ahead.
    All ranks meet where they need one model, for validation, checkpoints and the end of the fit: there it is the exact
    mean. Optimizer states and buffers stay per-rank.

    Args:
        algorithm: "adpsgd"; "ssp", or with its settings ``{"name": "ssp", "staleness": 8}``, see ``SSP``.
        topology: of "adpsgd", who is whose neighbour: "ring" (the default), "complete", "star", "exponential", or a
            matrix, see ``Gossip``; its weights do not matter here.
        compressor: "auto" or "none" for float32, which "adpsgd" sends 8 bytes a parameter and average of. Of "adpsgd",
            "moniqua" and its settings, with 8 or 4 bits; of "ssp", any codec.
        share_work: ranks take their batches from one list, so that a slow rank takes fewer in an epoch. False: every
            rank has as many, and all wait for the slowest where they meet.
        answer_timeout: seconds after which a rank that does not answer is taken for dead; above 0.
        buffers: see ``Gossip``.
        seed: of all randomness, 0 or more; None is 0.

    Attributes:
        share_work: as given.
        paused: whether no model changes but by its own rank; see ``pause``.
        called: whether some rank has called all others together; then ``join`` is due.
        on_call: what to do while this rank waits for others who call it; ``join`` must be part of it.
        work: this rank's state of the batches that all share, as a checkpoint has it, or None.

    Raises:
        ValueError: a name or setting is unknown, or a value is out of range.
    """

    kind = "asynchronous gossip"
    meters: Sequence[Meter] = ()
    paused = True
    on_call: Callable[[], object]
    work: Mapping[str, Any] | None = None

    def __init__(
        self,
        algorithm: str | dict[str, Any] = "adpsgd",
        topology: Topology | str | dict[str, Any] | list[Any] | None = None,
        compressor: Any = "auto",
        share_work: bool = True,
        answer_timeout: float = 30.0,
        buffers: dict[str, str] | None = None,
        seed: int | None = 0,
    ) -> None:
        super().__init__("mean", ("mean",), buffers)
        _patience("answer_timeout", answer_timeout)
        self.share_work = bool(truth("share_work", share_work))
        self._settings = _settings(algorithm, compressor, read_seed("seed", seed))
        if isinstance(self._settings, SSP) and topology is not None:
            raise ValueError(f"topology={topology!r}: 'ssp' sends to all ranks; leave it out, or use 'adpsgd'")
        self._topology_given, self._timeout = topology or "ring", float(answer_timeout)
        self.on_call = self.join
        self._links: Links | None = None

    # a fit

    def check(self, model: nn.Module, ranks: Collective, device: torch.device) -> None:
        """See ``Synchroniser``; parameters must be float32, on the CPU."""
        problem, graph = None, None
        try:
            check_initialized(model)
            if device.type != "cpu":
                raise ValueError(f"{self.kind} trains on CPUs as yet, and the model is on {device}; use GossipStrategy")
            self._topology = build_topology(self._topology_given, ranks.size)
            self._topology.check_symmetric("adpsgd")
            if self._topology.varies:
                raise ValueError(
                    f"topology {self._topology.name}: its edges change from round to round, and ranks that do not wait "
                    "have no rounds; use 'ring', 'exponential' or 'complete'"
                )
            graph = self._topology.checksum
            mixed_parameters(model, self.may_unfreeze)
        except ValueError as error:  # a file may be missing on one rank only
            problem = error
        settings = self._settings, graph, self.share_work, self._timeout, self.rules
        self._compare(settings, problem, ranks, device)
        self.rules.check(dict(model.named_buffers()))

    def _start(self) -> None:
        if any(isinstance(each, LBFGS) for each in self.optimizers):
            raise ValueError(
                "LBFGS calls its closure several times a step, with other parameters each time, while neighbours move "
                "them; use another optimizer, or GossipStrategy"
            )
        trained, ranks = mixed_parameters(self.model, self.may_unfreeze), self.ranks
        self._names = dict.fromkeys(trained)
        self.meters = [Meter(self.device)]
        self._apart = ranks.apart()
        self.counted = CountingCollective(self._apart, self.meter)
        self._joined, self._sent, self.paused = 0, 0, True
        self._furthest, self._sent_to = 0, dict[int, int]()
        self._consensus, self.waited, self.work = 0.0, 0.0, None
        self._links = None
        self._method, peers = self._begun(trained)
        if ranks.size > 1:
            self._board = Board(ranks, self._timeout, self.device)
            self._links = Links(ranks, peers, self._method.answer, self._method.kinds, self._timeout, self.device)
            self._method.connect(self._links)
        self._hooks = [each.register_step_post_hook(lambda *_: self._method.end()) for each in self.optimizers]

    def _begun(self, trained: dict[str, Tensor]) -> tuple[PairGossip | BoundedStaleness, list[int]]:
        """Return the algorithm at work, and the ranks that this one talks to."""
        rank, size = self.ranks.rank, self.ranks.size
        if isinstance(self._settings, SSP):
            others = [other for other in range(size) if other != rank]
            return BoundedStaleness(trained, self._settings, rank, size, kinds_of(self.model)), others
        return PairGossip(trained.values(), self._settings), list(self._topology.weights(rank, 0))

    def _rebase(self) -> None:
        """See ``Synchroniser``; nothing has moved yet."""
        self._furthest = self.attempts

    def before_step(self, optimizer: Optimizer, scale: Tensor | None = None) -> None:
        """See ``Synchroniser``: from here on the optimizer changes the parameters, and nobody reads them."""
        self._method.begin()

    def _after_step(self) -> None:
        meter = self.meter
        meter.begin_step()
        with self._named():
            self._method.end()  # if the GradScaler has skipped the step
            if self._links is not None and not self.paused:
                self._method.wait(self._look)
                self._look()
                sent = sum(self._links.sent.values())
                meter.bytes_sent, self._sent = meter.bytes_sent + sent - self._sent, sent
        meter.bytes_dense += all_reduce_bytes(4 * self._method.model.numel, self.ranks.size)
        meter.end_step()

    def _look(self) -> None:
        """Raise what has happened in other threads, or to other ranks."""
        if self._links is None:
            return
        try:
            self._links.check()
            self._board.links.check()
            self._method.look()
        except GoneError as gone:
            raise ExchangeError(f"{self._where}: {gone}") from gone
        except ValueError as error:
            raise ValueError(f"{self._where}: {error}") from error

    @property
    def _where(self) -> str:
        return f"rank {self.ranks.rank}, after {self.attempts} steps"

    @contextmanager
    def _named(self) -> Iterator[None]:
        """If something inside fails because a rank died, say which one."""
        try:
            yield
        except (GoneError, ExchangeError) as error:
            end = time.monotonic() + (_NAMED_S if isinstance(error, ExchangeError) else 0.0)
            while self._links is not None:
                self._look()
                if time.monotonic() >= end:
                    break
                time.sleep(0.01)
            if isinstance(error, ExchangeError):
                raise
            raise ExchangeError(f"{self._where}: {error}") from error

    # where all ranks meet

    def take(self, number: int) -> int:
        """Take a batch of the ``number``-th list: return how many all ranks have taken of it; see ``SharedBatches``."""
        with self._named():
            return self._board.add((BATCHES, number))

    def pause(self) -> None:
        """Wait for all ranks; from then on, until ``resume``, no model changes but by its own rank. Collective."""
        if self.paused or self._alone:
            return
        began = time.monotonic()
        with self._named():
            self._method.stop()
            self._look()
            self._board.meet(self._while_waiting)
        self._settle()
        self.waited += time.monotonic() - began

    def _while_waiting(self) -> None:
        self._look()
        if self.called:
            self.on_call()
            self.resume()  # those that called train on, and this rank stops for the others once more
            self._method.stop()

    def _settle(self) -> None:
        """Apply what neighbours have moved; nobody asks any more. Collective."""
        with self._named():
            self._method.settle(self._look)
            self.paused = True
            self._meet_furthest()

    def _meet_furthest(self) -> None:
        """Ask all ranks for their steps. Collective."""
        most = torch.tensor([self.attempts], dtype=torch.int64)
        with errors.explained("meeting the others", self.ranks.rank):
            self._apart.all_reduce(most, "max")
        self._furthest = int(most)

    def resume(self) -> None:
        """Go on averaging."""
        if self.paused and self._links is not None and not self._alone:
            self._method.resume()
            self.paused = False

    def call(self) -> None:
        """Have all ranks come together, between two batches or where they wait anyway; see ``called``."""
        if self._links is not None:
            with self._named():
                self._board.call(self._joined + 1)

    @property
    def called(self) -> bool:
        """Whether this rank is called by another, or by itself."""
        return self._links is not None and self._board.called > self._joined

    def look_for_calls(self) -> None:
        """Ask whether there is a call: a round trip to rank 0."""
        if self._links is not None:
            with self._named():
                self._board.add((BATCHES, 0), 0)

    def join(self) -> None:
        """Come to a call, and wait for all others; like ``pause``. Collective."""
        self._joined += 1
        self.resume()  # one that comes from a meeting has to tell the others again that it stops
        with self._named():
            self._method.stop()
            self._look()
            self._board.come(self._joined, self._look)
        self._settle()

    def _averaged(self, plain: bool) -> dict[str, Tensor]:
        if self._alone:
            return {}
        self.pause()
        with self._named():
            named = self.named()
            own = {name: named[name] for name in self._names}
            means = mean_of(own, self.counted, f"averaging all models after {self.attempts} steps")
            self._consensus = self._apart_from(means)
            return means | self._rest(self._names)

    def furthest(self) -> int:
        """See ``Synchroniser``: the largest number where the ranks have met last."""
        return self._furthest if self.ranks.size > 1 else self.attempts

    def finish(self) -> None:
        """See ``Synchroniser``: all ranks get the exact mean."""
        self.put(self.averaged_model(plain=True))

    def leave(self, failure: BaseException | None = None) -> None:
        """End the fit for this rank: say goodbye to the others, or tell them why it stops and wait for nobody."""
        links, self._links = self._links, None
        if links is None:
            return
        self._sent_to = links.sent
        cause = None if failure is None else failure.__cause__
        said = cause if isinstance(cause, GoneError) else failure
        word = said if said is None or isinstance(said, Exception) else RuntimeError(type(said).__name__)
        if word is None:
            with suppress(GoneError):
                self._method.stop()
            self._method.close()
        for each in (links, self._board.links):
            each.close(word)
        if word is not None:  # its threads end when the connections do
            self._method.close()

    def close(self) -> None:
        """See ``Synchroniser``."""
        for hook in self._hooks:
            hook.remove()
        self.leave(RuntimeError("stops") if self._alone else None)
        if not self._alone:
            self._apart.close()

    # what is saved and reported

    def state_dict(self) -> dict[str, Any]:
        """See ``Synchroniser``; ranks are at different steps."""
        return {"common": {}, "attempts": self.attempts, "method": self._method.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Synchroniser``. The run after it is another one: what ranks ask, and when, is never the same."""
        self.attempts, self.work = state["attempts"], state.get("work")
        self._meet_furthest()
        self._method.load_state_dict(state["method"])

    @property
    def method(self) -> str:
        """See ``Synchroniser``."""
        return f"{self._settings}, {self._topology.checksum:08x}"

    @property
    def _title(self) -> str:
        settings, how = self._settings, getattr(self._settings.compressor, "name", self._settings.compressor) or "none"
        if isinstance(settings, SSP):
            return f"{self.kind} by ssp with {how}, at most {settings.staleness} steps ahead"
        return f"{self.kind} by adpsgd with {how} on {self._topology.name}"

    @property
    def summary(self) -> str:
        """See ``Synchroniser``."""
        work = "batches from one list" if self.share_work else "as many batches on each rank"
        kept = 4 if isinstance(self._settings, ADPSGD) else 12
        return f"{self._title} of {self.ranks.size} ranks, {work}; keeps {kept} bytes a parameter"

    def stats(self) -> dict[str, Any]:
        """See ``Synchroniser``; also bytes by rank, and the algorithm's figures.

        ``staleness``: mean number of steps of this rank between a question and its answer, or that it was ahead of the
        slowest. ``wait_s``: seconds that this rank has waited where all meet.
        """
        sent = self._links.sent if self._links else self._sent_to
        return {
            **self.meter.read(),
            **{f"bytes_to_{peer}": float(count) for peer, count in sorted(sent.items())},
            **self._method.figures(),
            "wait_s": self.waited,
            "consensus_distance": self._consensus,
            "summary": self.summary,
        }


def _settings(algorithm: object, compressor: object, seed: int) -> ADPSGD | SSP:
    """Return the settings that ``algorithm`` names, or has."""
    given: dict[str, Any] = dict(algorithm) if isinstance(algorithm, Mapping) else {"name": algorithm}
    name = given.pop("name", None)
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} must be one of {', '.join(map(repr, ALGORITHMS))}")
    known = list(ALGORITHMS[name].NAMES)
    if unknown := given.keys() - set(known):
        raise ValueError(f"algorithm={algorithm!r}: {name} has no {sorted(unknown)[0]!r}; it has {known or 'nothing'}")
    if not (compressor in (None, "auto") or isinstance(compressor, Automatic)):
        given["compressor"] = compressor
    return ALGORITHMS[name](**given, seed=seed)
