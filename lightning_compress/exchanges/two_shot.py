"""Every rank owns a shard. It sums the messages it receives for that shard, encodes the sum, and sends it to all.

This is the double quantisation of 1-bit SGD (Seide, Fu, Droppo, Li, Yu, Interspeech 2014) with a single residual: the
owner's own shard enters unencoded, and the error of the second encode stays in that shard of the owner's vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lightning_compress import kernels
from lightning_compress.codecs import Codec
from lightning_compress.collectives import World
from lightning_compress.collectives.collective import Wait
from lightning_compress.collectives.counting import all_gather_rounds, all_to_all_rounds
from lightning_compress.core.random import mix, permutation
from lightning_compress.core.source import Source
from lightning_compress.core.state import States
from lightning_compress.core.told import Opening, Told
from lightning_compress.core.workspace import Messages
from lightning_compress.exchanges.exchange import (
    Cost,
    Exchange,
    ExchangePlan,
    Sums,
    read_sums,
    sections_of_sums,
)
from lightning_compress.exchanges.head import bits_of, opening_of
from lightning_compress.exchanges.heads import Heads
from lightning_compress.exchanges.message import MessagePlan, Out, Section
from lightning_compress.exchanges.owner import OwnerAdaGrad, OwnerStep
from lightning_compress.exchanges.parts import part_count, parts_of
from lightning_compress.exchanges.remote_error import DeferredError
from lightning_compress.exchanges.shards import Passed, ShardMessages
from lightning_compress.exchanges.varying import Varying, lengths_cost


@dataclass(frozen=True)
class TwoShot(Exchange):
    """All-to-all of shards, then all-gather of the encoded sums; a rank sends ``2 (W - 1) / W`` messages.

    Traffic and decoding time per rank hardly grow with the number of ranks. It encodes twice. For sparsifiers, the
    second encode drops what the first one kept. That is another algorithm, so ``auto`` never chooses it for them.

    In the first stage, the noise of unbiased methods averages out over the ranks. In the second it does not, so sums
    are encoded with more bits: half of log2 of the number of ranks. ``rotated`` and ``qsgd`` with 4 bits use 5 bits at
    4 ranks, and 6 bits at 8 and 16 ranks (``Codec.refined``). At 8 ranks, the variance is then at most twice that of
    ``all_gather``. With ``sums="same"`` it is 8 times that, for a fifth fewer bytes. Methods with error feedback use
    the same codec twice, because the residual also corrects the second error. The exceptions are ``fft`` and ``dct``,
    which keep more coefficients of a sum.

    With ``adagrad``, the owner of a shard applies AdaGrad to the mean in full precision, before it is encoded again::

        history <- history + mean^2;   out <- mean / (sqrt(history) + adagrad)

    The optimizer receives ``out``. It must be SGD, with or without momentum; others raise ValueError. The error of the
    second encode is then in units of ``out``, not of gradients. It is a second residual, which the owner adds to
    ``out`` before the next second encode, even with ``error_feedback=False``. So the mean is not conserved; each stage
    conserves its own values: the gradients that the owners receive, and ``out``. Each rank keeps ``history`` and
    ``residual`` in float32. With their second buffers they take 16 bytes per parameter on every rank, and are zero
    outside its own shard. They move with the shards when DistributedDataParallel rebuilds its buckets. Dense steps and
    single-rank runs apply AdaGrad too.

    Args:
        adagrad: added to the root of the history, above 0 (1e-8 is usual); None for no AdaGrad.
        sums: how the second stage encodes. "refined": with more bits for unbiased methods, ``fft``, ``dct``, and biased
            ones without full error feedback. "same": as the first stage. Or a codec for any method, such as ``{"name":
            "rotated", "bits": 4}``; a biased codec needs error feedback.

    Raises:
        ValueError: adagrad is not a positive number, or sums is none of these.
    """

    moves_residual: ClassVar[bool] = True
    adagrad: float | None = None
    sums: Sums = "refined"

    def __post_init__(self) -> None:
        object.__setattr__(self, "sums", read_sums("TwoShot", self.sums))  # frozen
        if self.adagrad is not None:
            OwnerAdaGrad(self.adagrad)  # raises if invalid

    @property
    def keeper(self) -> OwnerAdaGrad | None:
        """AdaGrad at the owner, if chosen."""
        return None if self.adagrad is None else OwnerAdaGrad(self.adagrad)

    def check(self, codec: Codec) -> None:
        """See ``Exchange.check``."""
        if not codec.reencodable:
            raise ValueError(
                f"exchange='two_shot' encodes decoded sums again, and {codec} would rescale them twice; "
                "use exchange='auto', 'all_reduce' or 'all_gather'"
            )

    def plan(self, sections: Sequence[Section], world: World, states: States | None = None) -> ExchangePlan:
        """See ``Exchange.plan``."""
        size = world.collective.size
        step = OwnerStep(self.adagrad, sections, world, states or {}) if self.adagrad else None
        shards = [[section.shard(rank, size) for section in sections] for rank in range(size)]
        parts = [_Part(shards, self.sums, world, step)]
        count = part_count(sections, parts[0].size, world)
        if count > 1 and not step:
            cut = [parts_of(shard, count) for shard in shards]
            parts = [_Part(part, self.sums, world, None) for part in zip(*cut, strict=True)]
        plan = _Plan(parts, world)
        plan.marked = all(section.marks for section in sections)
        return plan


class _Plan(ExchangePlan):
    description = "two_shot"

    def __init__(self, parts: Sequence[_Part], world: World) -> None:
        self._parts, self._error = parts, DeferredError()
        self._own = [span for part in parts for span in part.own.spans]
        size = world.collective.size
        self.cost = parts[0].lengths + Cost(
            bytes_sent=(size - 1) * sum(part.expected for part in parts),
            rounds=all_to_all_rounds(size) + all_gather_rounds(size),  # parts share the wire
            encodes=1.0,
            decodes=2.0 - 1 / size,  # own shard from all others, then all shards
            sum_encodes=1 / size,
            sum_decodes=1.0,
            calls=sum(part.calls for part in parts),
            parts=len(parts),
        )
        self.sum_ranks = 1 if parts[0].same else size

    @cached_property
    def opening(self) -> Opening | None:
        """See ``ExchangePlan.opening``."""
        return self._parts[0].opening() if len(self._parts) == 1 else None

    def mean(self, vector: Tensor, out: Out, key: int, flag: Tensor, source: Source | None = None) -> None:
        source = Source(vector) if source is None else source
        for span in self._own:  # encoded only after the others' are added
            source.part(span).into(vector[span])
        error, late = self._error, self.tells and len(self._parts) == 1 and self._parts[0].at_once
        keys = [mix(key, number) if number else key for number in range(len(self._parts))]
        with_keys = list(zip(self._parts, keys, strict=True))
        error.own = None
        waits = [part.send(source, vector, part_key, flag, self.opened) for part, part_key in with_keys]
        for number, (part, part_key) in enumerate(with_keys):
            waits[number]()
            waits[number] = part.send_sum(vector, part_key, flag, error, late)
        for part, wait in zip(self._parts, waits, strict=True):
            wait()
            if error.own:  # by now, every rank was sent the mark
                raise error.own
            self.told = part.read_sums(out, flag, late)
        for part in self._parts:
            part.check(flag, error)


class _Part:
    """A part of every shard: its two messages, and what is between them.

    Args:
        shards: the part's sections of each shard.
        sums: how sums are encoded; see ``sections_of_sums``.
        world: the ranks.
        step: AdaGrad at the owner, or None.

    Attributes:
        own: encodes this rank's shard.
        same: sums are encoded as each rank's own values are.
        size: bytes of the messages to all owners.
        expected: expected bytes of both messages.
        lengths: the cost of agreeing on their lengths.
        calls: how often it calls codecs, by a formula that is equal on all ranks: they may differ in their kernels.
    """

    def __init__(self, shards: Sequence[Sequence[Section]], sums: Sums, world: World, step: OwnerStep | None) -> None:
        self._collective, device, meter = world
        size, self._step = self._collective.size, step
        self._shards = [MessagePlan(shard, device, meter, marked=True) for shard in shards]
        finer = [sections_of_sums(shard, size, sums) for shard in shards]
        self.same = all(list(shard) == each for shard, each in zip(shards, finer, strict=True))
        self._sums = self._shards if self.same else [MessagePlan(shard, device, meter, marked=True) for shard in finer]
        self.own = self._shards[self._collective.rank]
        self._correlated = any(plan.correlated for plan in self._shards)
        both = self._shards, self._sums
        self._widest, self._widest_sum = (max(plans, key=lambda plan: plan.size) for plans in both)
        self.size = sum(plan.size for plan in self._shards)
        self.expected = sum(max(plan.expected_size for plan in plans) for plans in both)
        self._varying = Varying.of(self._shards, self._collective, device)
        self._varying_sums = Varying.of(self._sums, self._collective, device, owners=True)
        varying = [each is not None for each in (self._varying, self._varying_sums)]
        self.lengths = lengths_cost(varying[0], size, False) + lengths_cost(varying[1], size, True)
        width, sum_width = self._widest.size, self._widest_sum.size
        self._send = Messages(size, width, device)
        self._receive = Messages(size, max(width, sum_width), device)
        self._sum = Messages(1, sum_width, device)
        self._received = torch.empty(0, dtype=torch.float32)
        self._world, self._on_cpu = world, _on_cpu(device)
        self.calls = 2 * size + 2 if any(varying) or _draws_alike([*self._shards, *self._sums]) else 6

    @cached_property
    def _together(self) -> _Together | None:
        """What handles all shards at once; made in the first step, because many plans are only priced."""
        return _Together.of(self._shards, self._sums, self._step is not None, self._world)

    @property
    def at_once(self) -> bool:
        """Whether all shards are handled at once by kernels."""
        return self._together is not None

    def opening(self) -> Opening | None:
        """Return the heads of the messages to owners; see ``ExchangePlan.opening``."""
        heads = [shard.head for shard in self._shards]
        return opening_of(heads, self._send.all, self._sum.all[0], self._collective.rank) if self._together else None

    def send(self, source: Source, vector: Tensor, key: int, flag: Tensor, opened: bool) -> Wait:
        """Send every owner its shard of the source."""
        rank, size = self._collective.rank, self._collective.size
        if self._together:
            if not opened:
                self._together.open(self._send.all, self._sum.all[0], flag)
            self._together.encode(self._send.all, source, vector, key)
            self._received = self._rows(self._widest.size)
            return self._collective.begin("all_to_all", self._send.all, self._received)
        used, others = dict[int, int](), dict[int, Tensor]()
        places = permutation(key, size) if self._correlated else []
        for peer, shard in enumerate(self._shards):
            shard.share(mix(key, peer))
            if not self.same:
                self._sums[peer].share(mix(key, peer))
            if peer != rank:
                if self._correlated:  # without the owner, who adds its values unencoded
                    shard.correlate(mix(key, peer), _place_without(peer, rank, places), size - 1)
                others[peer] = self._send.all[peer, : shard.size]
                used[peer] = shard.encode(vector, others[peer], mix(key, rank, peer), flag, False, source)
        self._received = self._rows(self._widest.size)
        if self._varying:
            return self._varying.begin(others, used, self._received)
        return self._collective.begin("all_to_all", self._send.all, self._received)

    def send_sum(self, vector: Tensor, key: int, flag: Tensor, error: DeferredError, late: bool) -> Wait:
        """Add what arrived to the own shard of the vector, and send the sum to all."""
        rank, own, received = self._collective.rank, self.own, self._received
        total, keep = self._sums[rank], self._step is not None
        message = self._sum.all[0, : total.size]
        if self._together:
            self._together.add(received, message, vector, flag, error, late)
        else:
            for others in (received[:rank, : own.size], received[rank + 1 :, : own.size]):
                if len(others):
                    with error.deferred():
                        own.decode(others, vector, 1.0, accumulate=True)
                    own.head.read(others, flag, sums=True)
            own.zero_nonfinite(vector, flag)
            error.mark(flag)
        if self._step:
            self._step.before(vector)
        used = total.size
        if self._together:
            self._together.encode_sum(vector, message, key, keep)
        else:
            used = total.encode(vector, message, mix(key, rank, self._collective.size), flag, keep)
        if self._step:
            self._step.after(vector)
        self._received = self._rows(self._widest_sum.size)
        if self._varying_sums:
            return self._varying_sums.begin({rank: message}, {rank: used}, self._received)
        return self._collective.begin("all_gather", self._sum.all[0], self._received)

    def read_sums(self, out: Out, flag: Tensor, late: bool) -> Told | None:
        """Decode every shard's sum, and return the sums if the caller is to read their heads."""
        weight = 1.0 if self._step else 1 / self._collective.size
        if self._together:
            return self._together.read(self._received, out, weight, flag, late)
        for peer, shard in enumerate(self._sums):
            message = self._received[peer : peer + 1, : shard.size]
            shard.decode(message, out, weight, accumulate=False)
            shard.head.read(message, flag)
        return None

    def check(self, flag: Tensor, error: DeferredError) -> None:
        """Raise ValueError if an owner could not read what it received."""
        # reading the flag waits for the device: only where decoding can fail
        if (self._on_cpu or self._widest_sum.variable) and flag.isnan():
            error.check(shard.reports_error(self._received[peer]) for peer, shard in enumerate(self._sums))

    def _rows(self, width: int) -> Tensor:
        """Return room for one message of ``width`` bytes per rank."""
        size = self._collective.size
        return self._receive.all.view(-1)[: size * width].view(size, width)


