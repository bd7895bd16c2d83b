"""Sufficient factors against DistributedDataParallel's own gradients, on Gloo ranks."""

import copy
import math
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from lightning_compress.backward import sufficient_factors as sf
from lightning_compress.backward.sufficient_factors import decision
from lightning_compress.backward.sufficient_factors.decision import choose
from lightning_compress.backward.sufficient_factors.factored_layer import Layer
from tests.turns import by_turns

LINK = {"latency_s": 1e-6, "bytes_per_s": 1e7}


class Net(nn.Module):
    """A layer that is used twice, one that may be unused, sequences, and a head that never pays."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(96, 128)
        self.twice = nn.Linear(128, 128)
        self.maybe = nn.Linear(128, 128, bias=False)
        self.head = nn.Linear(128, 2)

    def forward(self, x, maybe=True):
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.head(self.maybe(x) if maybe else x)


def wrapped(factors=True, compressor=None, make=Net, ddp=None, **settings):
    torch.manual_seed(dist.get_rank())  # rank 0's weights are everyone's
    module = make()
    settings = {"layers": ["first", "twice", "maybe", "head"], "link": LINK} | settings
    handle = sf.enable(module, sf.FactorSettings(**settings)) if factors else None
    model = DistributedDataParallel(module, **(ddp or {}))
    compression = attach(model, compressor) if compressor else None
    if handle:
        handle.begin(model, compression)
    return model, handle, compression


def data(step, rows, *shape):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows, *shape, 96, generator=generator)


def gradients(model):
    return {name: None if each.grad is None else each.grad.clone() for name, each in model.module.named_parameters()}


def ragged():
    return 2 + dist.get_rank()  # rows of a rank


def plain(model, step, optimizer):
    optimizer.zero_grad()
    model(data(step, ragged())).square().mean().backward()


def accumulated(model, step, optimizer):
    optimizer.zero_grad()
    with model.no_sync():
        reused = data(step, ragged())
        model(reused).square().mean().backward()
        model(reused.copy_(data(step + 50, ragged()))).square().mean().backward()  # the same memory
    model(data(step + 70, 2)).square().mean().backward()


def twice_synchronised(model, step, optimizer):
    optimizer.zero_grad(set_to_none=False)
    model(data(step, 2)).square().mean().backward()
    model(data(step + 50, 3)).square().mean().backward()


def sequences(model, step, optimizer):
    optimizer.zero_grad()
    model(data(step, 1, 2)).square().mean().backward()


def clipped(model, step, optimizer):
    plain(model, step, optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def unused_somewhere(model, step, optimizer):
    optimizer.zero_grad()
    model(data(step, 2), maybe=step == 0 or (step == 2 and dist.get_rank() == 1)).square().mean().backward()


def two_forwards(model, step, optimizer):
    """The first backward decides; the second one's graph was made before."""
    optimizer.zero_grad()
    losses = [model(data(step + 50 * each, 2)).square().mean() for each in range(2)]
    with model.no_sync():
        pass
    sum(losses).backward()


WAYS = {each.__name__: each for each in (plain, accumulated, twice_synchronised, sequences, clipped, unused_somewhere)}
WAYS["two_forwards"] = two_forwards


