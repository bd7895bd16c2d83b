"""A sparse backward pass is the dense one of a masked gradient, whatever holds and changes the weight's gradient."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_compress.backward import disable, enable
from lightning_compress.backward.sparsity import top
from tests.backward.reference import MaskedLinear, mask_of, mask_of_each, whole


class Twice(nn.Module):
    """One layer, used so many times."""

    def __init__(self, layer, uses=1):
        super().__init__()
        self.layer, self.uses = layer, uses

    def forward(self, x):
        for use in range(self.uses):
            x = self.layer(x if use == 0 else x.clamp(-3, 3))
        return x


def pair(k=3, size=8, uses=1, bias=True, each=False, dtype=torch.float32, **settings):
    """The same layer, sparse and as the reference has it."""
    ours, theirs = nn.Linear(size, size, bias, dtype=dtype), MaskedLinear(size, size, bias, dtype=dtype)
    with torch.no_grad():
        for number, (one, other) in enumerate(zip(ours.parameters(), theirs.parameters(), strict=True)):
            one.copy_(whole(one.shape, seed=number))
            other.copy_(one)
    theirs.k, theirs.mask = k, mask_of_each if each else mask_of
    model = Twice(ours, uses)
    enable(model, k, output=True, per_example=each, **settings)
    return model, Twice(theirs, uses)


def step(model, seed, shape=(6, 8)):
    """Forward and backward on whole numbers; the input's gradient."""
    x = whole(shape, seed=100 + seed).requires_grad_()
    y = model(x)
    y.backward(whole(y.shape, seed=200 + seed))
    return x.grad


def agree(ours, theirs, seeds=range(3), shape=(6, 8), between=lambda model: model.zero_grad()):
    for seed in seeds:
        assert torch.equal(step(ours, seed, shape), step(theirs, seed, shape))
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert one.grad.layout == torch.strided
            assert torch.equal(one.grad, other.grad)
        between(ours)
        between(theirs)


def write(model):
    """What makes all rows dense behind our back."""
    model.layer.weight.grad.add_(1)
    model.layer.weight.grad = None


@pytest.mark.parametrize("shape", [(6, 8), (8,), (2, 3, 8), (0, 8)])
@pytest.mark.parametrize("each", [False, True])
def test_equals_the_dense_backward_of_the_masked_gradient(shape, each):
    agree(*pair(each=each), shape=shape)


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize(
    "between",
    [
        lambda model: None,
        lambda model: model.zero_grad(set_to_none=False),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 2),
        lambda model: (nn.utils.clip_grad_value_(model.parameters(), 2), model.zero_grad()),
        write,
    ],
    ids=["accumulated", "zeroed", "clipped", "clipped and dropped", "written"],
)
def test_whatever_happens_to_the_gradient(uses, between):
    agree(*pair(uses=uses), seeds=range(4), between=between)


def test_steps_mixed():
    """Accumulate, drop, accumulate: rows of all passes are cleared."""
    ours, theirs = pair()
    passes = {ours: iter(range(10)), theirs: iter(range(10))}
    agree(ours, theirs, range(10), between=lambda model: None if next(passes[model]) % 3 else model.zero_grad())


def test_the_buffer_is_used_again_and_never_under_somebody():
    ours, theirs = pair()
    weight = ours.layer.weight
    step(ours, 0)
    place = weight.grad.data_ptr()
    ours.zero_grad()
    step(ours, 1)
    assert weight.grad.data_ptr() == place
    kept = weight.grad  # a user's list of gradients
    before = kept.clone()
    ours.zero_grad()
    step(ours, 2)
    assert torch.equal(kept, before)
    x, other = whole((6, 8)), whole((6, 8), seed=9)
    (asked,) = torch.autograd.grad(ours(x), weight, other)  # while there is a weight.grad
    theirs(x).backward(other)
    assert asked.layout == torch.strided
    assert torch.equal(asked, theirs.layer.weight.grad)


def test_hooks_see_dense_gradients_and_are_called():
    ours, theirs = pair()
    seen = []
    for model in (ours, theirs):
        model.layer.weight.register_hook(lambda gradient: gradient.clamp(-2, 2))
        model.layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    agree(ours, theirs, between=lambda model: None)
    assert len(seen) == 6
    assert all(torch.equal(seen[number], seen[number + 1]) for number in (0, 2, 4))


def test_all_outputs_is_the_ordinary_backward_bit_for_bit():
    torch.manual_seed(0)
    layer = nn.Linear(32, 16)
    model, other = Twice(layer), Twice(copy.deepcopy(layer))
    enable(model, 16, output=True)
    x, gradient = torch.randn(8, 32), torch.randn(8, 16)
    for each in (model, other):
        each(x).backward(gradient)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert type(model(x).grad_fn) is type(other(x).grad_fn)


@pytest.mark.parametrize("k", [1, 5, 15])
def test_rows_that_are_not_zero(k):
    model = Twice(nn.Linear(32, 16))
    enable(model, k, output=True, sparse_bias=True)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(64, 32)).backward(torch.randn(64, 16))
        assert int((model.layer.weight.grad != 0).any(1).sum()) == k
        assert int((model.layer.bias.grad != 0).sum()) == k


