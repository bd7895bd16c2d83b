"""``delay=1`` in loops as users write them: those that are right train as delayed SGD does, the others raise."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from tests.turns import by_turns

ALL = {"name": "topk", "density": 1.0}
BATCHES = 6


class Sums(nn.Module):
    """Each gradient is the batch's slope; ``body`` may have another one."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(3, 3))
        self.ignored = nn.ParameterList([torch.zeros(2)])

    def forward(self, slope, body=None, ignored=0.0):
        body = slope if body is None else body
        return body * self.body.sum() + slope * self.head.sum() + ignored * self.ignored[0].sum()


class Run:
    """A model on this rank, and what compresses its gradients."""

    def __init__(self, view):
        module = Sums()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["ignored.0"])
        self.model = DistributedDataParallel(module, gradient_as_bucket_view=view)
        self.module, self.averaged, self.compression = module, [module.body, module.head], None

    def attach(self, *optimizer, **settings):
        given = {"min_numel": 1, "delay": 1, "optimizer": optimizer, **settings}
        self.compression = attach(self.model, ALL, **given)
        return optimizer[0] if optimizer else None

    def sgd(self, parameters=None, **settings):
        return self.attach(torch.optim.SGD(parameters or self.averaged, 1.0), **settings)

    @staticmethod
    def slope(batch):
        """This rank's, whose mean over the ranks is ``batch + 1``."""
        return batch + 1 + dist.get_rank() - (dist.get_world_size() - 1) / 2

    def backward(self, batch, factor=1.0, **slopes):
        (self.model(self.slope(batch), **slopes) * factor).backward()


def applied(loop, view):
    """How far each batch moved the head: the mean that was applied; and the error that ended the loop."""
    run, moved, said = Run(view), [], ""
    before = 0.0
    try:
        for _ in loop(run):
            now = float(run.module.head[0, 0])
            moved.append(round(before - now, 3))
            before = now
    except RuntimeError as error:
        said = str(error)
    run.compression.close()
    return moved, said


def both(loop):
    """The same with gradients of their own, and as views of buckets."""
    return [applied(loop, view) for view in (False, True)]


# --- right


def to_none(run):
    optimizer = run.sgd()
    for batch in range(BATCHES):
        optimizer.zero_grad()
        run.backward(batch)
        optimizer.step()
        yield