def _compare(way, compressor=None):
    """Largest error of ours against stock DDP's, of each parameter; whether ranks have the same bits; the ways."""
    ddp = {"find_unused_parameters": way == "unused_somewhere"}
    reference, _, _ = wrapped(False, ddp=ddp)
    model, handle, _ = wrapped(compressor=compressor, ddp=ddp)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (reference, model)]
    worst, same = {}, True
    for step in range(4):
        for each, optimizer in zip((reference, model), optimizers, strict=True):
            WAYS[way](each, step, optimizer)
        wanted, got = gradients(reference), gradients(model)
        for name in wanted:
            if wanted[name] is None:
                assert got[name] is None, name
                continue
            error = (wanted[name] - got[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-12)
            worst[name] = max(worst.get(name, 0.0), float(error))
            everyone = [torch.empty_like(got[name]) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, got[name])
            same = same and all(each.equal(everyone[0]) for each in everyone)
        for optimizer in optimizers:
            optimizer.step()
    ways = {layer.name: layer.way for layer in handle.layers}
    handle.close()
    return worst, same, ways


@pytest.mark.parametrize(("way", "size"), by_turns(list(WAYS), (2, 3, 4), take=1))
def test_gradients_are_those_of_ddp(pools, way, size):
    for worst, same, ways in pools[size].run(_compare, way):
        assert max(worst.values()) < 2e-5, worst
        assert same
        assert ways["first"] == ways["twice"] == ways["maybe"] == "factors"
        assert ways["head"] == "ordinary"


SIZES = 16  # bytes by which a rank tells another how many rows of a layer it has, and in what dtype


def _counted():
    """Bytes of a step by our counters, beside a compressor of the rest, whose own bytes are counted too."""
    found = {}
    for compressor in ("none", {"name": "topk", "density": 0.1}):
        model, handle, compression = wrapped(compressor=compressor, force=True, layers=["first", "maybe"])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            plain(model, step, optimizer)
            optimizer.step()
        stats = compression.stats()
        own = 4 * sum(p.numel() for n, p in model.module.named_parameters() if n.startswith(("twice", "head")))
        name = compressor if isinstance(compressor, str) else compressor["name"]
        found[name] = handle.sent, stats["bytes_sent"], stats["bytes_dense"], own
        found["residuals"] = [name for group in compression.groups for name in group.names]
        handle.close()
        compression.close()
    return found


def test_bytes_are_those_of_the_formula(pools):
    size = 3
    rows, width = 2 + size - 1, 96 + 128 + 128 + 128
    expected = (rows * width * 4 + 2 * SIZES) * (size - 1)
    for found in pools[size].run(_counted):
        sent, total, dense, rest = found["none"]
        assert sent == expected
        assert total == expected + round(rest * 2 * (size - 1) / size)
        whole = 4 * (96 * 128 + 128 + 128 * 128)
        assert dense == pytest.approx((whole + rest) * 2 * (size - 1) / size, abs=2)
        sent, total, _, _ = found["topk"]
        assert sent == expected
        assert expected < total < found["none"][1]
        assert not [name for name in found["residuals"] if name.startswith(("first", "maybe"))]


def _beside_topk():
    """The ordinary way is the compressor's; ranks keep the same bits; a rank's NaN reaches all, and no residual."""
    with patch.object(decision, "product_seconds", lambda layer, rows: rows):  # measured ones decide by chance
        model, handle, compression = wrapped(
            compressor={"name": "topk", "density": 0.05}, layers=["first", "maybe"], link={**LINK, "bytes_per_s": 1e15}
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(2):
            plain(model, step, optimizer)
            optimizer.step()
    ways = {layer.name: layer.way for layer in handle.layers}
    nonzero = float((model.module.maybe.weight.grad != 0).float().mean())
    handle.close()
    model, handle, compression = wrapped(compressor={"name": "topk", "density": 0.05}, layers=["first", "maybe"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plain(model, 0, optimizer)
    optimizer.step()
    before = [group.residual.committed.clone() for group in compression.groups]
    optimizer.zero_grad()
    bad = data(1, 2)
    if dist.get_rank() == 1:
        bad[0, 0] = math.inf
    model.module.first(bad).sum().mul(0).add(model(data(1, 2)).square().mean()).backward()
    finite = bool(model.module.first.weight.grad.isfinite().all())
    optimizer.step()
    kept = all(group.residual.committed.equal(old) for group, old in zip(compression.groups, before, strict=True))
    return ways, nonzero, finite, kept, compression.stats()["nonfinite_steps"]


def test_the_ordinary_way_is_the_compressors(pools):
    for ways, nonzero, finite, kept, count in pools[2].run(_beside_topk):
        assert set(ways.values()) == {"ordinary"}
        assert 0.04 < nonzero < 0.11
        assert not finite
        assert kept
        assert count == 1


def _empty():
    """Batches without a row: on a rank, then on all."""
    model, handle, compression = wrapped(compressor="bf16", layers=["first"], force=True)
    found = []
    for some in (2, 0 if dist.get_rank() else 2, 0):
        model.zero_grad()
        model(data(0, some)).sum().backward()
        found.append(float(model.module.first.weight.grad.abs().sum()))
    handle.close()
    compression.close()
    return found


def test_batches_without_a_row_beside_compression(pools):
    one, other = pools[2].run(_empty)
    assert one == other
    assert min(one[:2]) > one[2] == 0


def _half():
    """AMP with a GradScaler that skips one step; bfloat16 rows."""
    errors, skipped = {}, []
    for dtype in ("float32", "bfloat16"):
        reference, _, _ = wrapped(False)
        model, handle, _ = wrapped(dtype=dtype, force=True, layers=["first", "twice", "maybe"])
        for step in range(2):
            for each in (reference, model):
                each.zero_grad()
                each(data(step, ragged())).square().mean().backward()
        wanted, got = gradients(reference), gradients(model)
        errors[dtype] = max(float((wanted[n] - got[n]).norm() / wanted[n].norm()) for n in wanted)
        handle.close()
    model, handle, _ = wrapped(force=True, layers=["first", "twice", "maybe"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    sent = []
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(data(step, 2)).square().mean()
        if step == 1 and dist.get_rank() == 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        sent.append(handle.sent)
        before = model.module.first.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(before.equal(model.module.first.weight))
    handle.close()
    return errors, skipped, sent[-1]


def test_half_precision(pools):
    for errors, skipped, sent in pools[2].run(_half):
        assert errors["float32"] < 1e-5
        assert 1e-4 < errors["bfloat16"] < 1e-2
        assert skipped == [False, True, False]
        assert sent == 2 * (96 + 5 * 128 + 2 * 128) * 2 + 3 * SIZES  # of bfloat16; one of them is used twice


def _forced():
    model, _, _ = wrapped(force=True)
    before = [each.detach().clone() for each in model.parameters()]
    with pytest.raises(ValueError, match=r"head has 3 rows on each of 2 ranks.*K P = 6 is not below .* = 3\.9"):
        plain(model, 0, torch.optim.SGD(model.parameters(), 0.1))
    assert all(each.equal(old) for each, old in zip(model.parameters(), before, strict=True))


def test_force_refuses_what_sends_more(pools):
    pools[2].run(_forced)


def _elsewhere():
    """A weight that something else multiplies with; the same layer is left alone by functional calls and copies."""
    model, handle, _ = wrapped(layers=["first"])
    with pytest.raises(ValueError, match="first is used outside"):
        (model(data(0, 2)).square().mean() + model.module.first.weight.square().mean()).backward()
    handle.close()
    model, handle, _ = wrapped(layers=["first", "maybe"])
    copied = copy.deepcopy(model.module)
    copied(data(0, 2)).sum().backward()
    assert copied.first.weight.grad is not None
    inputs = data(0, 2).requires_grad_()
    torch.autograd.grad(model(inputs).sum(), inputs)  # no pass, and no rows
    plain(model, 0, torch.optim.SGD(model.parameters(), 0.1))
    assert max(handle.layers[0].counts) == 3
    keys = list(model.module.state_dict())
    handle.close()
    assert type(model.module.first) is nn.Linear
    assert keys == list(Net().state_dict())
    compiled = torch.compile(Net(), backend="eager")
    model, handle, _ = wrapped(make=lambda: compiled, layers=["first", "maybe"])
    plain(model, 0, torch.optim.SGD(model.parameters(), 0.1))
    assert {layer.name for layer in handle.layers} == {"first", "maybe"}
    grad = model.module.first.weight.grad
    handle.close()
    return grad.numpy()


def test_what_else_uses_the_layers(pools):
    one, other = pools[2].run(_elsewhere)
    assert (one == other).all()


def _unlike():
    with pytest.raises(ValueError, match="layers or settings for sufficient factors of rank 1 differ"):
        wrapped(layers=["first", "maybe"] if dist.get_rank() else ["first"])


def test_ranks_that_choose_differently(pools):
    pools[2].run(_unlike)


class Odd(nn.Module):
    """Layers of which only the first can travel as factors."""

    def __init__(self):
        super().__init__()
        self.good = nn.Linear(300, 300)
        self.conv = nn.Conv2d(1, 1, 3)
        self.tied = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)
        self.other.weight = self.tied.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.attention = nn.MultiheadAttention(8, 2)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.hooked = nn.Linear(8, 8)
        self.hooked.weight.register_hook(lambda gradient: gradient)
        self.quantised = nn.Linear(8, 8)
        self.quantised.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"layers": ["absent*"]}, "'absent\\*' matches no module.*: good"),
        ({"layers": ["conv"]}, "'conv': it is a Conv2d, and only nn.Linear"),
        ({"layers": ["*"]}, "'tied': weight is tied"),
        ({"layers": ["normed"]}, "'normed': it is a ParametrizedLinear"),
        ({"layers": ["attention.*"]}, "is a NonDynamicallyQuantizableLinear"),
        ({"layers": ["frozen"]}, "'frozen': its weight is frozen"),
        ({"layers": ["hooked"]}, "'hooked': its parameters have hooks"),
        ({"layers": ["quantised"]}, "'quantised': weight is quantised or of a special kind .*torch.int8"),
        ({"exclude": ["absent"]}, "exclude=.*'absent' matches no module"),
        ({"layers": ["good"], "exclude": ["good"]}, "leaves nothing of layers"),
        ({"exclude": ["good"]}, "no linear layer has 65,536 weights"),
        ({"layers": []}, "names no layer"),
        ({"layers": [3]}, "must be a pattern"),
        ({"dtype": "int8"}, "dtype='int8' must be one of"),
        ({"force": 1}, "force=1 must be true or false"),
        ({"link": {"latency_s": 1}}, "link="),
    ],
)
def test_refusals(settings, said):
    with pytest.raises(ValueError, match=said):
        choose(Odd(), sf.FactorSettings(**settings), 4)


def test_by_default_large_layers_that_may_pay():
    assert [layer.name for layer in choose(Odd(), sf.FactorSettings(), 4)] == ["good"]
    with pytest.raises(ValueError, match="no linear layer"):
        choose(Odd(), sf.FactorSettings(), 300)  # not even with a row each


def _all_of_a_model():
    with pytest.raises(ValueError, match="every trained parameter"):
        sf.enable(nn.Linear(300, 300, bias=False))
    handle = sf.enable(nn.Linear(300, 300))
    assert handle.layers[0].names == ["weight"]  # DistributedDataParallel keeps the bias


def test_ddp_keeps_a_parameter(pools):
    pools[2].run(_all_of_a_model)


def _alone():
    module = Net()
    assert sf.enable(module, sf.FactorSettings(layers=["first"])) is None
    assert type(module.first) is nn.Linear


def test_one_rank_changes_nothing(pools):
    pools[1].run(_alone)


def test_on_cuda_the_stream_of_the_hook_waits_for_the_rows_of_backward(monkeypatch):
    """A parameter's hook runs on the stream on which its node was made, perhaps by DistributedDataParallel."""
    backward, hook, rows = Mock(), Mock(), Mock(is_cuda=True)
    layer = Layer("", nn.Linear(3, 4))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: backward)
    layer.put(rows, rows)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: hook)
    assert layer.take(-1) == [(rows, rows)]  # no pass is under way
    hook.wait_event.assert_called_once_with(backward.record_event.return_value)
    layer.put(torch.zeros(2, 3), torch.zeros(2, 4))
    assert len(layer.take(-1)) == 1
    hook.wait_event.assert_called_once()
    hook.record_event.assert_not_called()
