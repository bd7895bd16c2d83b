"""LSTM and GRU with a sparse backward pass: against PyTorch's own, and against the dense one of masked gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_compress import backward
from lightning_compress.backward import sparsity as sparsity_module
from lightning_compress.backward.recurrent import scan
from lightning_compress.backward.scan import plan_steps
from lightning_compress.backward.sparsity import Sparsity

pytestmark = pytest.mark.filterwarnings("ignore:meProp. layer would keep")
HIDDEN, INPUT, STEPS, BATCH = 12, 5, 4, 3
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU}
CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}
MODES = {"step": {}, "sequence": {"per_sequence": True}, "example": {"per_example": True}}


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.out = nn.Linear(3, 2)


def sparse(layer: nn.Module, k: float, **options: Any) -> nn.Module:
    model = Model(copy.deepcopy(layer))
    backward.enable(model, {"layer": k}, **options)
    return model.layer


def hidden(layer: nn.Module, batch: int = BATCH) -> Any:
    size = layer.num_layers * (2 if layer.bidirectional else 1), batch, HIDDEN
    states = tuple(torch.randn(size, dtype=torch.double, requires_grad=True) for _ in range(2))
    return states if isinstance(layer, nn.LSTM) else states[0]


def leaves(hx: Any) -> list[Tensor]:
    return list(hx) if isinstance(hx, tuple) else [hx]


def loss_of(output: Any, hx: Any) -> Tensor:
    data = output.data if not isinstance(output, Tensor) else output
    weights = torch.linspace(-1, 1, data.numel(), dtype=data.dtype).view_as(data)
    return (data * weights).sum() + sum((each**2).sum() for each in leaves(hx))


def gradients(layer: nn.Module, x: Any, hx: Any = None) -> list[Tensor]:
    output, after = layer(x, hx)
    wanted = [*layer.parameters(), *([] if hx is None else leaves(hx))]
    return [output.data, *leaves(after), *torch.autograd.grad(loss_of(output, after), wanted)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": True},
        {"bidirectional": True, "num_layers": 2},
        {"num_layers": 2, "dropout": 0.5},
        {"bias": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", ["padded", "packed", "single"])
def test_all_outputs_are_the_ordinary_layer(
    kind: str, options: dict[str, Any], shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = KINDS[kind](INPUT, HIDDEN, dtype=torch.double, **options)
    ours = sparse(layer, 1.0)
    assert list(ours.state_dict()) == list(layer.state_dict())
    monkeypatch.setattr(Sparsity, "active", True)
    x, hx = torch.randn(STEPS, BATCH, INPUT, dtype=torch.double), hidden(layer)
    if options.get("batch_first"):
        x = x.transpose(0, 1)
    if shape == "packed":
        x = pack_padded_sequence(x, [2, 4, 1], batch_first=layer.batch_first, enforce_sorted=False)
    if shape == "single":
        x = x[0] if layer.batch_first else x[:, 0]
        hx = tuple(each[:, 0] for each in hx) if isinstance(hx, tuple) else hx[:, 0]
    for given in (hx, None):
        results = []
        for each in (ours, layer):
            torch.manual_seed(1)
            results.append(gradients(each, x, given))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    if shape == "packed":
        padded, lengths = pad_packed_sequence(ours(x, hx)[0], layer.batch_first)
        assert lengths.tolist() == [2, 4, 1]
        torch.manual_seed(1)
        assert padded.shape == pad_packed_sequence(layer(x, hx)[0], layer.batch_first)[0].shape


class _Mask(torch.autograd.Function):
    """Keeps, of the gradient of a step's gates, what is told, or what it chooses."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, keep: Any) -> Tensor:
        ctx.keep = keep
        return gates.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.keep(gradient), None


def slow(kind: str, x: Tensor, states: list[Tensor], weights: list[Tensor], lengths: list[int], keep: Any) -> Any:
    """The textbook's steps by autograd, the products' gradients masked; the masks of a GRU's products are one."""
    w_ih, w_hh, b_ih, b_hh = weights
    states, outputs = list(states), []
    for span, count in plan_steps(lengths):
        now = [each[:count] for each in states]
        masks: dict[str, Tensor] = {}
        outer = _Mask.apply(x[span] @ w_ih.t() + b_ih, lambda d, m=masks: keep(d, m))
        inner = _Mask.apply(now[0] @ w_hh.t() + b_hh, lambda d, m=masks: keep(d, m))
        if kind == "lstm":
            i, f, g, o = (outer + inner).chunk(4, 1)
            c = f.sigmoid() * now[1] + i.sigmoid() * g.tanh()
            new = [o.sigmoid() * c.tanh(), c]
        else:
            (r, z, n), (r2, z2, n2) = outer.chunk(3, 1), inner.chunk(3, 1)
            z = (z + z2).sigmoid()
            new = [(1 - z) * (n + (r + r2).sigmoid() * n2).tanh() + z * now[0]]
        states = [torch.cat([one, other[count:]]) for one, other in zip(new, states, strict=True)]
        outputs.append(new[0])
    return torch.cat(outputs), states


