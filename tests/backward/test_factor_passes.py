"""Sufficient factors where a step is not one plain backward: backwards within backwards, and gradients thrown away."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.backward.test_sufficient_factors import data, gradients, wrapped
from tests.turns import by_turns

LAYERS = ["first", "twice", "third", "head"]


class Recomputed(nn.Module):
    """The same function, whatever of it is under reentrant checkpoints."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(96, 128)
        self.norm = nn.LayerNorm(128)
        self.twice = nn.Linear(128, 128)
        self.third = nn.Linear(128, 128)
        self.head = nn.Linear(128, 2)  # never pays

    def forward(self, x, way="none"):
        twice, third = (lambda h: torch.tanh(self.twice(h))), (lambda h: torch.tanh(self.third(h)))
        x = self.norm(torch.tanh(self.first(x)))
        match way:
            case "inside":
                return self.head(kept(lambda h: twice(third(twice(h))), x))
            case "not_reentrant":
                return self.head(checkpoint(lambda h: twice(third(twice(h))), x, use_reentrant=False))
            case "several":
                return self.head(kept(twice, third(kept(twice, x))))
            case "outside_later":
                return self.head(twice(third(kept(twice, x))))
            case "outside_before":
                return self.head(kept(twice, third(twice(x))))
            case "around":  # backward is through with neither use of the layer when the inner one begins
                return self.head(twice(kept(third, twice(x))))
            case "last":
                return kept(lambda h: self.head(twice(h)), third(twice(x)))
            case "within":
                return kept(lambda h: self.head(kept(twice, h)), third(twice(x)))
            case "head":  # which is ordinary after the first backward: no rows say what it is nested in
                return kept(self.head, twice(third(twice(x))))
            case "headless":
                return twice(third(twice(x)))
        return self.head(twice(third(twice(x))))


def kept(function, x):
    return checkpoint(function, x, use_reentrant=True)


WAYS = ["inside", "several", "outside_later", "outside_before", "around", "last", "within", "head", "not_reentrant"]


def _worst(wanted, got):
    """Largest error of any gradient, relative to the parameter's largest."""
    errors = {name: (wanted[name] - got[name]).abs().max() / wanted[name].abs().max() for name in wanted}
    return max(float(each) for each in errors.values())


def _compare(way, synchronised=True, compressor=None):
    """Largest error against stock DDP's without checkpoints; what was decided; bytes."""
    reference, _, _ = wrapped(False, make=Recomputed)
    model, handle, _ = wrapped(compressor=compressor, make=Recomputed, layers=LAYERS)
    worst = 0.0
    for step in range(3):
        for each, how in ((reference, "none"), (model, way)):
            each.zero_grad()
            if not synchronised:
                with each.no_sync():
                    each(data(step + 50, 3), how).square().mean().backward()
            each(data(step, 2 + dist.get_rank()), how).square().mean().backward()
        worst = max(worst, _worst(gradients(reference), gradients(model)))
        for each in (reference, model):
            torch.optim.SGD(each.parameters(), 0.1).step()
    return worst, {layer.name: layer.way for layer in handle.layers}, int(handle._meter.bytes_sent)


@pytest.mark.parametrize(("way", "size"), by_turns(WAYS, (2, 3), take=1))
def test_backwards_within_backwards(pools, way, size):
    given = [(True,), (False,)]
    given += [(True, {"name": "topk", "density": 1.0})] if way in ("inside", "head") else []  # lossless
    for each in given:
        for worst, ways, _ in pools[size].run(_compare, way, *each):
            assert worst < 2e-5
            assert ways == dict.fromkeys(LAYERS[:3], "factors") | {"head": "ordinary"}


def test_backwards_within_backwards_send_no_more(pools):
    plain = {sent for *_, sent in pools[2].run(_compare, "none")}
    for way in ("inside", "several", "within"):
        assert {sent for *_, sent in pools[2].run(_compare, way)} == plain


