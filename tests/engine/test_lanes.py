"""Neighbouring buckets are averaged side by side, over transports of their own, without a change of any bit."""

import threading
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from lightning_compress.collectives import LocalCollective
from lightning_compress.collectives.counting import Meter
from lightning_compress.collectives.turns import TurnCollective, given
from lightning_compress.engine import attach as attaching
from lightning_compress.engine.groups import Lanes
from lightning_compress.engine.hook import Workers


def _trained(compressor, lanes, steps=4, **settings):
    """Parameters after some steps of a model in many buckets, and the threads that averaged them."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    model = DistributedDataParallel(net, bucket_cap_mb=0.02)
    beside = attaching.Compression if lanes == 2 else lambda *given, beside, **named: One(*given, **named)
    with mock.patch.object(attaching, "Compression", beside):
        compression = attach(model, compressor, **settings)
    threads, average = set(), compression._average

    def noted(*given):
        threads.add(threading.get_ident())
        average(*given)

    compression._average = noted
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        torch.manual_seed(100 * step + torch.distributed.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    found = [each.detach().clone() for each in net.parameters()]
    state = compression.state_dict()
    compression.close()
    return found, len(compression.lanes.all), len(threads), state["step"]


class One(attaching.Compression):
    """With a single lane."""


def _both(compressor, settings):
    one, two = (_trained(compressor, lanes, **settings) for lanes in (1, 2))
    same = all(each.equal(other) for each, other in zip(one[0], two[0], strict=True))
    return same, one[1:], two[1:]


@pytest.mark.parametrize(
    ("compressor", "settings"),
    [
        ("onebit", {}),
        ("onebit", {"exchange": "two_shot"}),
        ("rotated", {"exchange": "two_shot"}),
        ({"name": "topk", "density": 0.1}, {}),
        ("powersgd", {}),
        ("bf16", {}),
        ("rotated", {"deterministic": True}),
        ("onebit", {"warmup_steps": 2}),
    ],
    ids=str,
)
def test_the_same_bits_as_in_one_lane(pools, compressor, settings):
    for same, one, two in pools[3].run(_both, compressor, settings):
        assert same
        assert one == (1, 1, 4)
        assert two == (2, 2, 4)


def test_whoever_waits_gives_the_turn():
    turn, begun, free = threading.RLock(), threading.Event(), threading.Event()

    class Slow(LocalCollective):
        def all_reduce(self, tensor, operation="sum"):
            begun.set()
            assert free.wait(10)

    def waiting():
        with turn:
            TurnCollective(Slow(), turn).all_reduce(torch.ones(1))

    thread = threading.Thread(target=waiting)
    thread.start()
    assert begun.wait(10)
    with turn:  # although the thread is not done
        assert thread.is_alive()
    free.set()
    thread.join(10)
    assert not thread.is_alive()
    with turn, given(turn):
        pass


def test_groups_have_the_lanes_by_turns():
    lanes = Lanes([LocalCollective(), LocalCollective()], Meter(torch.device("cpu")), ordered=False)
    assert [lanes.next() is lane for lane in lanes.all * 2] == [True] * 4
    one = Lanes([LocalCollective()], Meter(torch.device("cpu")), ordered=False)
    assert one.next() is one.next()


def test_a_bucket_begins_when_the_one_before_has_started():
    workers, order, both = Workers(2), [], threading.Barrier(2)

    def average(number):
        def run(started):
            order.append(number)
            started()
            both.wait(10)  # two at a time

        return run

    for number in range(6):
        workers.submit(average(number), lambda: None)
    workers.wait()
    assert order == list(range(6))
    assert workers.idle


def test_after_an_error_the_other_buckets_of_that_thread_are_skipped():
    workers, run = Workers(2), []

    def fail(started):
        raise ArithmeticError("here")

    def good(number):
        return lambda started: run.append(number)

    ended = []
    for number, average in enumerate([fail, good(1), good(2), good(3)]):
        workers.submit(average, lambda number=number: ended.append(number))
    with pytest.raises(ArithmeticError, match="here"):
        workers.wait()
    assert run == [1, 3]
    assert sorted(ended) == [0, 1, 2, 3]
    workers.submit(good(4), lambda: None)
    workers.wait()
    assert run == [1, 3, 4]
