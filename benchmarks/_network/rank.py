"""One rank of the lab: what it measured, took down, or played again."""

from __future__ import annotations

import gc
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._local import Alone, Local
from benchmarks._network import replay
from benchmarks._network.asleep import Asleep
from benchmarks._network.methods import delayed, local, make, optimizer
from benchmarks._network.trace import Recorder, Turn
from benchmarks.harness.models import MODELS, batch
from benchmarks.harness.rank import spanned
from lightning_compress import Compression
from lightning_compress.exchanges.message import MessagePlan
from lightning_compress.exchanges.shards import ShardMessages


def find(told: dict[str, Any]) -> dict[str, Any]:
    """Do what is told."""
    if "traces" in told:
        return replay.play(told)
    found = Measuring(told).run()
    return {name: found[name] for name in ("ms", "wire_bytes")} if told.get("asleep_ms") else found


class Measuring:
    """Measure the methods in turn, in rounds, so that what disturbs the machine disturbs all alike.

    Of local steps it is the mean of a whole round, in which ranks meet only as the method does. With a delay it is the
    mean of all steps of a round, until the last average is there; so it is where computing is a sleep.

    Args:
        arguments: ``model``, ``methods``, ``steps``, ``rounds``; ``warm``, the steps before measuring (buckets are
            rebuilt, sparse sums grow to their size); ``record``, whether to take steps down too, and ``turn``, a file
            by which ranks then compute one by one; ``asleep_ms``, of a step whose computing is a sleep.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._told = arguments
        self._turn = Turn(arguments.get("turn"))
        self._times: dict[str, list[float]] = {name: [] for name in arguments["methods"]}
        self._wire: dict[str, list[int]] = {name: [] for name in arguments["methods"]}
        self._found: dict[str, Any] = {"formula_bytes": {}, "bits": {}, "step_bits": {}, "traces": {}, "said": {}}

    def run(self) -> dict[str, Any]:
        """Medians by method: ``ms``, ``wire_bytes``; ``formula_bytes``, ``bits`` of ours; ``traces``, if asked for.

        And ``step_bits``, of local steps: on the wire, per parameter and step.
        """
        names, rounds = list(self._times), self._told["rounds"]
        for number in range(rounds):
            for name in names[number:] + names[:number]:
                self._one_round(name, self._told["steps"] // rounds)
        medians = {name: 1e3 * statistics.median(each) for name, each in self._times.items()}
        sent = {name: statistics.median(each) for name, each in self._wire.items()}
        return {"ms": medians, "wire_bytes": sent, **self._found}

    def _one_round(self, name: str, steps: int) -> None:
        """Some steps of a method, on a model of its own; one by one, if nothing travels beside the next one."""
        torch.manual_seed(0)
        of, asleep_ms = self._told["model"], self._told.get("asleep_ms")
        module = Asleep(of, asleep_ms / 1e3) if asleep_ms else MODELS[of][0]()
        if alone := local(name, module):
            self._local_steps(name, module, alone, max(2, steps // alone.every))
            return
        together = bool(asleep_ms) or delayed(name)
        recorder = Recorder(name, module, self._turn) if self._told.get("record") else None
        model, compression = (recorder.model, recorder.compression) if recorder else make(name)(module)
        stepper = optimizer(model)
        inputs = torch.zeros((), requires_grad=True) if asleep_ms else batch(of, dist.get_rank())
        work, sent = partial(_step, model, stepper, inputs), partial(_sent, compression, together)
        with hearing_auto() as said, counting_bits() as bits, recorder.watching() if recorder else nullcontext():
            for _ in range(self._told["warm"]):
                work(None)
            spans = [steps] if together else [1] * steps
            promised = [self._time(name, count, partial(work, recorder), sent) for count in spans]
        if compression is not None:
            self._found["formula_bytes"][name] = statistics.median(promised)
            compression.close()
        if bits[1]:
            self._found["bits"][name] = 8 * bits[0] / bits[1]
        self._found["said"][name] = said
        if recorder:
            self._keep(name, recorder.trace)
        del model, module, stepper, compression, recorder, work, sent
        gc.collect()

    def _time(self, name: str, steps: int, work: Callable[[], object], sent: Callable[[], float]) -> float:
        """Measure steps between which ranks do not meet; returns the bytes of one, by formula."""
        already = sent()
        with spanned() as span:
            for _ in range(steps):
                work()
            promised = sent() - already
        self._times[name].append(span.seconds / steps)
        self._wire[name].append(span.sent // steps)
        return promised / steps

    def _keep(self, name: str, trace: dict[str, Any]) -> None:
        """Steps that were recorded, behind those of earlier rounds."""
        known = self._found["traces"].setdefault(name, trace)
        known["steps"] += trace["steps"] if known is not trace else []

    def _local_steps(self, name: str, module: torch.nn.Module, local: Local | Alone, rounds: int) -> None:
        """Whole rounds of local steps, after one that does not count; ranks do not meet in between."""
        stepper, inputs = optimizer(module), batch(self._told["model"], dist.get_rank())

        def step() -> None:
            _step(module, stepper, inputs, None)
            local.after()

        with hearing_auto() as said:
            for _ in range(local.every):
                step()
            # of streaming, what travels over the end of a round is counted in the next
            formula = [self._time(name, local.every, step, lambda: local.bytes_sent) for _ in range(rounds)]
            local.close()
        self._found["formula_bytes"][name] = statistics.mean(formula)
        count = sum(each.numel() for each in module.parameters())
        self._found["step_bits"][name] = 8 * statistics.median(self._wire[name]) / count
        self._found["said"][name] = said


def _sent(compression: Compression | None, together: bool) -> float:
    """Bytes so far, by formula; with ``together`` of what still travels, too, which is waited for."""
    if compression is None:
        return 0.0
    return float(compression.stats()["total_bytes_sent"]) if together else compression.meter.bytes_sent


def _step(model: torch.nn.Module, stepper: torch.optim.Optimizer, inputs: Tensor, recorder: Recorder | None) -> None:
    stepper.zero_grad()
    if not recorder:
        model(inputs).square().mean().backward()
        stepper.step()
        return
    recorder.begin()
    loss = model(inputs).square().mean()
    recorder.mark("forward")
    loss.backward()
    recorder.mark("tail")
    stepper.step()
    recorder.mark("optimizer")
    recorder.end()


@contextmanager
def hearing_auto() -> Iterator[list[str]]:
    """What ``auto`` says of its choices, on rank 0."""
    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("lightning_compress.planning.choose")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)


@contextmanager
def counting_bits() -> Iterator[list[int]]:
    """Bytes of the messages that codecs made, padding and flags included, and elements that went into them."""
    counted = [0, 0]
    encode, plan_shards, encode_shards = MessagePlan.encode, ShardMessages.of, ShardMessages.encode
    without = ShardMessages.without
    plans: dict[int, list[MessagePlan]] = {}

    def count(plan: MessagePlan, used: int) -> None:
        counted[0] += used
        counted[1] += sum(span.stop - span.start for span in plan.spans)

    def watched(plan: MessagePlan, *arguments: Any, **named: Any) -> int:
        used = encode(plan, *arguments, **named)
        count(plan, used)
        return used

    def planned(messages: Sequence[tuple[int, MessagePlan, int]], *more: Any) -> ShardMessages:
        shards = plan_shards(messages, *more)
        plans[id(shards)] = [plan for _, plan, _ in messages]
        return shards

    def some(shards: ShardMessages, *sections: Any) -> ShardMessages:
        left = without(shards, *sections)
        plans[id(left)] = plans[id(shards)]  # the others are in the same messages
        return left

    def shards_watched(shards: ShardMessages, *arguments: Any) -> None:
        encode_shards(shards, *arguments)
        for plan in plans[id(shards)]:
            count(plan, plan.size)

    with (
        mock.patch.object(MessagePlan, "encode", watched),
        mock.patch.object(ShardMessages, "of", planned),
        mock.patch.object(ShardMessages, "without", some),
        mock.patch.object(ShardMessages, "encode", shards_watched),
    ):
        yield counted
