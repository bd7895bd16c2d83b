"""The law suite for reducers from outside: one of a few lines passes, and each way of breaking a law is named."""

import re
from dataclasses import dataclass

import pytest
import torch

from lightning_compress.reducers import Reducer, ReducerPlan, StateSpec, all_reduce_bytes
from lightning_compress.testing import check_codec


class SumPlan(ReducerPlan):
    """The mean, by an all-reduce; faults by their names."""

    rounds = 1

    def __init__(self, layout, carried, world, settings, states):
        self.world, self.fault, self.states = world, settings.fault, states
        self.hidden, self.steps = torch.zeros(layout.numel), 0
        self.bytes_sent = all_reduce_bytes(4 * (layout.numel + carried), world.collective.size)
        if self.fault == "bytes":
            self.bytes_sent //= 2

    def mean(self, vector, out, carried, key):
        before, own = vector.clone(), carried[0].clone()
        whole = torch.cat([vector, carried])
        if self.fault == "own" and self.world.collective.rank:
            whole[: len(vector)] = 0.0
        self.world.collective.all_reduce(whole)
        out.copy_(whole[: len(vector)]).div_(self.world.collective.size)
        carried.copy_(whole[len(vector) :])
        vector.zero_()
        if self.fault:
            getattr(self, self.fault, lambda *given: None)(vector, out, before, carried, own)

    def flag(self, vector, out, before, carried, own):
        carried[0] = own

    def rank(self, vector, out, before, carried, own):
        out += 1e-6 * self.world.collective.rank

    def mass(self, vector, out, before, carried, own):
        vector += before

    def nothing(self, vector, out, before, carried, own):
        vector += before
        out.zero_()

    def half(self, vector, out, before, carried, own):
        vector += 0.5 * before
        out *= 0.5

    def lost(self, vector, out, before, carried, own):
        out *= 0.5

    def own(self, vector, out, before, carried, own):
        if self.world.collective.rank:
            vector += before

    def noise(self, vector, out, before, carried, own):
        out += 1e-3
        vector -= 1e-3

    def kept(self, vector, out, before, carried, own):
        """A mean of the means so far, in which the plan has the earlier ones."""
        self.hidden.mul_(0.5).add_(out, alpha=0.5)
        out.copy_(self.hidden)

    def declared(self, vector, out, before, carried, own):
        state = self.states["mean"]
        torch.mul(state.base(), 0.5, out=state.pending).add_(out, alpha=0.5)
        out.copy_(state.pending)

    def at_times(self, vector, out, before, carried, own):
        """Writes in every other step."""
        self.steps += 1
        out.copy_(out if self.steps % 2 else 0.5 * (out + self.states["mean"].base()))
        if self.steps % 2:
            self.states["mean"].pending.copy_(out)

    def reads_pending(self, vector, out, before, carried, own):
        out.copy_(self.states["mean"].pending.mul_(0.5).add_(out, alpha=0.5))

    def shared(self, vector, out, before, carried, own):
        """Each rank has a number of its own, which ranks that resume with another one's would not."""
        self.states["mean"].pending.fill_(float(before.abs().amax()))

    def too_soon(self, vector, out, before, carried, own):
        self.declared(vector, out, before, carried, own)
        self.states["mean"].committed.copy_(out)


@dataclass(frozen=True)
class Sum(Reducer):
    fault: str = ""

    def state(self, layout):
        holder = "shared" if self.fault == "shared" else "rank"
        keeps = self.fault in ("declared", "too_soon", "at_times", "shared", "reads_pending")
        return {"mean": StateSpec(layout, holder)} if keeps else {}

    def plan(self, layout, carried, world, states):
        return SumPlan(layout, carried, world, self, states)


def failing(fault, **flags):
    """``Sum`` with a fault, and other flags."""
    return type("Failing", (Sum,), flags)(fault)


def test_a_reducer_of_a_few_lines_passes():
    check_codec(Sum(), lossless=Sum(), ranks=(2, 4))
    check_codec(failing("declared", conserves=False))


@pytest.mark.parametrize(
    ("reducer", "words"),
    [
        (Sum("flag"), "law 7 (non-finite values propagate): "),
        (Sum("rank"), "law 4 ("),
        (Sum("mass"), "law 1 ("),
        (Sum("bytes"), "law 2 (size): "),
        (Sum("nothing"), "law 8 (fidelity): "),
        (Sum("half"), "law 8 (fidelity): Sum(fault='half') by auto on 2 ranks is not declared contractive"),
        (Sum("kept"), "law 1 (conservation): "),
        (failing("nothing", conserves=False), "has a cosine to it of 0.00 in an eighth"),
        (failing("lost", conserves=False), "what is sent is the mean 0.5 times"),
        (failing("own", contractive=True), "law 8 (fidelity): "),
        (failing("noise", keeps_zeros=True), "is declared keeps_zeros, but "),
        (failing("kept", conserves=False), "law 6 (state is committed): "),
        (failing("at_times", conserves=False), "rank 0: the state 'mean' is not written, or not finite, after a step"),
        (failing("reads_pending", conserves=False), "read state.base(), write all of state.pending in every mean"),
        (Sum("shared"), "rank 1: the state 'mean' is declared 'shared', but differs from rank 0's; declare it 'rank'"),
        (failing("too_soon", conserves=False), "continues differently after a step that was rolled back"),
    ],
    ids=lambda each: f"{each.fault}-{type(each).__name__}" if isinstance(each, Sum) else "",
)
def test_a_broken_reducer_is_named(reducer, words):
    with pytest.raises(AssertionError, match=re.escape(words)):
        check_codec(reducer)
