"""``Fabric(strategy=...)``: what a Trainer sends and ends with, no_backward_sync, clipping, checkpoints."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_compress
from lightning_compress import attach
from lightning_compress.fabric import CompressedDDPStrategy, _other_choice
from tests.front_ends.fabric_loop import launched, quietly, set_up, train
from tests.helpers.training import Net, fit, parameters

DGC = {"name": "dgc", "density": 0.05}


@pytest.mark.parametrize("name", ["compressed_ddp", "compressed_ddp_onebit", "compressed_ddp_sketch"])
@pytest.mark.parametrize("variant", ["", "_find_unused_parameters_true", "_spawn", "_fork", "_notebook"])
def test_registered(name, variant):
    strategy = STRATEGY_REGISTRY.get(name + variant)
    assert type(strategy) is CompressedDDPStrategy
    assert strategy._ddp_kwargs.get("find_unused_parameters", False) == variant.startswith("_find")
    assert strategy._start_method == {"_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}.get(variant, "popen")


def test_each_class_tree_refuses_the_other_ones_strategy():
    with pytest.raises(ValueError, match=r"lightning\.fabric\.strategies\.Strategy"):
        Fabric(accelerator="cpu", devices=2, strategy=lightning_compress.CompressedDDPStrategy("onebit"))
    with pytest.raises(ValueError, match=r"lightning_compress\.fabric\.CompressedDDPStrategy\(compressor"):
        Trainer(accelerator="cpu", devices=2, strategy=CompressedDDPStrategy("onebit"))


def test_wrong_arguments():
    with pytest.raises(ValueError, match="write compressor="):
        CompressedDDPStrategy("topk", density=0.1)
    with pytest.raises(ValueError, match="communication hook"):
        CompressedDDPStrategy("topk", mixed_precision=object())
    with pytest.raises(ValueError, match="did you mean 'warmup_steps'"):
        CompressedDDPStrategy("topk", warmup_step=3)


def _both(settings, steps=6, accumulate=1, clip=None, optimizer="sgd", scale=None):
    """What the same training sends and ends with, by a Trainer and by Fabric."""
    by_trainer = {"accumulate_grad_batches": accumulate}
    if clip:
        ((kind, value),) = clip.items()
        by_trainer |= {"gradient_clip_val": value, "gradient_clip_algorithm": {"max_norm": "norm"}.get(kind, "value")}
    scaler = partial(torch.amp.GradScaler, "cpu", init_scale=scale)
    if scale:
        by_trainer |= {"plugins": [MixedPrecision("16-mixed", "cpu", scaler())]}
    strategy = lightning_compress.CompressedDDPStrategy(**settings) if isinstance(settings, dict) else settings
    trainer, model = fit(strategy, steps, partial(Net, optimizer), **by_trainer)
    stats = trainer.strategy.comm_stats()
    strategy = CompressedDDPStrategy(**settings) if isinstance(settings, dict) else settings
    plugins = [FabricMixedPrecision("16-mixed", "cpu", scaler())] if scale else None
    (fabric, _) = quietly(launched, strategy, plugins=plugins)
    trained = set_up(fabric, optimizer)
    train(fabric, *trained, steps, accumulate=accumulate, clip=clip)
    fabric.strategy.compression.close()
    again = fabric.strategy.comm_stats()
    names = ("total_bytes_sent", "total_bytes_dense", "steps", "nonfinite_steps", "residual_norm", "summary")
    sent = [{name: each[name] for name in names} for each in (stats, again)]
    return [parameters(model).numpy(), parameters(trained[0].module).numpy()], sent


@pytest.mark.parametrize(
    "settings",
    [
        {"compressor": "onebit"},
        {"compressor": {"name": "rotated", "bits": 4}, "bucket_cap_mb": 0.02},
        {"compressor": "topk", "rules": [{"kind": "conv", "compressor": "bf16"}], "warmup_steps": 2},
        {"compressor": DGC, "schedule": {"density": {0: 0.5, 3: 0.05}}},
        {"compressor": "none"},
        "compressed_ddp_powersgd",
    ],
    ids=str,
)
def test_trains_as_a_trainer_does(pools, settings):
    for (first, second), (stats, again) in pools[2].run(_both, settings):
        assert np.array_equal(first, second)
        assert stats == again
        assert stats["steps"] == 6


@pytest.mark.parametrize("settings", [{"compressor": "onebit"}, {"compressor": "none"}], ids=str)
@pytest.mark.parametrize("clip", [None, {"max_norm": 0.1}, {"clip_val": 0.01}])
def test_accumulation_and_clipping(pools, settings, clip):
    for (first, second), (stats, again) in pools[2].run(_both, settings, 4, 3, clip):
        assert np.array_equal(first, second)
        assert stats == again


def test_a_loss_scale(pools):
    """The first steps overflow, so that the scaler skips them: no residual may have moved."""
    for (first, second), (stats, again) in pools[2].run(_both, {"compressor": "onebit"}, 8, 1, None, "sgd", 2.0**40):
        assert np.isfinite(first).all()
        assert np.array_equal(first, second)
        assert stats == again
        assert stats["nonfinite_steps"] > 0


def _refused(settings, clip):
    fabric = launched(CompressedDDPStrategy(**settings))
    model, optimizer = set_up(fabric)
    try:
        train(fabric, model, optimizer, 1, clip=clip)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("given", ["max_norm", "clip_val"])
def test_steps_are_not_clipped(pools, given):
    for said in pools[2].run(_refused, {"compressor": DGC}, {given: 0.5}):
        assert f"{given}=0.5 cannot be combined with DGC(" in said
        assert "local_clip_norm=0.5" in said


def _apart():
    """The same training, with model and optimizer set up one after the other."""
    weights = []
    for apart in (False, True):
        fabric = launched(CompressedDDPStrategy("onebit"))
        trained = set_up(fabric, "adamw", apart=apart)
        train(fabric, *trained, 4)
        weights.append(parameters(trained[0]).numpy())
        assert fabric.strategy.compression.optimizers.complete
    return weights


def test_set_up_apart(pools):
    for together, apart in pools[2].run(_apart):
        assert np.array_equal(together, apart)


def _warned():
    """What Fabric warns of where Adam steps a rotated embedding, and the optimizer comes after the model."""
    fabric = launched(CompressedDDPStrategy("rotated"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fabric.setup_module(nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 8)))
        before = len([each for each in caught if "embedding" in str(each.message)])
        fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    return before, [str(each.message) for each in caught if "embedding" in str(each.message)]


def test_a_rotated_embedding_beside_adam_warns(pools):
    (before, (said,)), others = pools[2].run(_warned)
    assert before == 0
    assert "mixes rows of the embedding '0.weight'" in said
    assert others == (0, [])


def _resumed(folder, settings, steps=6, apart=3):
    """A run, and the same run interrupted after half of its steps: weights, residuals and what was said."""
    results, said = [], []
    for begin, end in ((0, steps), (0, apart), (apart, steps)):
        fabric = launched(CompressedDDPStrategy(**{"bucket_cap_mb": 0.02, **settings}))
        model, optimizer = set_up(fabric, seed=begin)  # from another start, which loading replaces
        state = {"model": model, "optimizer": optimizer, "step": begin}
        if begin:
            (rest, warned) = quietly(fabric.load, f"{folder}/half.ckpt", state)
            assert not rest
            assert state["step"] == apart
            said += warned
        if end < steps:
            train(fabric, model, optimizer, end)
            fabric.save(f"{folder}/half.ckpt", state | {"step": end})
        else:
            torch.manual_seed(0)
            train(fabric, model, optimizer, end, begin)
            states = fabric.strategy.compression.groups.states()
            kept = [state.committed.float() for state in states]
            results.append([parameters(model).numpy(), torch.cat(kept).numpy() if kept else np.zeros(0)])
    return results, said


@pytest.mark.parametrize(
    "settings",
    [
        {"compressor": "onebit"},
        {"compressor": DGC, "warmup_steps": 1},
        {"compressor": {"name": "powersgd", "rank": 2}},
        {"compressor": "rotated"},
        {"compressor": "auto"},
        {"compressor": "topk", "state": "sidecar", "schedule": {"density": {0: 0.5, 2: 0.1, 5: 0.02}}},
    ],
    ids=str,
)
def test_resumes_bit_for_bit(pools, tmp_path, settings):
    residuals = []
    for ((whole, kept), (again, restored)), said in pools[2].run(_resumed, str(tmp_path), settings):
        assert np.array_equal(whole, again)
        assert np.array_equal(kept, restored)
        assert not said
        residuals.append(kept)
    if settings["compressor"] not in ("rotated", "auto"):
        assert not np.array_equal(*residuals), "each rank has its own"
        assert len(list((tmp_path / "half.ckpt.lc").iterdir())) == 2
    content = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert content["optimizer"]["param_groups"][0]["momentum"] == 0.9  # dgc gives it back


def test_another_choice_of_auto_is_said():
    now = {"compressor": {"name": "rotated", "bits": 4}}
    assert not _other_choice(now, now)
    assert not _other_choice(None, now)
    assert "Give compressor={'name': 'bf16'} to continue" in _other_choice({"compressor": {"name": "bf16"}}, now)


def _lost(folder, settings):
    (_, said) = _resumed(folder, settings)
    return said


def test_what_cannot_be_restored_is_said(pools, tmp_path):
    assert all(not said for said in pools[2].run(_lost, str(tmp_path), {"compressor": "onebit", "state": "mean"}))
    said = pools[2].run(_lost, str(tmp_path), {"compressor": "onebit", "state": "none"})
    assert "begins again from zero" in said[0][0]


class Scores(nn.Module):
    """Large enough to be compressed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))

    def forward(self, x):
        return self.layers(x)


