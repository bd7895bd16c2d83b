"""What ``exchange="auto"`` measures, chooses, says and keeps."""

import logging
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import CompressedDDPStrategy, attach
from lightning_compress.codecs import BF16, QSGD, Dense, OneBit, TopK
from lightning_compress.collectives import CountingCollective, LocalCollective, TorchCollective, World, run_threads
from lightning_compress.collectives.counting import Meter
from lightning_compress.contrib.codecs.randomk import RandomK
from lightning_compress.core.layout import Layout
from lightning_compress.exchanges import Hierarchical, nodes
from lightning_compress.exchanges.message import Section
from lightning_compress.planning import choose
from lightning_compress.planning import link as probe
from lightning_compress.planning.choose import Auto
from lightning_compress.planning.cost import CODES, COPIES, UNKNOWN, Link, Speeds
from lightning_compress.settings.run_state import RunState
from tests.helpers import link as pretended

CPU = torch.device("cpu")
FAST, SLOW, FAR = Link(1e-6, 1e11), Link(1e-6, 1e7), Link(1e-1, 1e7)
BUSY = Speeds(1e-7, 1e-7)


def plan(exchange, collective, *codecs, numel=1 << 18):
    """For sections of one codec each."""
    layouts = [Layout.of([(f"p{number}", (numel // 64, 64))]) for number in range(len(codecs))]
    sections = [Section(codec, layouts[number], numel * number) for number, codec in enumerate(codecs)]
    return exchange.plan(sections, World(collective, CPU, Meter(CPU)))


def chosen(ranks, exchange, *codecs, **more):
    """What all of so many ranks choose."""
    found = run_threads(ranks, lambda collective: plan(exchange, collective, *codecs, **more).description)
    assert len(set(found)) == 1
    return found[0]


@pytest.fixture
def world(monkeypatch):
    """Sets what is measured, by rank where there is a list; counts how often."""
    calls = []

    def become(links, speeds):
        def time_link(collective, device):
            calls.append("link")
            return links[collective.rank] if isinstance(links, list) else links

        def time_codec(codec, device, crowd):
            calls.append(type(codec).__name__)
            return COPIES if isinstance(codec, Dense) else speeds

        monkeypatch.setattr(probe, "time_link", time_link)
        monkeypatch.setattr(probe, "time_codec", time_codec)
        return calls

    return become


@pytest.mark.parametrize(
    ("ranks", "codec", "description"),
    [
        (2, OneBit(), "all_gather"),
        (3, OneBit(), "all_gather"),
        (4, OneBit(), "two_shot"),
        (4, BF16(), "all_reduce"),
        (3, TopK(0.01), "all_gather"),
        (8, TopK(0.01), "split_gather"),
        (4, RandomK(0.01), "all_reduce"),
    ],
)
def test_where_bytes_decide(ranks, codec, description):
    assert chosen(ranks, Auto(link=SLOW), codec) == description


@pytest.mark.parametrize("link", [SLOW, FAST, FAR])
@pytest.mark.parametrize("codec", [OneBit(), QSGD(), TopK(0.01)], ids=repr)
@pytest.mark.parametrize("ranks", [2, 3])
def test_two_shot_is_not_for_two_or_three(ranks, codec, link):
    assert "two_shot" not in chosen(ranks, Auto("never", link), codec)
    assert "two_shot" not in chosen(ranks, Auto("dense", link), codec)


def test_latency_decides_too():
    assert chosen(8, Auto(link=FAR), OneBit()) == "all_gather"  # 3 rounds, and not 10
    assert chosen(8, Auto(link=FAR), TopK(0.01)) == "all_gather"


@pytest.mark.parametrize("codec", [OneBit(), TopK(0.01), BF16()], ids=repr)
@pytest.mark.parametrize("ranks", [2, 5])
def test_dense_where_nothing_pays_only_if_told_to(ranks, codec):
    assert "of float32, since" in chosen(ranks, Auto("dense", FAST), codec)
    assert "float32" not in chosen(ranks, Auto(link=FAST), codec)


def test_dense_where_it_sends_less_only_if_told_to():
    assert "float32, since all_gather would send" in chosen(3, Auto("dense", SLOW), TopK(0.5))
    assert chosen(3, Auto(link=SLOW), TopK(0.5)) == "all_gather"


def test_ranks_that_measure_otherwise_choose_alike(world):
    world([SLOW, FAST, FAR, FAST], BUSY)
    found = run_threads(4, lambda collective: plan(Auto("dense"), collective, OneBit()).description)
    assert found == ["two_shot"] * 4  # as rank 0's link says
    world([FAST, SLOW, SLOW, SLOW], BUSY)
    found = run_threads(4, lambda collective: plan(Auto("dense"), collective, OneBit()).description)
    assert all("of float32" in each for each in found)


def test_measured_once_and_not_counted(world):
    calls = world(SLOW, COPIES)
    meter, auto = Meter(CPU), [Auto(), Auto()]

    def rank(collective):
        counting = CountingCollective(collective, meter)
        own = auto[collective.rank]
        for codec in (OneBit(), OneBit(block=512), TopK(0.01), OneBit()):
            plan(own, counting, codec)
        return own.measured()

    first, second = run_threads(2, rank)
    assert first == second
    assert sorted(calls) == sorted(2 * ["link", "Dense", "OneBit", "TopK"])
    assert meter.bytes_sent == 0


def test_one_object_for_all_threads(world):
    world(SLOW, COPIES)
    auto = Auto()
    assert chosen(5, auto, OneBit()) == "two_shot"
    assert auto.measured()["links"] == {"ranks": [SLOW.latency_s, SLOW.bytes_per_s]}


@pytest.mark.parametrize("exchange", [Auto(), Auto("dense")])
def test_one_rank_measures_nothing(world, exchange):
    calls = world(SLOW, BUSY)
    assert plan(exchange, LocalCollective(), OneBit()).description == "all_reduce"
    assert not calls


def test_a_given_link_measures_nothing(world):
    calls = world(FAST, BUSY)
    assert chosen(2, Auto(link={"latency_s": 1e-6, "bytes_per_s": 1e7}), OneBit()) == "all_gather"
    assert not calls


def test_the_log_says_what_and_why(caplog):
    with caplog.at_level(logging.INFO, "lightning_compress"):
        chosen(4, Auto(link=SLOW), OneBit())
        chosen(4, Auto("dense", FAST), OneBit())
        chosen(3, Auto("dense", SLOW), TopK(0.5))
    first, second, third = caplog.records  # rank 0 only
    assert first.levelno == logging.INFO
    assert "two_shot: " in first.message
    for words in (" bytes a rank for 262144 elements", "all_gather", "float32", "80 Mbit/s and 1 us"):
        assert words in first.message
    assert second.levelno == logging.WARNING
    assert "all_reduce of float32, since " in second.message
    assert "leave out fallback='dense'" in second.message
    assert third.levelno == logging.WARNING
    assert "all_reduce of float32, since all_gather would send " in third.message


def test_nodes_are_looked_at_where_there_are_some():
    link = Link(1e-5, 1e8)
    found = chosen(8, Auto(link=link, node_size=4), OneBit(), numel=1 << 20)
    assert found.endswith("between nodes of 4")
    assert chosen(8, Auto(link=link, node_size=1), OneBit(), numel=1 << 20) == "two_shot"
    assert chosen(8, Auto(link=link, node_size=8), OneBit(), numel=1 << 20) == "two_shot"  # one node only


@pytest.mark.parametrize(("ranks", "node"), [(4, 2), (8, 4), (9, 3)])
@pytest.mark.parametrize("shape", [(100, 30), (64, 33)])
@pytest.mark.parametrize("codec", [OneBit(), TopK(0.01)], ids=repr)
def test_ranks_whose_parts_of_a_node_differ_in_size_choose_alike(codec, shape, ranks, node):
    """At a bandwidth where two ways cost nearly the same, a block more or less would decide."""
    sections = [Section(codec, Layout.of([("p", shape)]), 0)]

    def rank(collective):
        links = [Link(1e-4, 10 ** (5.5 + 0.05 * number)) for number in range(50)]
        meta = World(collective, torch.device("meta"), Meter(CPU))
        return [Auto(link=link, node_size=node).plan(sections, meta).description for link in links]

    found = run_threads(ranks, rank)
    assert all(each == found[0] for each in found)


def test_nodes_are_measured(world):
    calls = world(SLOW, COPIES)
    auto = [Auto(node_size=2) for _ in range(4)]
    run_threads(4, lambda collective: plan(auto[collective.rank], collective, OneBit()))
    assert calls.count("link") == 4 * 3
    assert auto[0].measured() == auto[3].measured()
    assert auto[0].measured()["links"].keys() == {"ranks", "inside", "between"}


def test_between_nodes_all_decide_alike(world):
    world([SLOW, FAST, FAST, FAST], BUSY)
    exchanges = [Hierarchical(node_size=2) for _ in range(6)]
    found = run_threads(6, lambda collective: plan(exchanges[collective.rank], collective, OneBit()).description)
    assert len(set(found)) == 1
    assert all(each.outer.measured() == exchanges[0].outer.measured() for each in exchanges)
    assert exchanges[0].outer.measured()["links"]["ranks"] == [SLOW.latency_s, SLOW.bytes_per_s]


def test_what_was_measured_is_kept_by_settings(world):
    world(SLOW, COPIES)
    dense = {"name": "auto", "fallback": "dense"}
    settings = [RunState.of("onebit", dense) for _ in range(4)]
    before = run_threads(
        4, lambda collective: plan(settings[collective.rank].exchange, collective, OneBit()).description
    )
    running = settings[0].running()
    calls = world(FAST, BUSY)
    calls.clear()
    resumed = [RunState.of("onebit", dense).resumed(running) for _ in range(4)]
    after = run_threads(4, lambda collective: plan(resumed[collective.rank].exchange, collective, OneBit()).description)
    assert before == after == ["two_shot"] * 4
    assert not calls
    anew = run_threads(4, lambda collective: plan(Auto("dense"), collective, OneBit()).description)
    assert "float32" in anew[0]  # what it would have been


class Elsewhere:
    """Host names as a job's ranks have them."""

    def __init__(self, monkeypatch):
        self._names, self._monkeypatch = threading.local(), monkeypatch

    def run(self, hosts, job):
        def named(collective):
            self._names.own = hosts[collective.rank]
            return job(collective)

        self._monkeypatch.setattr(socket, "gethostname", lambda: self._names.own)
        return run_threads(len(hosts), named)


HERE = ["a", "a"]


@pytest.mark.parametrize(
    ("hosts", "again"),
    [(HERE, False), (["a", "b"], True), (["b", "b"], True), (["a", "a", "a"], True), (["a", "a", "b", "b"], True)],
    ids=str,
)
def test_figures_do_not_outlive_the_cluster(world, monkeypatch, hosts, again):
    elsewhere = Elsewhere(monkeypatch)
    world(FAST, COPIES)  # as the loopback of one node
    own = [Auto() for _ in HERE]
    elsewhere.run(HERE, lambda collective: plan(own[collective.rank], collective, OneBit()))
    kept = own[0].measured()
    calls = world(SLOW, CODES)
    calls.clear()
    resumed = [Auto().with_measurements(kept) for _ in hosts]
    elsewhere.run(hosts, lambda collective: plan(resumed[collective.rank], collective, OneBit()))
    found = resumed[-1].measured()
    assert all(each.measured() == found for each in resumed)
    link = SLOW if again else FAST
    assert found["links"]["ranks"] == [link.latency_s, link.bytes_per_s]
    assert found["cluster"]["ranks"] == len(hosts)
    assert found["cluster"]["nodes"] == len(set(hosts))
    assert sorted(set(calls)) == (["Dense", "OneBit", "link"] if again else [])
    calls.clear()
    elsewhere.run(hosts, lambda collective: plan(resumed[collective.rank], collective, OneBit()))
    assert not calls  # once


def test_one_object_for_all_threads_moves_too(world, monkeypatch):
    elsewhere = Elsewhere(monkeypatch)
    world(FAST, COPIES)
    own = [Auto() for _ in HERE]
    elsewhere.run(HERE, lambda collective: plan(own[collective.rank], collective, OneBit()))
    world(SLOW, CODES)
    shared = Auto().with_measurements(own[0].measured())
    elsewhere.run(["a", "b", "c"], lambda collective: plan(shared, collective, OneBit()))
    assert shared.measured()["links"] == {"ranks": [SLOW.latency_s, SLOW.bytes_per_s]}


def test_one_node_that_goes_on_as_eight_compresses_again(world, monkeypatch):
    elsewhere = Elsewhere(monkeypatch)
    world(FAST, COPIES)
    own = [Auto("dense") for _ in range(8)]

    def job(autos):
        return lambda collective: plan(autos[collective.rank], collective, OneBit()).description

    assert "of float32" in elsewhere.run(["one"] * 8, job(own))[0]
    world(SLOW, CODES)
    resumed = [Auto("dense").with_measurements(own[0].measured()) for _ in range(8)]
    found = elsewhere.run([f"node{rank}" for rank in range(8)], job(resumed))
    assert found == ["two_shot"] * 8


def test_speeds_are_of_codecs_as_they_are_set(world):
    calls = world(SLOW, COPIES)
    auto = [Auto() for _ in range(2)]

    def rank(collective):
        for codec in (TopK(0.01), TopK(0.1), TopK(0.01, indices="rice"), QSGD(4), QSGD(8), QSGD(4, coding="elias")):
            plan(auto[collective.rank], collective, codec)
        return auto[collective.rank].measured()["speeds"]

    first, second = run_threads(2, rank)
    assert first == second
    assert calls.count("TopK") == 2 * 2  # a schedule of numbers brings no new figures into a run
    assert calls.count("QSGD") == 2 * 2
    assert len(first) == 6  # sums of 8 bits are encoded by bf16


def test_ranks_of_a_host_need_not_be_neighbours(monkeypatch, world):
    """As srun --distribution=cyclic places them."""
    world([FAST if rank < 4 else SLOW for rank in range(8)], COPIES)
    monkeypatch.setattr(probe, "time_link", lambda collective, device: FAST if collective.size == 4 else SLOW)
    monkeypatch.setattr(
        nodes, "hosts_of", lambda collective, device: [b"AB"[r % 2 :][:1] for r in range(collective.size)]
    )
    taken = []
    made = choose.Between
    monkeypatch.setattr(choose, "Between", lambda outer, of: taken.append(of) or made(outer, of))
    exchange = Auto()
    assert "between nodes of 4" in chosen(8, exchange, OneBit())
    assert taken.count([[0, 2, 4, 6], [1, 3, 5, 7]]) == len(taken) > 0
    kept = exchange.measured()
    taken.clear()
    again = Auto().with_measurements(kept | {"cluster": {"ranks": 8, "nodes": 2, "hosts": kept["cluster"]["hosts"]}})
    assert "between nodes of 4" in chosen(8, again, OneBit())
    assert taken.count([[0, 2, 4, 6], [1, 3, 5, 7]]) == len(taken) > 0


@pytest.mark.parametrize(
    "measured",
    [
        {"links": {"ranks": [0.0, 1.0]}, "speeds": {}, "node_size": 1},
        {"links": {"ranks": [1.0]}, "speeds": {}, "node_size": 1},
        {"links": {}, "speeds": {}, "node_size": 1},
        {"links": {"ranks": [1.0, 1.0]}, "speeds": {}, "node_size": 2},
        {"links": {"ranks": [1.0, 1.0]}, "speeds": {"OneBit": [1.0, -1.0, 0.0]}, "node_size": 1},
        {"links": [1.0], "speeds": {}, "node_size": 1},
        {"links": {"ranks": [1.0, 1.0]}, "speeds": {}, "node_size": 1, "cluster": {"ranks": 2}},
        {"links": {}, "speeds": {}, "node_size": "two"},
        {"links": {"ranks": [1.0, 1.0]}, "speeds": {}, "node_size": 1, "nodes": [[0, 2], [1, 3]]},
        {"speeds": {}},
    ],
)
def test_what_was_never_measured_is_refused(measured):
    running = RunState.of("onebit").running() | {"measured": measured}
    with pytest.raises(ValueError):  # noqa: PT011  # whatever is wrong with it
        RunState.of("onebit").resumed(running)


def _run(steps, link, state=None):
    """Parameters after some steps, what the groups go by, and the state; ``link`` is what would be measured."""
    probe.time_link = lambda collective, device: link
    torch.manual_seed(0)
    net = nn.Linear(512, 64)
    model = DistributedDataParallel(net)
    compression = attach(model, {"name": "topk", "density": 0.01}, Auto("dense"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if state:
        net.load_state_dict(state[0])
        compression.load_state_dict(state[1])
    for step in range(*steps):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 512)).square().mean().backward()
        optimizer.step()
    ways = [group.plan(steps[1]).description for group in compression.groups]
    states = {name: each.clone() for name, each in net.state_dict().items()}, compression.state_dict()
    compression.close()
    probe.time_link = lambda collective, device: pretended.SLOW
    return states, ways


def _resumed():
    whole, ways = _run((0, 6), SLOW)
    half, _ = _run((0, 3), SLOW)
    again, ways_again = _run((3, 6), FAST, half)  # where nothing would pay now
    _, anew = _run((0, 1), FAST)
    return all(whole[0][name].equal(again[0][name]) for name in whole[0]), ways, ways_again, anew


def test_a_resumed_run_goes_on_exactly_on_another_link(pools):
    for same, ways, ways_again, anew in pools[2].run(_resumed):
        assert same
        assert ways == ways_again == ["all_gather"]
        assert "of float32" in anew[0]


def _measure():
    time_link, time_codec = pretended.REAL
    link = time_link(TorchCollective(), CPU)
    return link, time_codec(OneBit(), CPU), torch.initial_seed(), torch.get_rng_state().sum()


def test_what_a_kernel_takes_to_be_compiled_does_not_count(monkeypatch):
    seen = []

    def timed(codec, clock, device, numel):
        seen.append(numel)
        return (1.0, 1.0) if len(seen) == 1 else (1e-9 * numel, 2e-9 * numel)

    monkeypatch.setattr(probe, "_time_codec", timed)
    speeds = pretended.REAL[1](OneBit(), CPU)
    assert speeds.encode_s == pytest.approx(probe.BESIDE * 1e-9)
    assert speeds.decode_s == pytest.approx(probe.BESIDE * 2e-9)
    assert speeds.start_s == pytest.approx(0, abs=1e-9)


def test_ranks_that_share_a_core_count_its_own_time_for_each(monkeypatch):
    def timed(codec, clock, device, numel):
        start = clock()
        time.sleep(0.05)  # another rank has the core
        return clock() - start, clock() - start

    monkeypatch.setattr(probe, "_time_codec", timed)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert pretended.REAL[1](OneBit(), CPU, 1.0).start_s > 0.04
        assert pretended.REAL[1](OneBit(), CPU, 2.0).start_s < 0.04
    finally:
        torch.set_num_threads(threads)


def test_a_real_probe(pools):
    ranks = pools[2].run(_measure)
    for link, speeds, *_ in ranks:
        assert 1e-7 < link.latency_s < 1.0
        assert 1e5 < link.bytes_per_s < 1e12
        assert 1e-12 < speeds.encode_s < 1e-4


def test_what_is_measured_leaves_no_trace_in_random_numbers():
    before = torch.get_rng_state()
    pretended.REAL[1](QSGD(), CPU)
    assert before.equal(torch.get_rng_state())


def test_settings_that_cannot_go_by_what_is_measured():
    assert RunState.of("onebit", deterministic=True).exchange.link == UNKNOWN
    assert RunState.of("onebit", {"name": "hierarchical"}, deterministic=True).exchange.outer.link == UNKNOWN
    assert RunState.of("dgc").exchange.node_size == 1  # a velocity is one rank's
    assert RunState.of("onebit").exchange == Auto()


@pytest.mark.parametrize(
    ("exchange", "words"),
    [
        ({"name": "auto", "fallback": "no"}, "fallback='no'"),
        ({"name": "auto", "link": 5}, "link=5: use null"),
        ({"name": "auto", "node_size": 0}, "node_size=0"),
    ],
)
def test_refused_at_construction(exchange, words):
    with pytest.raises(ValueError, match=words):
        CompressedDDPStrategy(exchange=exchange)


def test_a_node_size_that_does_not_divide_the_ranks_is_refused():
    def refused(collective):
        with pytest.raises(ValueError, match=r"Auto\(node_size=3\): it must divide the 4 ranks"):
            plan(Auto(link=UNKNOWN, node_size=3), collective, OneBit())

    run_threads(4, refused)
    assert chosen(4, Auto(link=UNKNOWN, node_size=8), OneBit())  # all on one node
