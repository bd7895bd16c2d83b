"""Whether compression paid: a fit's step as measured, and DistributedDataParallel's as the cost model predicts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_compress.codecs import Dense
from lightning_compress.collectives import World, consensus
from lightning_compress.core import errors
from lightning_compress.planning.choose import Auto
from lightning_compress.planning.cost import UNKNOWN
from lightning_compress.planning.decide import on_one_machine
from lightning_compress.planning.predict import BUCKET, Buckets, Place
from lightning_compress.planning.summary import label
from lightning_compress.settings.rules import Shape
from lightning_compress.settings.run_state import RunState

PAYS = 1.1
"""How many times as fast as DistributedDataParallel's a step must be to count as faster, and the other way round."""
OFF = 1.5
"""If the cost model is off by this factor for a fit's own step, it says nothing about another one."""
ADVISE = "'lightning-compress advise' predicts what DDP would take"


@dataclass(frozen=True)
class Run:
    """What a fit trained, and what its steps took.

    Args:
        settings: of the compression.
        parameters: names and shapes of what is averaged, float32, in the model's order.
        ranks: 2 or more.
        step_s: seconds of a step; with local steps, with its share of a round's average.
        computing_s: of these, seconds without waiting for averages; None: not known.
        bucket_bytes: of the buckets in which gradients are compressed.
        hides: see ``Place``.
        batches: accumulated in a step.
        every: local steps of a round; 1: gradients are averaged.
    """

    settings: RunState
    parameters: Sequence[tuple[str, Shape]]
    ranks: int
    step_s: float
    computing_s: float | None
    bucket_bytes: int = BUCKET
    hides: bool = True
    batches: int = 1
    every: int = 1

    @property
    def float32(self) -> bool:
        """Whether ``auto`` chose to send gradients as they are."""
        return self.every == 1 and self.settings.chosen is not None and dense(self.settings)

    def own_s(self, planner: Auto) -> float | None:
        """Return the predicted seconds of this fit's own step; None: no model predicts it."""
        if self.computing_s is None or self.float32:
            return None
        try:
            buckets = Buckets.of(self.settings, self.parameters, self._place(planner))
        except (ValueError, KeyError):  # a reducer, or a codec that was not timed
            return None
        if self.every > 1:
            return self.computing_s + buckets.step(0.0).exchange_s / self.every
        return self._step_s(buckets, self.computing_s)

    def explained_by(self, planner: Auto) -> bool:
        """Return whether the prediction of this fit's own step is about right, or there is none."""
        own = self.own_s(planner)
        return own is None or 1 / OFF < own / self.step_s < OFF

    def ddp_s(self, planner: Auto) -> float | None:
        """Return the predicted seconds of a step with DistributedDataParallel; None: computing is not known."""
        computing, place = self.computing_s, self._place(planner)
        if computing is None:
            try:
                computing = Buckets.of(self.settings, self.parameters, place).computing(self.step_s / self.batches)
            except (ValueError, KeyError):
                return None
            computing *= self.batches
        return self._step_s(Buckets.of(None, self.parameters, place), computing)

    def fastest(self, planner: Auto) -> tuple[str, float] | None:
        """Return the compressor that is predicted to be fastest, and its step's seconds, if DDP averaged."""
        place, steps = self._place(planner), dict[str, float]()
        computing = Buckets.of(None, self.parameters, place).computing(self.step_s)
        for codec in self.settings.candidates[1:]:
            assert self.settings.chosen is not None
            try:
                settings = self.settings.become(replace(self.settings.chosen, codec=codec))
                steps[label(codec)] = Buckets.of(settings, self.parameters, place).step(computing).step_s
            except (ValueError, KeyError):
                continue
        return min(steps.items(), key=lambda each: each[1]) if steps and self.batches == 1 else None

    def _place(self, planner: Auto) -> Place:
        return Place(self.ranks, planner, self.bucket_bytes, self.hides)

    def _step_s(self, buckets: Buckets, computing_s: float) -> float:
        """Return the seconds of a step whose last batch alone is averaged."""
        last = computing_s / self.batches
        return computing_s - last + buckets.step(last).step_s