def test_ties_take_the_first_and_nan_is_kept():
    assert top(torch.tensor([1.0, 2, 2, 2, 0]), 2).tolist() == [1, 2]
    assert top(torch.tensor([[0.0, 0, 0], [1, 3, 3]]), 2).tolist() == [[0, 1], [1, 2]]
    assert top(torch.tensor([5.0, 1, float("nan"), 2]), 1).tolist() == [2]
    model = Twice(nn.Linear(4, 8, bias=False))
    enable(model, 3, output=True)
    model(torch.ones(2, 4)).sum().backward()
    assert (model.layer.weight.grad != 0).any(1).tolist() == [True] * 3 + [False] * 5


def test_gradcheck_where_only_what_is_kept_matters():
    model, _ = pair(dtype=torch.float64)
    layer, mask = model.layer, torch.tensor([0, 1, 0, 0, 1, 1, 0, 0], dtype=torch.float64)

    def function(x, weight, bias):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,)) * mask

    inputs = [torch.randn(4, 8, dtype=torch.float64), *(each.detach().clone() for each in layer.parameters())]
    assert torch.autograd.gradcheck(function, [each.requires_grad_() for each in inputs])


def test_second_derivatives_are_refused():
    model, _ = pair()
    x = whole((6, 8)).requires_grad_()
    with pytest.raises(RuntimeError, match=r"layer: .*create_graph=True.*disable"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("frozen", ["weight", "bias", "x"])
def test_what_needs_no_gradient_has_none(frozen):
    model, _ = pair()
    x = whole((6, 8)).requires_grad_(frozen != "x")
    if frozen != "x":
        getattr(model.layer, frozen).requires_grad_(False)
    model(x).sum().backward()
    assert (x.grad is None, model.layer.weight.grad is None, model.layer.bias.grad is None) == (
        frozen == "x",
        frozen == "weight",
        frozen == "bias",
    )


def test_autocast_and_checkpointing():
    ours, theirs = pair()

    def run(model):
        x = whole((6, 8)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(model, x, use_reentrant=False)
        assert y.dtype == torch.bfloat16
        y.backward(whole(y.shape, seed=3, dtype=torch.bfloat16))
        return x.grad

    for _ in range(2):
        assert torch.equal(run(ours), run(theirs))
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert one.grad.dtype == torch.float32
            assert torch.equal(one.grad, other.grad)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("settings", [{}, {"each": True}, {"memory": 1.0}], ids=str)
def test_compiled(settings):
    ours, _ = pair(**settings)
    other = copy.deepcopy(ours)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph="memory" not in settings)
    for seed in range(2):
        assert torch.equal(step(compiled, seed), step(other, seed))
        for one, mine in zip(ours.parameters(), other.parameters(), strict=True):
            assert torch.equal(one.grad, mine.grad)


def test_memory_keeps_what_is_dropped():
    model, _ = pair(memory=1.0)
    given, kept = torch.zeros(8), torch.zeros(8)
    for seed in range(5):
        model.zero_grad()
        x = torch.ones(4, 8)
        y = model(x)
        gradient = whole(y.shape, seed=seed)
        y.backward(gradient)
        given += gradient.sum(0)
        kept += model.layer.weight.grad[:, 0]  # inputs are 1: the column sums of what was kept
    memory = model.layer.sparsity.memory
    assert torch.allclose(kept + memory, given)
    assert int((memory == 0).sum()) >= 3
    before = memory.clone()
    model(x).backward(torch.full_like(y, float("inf")))  # a step that a loss scaler skips
    assert torch.equal(model.layer.sparsity.memory, before)
    model.layer.sparsity.resize(1.0)  # all that is left is added, and then it is the ordinary pass
    model(x).backward(gradient)
    assert not model.layer.sparsity.active


def test_memory_fades():
    model, _ = pair(memory=0.5)
    y = model(torch.ones(4, 8))
    y.backward(gradient := whole(y.shape, seed=1))
    expected = 0.5 * gradient.sum(0) * (1 - mask_of(gradient, 3))
    assert torch.equal(model.layer.sparsity.memory, expected)


def test_copies_and_pickles():
    model, theirs = pair()
    step(model, 0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.zero_grad()
        theirs.zero_grad()
        agree(other, theirs)
        assert other.layer.weight.data_ptr() != model.layer.weight.data_ptr()


def test_sparse_inputs_are_refused():
    model, _ = pair()
    with pytest.raises(ValueError, match=r"layer: .*to_dense"):
        model(whole((6, 8)).to_sparse())


def test_enable_and_disable_change_nothing_else():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    before = {name: each.data_ptr() for name, each in model.state_dict().items()}
    identities = [id(each) for each in model.parameters()]
    enable(model, 0.5)
    assert isinstance(model[0], nn.Linear)
    assert {name: each.data_ptr() for name, each in model.state_dict().items()} == before
    assert [id(each) for each in model.parameters()] == identities
    assert not list(model.buffers())
    enable(model, 2)  # again, with other settings
    assert model[0].sparsity.k == 2
    disable(model)
    disable(model)
    assert type(model[0]) is nn.Linear
    assert not hasattr(model[0], "sparsity")


def test_what_else_reaches_the_weight_while_it_accumulates_is_cleared_too():
    model = nn.Sequential(nn.Linear(6, 10))
    enable(model, 2, output=True)
    x = torch.randn(5, 6)
    for _ in range(3):
        model.zero_grad()
        model(x).square().sum().backward()
        (model(x).square().sum() + model[0].weight.square().sum()).backward()
        model.zero_grad()
        model(x).square().sum().backward()
        assert int(model[0].weight.grad.any(1).sum()) == 2
