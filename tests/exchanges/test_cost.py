"""The cost model, by hand and by what must grow."""

import pytest

from lightning_compress.exchanges.exchange import Cost
from lightning_compress.planning.cost import Link, Speeds, device_seconds, link_of, overlapped_seconds, wire_seconds

LINK = Link(1e-3, 1e6)
SPEEDS = Speeds(2e-6, 1e-6, 1e-4)
WORK = [(1000, SPEEDS)]


def cost(**numbers):
    standard = {"bytes_sent": 5000, "rounds": 3, "encodes": 1.0, "decodes": 2.0, "calls": 2}
    return Cost(**standard | numbers)


def step_seconds(cost, work, link, copy_s=0.0):
    return device_seconds(cost, work, copy_s) + wire_seconds(cost, link)


def test_by_hand():
    assert wire_seconds(cost(), LINK) == pytest.approx(3e-3 + 5e-3)
    assert wire_seconds(cost(), LINK, sharing=4) == pytest.approx(3e-3 + 4 * 5e-3)
    within = cost(inner_bytes=4000, inner_rounds=2)
    assert wire_seconds(within, LINK, Link(1e-4, 1e8), sharing=2) == pytest.approx(1e-3 + 2e-3 + 2e-4 + 4e-5)
    assert device_seconds(cost(), WORK) == pytest.approx(2e-3 + 2e-3 + 2e-4)
    assert device_seconds(cost(copies=3.0), WORK, copy_s=1e-7) == pytest.approx(4.2e-3 + 3e-4)
    sums, finer = cost(sum_encodes=0.25, sum_decodes=1.0), [(1000, Speeds(4e-6, 3e-6, 1e-4))]
    assert device_seconds(sums, WORK) == device_seconds(cost(), WORK)
    assert device_seconds(sums, WORK, sums=finer) == pytest.approx(1.5e-3 + 1e-3 + 1e-3 + 3e-3 + 2e-4)
    assert step_seconds(cost(), WORK, LINK) == pytest.approx(8e-3 + 4.2e-3)


def test_the_shorter_of_wire_and_device_is_hidden_but_for_a_part():
    assert overlapped_seconds(3.0, 2.0, 0) == overlapped_seconds(2.0, 3.0, 1) == 5.0
    assert overlapped_seconds(3.0, 2.0, 4) == overlapped_seconds(2.0, 3.0, 4) == 3.5
    assert (cost(parts=2) + cost(parts=3)).parts == 3  # one after the other


@pytest.mark.parametrize("number", ["bytes_sent", "rounds", "encodes", "decodes", "copies", "calls"])
def test_more_of_anything_takes_longer(number):
    more = cost(**{number: 2 * getattr(cost(copies=1.0), number)})
    assert step_seconds(more, WORK, LINK, copy_s=1e-7) > step_seconds(cost(), WORK, LINK, copy_s=1e-7)


@pytest.mark.parametrize("slower", [Link(2e-3, 1e6), Link(1e-3, 5e5)])
def test_a_slower_link_takes_longer(slower):
    assert step_seconds(cost(), WORK, slower) > step_seconds(cost(), WORK, LINK)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"latency_s": 0.0, "bytes_per_s": 1.0}, "latency_s=0.0.* above 0"),
        ({"latency_s": 1e-4, "bytes_per_s": float("inf")}, "bytes_per_s=inf"),
        ({"latency_s": 1e-4, "bytes_per_s": True}, "bytes_per_s=True"),
        ({"latency_s": 1e-4}, "latency_s and bytes_per_s"),
        ("1gbit", "link='1gbit'"),
    ],
)
def test_no_such_link(given, words):
    with pytest.raises(ValueError, match=words):
        link_of(given)


def test_no_such_speed():
    with pytest.raises(ValueError, match=r"decode_s=-1.* 0 or more"):
        Speeds(0.0, -1.0)
