"""Bad input is a clear error before training, on every rank, and nothing hangs."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import CompressedDDPStrategy, GossipStrategy, LocalSGDStrategy, Moniqua, attach
from lightning_compress.codecs import QSGD, Codec, Dense
from lightning_compress.codecs.cast import Narrow
from lightning_compress.corrections import Corrected
from lightning_compress.engine.checks import check_module
from lightning_compress.reducers import Reducer
from lightning_compress.settings.automatic import Automatic
from lightning_compress.settings.parsing import COMPRESSORS
from lightning_compress.settings.run_state import RunState
from tests.helpers.training import Net, fit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"compressor": "nosuch"},
            "unknown compressor 'nosuch'; there are: auto, none, fp16, bf16, topk, onebit, efsign, qsgd, rotated, ",
        ),
        ({"compressor": {"name": "moniqua", "bits": 1}}, "neighbours, not gradients: it needs strategy='gossip'"),
        ({"compressor": Moniqua()}, "it needs strategy='gossip'"),
        ({"bucket_cap": 3}, "CompressedDDPStrategy has no argument 'bucket_cap'; did you mean 'bucket_cap_mb'?"),
        ({"warm_up_steps": 3}, "has no argument 'warm_up_steps'; did you mean 'warmup_steps'?"),
        ({"find_unused": True}, "did you mean 'find_unused_parameters'?"),
        ({"device_ids": [0]}, "has no argument 'device_ids'"),
        ({"zzz": 1}, "has no argument 'zzz'; it has compressor, exchange"),
        ({"compressor": {"name": "topk", "ratio": 3}}, "no setting 'ratio'; it has: density, scope, selection"),
        ({"compressor": {"density": 0.1}}, "a mapping with a 'name'"),
        ({"compressor": 7}, "compressor=7"),
        ({"compressor": QSGD}, "compressor=QSGD is a class; write compressor=QSGD()"),
        ({"compressor": {"name": "topk", "density": 0.0}}, "density"),
        (
            {"compressor": {"name": "topk", "density": 1.5}},
            "TopK(density=1.5): density must be in (0, 1]; for 1.5 % write 0.015",
        ),
        (
            {"compressor": {"name": "topk", "density": 1}},
            "TopK(density=1): density must be in (0, 1]; for 1 % write 0.01; 1.0 is all of it",
        ),
        ({"compressor": {"name": "topk", "density": 500}}, "TopK(density=500): density must be in (0, 1]; 0.01 sends"),
        (
            {"compressor": {"name": "rows", "density": 10}},
            "Rows(density=10): density must be in (0, 1]; for 10 % write 0.1",
        ),
        ({"compressor": "top-k"}, "unknown compressor 'top-k'; did you mean 'topk'? There are: auto, none"),
        ({"compressor": "Rotate"}, "did you mean 'rotated'?"),
        ({"exchange": "all-gather"}, "unknown exchange 'all-gather'; did you mean 'all_gather'? There are"),
        (
            {"compressor": "topk", "density": 0.01},
            "has no argument 'density'; write compressor={'name': 'topk', 'density': 0.01}",
        ),
        (
            {"compressor": {"name": "topk", "density": 0.1}, "values": "fp16"},
            "write compressor={'name': 'topk', 'density': 0.1, 'values': 'fp16'}",
        ),
        ({"compressor": {"name": "onebit", "block": 100}}, "multiple of 8"),
        ({"compressor": {"name": "auto", "gain": 1.0}}, "gain=1.0"),
        ({"error_feedback": True}, "chooses among methods that need none"),
        ({"schedule": {"density": {0: 0.1}}}, "has no settings that could change"),
        ({"exchange": "split_gather"}, "carries none of what compressor='auto' chooses among"),
        ({"rules": [{"kind": "conv", "compressor": "auto"}]}, "a rule names its compressor"),
        ({"exchange": "ring"}, "unknown exchange 'ring'; there are: all_reduce, all_gather, two_shot"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"min_numel": 1.5}, "min_numel=1.5"),
        ({"rules": [{"match": 5, "compressor": "none"}]}, "match=5 must be a list"),
        ({"exclude": ["head"]}, "exclude= is gone: write rules=[{'match': ['head.*'], 'compressor': 'none'}]"),
        ({"residual_decay": 0.5}, "residual_decay= is gone: write error_feedback={'decay': 0.95}"),
        ({"residual_dtype": "bfloat16"}, "residual_dtype= is gone: write error_feedback={'dtype': 'bfloat16'}"),
        ({"residual_follows_lr": True}, "residual_follows_lr= is gone: write error_feedback={'follows_lr': True}"),
        ({"local_clip_by": "bucket"}, "local_clip_by= is gone: write local_clip_norm={'norm': 1.0, 'by': 'bucket'}"),
        ({"local_clip_norm": {"norm": 1.0, "by": "model"}}, "must be one of 'parameter', 'bucket'"),
        ({"local_clip_norm": {"by": "bucket"}}, "must be a norm, or a mapping of norm and by"),
        (
            {"compressor": {"name": "dgc", "clip": 1.0}},
            "no setting 'clip' any more: give local_clip_norm=1.0",
        ),
        ({"compressor": {"name": "dgc", "clip_by": "bucket"}}, "any more: give local_clip_norm={'norm': 1.0, 'by': 'b"),
        (
            {"compressor": {"name": "rotated", "seed": 1}},
            "no setting 'seed' any more: all runs have the same rotation",
        ),
        (
            {"compressor": {"name": "dgc", "warmup": False}},
            "give schedule='dgc' beside the compressor, or schedule='none'",
        ),
        ({"compressor": {"name": "dgc", "sparsifier": "topk"}, "schedule": "dgc"}, "are ignored with a sparsifier"),
        ({"compressor": {"name": "onebit_adam", "freeze_steps": 9}}, "any more: give warmup_steps=1000 beside"),
        ({"compressor": "onebit_adam", "warmup_steps": 0}, "warmup_steps=0: onebit_adam needs 1 or more dense steps"),
        ({"warmup_rounds": 5}, "warmup_rounds= is gone: write warmup_steps=5, which are rounds there"),
        ({"compressor": {"name": "powersgd", "seed": 1}}, "no setting 'seed' any more: the first Q follows from names"),
        ({"compressor": "topk", "exchange": "all_reduce"}, "those of TopK"),
        ({"error_feedback": "yes"}, "error_feedback='yes'"),
        ({"ddp_comm_hook": print}, "ddp_comm_hook"),
        ({"ddp_comm_state": object()}, "ddp_comm_state"),
        ({"ddp_comm_wrapper": print}, "compressor='bf16' or 'fp16'"),
        ({"mixed_precision": object()}, "Trainer(precision=...)"),
        ({"delay_all_reduce_named_params": [("a", None)]}, "use rules=[{'match': [...], 'compressor': 'none'}]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_at_construction(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        CompressedDDPStrategy(**arguments)


def test_every_compressor_has_a_name():
    """But for what the gradients' dtype makes of ``none``; ``qsgd`` has its own coding derived from it."""
    named = {*COMPRESSORS.complete().values()}  # imports those of contrib
    ours = {each for base in (Codec, Reducer, Corrected, Automatic) for each in (base, *_subclasses(base))}
    ours = {each for each in ours if each.__module__.startswith("lightning_compress.")}
    concrete = {each for each in ours if not ours & set(each.__subclasses__())}
    assert concrete == (named | {Narrow}) - {Dense, QSGD}