class _Together:
    """Handles all shards at once, by as many kernels or calls for any number of ranks.

    Args:
        shards: plans of each shard's message.
        sums: plans of each shard's sum.
        changed: the sum is changed before it is encoded.
        world: the ranks.
    """

    def __init__(self, shards: Sequence[MessagePlan], sums: Sequence[MessagePlan], changed: bool, world: World) -> None:
        (rank, size), device, meter = (world.collective.rank, world.collective.size), world.device, world.meter
        self._rank = rank
        width, sum_width = (max(plan.size for plan in plans) for plans in (shards, sums))
        others = [(peer, plan, peer * width) for peer, plan in enumerate(shards) if peer != rank]
        everyones = [(peer, plan, peer * sum_width) for peer, plan in enumerate(sums)]
        self._to_owners = ShardMessages.of(others, device, meter)
        added = ShardMessages.of([(rank, shards[rank], 0)], device, meter)
        own_sum = ShardMessages.of([(size, sums[rank], 0)], device, meter)
        self._passed = None if changed else Passed(added, own_sum)
        passed = self._passed.sections if self._passed else ()
        self._added, self._own_sum = added.without(passed), own_sum.without(passed)
        self._heads = Heads([plan.head for plan in shards], [each.span for each in added.alone], rank, device)
        self._folds = bool(added.alone) or not added.together
        self._sums = ShardMessages.of(everyones, device, meter)
        # the head of a row's last owner, as of every other, has what any rank said of all of the row
        self._bits = bits_of([(plan.head, peer * sum_width) for peer, plan in enumerate(sums)])

    @classmethod
    def of(
        cls, shards: Sequence[MessagePlan], sums: Sequence[MessagePlan], changed: bool, world: World
    ) -> _Together | None:
        """Return None if lengths vary, if ranks draw alike, or if a GPU has no kernels."""
        plans = [*shards, *sums]
        apart = any(plan.variable for plan in plans) or _draws_alike(plans)
        ready = world.device.type == "cpu" or kernels.compiler(world.device) == "triton"
        return cls(shards, sums, changed, world) if ready and not apart else None

    def open(self, messages: Tensor, own_sum: Tensor, flag: Tensor) -> None:
        """Write the heads of all messages."""
        self._heads.write(messages, own_sum, flag)

    def encode(self, messages: Tensor, source: Source, vector: Tensor, key: int) -> None:
        """Encode all shards but the own one."""
        self._to_owners.encode(source, vector, messages, mix(key, self._rank), False)

    def add(
        self, received: Tensor, own_sum: Tensor, vector: Tensor, flag: Tensor, error: DeferredError, late: bool
    ) -> None:
        """Add what arrived to the own shard, and begin its sum's message: what kernels add, they also check."""
        fold = self._heads.told(own_sum, flag, late)
        try:
            self._added.decode(received, vector, 1.0, True, fold)
        except ValueError as problem:  # other ranks wait for this rank's next message
            error.own = error.own or problem
        if self._passed:
            self._passed.run(received, vector, fold)
        if self._folds:
            self._heads.fold(received, vector, fold)
        if error.own:
            error.mark(flag)
            self._heads.report(own_sum, flag)

    def encode_sum(self, vector: Tensor, own_sum: Tensor, key: int, keep: bool) -> None:
        """Encode the sum of the own shard."""
        self._own_sum.encode(Source(vector), vector, own_sum, mix(key, self._rank), keep)

    def read(self, received: Tensor, out: Out, weight: float, flag: Tensor, late: bool) -> Told | None:
        """Decode all sums, and read their heads unless that comes later."""
        if not late:
            self._heads.read(received, flag)
        self._sums.decode(received, out, weight, accumulate=False)
        return Told(received, self._bits, 1) if late else None


def _place_without(peer: int, rank: int, places: Sequence[int]) -> int:
    """Return the place of a rank when another one has left, so that those behind move up."""
    return sorted(place for other, place in enumerate(places) if other != peer).index(places[rank])


def _on_cpu(device: torch.device) -> bool:
    """Whether the device is a CPU, and not one that Triton's interpreter takes for an accelerator."""
    return device.type == "cpu" and kernels.compiler(device) != "triton"


def _draws_alike(plans: Sequence[MessagePlan]) -> bool:
    """Whether ranks draw what they share, in which case shards are handled one by one."""
    return any(plan.draws_alike for plan in plans)