def in_place(run):
    optimizer = run.sgd()
    for batch in range(BATCHES):
        run.backward(batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        yield


def by_data(run):
    optimizer = run.sgd()
    for batch in range(BATCHES):
        for each in run.model.parameters():
            if each.grad is not None:
                each.grad.data.zero_()  # which no version counter counts
        run.backward(batch)
        optimizer.step()
        yield


def other_zeros(run):
    optimizer = run.sgd()
    for batch in range(BATCHES):
        for each in run.model.parameters():
            each.grad = torch.zeros_like(each)
        run.backward(batch)
        optimizer.step()
        yield


def in_between(run):
    """Zeroed after the forward pass."""
    optimizer = run.sgd()
    for batch in range(BATCHES):
        loss = run.model(run.slope(batch))
        run.model.zero_grad()
        loss.backward()
        optimizer.step()
        yield


def closures(run):
    optimizer = run.sgd()
    for batch in range(BATCHES):

        def closure(batch=batch):
            optimizer.zero_grad()
            run.backward(batch)

        optimizer.step(closure)
        yield


def accumulated(run, zero=torch.optim.Optimizer.zero_grad):
    optimizer = run.sgd()
    for batch in range(BATCHES):
        zero(optimizer)
        with run.model.no_sync():
            run.backward(batch, 0.5)
            run.backward(batch, 0.25)
        run.backward(batch, 0.25)
        optimizer.step()
        yield


def accumulated_in_place(run):
    yield from accumulated(run, lambda optimizer: optimizer.zero_grad(set_to_none=False))


def aside(run):
    """Gradients of the model alone, which are never averaged, before they are zeroed."""
    optimizer = run.sgd()
    for batch in range(BATCHES):
        run.backward(batch)
        optimizer.step()
        run.module(1.0).backward()
        optimizer.zero_grad()
        yield


def head_only(run):
    optimizer = run.sgd([run.module.head])
    for batch in range(BATCHES):
        optimizer.zero_grad()
        run.backward(batch)
        optimizer.step()
        yield


def head_found(run):
    run.attach()
    optimizer = torch.optim.SGD([run.module.head], 1.0)
    for batch in range(BATCHES):
        optimizer.zero_grad(set_to_none=False)
        run.backward(batch)
        optimizer.step()
        yield


def head_without_gradient(run):
    """The only mean that is not 0 is one that is never zeroed."""
    optimizer = run.sgd([run.module.head])
    for batch in range(BATCHES):
        optimizer.zero_grad()
        (run.model(0.0, body=run.slope(batch))).backward()
        optimizer.step()
        yield


def head_later(run):
    """An optimizer of all parameters, then one of the head."""
    optimizer = run.sgd()
    for batch in range(BATCHES):
        if batch == 3:
            optimizer = torch.optim.SGD([run.module.head], 1.0)
        optimizer.zero_grad()
        run.backward(batch)
        optimizer.step()
        yield


def by_hand(run):
    """Steps of which nobody is notified."""
    run.attach()
    for batch in range(BATCHES):
        run.backward(batch)
        with torch.no_grad():
            run.module.head -= run.module.head.grad
        run.module.head.grad = None
        yield


def two(run):
    run.attach()
    optimizers = [torch.optim.SGD([each], 1.0) for each in (run.module.body, run.module.head)]
    for batch in range(BATCHES):
        run.model.zero_grad()
        run.backward(batch)
        for each in optimizers:
            each.step()
        yield


def zeros(run):
    """The mean of batch 2 is 0."""
    optimizer = run.sgd()
    for batch in range(BATCHES):
        optimizer.zero_grad(set_to_none=False)
        run.backward(-1 if batch == 2 else batch)
        optimizer.step()
        yield


def clipped(run):
    optimizer = run.sgd()
    for batch in range(BATCHES):
        optimizer.zero_grad()
        run.backward(batch)
        nn.utils.clip_grad_norm_(run.averaged, 1e6)
        optimizer.step()
        yield


def stateful(run):
    """A state is loaded between two steps, and settings change."""
    optimizer = run.sgd()
    for batch in range(BATCHES):
        optimizer.zero_grad()
        run.backward(batch)
        optimizer.step()
        if batch == 2:
            run.compression.load_state_dict(run.compression.state_dict())
        if batch == 3:
            run.compression.retune(density=0.9999)
        yield


def not_in_the_first(run):
    """The first step has nothing to apply, and the user knows."""
    optimizer = run.sgd()
    for first in (True, False):
        if not first:
            run.compression.reset()
        for batch in range(BATCHES):
            optimizer.zero_grad()
            run.backward(batch)
            if batch:
                optimizer.step()
            yield


def discarded(run):
    """What batch 3 applies is too large."""
    optimizer = run.sgd()
    for batch in range(BATCHES):
        optimizer.zero_grad()
        run.backward(batch)
        if run.module.head.grad[0, 0] == 3:
            optimizer.zero_grad()
        optimizer.step()
        yield


def spoilt(batch):
    """Factor of the loss on this rank: one gradient of rank 1 in batch 2 is infinite."""
    return float("inf") if batch == 2 and dist.get_rank() == 1 else 1.0


def skipped(run):
    optimizer = run.sgd(on_nonfinite="skip")
    for batch in range(BATCHES):
        optimizer.zero_grad()
        run.backward(batch, spoilt(batch))
        optimizer.step()
        yield


def raised(run):
    optimizer = run.sgd(on_nonfinite="raise")
    for batch in range(BATCHES):
        optimizer.zero_grad()
        run.backward(batch, spoilt(batch))
        try:
            optimizer.step()
        except FloatingPointError:
            assert batch == 3
        yield


def skipped_by_the_user(run):
    optimizer = run.sgd()
    for batch in range(BATCHES):
        optimizer.zero_grad()
        run.backward(batch, spoilt(batch))
        if nn.utils.clip_grad_norm_(run.averaged, 1e6).isfinite():
            optimizer.step()
        yield


def scaled(run, spoils=lambda batch: {"factor": spoilt(batch)}, parameters=None):
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    optimizer = run.sgd(parameters, scale=lambda: scaler._scale)
    for batch in range(BATCHES):
        optimizer.zero_grad()
        given = spoils(batch)
        run.backward(batch, scaler.scale(torch.ones(())) * given.pop("factor", 1.0), **given)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        yield


def scaled_and_ignored(run):
    """The scaler skips a step because of a gradient that is not averaged."""
    everything = list(run.model.parameters())
    yield from scaled(run, lambda batch: {"ignored": float("inf") if batch == 3 else 1.0}, everything)


PLAIN = [float(mean) for mean in range(BATCHES)]
SKIPPED = [0.0, 1.0, 2.0, 0.0, 4.0, 5.0]
RIGHT = {
    loop.__name__: (loop, expected)
    for expected, loops in (
        (PLAIN, (to_none, in_place, by_data, other_zeros, in_between, closures, accumulated, accumulated_in_place)),
        (PLAIN, (aside, head_only, head_found, head_later, by_hand, two, clipped, stateful)),
        ([0.0] * BATCHES, (head_without_gradient,)),
        (PLAIN * 2, (not_in_the_first,)),
        (SKIPPED, (zeros, discarded, skipped, raised, skipped_by_the_user, scaled, scaled_and_ignored)),
    )
    for loop in loops
}
"""Loops, and what each batch applies: the mean of the batch before."""


def right(name):
    return both(RIGHT[name][0])


@pytest.mark.parametrize(("name", "size"), by_turns(RIGHT, (2, 3), 1))
def test_a_loop_that_is_right_trains(pools, name, size):
    for found in pools[size].run(right, name):
        assert found == [(RIGHT[name][1], "")] * 2


# --- wrong


def every_second(run, first=0):
    """The gradients of every second batch are not to be applied."""
    optimizer = run.sgd()
    for batch in range(BATCHES):

        def closure(batch=batch):
            optimizer.zero_grad()
            run.backward(batch)

        if batch % 2 == first:
            optimizer.step(closure)
        else:
            closure()
        yield


def every_other(run):
    yield from every_second(run, 1)


def through(run):
    """A second loss, whose gradients are not wanted here, reaches these parameters, too."""
    run.attach()
    optimizer = torch.optim.SGD(run.model.parameters(), 1.0)
    for batch in range(BATCHES):
        optimizer.zero_grad()
        run.backward(batch)
        optimizer.step()
        optimizer.zero_grad()
        run.backward(-batch)
        yield


def scaled_every_second(run):
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    optimizer = run.sgd(scale=lambda: scaler._scale)
    for batch in range(BATCHES):
        optimizer.zero_grad()
        run.backward(batch, scaler.scale(torch.ones(())))
        if batch % 2 == 0:
            scaler.step(optimizer)
            scaler.update()
        yield


def never_zeroed(run, **slopes):
    optimizer = run.sgd()
    for batch in range(BATCHES):
        run.backward(batch, **slopes)
        nn.utils.clip_grad_norm_(run.averaged, 1e6)
        optimizer.step()
        yield


def never_zeroed_where_means_are_0(run):
    yield from never_zeroed(run, body=0.0)


def every_pass_synchronises(run):
    optimizer = run.sgd()
    for batch in range(BATCHES):
        optimizer.zero_grad()
        run.backward(batch)
        run.backward(batch)
        optimizer.step()
        yield


STEP = "before the optimizer stepped, and delay=1 would lose the average that the first one applied"
ZERO = "a second backward began before zero_grad()"
WRONG = {
    loop.__name__: (loop, *expected)
    for loop, *expected in (
        (every_second, [0.0, 0.0], STEP),
        (every_other, [0.0, 1.0, 0.0], STEP),
        (through, [0.0], STEP),
        (scaled_every_second, [0.0, 0.0], STEP),
        (never_zeroed, [0.0, 1.0], ZERO),
        (never_zeroed_where_means_are_0, [0.0, 1.0], ZERO),
        (every_pass_synchronises, [1.0], ZERO),
    )
}
"""Loops, what each batch applies until one raises, and what is said then."""


def wrong(name):
    return both(WRONG[name][0])


@pytest.mark.parametrize(("name", "size"), by_turns(WRONG, (2, 3), 2))
def test_a_loop_that_would_lose_averages_or_use_them_twice_raises_on_every_rank(pools, name, size):
    _, expected, message = WRONG[name]
    for found in pools[size].run(wrong, name):
        for moved, said in found:
            assert moved == expected
            assert message in said
            assert "no_sync()" in said
            assert "delay=0" in said