def _subclasses(cls):
    return {each for child in cls.__subclasses__() for each in (child, *_subclasses(child))}


def _refusal(strategy, trainer=None, make=Net):
    """What a fit on this rank is refused with."""
    try:
        fit(CompressedDDPStrategy(**strategy), 2, make, **(trainer or {}))
    except ValueError as error:
        return str(error)
    return "trained"


def _different_settings():
    return _refusal({"compressor": "topk" if dist.get_rank() == 1 else "onebit"})


class SparseNet(Net):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 20, sparse=True)


class WiderNet(Net):
    def __init__(self):
        super().__init__()
        if dist.get_rank() == 2:
            self.head[0] = nn.Linear(144, 65)
            self.head[2] = nn.Linear(65, 10)


class BackwardStepped(Net):
    def __init__(self):
        super().__init__()
        from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(torch.optim.SGD, self.head.parameters(), {"lr": 0.1})


def _static_graph():
    return _refusal({"compressor": "topk", "static_graph": True}, {"accumulate_grad_batches": 2})


def _pattern():
    return _refusal({"compressor": "topk", "rules": [{"match": "nosuch.*", "compressor": "none"}]})


def _sparse():
    return _refusal({"compressor": "topk"}, make=SparseNet)


def _wider():
    return _refusal({"compressor": "topk"}, make=WiderNet)


def _stepped():
    return _refusal({"compressor": "topk"}, make=BackwardStepped)


class ComplexNet(Net):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(64, 64, dtype=torch.complex64))