class Broken(torch.autograd.Function):
    """Something that fails in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError


def _raised():
    """A backward within a backward raises when it has left and sent rows; the step is thrown away, others follow."""
    reference, _, _ = wrapped(False, make=Recomputed)
    model, _, _ = wrapped(make=Recomputed, layers=LAYERS)
    inner = model.module
    for step in range(3):
        if step:  # beside DistributedDataParallel, which does not survive it
            out = kept(lambda h: inner.third(Broken.apply(inner.twice(h))), torch.ones(2, 128, requires_grad=True))
            with pytest.raises(ArithmeticError):
                inner.head(inner.twice(out)).sum().backward()
        for each in (reference, model):
            each.zero_grad()
            each(data(step, 2), "inside" if each is model else "none").square().mean().backward()
    return _worst(gradients(reference), gradients(model))


def test_after_one_that_raised(pools):
    assert max(pools[2].run(_raised)) < 2e-5


def _changed():
    """A run that goes on from a checkpoint sends early at once, and the first pass shows what comes twice."""
    errors = []
    reference, _, _ = wrapped(False, make=Recomputed)
    for ways in (("several", "several"), ("none", "none", "several")):
        model, handle, _ = wrapped(make=Recomputed, layers=LAYERS)
        names = ["third", "twice", "first"]
        handle.load_state_dict({"ranks": 2, "ways": dict.fromkeys(names, "factors"), "ordered": True})
        for step, way in enumerate(ways):
            for each in (reference, model):
                each.zero_grad()
            reference(data(step, 2)).square().mean().backward()
            try:
                model(data(step, 2), way).square().mean().backward()
                errors.append(_worst(gradients(reference), gradients(model)))
            except ValueError as error:
                errors.append(str(error))
    return errors


def test_a_layer_that_begins_to_come_twice_is_named(pools):
    for *errors, last in pools[2].run(_changed):
        assert max(errors) < 2e-5
        assert "twice is used by several reentrant checkpoints" in last


def _twice_differentiated():
    model, _, _ = wrapped(make=Recomputed, layers=LAYERS)
    inputs = data(0, 2).requires_grad_()
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return str(caught.value)


def test_second_derivatives_are_refused(pools):
    for said in pools[2].run(_twice_differentiated):
        assert said.startswith("head: the backward pass of a layer that travels as factors has no derivative")
        assert "(exclude=['head'])" in said


def of(model, *names):
    """Parameters of these layers."""
    return [each for name in names for each in getattr(model.module, name).parameters()]


def zeroed_data(model):
    for each in model.parameters():
        if each.grad is not None:
            each.grad.data.zero_()


THROWN = {  # between a backward that does not synchronise and one that does
    "none": lambda model: model.zero_grad(),
    "zeros": lambda model: torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False),
    "data": zeroed_data,
    "one of two optimizers": lambda model: torch.optim.SGD(of(model, "twice", "norm")).zero_grad(),
    "the other of two": lambda model: torch.optim.SGD(of(model, "first", "third"), 0.1).zero_grad(set_to_none=False),
    "nothing": lambda model: [each.grad.nan_to_num_() for each in model.parameters() if each.grad is not None],
}


def _thrown():
    """Errors against stock DDP, where gradients are thrown away after some of the backwards."""
    reference, _, _ = wrapped(False, make=Recomputed)
    model, handle, _ = wrapped(make=Recomputed, layers=LAYERS[:3])
    worst = {}
    for how, throw in THROWN.items():
        for begins in (False, True):  # with a backward that synchronises, whose mean is there already
            for step in range(2):
                for each in (reference, model):
                    each.zero_grad()
                    if begins:
                        each(data(step + 30, 2)).square().mean().backward()
                    with each.no_sync():
                        each(data(step + 50, 3)).square().mean().backward()
                        each(data(step + 70, 2)).square().mean().backward()
                        throw(each)
                        each(data(step + 90, 2)).square().mean().backward()
                    each(data(step, 2)).square().mean().backward()
                worst[how, begins, step] = _worst(gradients(reference), gradients(model))
    handle.close()
    return worst


@pytest.mark.parametrize("size", [2, 3])
def test_rows_are_dropped_with_the_gradients_that_they_are_a_part_of(pools, size):
    for worst in pools[size].run(_thrown):
        assert max(worst.values()) < 2e-5, worst


def _unused_after():
    """A layer of the ordinary way whose gradient was thrown away, and that the next backward does not use."""
    model, handle, _ = wrapped(make=Recomputed, layers=LAYERS, ddp={"find_unused_parameters": True})
    model(data(0, 2)).square().mean().backward()
    model.zero_grad()
    with model.no_sync():
        model(data(1, 2)).square().mean().backward()
    model.zero_grad()
    model(data(2, 2), "headless").square().mean().backward()
    assert {layer.name: layer.way for layer in handle.layers}["head"] == "ordinary"
    return [each.grad is None for each in model.module.head.parameters()]


def test_what_was_thrown_away_and_is_unused_has_no_gradient(pools):
    assert pools[2].run(_unused_after) == [[True, True]] * 2


def _held():
    """Gradients that somebody still has a hold of are not overwritten."""
    model, _, _ = wrapped(make=Recomputed, layers=LAYERS[:3])
    same = []
    for step in range(3):
        model.zero_grad()
        model(data(step, 2)).square().mean().backward()
        held = model.module.twice.weight.grad
        before = held.clone()
        model.zero_grad()
        model(data(step + 50, 2)).square().mean().backward()
        same.append(held.equal(before))
    return same


def test_gradients_that_are_held_stay(pools):
    for same in pools[2].run(_held):
        assert all(same)