def problem(kind: str, lengths: list[int]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    gates = 4 if kind == "lstm" else 3
    random = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.double).mul_(0.5).requires_grad_()

    states = [draw(lengths[0], HIDDEN) for _ in range(2 if kind == "lstm" else 1)]
    weights = [draw(gates * HIDDEN, INPUT), draw(gates * HIDDEN, HIDDEN), draw(gates * HIDDEN), draw(gates * HIDDEN)]
    return draw(sum(lengths), INPUT), states, [nn.Parameter(each.detach()) for each in weights]


@pytest.mark.parametrize("lengths", [[3, 3, 3], [3, 2, 1, 1]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sparse_bias", [False, True])
def test_equals_the_dense_backward_of_masked_gates(
    kind: str, mode: str, sparse_bias: bool, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, states, weights = problem(kind, lengths)
    sparsity = Sparsity("layer", HIDDEN, 3, sparse_bias=sparse_bias, **MODES[mode])
    chosen: list[Tensor] = []
    true_top = sparsity_module.top
    monkeypatch.setattr(sparsity_module, "top", lambda *given: chosen.append(true_top(*given)) or chosen[-1])
    output, after = scan(kind, x, tuple(states), weights, plan_steps(lengths), sparsity)
    wanted = [x, *states, *weights[: 4 if sparse_bias else 2]]
    ours = torch.autograd.grad(loss_of(output, after), wanted)
    assert len(chosen) == (1 if mode == "sequence" else len(lengths))
    turn = iter(chosen)

    def keep(gradient: Tensor, masks: dict[str, Tensor]) -> Tensor:
        if "mask" not in masks:
            index = chosen[0] if mode == "sequence" else next(turn)
            parts = gradient.view(-1, HIDDEN) if mode == "example" else gradient.view(len(gradient), -1, HIDDEN)[0]
            mask = torch.zeros_like(parts).scatter_(1, index, 1.0)
            masks["mask"] = mask.view_as(gradient) if mode == "example" else mask.view(1, -1)
        return gradient * masks["mask"]

    slow_output, slow_after = slow(kind, x, states, weights, lengths, keep)
    torch.testing.assert_close(output, slow_output, rtol=1e-12, atol=1e-12)
    theirs = torch.autograd.grad(loss_of(slow_output, tuple(slow_after)), wanted)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    if mode == "sequence":
        gates = 4 if kind == "lstm" else 3
        for weight in ours[1 + len(states) : 3 + len(states)]:
            assert int(weight.any(1).sum()) == gates * 3


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_with_all_outputs(kind: str) -> None:
    x, states, weights = problem(kind, [2, 1])
    sparsity = Sparsity("layer", HIDDEN, HIDDEN)

    def run(*given: Tensor) -> Any:
        output, after = scan(kind, given[0], given[5:], given[1:5], plan_steps([2, 1]), sparsity)
        return output, *after

    assert torch.autograd.gradcheck(run, (x, *weights, *states), fast_mode=True)


@pytest.mark.parametrize("kind", CELLS)
def test_rows_that_a_cell_keeps_have_their_true_gradient(kind: str) -> None:
    cell = CELLS[kind](INPUT, HIDDEN, dtype=torch.double)
    ours = sparse(cell, 4)
    x = torch.randn(BATCH, INPUT, dtype=torch.double)
    before = torch.randn(2, BATCH, HIDDEN, dtype=torch.double)
    results = []
    for each in (ours, cell):
        after = each(x, tuple(before) if kind == "lstm" else before[0])
        loss_of(leaves(after)[0], after).backward()
        results.append([each.weight_ih.grad, each.weight_hh.grad, each.bias_ih.grad, each.bias_hh.grad])
    (weight, _, *biases), (true, _, *others) = results
    rows = weight.any(1)
    assert rows.view(-1, HIDDEN).sum(1).tolist() == [4] * (4 if kind == "lstm" else 3)
    torch.testing.assert_close(weight[rows], true[rows])
    torch.testing.assert_close(biases, others)
    single = ours(x[0])
    torch.testing.assert_close(leaves(single)[0], leaves(ours(x))[0][0])


@pytest.mark.parametrize("options", [{}, {"per_sequence": True}], ids=str)
def test_training_step_by_step_with_accumulation(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(INPUT, HIDDEN, num_layers=2, bidirectional=True)
    ours, other = sparse(layer, 3, **options), sparse(layer, 3, **options)
    for step in range(3):
        x = torch.randn(STEPS, BATCH, INPUT)
        for each in (ours, other):
            each.zero_grad(set_to_none=step != 2)
        for part in (x, -x):
            loss_of(*ours(part)).backward()
        whole = [torch.autograd.grad(loss_of(*other(part)), list(other.parameters())) for part in (x, -x)]
        for parameter, *both in zip(ours.parameters(), *whole, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, both[0] + both[1], rtol=1e-5, atol=1e-6)


def test_bfloat16_and_no_grad() -> None:
    layer = nn.LSTM(INPUT, HIDDEN)
    ours, x = sparse(layer, 3), torch.randn(STEPS, BATCH, INPUT)
    with torch.no_grad():
        assert torch.equal(ours(x)[0], layer(x)[0])
    with torch.autocast("cpu", torch.bfloat16):
        output, after = ours(x)
    assert output.dtype == torch.bfloat16
    loss_of(output.float(), tuple(each.float() for each in after)).backward()
    assert all(each.grad.dtype == torch.float32 and each.grad.isfinite().all() for each in ours.parameters())


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_examples(kind: str, options: dict[str, bool]) -> None:
    layer = KINDS[kind](INPUT, HIDDEN, num_layers=2, bidirectional=True, batch_first=True)
    cell = CELLS[kind](INPUT, HIDDEN)
    ours, our_cell = sparse(layer, 3, **options), sparse(cell, 3, **options)
    x = torch.randn(0, STEPS, INPUT, requires_grad=True)
    (output, after), (wanted, state) = ours(x), layer(x)
    pairs = zip((output, *leaves(after)), (wanted, *leaves(state)), strict=True)
    assert all(one.shape == other.shape for one, other in pairs)
    (output.sum() + leaves(our_cell(x[:, 0]))[0].sum()).backward()
    assert x.grad is not None
    assert not any(each.grad.any() for each in (*ours.parameters(), *our_cell.parameters()))
    for each in (ours, layer):
        with pytest.raises(RuntimeError, match="Expected sequence length to be larger than 0"):
            each(torch.randn(BATCH, 0, INPUT))


def test_disable_gives_the_layer_back() -> None:
    model = Model(nn.LSTM(INPUT, HIDDEN))
    backward.enable(model, {"layer": 3})
    assert type(model.layer) is not nn.LSTM
    backward.disable(model)
    assert type(model.layer) is nn.LSTM
    assert model.layer(torch.randn(STEPS, BATCH, INPUT))[0].shape == (STEPS, BATCH, HIDDEN)


def test_second_derivatives_are_refused() -> None:
    ours, x = sparse(nn.LSTM(INPUT, HIDDEN), 3), torch.randn(STEPS, BATCH, INPUT, requires_grad=True)
    with pytest.raises(RuntimeError, match="no derivative"):
        torch.autograd.grad(ours(x)[0].sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("layer", "options", "words"),
    [
        (nn.LSTM(INPUT, HIDDEN, proj_size=4), {}, "projections"),
        (nn.LSTM(INPUT, HIDDEN), {"memory": 0.5}, "LSTM has none"),
        (nn.GRU(INPUT, HIDDEN), {"per_example": True, "per_sequence": True}, "exclude each other"),
        (nn.GRU(INPUT, HIDDEN), {"group": object()}, "only with per_sequence=True"),
    ],
)
def test_what_is_refused(layer: nn.Module, options: dict[str, Any], words: str) -> None:
    model = Model(layer)
    with pytest.raises(ValueError, match=words):
        backward.enable(model, {"layer": 3}, **options)
    assert type(model.layer) is type(layer)
    assert not hasattr(model.layer, "sparsity")


def test_wrong_hidden_states_are_refused() -> None:
    ours, x = sparse(nn.LSTM(INPUT, HIDDEN), 3), torch.randn(STEPS, BATCH, INPUT)
    with pytest.raises(RuntimeError, match="hidden"):
        ours(x, (torch.zeros(1, BATCH, 4), torch.zeros(1, BATCH, HIDDEN)))
    with pytest.raises(RuntimeError, match="hidden"):
        ours(x, (torch.zeros(BATCH, HIDDEN), torch.zeros(BATCH, HIDDEN)))
    with pytest.raises(ValueError, match="2D or 3D"):
        ours(x[0, 0])


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_sums_over_many_steps_lose_nothing_in_16_bits(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = nn.LSTM(INPUT, HIDDEN), torch.full((800, 1, INPUT), 0.5)
    ours = sparse(layer, 1.0, **options)
    monkeypatch.setattr(Sparsity, "active", True)
    with torch.autocast("cpu", torch.bfloat16):
        ours(x)[0].sum().backward()
    layer(x)[0].sum().backward()
    for one, other in zip(ours.parameters(), layer.parameters(), strict=True):
        assert float((one.grad - other.grad).norm() / other.grad.norm()) < 0.03