@dataclass(frozen=True)
class Where:
    """Where a fit ran.

    Args:
        one_machine: all ranks are processes of one machine's CPUs.
        planner: knows the link; None: it was not measured.
        source: how it knows.
    """

    one_machine: bool = False
    planner: Auto | None = None
    source: str = ""


def dense(settings: RunState) -> bool:
    """Return whether nothing is compressed."""
    return all(isinstance(method, Dense) for method in settings.methods)


def known(settings: RunState) -> Where:
    """Return where a fit ran, by what its exchange has measured or was told."""
    exchange = settings.exchange
    if not isinstance(exchange, Auto) or exchange.known_link is None:
        return Where()
    if exchange.link is None:
        return Where(planner=exchange, source="measured at setup")
    if exchange.link == UNKNOWN:  # assumed, not given
        return Where()
    return Where(planner=exchange, source="as given to exchange=")


def look(settings: RunState, run: Run | None, votes: World, transport: World, able: bool) -> Where:
    """Return where a fit ran; measure the link if nobody has, or if that does not explain the fit's step. Collective.

    Measuring takes about a second at 10 Mbit/s, and less on faster links. All ranks measure, or none does.

    Args:
        settings: of the compression.
        run: of this rank; None: it says nothing.
        votes: by which the ranks agree.
        transport: by which they average.
        able: this rank has the time to measure.
    """
    collective, device, _ = votes
    with errors.explained("agreeing on the report of the fit", collective.rank):
        if transport.device.type == "cpu" and on_one_machine(collective, device):
            return Where(one_machine=True)
        found = known(settings)
        wanted = found.planner is None or (run is not None and not run.explained_by(found.planner))
        wanted, unable = consensus.anywhere([wanted, run is None or not able], collective, device)
        if not wanted or unable:
            return found
        planner = Auto()
        planner.measure([], transport)
    if found.planner is not None:
        measured = found.planner.measured() | {
            name: planner.measured()[name] for name in ("links", "node_size", "nodes")
        }
        planner = planner.with_measurements(measured)
    return Where(planner=planner, source="measured at the end")


def sentence(run: Run, where: Where) -> str:
    """Return what a step took, what DistributedDataParallel's would take, and what to write if that is no more."""
    took, chosen = milliseconds(run.step_s), ", which auto chose" * run.float32
    if where.one_machine:
        instead = "" if run.float32 or run.every > 1 else ", where DDP was faster in our runs: write strategy='ddp'"
        took += f" with float32{chosen}" * run.float32
        return f"{took}; all ranks are on this machine{instead}. Over a network, {ADVISE}"
    if (planner := where.planner) is None:
        return f"{took}{f' with float32{chosen}' * run.float32}; {ADVISE}"
    link = f"Link: {planner.known_link}, {where.source}"
    if run.float32:
        best = run.fastest(planner)
        other = f"; the fastest compressor, {best[0]}, would take about {_about(best[1])} (predicted)" if best else ""
        return f"{took} with float32{chosen}{other}. {link}"
    if not run.explained_by(planner):
        own = _about(run.own_s(planner) or 0.0)
        return f"{took}; the cost model predicts {own} for it, so do not trust it here: compare with strategy='ddp'"
    if (ddp := run.ddp_s(planner)) is None:
        return f"{took}; {ADVISE}"
    verdict = _verdict(run, ddp / run.step_s)
    return f"{took}; DDP would take about {_about(ddp)} on this link (predicted): {verdict}. {link}"


def _verdict(run: Run, times: float) -> str:
    """Return how many times as fast a step was as DistributedDataParallel's would be, and what to write if it lost."""
    if times >= PAYS:
        return f"{times:.2g} x"
    better = "compressor='auto', which takes float32 where that is faster"
    instead = "strategy='ddp'" if run.settings.chosen or run.every > 1 else better
    lost = f"compression lost ({times:.2g} x)" if times * PAYS <= 1 else f"compression gained nothing ({times:.2g} x)"
    return f"{lost}. Write {instead}"


def milliseconds(seconds: float) -> str:
    """Return a measured time in milliseconds, with three digits or more."""
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def _about(seconds: float) -> str:
    """Return a predicted time in milliseconds, with two digits."""
    return f"{float(f'{1e3 * seconds:.2g}'):,g} ms"