def _adversaries(folder, begin, end, saves=None):
    """Two models with an optimizer each, in turns; both in one checkpoint."""
    fabric = launched(CompressedDDPStrategy("topk", bucket_cap_mb=0.01))
    torch.manual_seed(begin)
    one, two = Scores(), Scores()
    one, by_one = fabric.setup(one, torch.optim.SGD(one.parameters(), 0.05))
    two, by_two = fabric.setup(two, torch.optim.SGD(two.parameters(), 0.1, momentum=0.9))
    state = {"one": one, "by_one": by_one, "two": two, "by_two": by_two}
    said = []
    if begin:
        rest, said = quietly(fabric.load, f"{folder}/both.ckpt", state)
        assert not rest
    for step in range(begin, end):
        data = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + fabric.global_rank))
        for model, optimizer in ((one, by_one), (two, by_two)):
            optimizer.zero_grad()
            fabric.backward((model(data) - data.flip(1)).square().mean())
            optimizer.step()
    if saves:
        fabric.save(f"{folder}/both.ckpt", state)
    with pytest.raises(RuntimeError, match="2 models were set up"):
        fabric.strategy.comm_stats()
    assert [each.step for each in fabric.strategy.compressions] == [end, end]
    return torch.cat([parameters(one), parameters(two)]).numpy(), said


