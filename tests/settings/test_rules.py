"""Rules: which parameter takes which compressor, and how several of them travel together."""

import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import CompressedDDPStrategy, attach
from lightning_compress.codecs import BF16, QSGD, Dense, OneBit, TopK
from lightning_compress.collectives import CountingCollective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges.message import Section
from lightning_compress.planning.choose import Auto
from lightning_compress.settings.rules import kinds_of
from lightning_compress.settings.run_state import RunState
from tests.helpers.training import Net

CPU = torch.device("cpu")


class Adapter(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.low = nn.Parameter(torch.zeros(8, 2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.conv = nn.Conv2d(3, 16, 5)
        self.norm = nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 2)
        self.memory = nn.LSTM(32, 32)
        self.adapter = Adapter()
        self.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(32, 64))
        self.bare = nn.Parameter(torch.zeros(64, 32))
        self.tied = nn.Linear(32, 100, bias=False)
        self.tied.weight = self.words.weight


def test_kinds():
    kinds = kinds_of(Model())
    wanted = {
        "words.weight": "embedding",
        "conv.bias": "conv",
        "norm.weight": "norm",
        "attention.in_proj_weight": "linear",
        "attention.out_proj.weight": "linear",
        "memory.weight_ih_l0": "other",
        "adapter.low": "linear",
        "scaled.parametrizations.weight.original1": "linear",
        "bare": "other",
    }
    assert {name: kinds[name] for name in wanted} == wanted
    assert "tied.weight" not in kinds


RULES = [
    {"kind": "embedding", "compressor": "bf16"},
    {"match": ["*.out_proj.*", "bare"], "compressor": {"name": "qsgd", "bits": 8}},
    {"match": "adapter.*", "kind": "linear", "compressor": "none"},
    {"match": "*", "kind": "linear", "compressor": OneBit()},
]


def chosen(compressor, rules, min_numel=1024, exclude=()):
    model = Model()
    excluded = [{"match": list(exclude), "compressor": "none"}] * bool(exclude)
    settings = RunState.of(compressor, rules=[*excluded, *rules], min_numel=min_numel).bound(kinds_of(model))
    settings.rules.check([name for name, _ in model.named_parameters()])
    return {name: settings.rules.method_of(name, tuple(p.shape)) for name, p in model.named_parameters()}


def test_the_first_rule_that_takes_a_parameter_has_it():
    methods = chosen("topk", RULES)
    assert methods["words.weight"] == BF16()
    assert methods["attention.out_proj.weight"] == methods["bare"] == QSGD(bits=8)
    assert methods["attention.in_proj_weight"] == OneBit()
    assert methods["scaled.parametrizations.weight.original1"] == OneBit()
    assert methods["conv.weight"] == methods["memory.weight_hh_l0"] == TopK()
    assert methods["norm.weight"] == methods["adapter.weight"] == methods["adapter.low"] == Dense()


def test_cut_off_and_exclusion_come_first():
    methods = chosen("topk", RULES, min_numel=1100, exclude=["words.*"])
    assert methods["words.weight"] == Dense()
    assert methods["bare"] == QSGD(bits=8)
    assert methods["attention.out_proj.weight"] == Dense()  # 1,024 elements
    assert methods["attention.out_proj.bias"] == Dense()
    assert chosen("bf16", RULES)["attention.out_proj.bias"] == BF16()  # as it would be without the rule


def test_a_section_for_every_method_and_none_twice():
    rules = [{"match": "a*", "compressor": "onebit"}, {"match": "b*", "compressor": "topk"}]
    parameters = [("b", (64, 64)), ("a", (32, 64)), ("c", (64, 32)), ("small", (5,)), ("a2", (64, 64))]
    order, sections = RunState.of("topk", rules=rules).rules.sections(parameters)
    assert order == (1, 4, 0, 2, 3)
    assert [(each.method, each.layout.names, each.number) for each in sections] == [
        (OneBit(), ("a", "a2"), 1),
        (TopK(), ("b", "c"), 2),
        (Dense(), ("small",), 0),
    ]
    assert [each.start for each in sections] == [0, 6144, 2 * 6144]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"kind": "conv", "compressor": "bf16"}, "must be a list"),
        ("conv", "must be a list"),
        ([{"kind": "conv"}], "must be a mapping with compressor, and match or kind or both"),
        ([{"compressor": "bf16"}], "must say which parameters"),
        ([{"kind": "convolution", "compressor": "bf16"}], "must be one of embedding, conv, linear, norm, other"),
        ([{"kind": "conv", "compressor": "nosuch"}], "unknown compressor 'nosuch'"),
        ([{"kind": "conv", "compressor": {"name": "topk", "density": 2}}], "density must be in"),
        ([{"kind": "conv", "name": "a", "compressor": "bf16"}], "must be a mapping with compressor"),
        ([{"match": 5, "compressor": "bf16"}], "match=5 must be a list of name patterns"),
    ],
)
def test_refused_at_construction(rules, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        CompressedDDPStrategy("topk", rules=rules)


def test_the_exchange_must_carry_all_methods():
    with pytest.raises(ValueError, match="those of OneBit"):
        RunState.of("bf16", "all_reduce", rules=[{"kind": "conv", "compressor": "onebit"}])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"match": "nosuch.*", "compressor": "bf16"}, "{'match': ['nosuch.*']} takes no parameter"),
        ({"match": "bare", "kind": "conv", "compressor": "bf16"}, "takes no parameter"),
        ({"match": "words.weight", "compressor": "bf16"}, "not taken by a rule before it"),
    ],
)
def test_a_rule_that_takes_nothing_is_refused(rule, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        chosen("topk", [*RULES, rule])


def together(size, codecs, rows):
    """One mean by ``auto`` over stretches of ``rows`` x 64 elements: bytes by formula and counted, what is owed."""
    layouts = [Layout.of([(f"p{number}", (count, 64))]) for number, count in enumerate(rows)]
    starts = np.cumsum([0, *(layout.numel for layout in layouts)]).tolist()
    sections = [Section(*each) for each in zip(codecs, layouts, starts, strict=False)]

    def rank(collective):
        meter = Meter(CPU)
        plan = Auto().plan(sections, World(CountingCollective(collective, meter), CPU, meter))
        before = torch.randn(starts[-1], generator=torch.Generator().manual_seed(collective.rank))
        after, mean, flag = before.clone(), torch.empty(starts[-1]), torch.zeros(())
        plan.mean(after, mean, 3, flag)
        return plan.description, plan.cost.bytes_sent, meter.bytes_sent, before, after, mean, flag

    ranks = run_threads(size, rank)
    before, after = (sum(each[place].double() for each in ranks) for place in (3, 4))
    owed = (before - after - size * ranks[0][5].double()).abs()
    assert all(each[5].equal(ranks[0][5]) for each in ranks)
    assert all(each[2] == pytest.approx(each[1], rel=0.02) for each in ranks)  # sums of sparse messages vary
    assert not any(each[6].isnan() for each in ranks)
    return ranks[0][0], ranks[0][1], owed, starts


@pytest.mark.parametrize(
    ("size", "codecs", "rows", "description"),
    [
        (4, [Dense(), TopK(0.01)], [1, 9000], "all_gather"),  # a few numbers ride along
        (4, [Dense(), TopK(0.01)], [4000, 9000], "split_gather"),  # which costs as much for the dense ones
        (5, [BF16(), TopK(0.01)], [4000, 4000], "all_reduce, all_gather"),
        (5, [Dense(), BF16(), OneBit()], [1, 4000, 9000], "two_shot"),  # as many bytes for a cast
        (5, [TopK(0.01), QSGD(), BF16()], [3000, 9000, 4000], "all_gather, two_shot, all_reduce"),
        (2, [OneBit(), TopK(0.01)], [3000, 3000], "all_gather"),
        (3, [BF16(), Dense()], [4000, 3000], "all_reduce"),
    ],
)
def test_methods_travel_together_unless_that_costs(size, codecs, rows, description):
    found, sent, owed, starts = together(size, codecs, rows)
    assert found == description
    for codec, first, last in zip(codecs, starts, starts[1:], strict=False):
        assert owed[first:last].max() < (0.1 if isinstance(codec, BF16) else 1e-4)
    dense = 2 * (size - 1) * 4 * starts[-1] / size
    assert sent < dense


def _trained(error_feedback):
    """Residual norms by parameter after a few steps under three methods."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 64), nn.Conv1d(6, 32, 9, padding=4))
    model = DistributedDataParallel(net)
    rules = [{"kind": "embedding", "compressor": "qsgd"}, {"match": "2.*", "compressor": "onebit"}]
    compression = attach(model, "topk", rules=rules, error_feedback=error_feedback)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        words = torch.randint(100, (8, 6), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(words).square().mean().backward()
        optimizer.step()
    norms = {
        segment.name: float(group.residual.committed[segment.offset : segment.end].norm())
        for group in compression.groups
        for segment in (group.layout.segments if group.residual else ())
    }
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return norms, flat.numpy(), compression.stats()["ratio"]


@pytest.mark.parametrize(
    ("error_feedback", "kept"), [(None, [False, True, True]), (True, [True] * 3), (False, [False] * 3)]
)
def test_residuals_are_for_the_methods_that_need_them(pools, error_feedback, kept):
    (norms, first, ratio), (_, second, _) = pools[2].run(_trained, error_feedback)
    assert [norms.get(name, 0) > 0 for name in ("0.weight", "1.weight", "2.weight")] == kept
    assert np.array_equal(first, second)
    assert ratio > 8


def _nothing_to_take():
    try:
        attach(DistributedDataParallel(Net()), "topk", rules=[{"kind": "embedding", "compressor": "bf16"}])
    except ValueError as error:
        return str(error)
    return "trained"


def test_refused_before_training_on_every_rank(pools):
    for answer in pools[2].run(_nothing_to_take):
        assert "{'kind': 'embedding'} takes no parameter" in answer
        assert "of the kinds conv, linear, norm" in answer


@pytest.mark.filterwarnings("ignore")
def test_lightning_cli_yaml(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer:\n  accelerator: cpu\n  logger: false\n  strategy:\n"
        "    class_path: lightning_compress.CompressedDDPStrategy\n    init_args:\n"
        "      compressor: bf16\n      rules:\n"
        "      - {kind: conv, compressor: {name: topk, density: 0.1}}\n      - {match: head.*, compressor: none}\n"
    )
    cli = LightningCLI(Net, args=[f"--config={config}"], run=False)
    rules = cli.trainer.strategy._settings.rules.rules
    assert [(rule.kind, rule.match, rule.method) for rule in rules] == [
        ("conv", (), TopK(density=0.1)),
        (None, ("head.*",), Dense()),
    ]