def _complex():
    return _refusal({"compressor": "none", "deterministic": True}, make=ComplexNet)


def test_a_model_on_two_devices_is_refused_but_for_none():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, device="meta"))
    with pytest.raises(
        ValueError, match=r"on cpu, meta, but .* move the model to one device, or use CompressedDDPStrategy\('none'\)"
    ):
        check_module(model, RunState.of("onebit"))
    check_module(model, RunState.of("none"))


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (_different_settings, "compression settings of rank 1 differ from those of rank 0"),
        (_wider, "trained parameters (names, shapes, dtypes) of rank 2 differ from those of rank 0"),
        (_static_graph, "static_graph=True with accumulate_grad_batches=2"),
        (_pattern, "takes no parameter by 'nosuch.*'"),
        (_sparse, "words has sparse gradients; build it with sparse=False"),
        (_stepped, "runs inside backward"),
        (
            _complex,
            "torch.view_as_complex in forward, or use CompressedDDPStrategy('none') with",
        ),
    ],
)
def test_refused_before_training_on_every_rank(pools, job, message):
    for answer in pools[3].run(job):
        assert message in answer


class LazyNet(Net):
    def __init__(self):
        super().__init__()
        self.head[0] = nn.LazyLinear(64)


def _lazy():
    said = []
    for strategy in (
        CompressedDDPStrategy("none"),
        CompressedDDPStrategy("topk"),
        LocalSGDStrategy(2),
        GossipStrategy(),
    ):
        with pytest.raises(ValueError, match="no shape") as caught:
            fit(strategy, 2, LazyNet)
        said.append(str(caught.value))
    return said


def test_a_lazy_module_is_named(pools):
    words = "head.0 is a LazyLinear whose parameters have no shape yet: run one batch through the model before training"
    assert pools[2].run(_lazy) == [[words] * 4] * 2


def _join():
    from torch.distributed.algorithms import Join

    ddp = DistributedDataParallel(nn.Linear(64, 64))
    attach(ddp, "onebit")
    try:
        with Join([ddp]):
            ddp(torch.ones(1, 64)).sum().backward()
    except ValueError as error:
        return str(error)
    return "trained"


def test_join_is_refused(pools):
    # Its context manager leaves collectives behind when it is left by an exception, so in a pool of its own.
    from tests.helpers.processes import Pool

    pool = Pool(2)
    try:
        assert all("Join (uneven inputs)" in answer for answer in pool.run(_join))
    finally:
        pool.close()


def _one_rank_cannot():
    try:
        attach(DistributedDataParallel(nn.EmbeddingBag(64, 64, sparse=dist.get_rank() == 1)), "onebit")
    except ValueError as error:
        return str(error)
    return "trained"


def test_a_problem_of_one_rank_stops_all(pools):
    first, second, third = pools[3].run(_one_rank_cannot)
    assert "has sparse gradients" in second
    assert first == third == f"rank 1: {second}"


def _delayed():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    delayed = {
        "delay_all_reduce_named_params": [("0.weight", model[0].weight)],
        "param_to_hook_all_reduce": model[1].weight,
    }
    try:
        attach(DistributedDataParallel(model, **delayed), "onebit")
    except ValueError as error:
        return str(error)
    return "trained"


def test_a_bare_model_with_delayed_parameters_is_refused(pools):
    assert all("delay_all_reduce_named_params" in answer for answer in pools[2].run(_delayed))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))

    def forward(self, x):
        return (self.phase * x).abs().sum()


def _uncompressed():
    """Of stock DistributedDataParallel: what is averaged of an embedding and of complex numbers."""
    rank = dist.get_rank()
    words = DistributedDataParallel(nn.EmbeddingBag(6, 4, sparse=True, mode="sum"))
    phase = DistributedDataParallel(Complex())
    handles = [attach(each, "none") for each in (words, phase)]
    words(torch.tensor([[rank]])).sum().backward()
    phase(torch.full((4, 4), 1.0 + 2 * rank)).backward()
    for each in handles:
        each.close()
    return words.module.weight.grad.to_dense(), phase.module.phase.grad


def test_none_takes_every_model(pools):
    for words, phase in pools[2].run(_uncompressed):
        assert words[:2].equal(torch.full((2, 4), 0.5))
        assert not words[2:].any()
        assert phase.real.equal(torch.full((4, 4), 2.0))


def test_what_is_no_distributed_model_is_refused():
    with pytest.raises(ValueError, match=r"Linear is not a DistributedDataParallel: pass torch\.nn\.parallel"):
        attach(nn.Linear(3, 3))