def test_two_models_in_one_checkpoint(pools, tmp_path):
    whole = [weights for weights, _ in pools[2].run(_adversaries, str(tmp_path), 0, 6)]
    pools[2].run(_adversaries, str(tmp_path), 0, 3, True)
    assert {path.name for path in tmp_path.glob("*.lc")} == {"both.ckpt.by_one.lc", "both.ckpt.by_two.lc"}
    for before, (again, said) in zip(whole, pools[2].run(_adversaries, str(tmp_path), 3, 6), strict=True):
        assert np.array_equal(before, again)
        assert not said


def _shared(folder, names):
    """Two models whose parameters have other names stepped by one optimizer, and a third by its own."""
    fabric = launched(CompressedDDPStrategy("topk"))
    models = [fabric.setup_module(each) for each in (Scores(), nn.Sequential(nn.Linear(64, 64)), Scores())]
    both = torch.optim.SGD([each for model in models[:2] for each in model.parameters()], 0.1)
    both, own = fabric.setup_optimizers(both, torch.optim.SGD(models[2].parameters(), 0.1))
    objects = {"both": both, "own": own} | dict(zip(("first", "second", "third"), models, strict=True))
    said = []
    if names:
        _, said = quietly(fabric.load, f"{folder}/some.ckpt", {name: objects[name] for name in names})
    else:
        data = torch.randn(8, 64, generator=torch.Generator().manual_seed(fabric.global_rank))
        for model in models:
            fabric.backward((model(data) - data.flip(1)).square().mean())
        both.step()
        own.step()
        fabric.save(f"{folder}/some.ckpt", objects)
    found = [each.groups.states() for each in fabric.strategy.compressions]
    return [float(sum(state.committed.square().sum() for state in states)) for states in found], said


@pytest.mark.parametrize("names", [["first", "second", "third", "both", "own"], ["third", "own"], ["first", "both"]])
def test_each_model_gets_its_own_residual_back(pools, tmp_path, names):
    saved = [kept for kept, _ in pools[2].run(_shared, str(tmp_path), [])]
    for kept, (restored, said) in zip(saved, pools[2].run(_shared, str(tmp_path), names), strict=True):
        assert all(kept)
        assert restored == pytest.approx([kept[0] * ("both" in names), kept[1] * ("both" in names),
                                          kept[2] * ("own" in names)])  # fmt: skip
        assert not said


def _residuals(fabric):
    return torch.cat([each.committed for each in fabric.strategy.compression.groups.states()]).numpy()


