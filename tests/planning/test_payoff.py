"""What the end of a fit says: did compression pay?"""

import pytest

from lightning_compress.exchanges.nodes import Cluster
from lightning_compress.planning.choose import Auto
from lightning_compress.planning.cost import COPIES, Link
from lightning_compress.planning.link import kind_of
from lightning_compress.planning.payoff import Run, Where, known, sentence
from lightning_compress.settings.automatic import Automatic, Chosen
from lightning_compress.settings.run_state import RunState

SLOW, FAST = Link(1e-4, 1e7), Link(1e-5, 1e11)
MATRICES = [(f"weight {number}", (1024, 1024)) for number in range(4)]
SPEEDS = {kind_of(each): COPIES for each in Automatic.candidates}


def where(link=SLOW):
    return Where(planner=Auto.knowing({"ranks": link}, SPEEDS), source="measured at setup")


def run(settings, step_s, computing_s=0.02, **given):
    return Run(RunState.of(settings) if isinstance(settings, str) else settings, MATRICES, 2, step_s, computing_s,
               hides=False, **given)  # fmt: skip


def auto_took_float32(**given):
    state = RunState.of("auto").become(Chosen(Automatic.candidates[0], Cluster(2, 2, "")))
    return run(state, given.pop("step_s", 0.02), None, **given)


@pytest.mark.parametrize(
    ("fit", "place", "words"),
    [
        (run("qsgd", 0.25), where(), "DDP would take about 1,700 ms on this link (predicted): 6.8 x. Link: 80 Mbit/s"),
        (run("qsgd", 0.022), where(FAST), "compression gained nothing (0.91 x). Write compressor='auto'"),
        (run("qsgd", 0.028), where(FAST), "compression lost (0.72 x). Write compressor='auto', which takes float32"),
        (run("rotated", 0.03, every=8), where(), "57 x"),
        (run("rotated", 0.03, 0.02, every=8), where(FAST), "compression lost (0.67 x). Write strategy='ddp'"),
        (run("qsgd", 2.0), where(), "the cost model predicts 240 ms for it, so do not trust it here"),
        (run("qsgd", 0.25, None), where(), "DDP would take about 1,700 ms"),
        (run("powersgd", 0.25), where(), "DDP would take about 1,700 ms"),
        (run("powersgd", 0.25, None), where(), "'lightning-compress advise' predicts"),
        (run("qsgd", 0.25), Where(), "250 ms; 'lightning-compress advise' predicts what DDP would take"),
        (run("qsgd", 0.25), Where(one_machine=True), "all ranks are on this machine, where DDP was faster in our runs"),
        (auto_took_float32(), Where(one_machine=True), "20 ms with float32, which auto chose; all ranks are on this"),
        (auto_took_float32(), where(FAST), "; the fastest compressor, bf16, would take about"),
    ],
)
def test_a_line_says_whether_it_paid(fit, place, words):
    assert words in sentence(fit, place)


def test_accumulated_batches_compute_without_averages():
    one, four = (run("qsgd", 0.25, batches=batches).ddp_s(where().planner) for batches in (1, 4))
    assert one == pytest.approx(four)  # nothing hides where all cores compute
    hidden, late = (Run(RunState.of("qsgd"), MATRICES, 2, 0.5, 0.3, batches=batches) for batches in (1, 4))
    assert late.ddp_s(where().planner) > 1.05 * hidden.ddp_s(where().planner)  # less backward beside the messages


def test_only_a_link_that_was_measured_or_given_counts():
    given = {"latency_s": 1e-4, "bytes_per_s": 1e8}
    assert known(RunState.of("qsgd")).planner is None
    assert known(RunState.of("qsgd", "all_gather")).planner is None
    assert known(RunState.of("qsgd", deterministic=True)).planner is None  # it assumes one
    assert known(RunState.of("qsgd", Auto(link=given))).source == "as given to exchange="
