"""What a compression's settings do, log and report in a fit of a sharded model; most are as in a fit of DDP's."""

import warnings
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_compress import CommunicationMonitor
from tests.callbacks.test_monitor import COUNTED, SAMPLED, Memory
from tests.helpers.fsdp import Lit, fingerprint, fit, fresh, sharded
from tests.strategies.test_report import Marks, listening

TOPK = {"name": "topk", "density": 0.1}
DENSE = 4 * (18_272 // 2)
"""Bytes that a shard of the model has in float32; the 2 replicas' all-reduce sends as many."""
TABLE = 78 * 32 // 2
"""Elements of a shard of the letters, or of the head."""


class Falls(Lit):
    """Its learning rate falls in every step."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.4, momentum=0.9)
        falling = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": falling, "interval": "step"}]


class Drifts(Callback):
    """One shard of one replica gets a wrong number."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step == 3 and dist.get_rank() == 3:
            with torch.no_grad():
                module.net.head.weight.to_local()[0, 0] += 1


RULES = [{"match": "net.head.*", "compressor": "bf16"}, {"kind": "embedding", "compressor": "qsgd"}]
FITS = {
    "steps": ({"schedule": {"density": {0: 0.3, 4: 0.1}}, "warmup_steps": 2}, {}),
    "epochs": (
        {"schedule": {"density": {"unit": "epoch", "values": {0: 0.3, 1: 0.1}}}},
        {"limit_train_batches": 3},
    ),
    "rate": (
        {"schedule": {"density": {"kind": "lr", "factor": 2}}, "error_feedback": {"follows_lr": True}},
        {"make": Falls},
    ),
    "rules": ({"compressor": "none", "rules": RULES}, {}),
    "drift": ({"check_drift_every": 2}, {"callbacks": [Drifts()]}),
    "resync": ({"check_drift_every": 2, "on_drift": "resync"}, {"callbacks": [Drifts()]}),
}


def _fits():
    """Of each fit: rows and hyperparameters of the monitor, lines, warnings, an error, the model's hash."""
    fresh()
    found = {}
    for name, (settings, options) in FITS.items():
        memory, error, mark = Memory(), "", ""
        strategy = sharded(**{"compressor": TOPK, **settings})
        with listening() as lines, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            callbacks = [*options.get("callbacks", ()), CommunicationMonitor(), Marks(lines)]
            more = {"logger": memory, "log_every_n_steps": 1, "quiet": False}
            try:
                _, model = fit(strategy, 6, **{**options, "callbacks": callbacks, **more})
                mark = fingerprint(model.net)
            except RuntimeError as raised:
                error = str(raised)
        rows = [
            {key.removeprefix("comm/"): value for key, value in row.items() if key.startswith("comm/")}
            for _, row in sorted(memory.rows.items())
        ]
        said = [each for each in lines.said if each.startswith("lightning_compress: ") or "progress bar" in each]
        warned = [str(each.message) for each in caught if "topk" in str(each.message)]
        found[name] = rows, memory.hyperparameters, said, warned, error, mark
    return found


@pytest.fixture(scope="module")
def fits(pools):
    """By rank."""
    return pools[4].run(_fits, timeout=120)


def test_the_monitor_has_each_step(fits):
    rows = fits[0]["steps"][0]
    assert len(rows) == 6
    for number, row in enumerate(rows, start=1):
        assert row.keys() == COUNTED | SAMPLED
        assert (row["steps"], row["bytes_dense"]) == (number, DENSE)
        assert row["total_bytes_sent"] == sum(each["bytes_sent"] for each in rows[:number])
        assert row["ratio"] == DENSE / row["bytes_sent"]
        assert (row["relative_error"] > 0) == (row["residual_norm"] > 0) == (number > 2)


def _ratios(fits, name):
    return [row["ratio"] for row in fits[0][name][0]]


def test_warm_up_and_schedules_change_what_is_sent(fits):
    dense, _, first, _, last, _ = steps = _ratios(fits, "steps")
    assert dense == pytest.approx(1, abs=0.001)
    assert steps == [dense] * 2 + [first] * 2 + [last] * 2
    assert last > 2 * first > 2 * dense
    assert _ratios(fits, "epochs") == [first] * 3 + [last] * 3
    rates = _ratios(fits, "rate")
    assert all(later < earlier for earlier, later in pairwise(rates))


def test_rules_go_by_whole_names_and_kinds(fits):
    (row, *_) = fits[0]["rules"][0]
    saved = 2 * TABLE + 3.5 * TABLE  # of the head and the letters; the places are fewer than min_numel
    assert DENSE - saved < row["bytes_sent"] < DENSE - saved + 64
    assert fits[0]["rules"][2][0].startswith("lightning_compress: none and 2 rules by ")


def test_lines_and_hyperparameters_are_rank_0s(fits):
    _, hyperparameters, said, warned, *_ = fits[0]["steps"]
    line = "topk (density 0.1) by all_gather, 4.1 x fewer bytes, after 2 dense steps, density by schedule"
    assert said[0] == f"lightning_compress: {line}"
    assert said[1] == "the progress bar begins"
    assert [each.split(": ")[1] for each in said[2:]] == ["sent", "average", "step"]
    assert "in 6 steps; float32 would send 219 kB" in said[2]
    assert hyperparameters["lightning_compress/summary"] == line
    assert any("with AdamW may raise the loss" in each for each in warned)
    for _, others, said, warned, *_ in (rank["steps"] for rank in fits[1:]):
        assert (others, said, warned) == ({}, ["the progress bar begins"], [])


def test_drift_of_a_shard_is_an_error_of_all_ranks_or_mended(fits):
    for rank, found in enumerate(fits):
        *_, error, _ = found["drift"]
        assert "drift: after step 4, " in error
        assert ("net.head.weight of replica 1 differ from replica 0's" in error) == (rank in (1, 3))
        assert ("copy replica 0's model to all" in error) == (rank in (1, 3))
    assert len({found["resync"][-1] for found in fits}) == 1
    assert not any(each for found in fits for name in FITS if name != "drift" for each in found[name][4])