def _on(folder, begin, end):
    """The residual of this rank when it has restored a checkpoint, and when it saves one."""
    fabric = launched(CompressedDDPStrategy("topk"))
    model, optimizer = set_up(fabric)
    state, said, restored = {"model": model, "optimizer": optimizer}, [], None
    if begin:
        _, said = quietly(fabric.load, f"{folder}/some.ckpt", state)
        restored = _residuals(fabric).copy()
    train(fabric, model, optimizer, end, begin)
    fabric.save(f"{folder}/some.ckpt", state)
    return restored, _residuals(fabric), said


def test_another_number_of_ranks_goes_on_from_the_mean(pools, tmp_path):
    saved = [kept for _, kept, _ in pools[3].run(_on, str(tmp_path), 0, 3)]
    for restored, after, said in pools[2].run(_on, str(tmp_path), 3, 5):
        assert np.allclose(restored, np.mean(saved, axis=0), atol=1e-7)
        assert not np.array_equal(restored, after)
        assert not said


def _misuse(folder):
    """What saving or loading in the wrong way says."""
    fabric = launched(CompressedDDPStrategy("onebit"))
    model, optimizer = set_up(fabric)
    train(fabric, model, optimizer, 2)
    state, compression, said = {"model": model, "optimizer": optimizer}, fabric.strategy.compression, []
    for function in (fabric.save, fabric.load):
        try:
            function(f"{folder}/a.ckpt", state | {"compression": compression})
        except ValueError as error:
            said.append(str(error))
    said += quietly(fabric.save, f"{folder}/b.ckpt", {"optimizer": optimizer.state_dict()})[1]
    said += quietly(fabric.save, f"{folder}/weights.ckpt", {"model": model})[1]
    fabric.save(f"{folder}/c.ckpt", state)
    content, warned = quietly(fabric.load, f"{folder}/c.ckpt")
    assert {"model", "optimizer", "lightning_compress"} <= content.keys()
    try:
        attach(model, "onebit")
    except ValueError as error:
        warned.append(str(error))
    return [*said, *warned]


def test_wrong_ways_are_said(pools, tmp_path):
    for rank, said in enumerate(pools[2].run(_misuse, str(tmp_path))):
        wanted = ["fabric.save() got a compression as 'compression'", "fabric.load() got a compression"]
        wanted += ["an optimizer's state_dict", "residuals, which were not restored"] if rank == 0 else []
        wanted += ["use Fabric(strategy=lightning_compress.fabric.CompressedDDPStrategy(...)) in place of attach"]
        assert len(said) == len(wanted), said
        assert all(part in each for part, each in zip(wanted, said, strict=True))
    assert not (tmp_path / "a.ckpt").exists()
    assert not (tmp_path / "weights.ckpt.lc").exists()


class Wrapped:
    """An optimizer around another one, whose step takes no closure."""

    def __init__(self, inner):
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def step(self):
        with torch.no_grad():
            for each in self.param_groups[0]["params"]:
                each -= 0.1 * each.grad

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


def _wrapped(scaled):
    scaler = FabricMixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0))
    fabric = launched(CompressedDDPStrategy("topk", on_nonfinite="skip"), plugins=[scaler] if scaled else None)
    torch.manual_seed(0)
    model = Scores()
    model, optimizer = fabric.setup(model, Wrapped(torch.optim.SGD(model.parameters(), 0.1)))
    for _ in range(3):
        optimizer.zero_grad()
        fabric.backward(model(torch.ones(4, 64)).square().mean())
        optimizer.step()
    return fabric.strategy.comm_stats()["steps"]


@pytest.mark.parametrize("scaled", [False, True])
def test_an_optimizer_whose_step_takes_no_closure(pools, scaled):
    assert pools[2].run(_wrapped, scaled) == [3, 3]


def _handle(folder, own):
    """A bare model and its handle, of which all ranks load rank 0's state, or their own."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Scores())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compression = attach(model, "onebit", optimizer=optimizer)
    rank = dist.get_rank()
    model(torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
    optimizer.step()
    torch.save(compression.state_dict(), f"{folder}/rank{rank}.pt")
    dist.barrier()
    before = torch.cat([each.committed.clone() for each in compression.groups.states()])
    try:
        compression.load_state_dict(torch.load(f"{folder}/rank{rank if own else 0}.pt", weights_only=True))
    except ValueError as error:
        return str(error)
    assert before.equal(torch.cat([each.committed for each in compression.groups.states()]))
    return ""


def test_a_rank_does_not_take_another_ones_residual(pools, tmp_path):
    assert pools[2].run(_handle, str(tmp_path), True) == ["", ""]
    for said in pools[2].run(_handle, str(tmp_path), False):
        assert "rank 1 got the state of rank 0, but each rank has its own residual" in said
