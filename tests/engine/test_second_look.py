"""``auto`` times what it picked against float32 in the first steps: what wins, and what a resumed run does."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from lightning_compress.codecs import Dense, Rotated
from lightning_compress.collectives import run_threads
from lightning_compress.engine import second_look
from lightning_compress.engine.second_look import BLOCK, END, WARM, SecondLook
from lightning_compress.exchanges.nodes import Cluster
from lightning_compress.settings.automatic import Chosen
from lightning_compress.settings.run_state import RunState
from tests.helpers.training import Net, parameters

PICKED = Rotated(bits=4)
CPU = torch.device("cpu")


def state(float32_s=0.02):
    cluster = Cluster(ranks=2, nodes=1, hosts="two")
    return RunState.of("auto").become(Chosen(PICKED, cluster, float32_s=float32_s))


def compressors(monkeypatch, picked_s, dense_s, float32_s=0.02, first=0, last=END + 5, before=PICKED, meddle=None):
    """What runs in each step, by rank, if steps take so long."""
    clocks, thread = {}, threading.get_ident
    monkeypatch.setattr(second_look, "CLEAR", 2.0)
    monkeypatch.setattr(second_look, "time", SimpleNamespace(perf_counter=lambda: clocks[thread()]))

    def run(collective):
        clocks[thread()] = 0.0
        begun = state(float32_s)
        look = SecondLook(begun, collective, CPU)
        now, found = begun if before == PICKED else begun.retuned(before, {}), []
        for step in range(first, last):
            if meddle and step == meddle[0]:
                now = now.retuned(meddle[1], {})
            now = look.settings(step, now)
            found.append(now.compressor)
            # rank 1 is a slow clock, which must not decide
            clocks[thread()] += (dense_s if now.compressor == Dense() else picked_s) * (1 + collective.rank)
        return found

    one, two = run_threads(2, run)
    assert one == two
    return one


def blocks():
    return [Dense() if step >= WARM and (step - WARM) // BLOCK % 2 else PICKED for step in range(END)]


@pytest.mark.parametrize(
    ("picked_s", "dense_s", "stays"),
    [(0.080, 0.080, Dense()), (0.077, 0.080, Dense()), (0.090, 0.080, Dense()), (0.070, 0.080, PICKED)],
)
def test_float32_stays_unless_what_was_picked_is_faster(monkeypatch, picked_s, dense_s, stays):
    found = compressors(monkeypatch, picked_s, dense_s)
    assert found[:END] == blocks()
    assert found[END:] == [stays] * 5


def test_where_it_pays_clearly_float32_is_not_tried(monkeypatch):
    assert set(compressors(monkeypatch, 0.1, 1.0, float32_s=0.21)) == {PICKED}
    assert Dense() in compressors(monkeypatch, 0.1, 1.0, float32_s=0.19)


@pytest.mark.parametrize("step", [3, WARM + BLOCK + 3, WARM + 2 * BLOCK + 3])
def test_what_the_user_retunes_to_goes_on(monkeypatch, step):
    found = compressors(monkeypatch, 0.08, 0.08, meddle=(step, "onebit"))
    assert {type(each).__name__ for each in found[step:]} == {"OneBit"}


@pytest.mark.parametrize("before", [PICKED, Dense()])
def test_a_run_that_has_decided_is_left_alone(monkeypatch, before):
    assert set(compressors(monkeypatch, 0.08, 0.08, first=END, before=before)) == {before}


def test_a_run_that_is_resumed_in_between_goes_on(monkeypatch):
    first = WARM + BLOCK + 3
    found = compressors(monkeypatch, 0.08, 0.08, first=first, before=Dense())
    assert found[: END - first] == blocks()[first:]
    assert found[END - first :] == [Dense()] * 5


@pytest.mark.parametrize(
    ("settings", "looks"),
    [({}, True), ({"deterministic": True}, False), ({"warmup_steps": 5}, False), ({"delay": 1}, False)],
)
def test_nothing_is_timed_where_times_must_not_decide(settings, looks):
    assert RunState.of("auto", **settings).options.looks_twice == looks


def _trained(faster, first, last, loaded=None):
    """Weights, what runs, and a state, after steps of which each rank has its own data."""
    kept = second_look.FASTER, second_look.CLEAR
    second_look.FASTER, second_look.CLEAR = faster, 1e9
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    handle = attach(model, optimizer=optimizer)
    if loaded:
        model.module.load_state_dict(loaded[0])
        handle.load_state_dict(loaded[1])
    for step in range(first, last):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 1, 8, 8)).square().mean().backward()
        optimizer.step()
    weights = {name: each.clone() for name, each in model.module.state_dict().items()}
    found = parameters(model).numpy().copy(), str(handle.next_settings.compressor), handle.state_dict()
    handle.close()
    second_look.FASTER, second_look.CLEAR = kept
    return *found, weights


def _resumed(faster):
    whole, runs, _, _ = _trained(faster, 0, END + 6)
    _, _, middle, weights = _trained(faster, 0, WARM + BLOCK + 3)
    again, now, _, _ = _trained(faster, WARM + BLOCK + 3, END + 6, (weights, middle))
    return whole, runs, again, now


@pytest.mark.parametrize(("faster", "stays"), [(0.0, "Dense()"), (float("inf"), str(PICKED))])
def test_ranks_agree_and_a_resumed_run_is_the_same(pools, faster, stays):
    (one, runs, again, now), (two, *_) = pools[2].run(_resumed, faster)
    assert (runs, now) == (stays, stays)
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(one, again)
