"""Questions and answers between neighbours, over sockets between processes."""

import os
import threading
import time

import pytest
import torch

from lightning_compress.collectives import TorchCollective
from lightning_compress.contrib.asynchronous import connection, links
from lightning_compress.contrib.asynchronous.links import FIRST_KIND, HEADER, GoneError, Links, Reply

CPU = torch.device("cpu")
ASK, TELL, SLEEP, RAISE = range(FIRST_KIND, FIRST_KIND + 4)
UNKNOWN, MOST = 99, 5_000_000
NONE = ", which is none that ranks send"
KINDS = dict.fromkeys((ASK, TELL, SLEEP, RAISE), MOST)


def _ring(ranks):
    return {(ranks.rank - 1) % ranks.size, (ranks.rank + 1) % ranks.size} - {ranks.rank}


def _answer(rank, message):
    """The body backwards, with the rank that asked."""
    if message.kind == SLEEP:
        time.sleep(message.number)
    if message.kind == RAISE:
        raise ArithmeticError("no answer to this")
    return Reply(TELL, rank, -message.number, [message.body.flip(0)])


def _made(timeout=20.0, kinds=KINDS):
    ranks = TorchCollective()
    return Links(ranks, sorted(_ring(ranks)), _answer, kinds, timeout, CPU)


def _said(function):
    """What an error says, or nothing."""
    try:
        function()
    except (GoneError, ValueError) as error:
        return str(error)
    return ""


def _until_gone(made):
    end = time.monotonic() + 20
    while not (said := _said(made.check)) and time.monotonic() < end:
        time.sleep(0.01)
    return said


def _all_ask_at_once(rounds, sizes):
    made, wrong = _made(), []

    def ask(peer):
        for number in range(rounds):
            parts = [torch.full((size,), made.rank + number, dtype=torch.int16) for size in sizes]
            parts.append(torch.tensor([float(number)]))
            reply = made.ask(peer, ASK, number, float(number), parts)
            sent = torch.cat([each.view(torch.uint8) for each in parts])
            if (reply.kind, reply.clock, reply.number) != (TELL, made.rank, -float(number)):
                wrong.append(reply)
            if not reply.body.equal(sent.flip(0)):
                wrong.append(reply.body)

    threads = [threading.Thread(target=ask, args=(peer,)) for peer in made.peers]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    TorchCollective().all_reduce(torch.zeros(1))  # until others have asked
    made.close()  # and their goodbyes have come, behind what was answered
    return wrong, made.sent, made.left, _said(made.check)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_asks_and_answers_at_the_same_time(pools, size):
    sizes = [0, 1, 70_001]
    for rank, (wrong, sent, left, said) in enumerate(pools[size].run(_all_ask_at_once, 20, sizes)):
        neighbours = {(rank - 1) % size, (rank + 1) % size}
        assert not wrong
        body = 2 * sum(sizes) + 4
        assert sent == dict.fromkeys(neighbours, 2 * 20 * (HEADER + body))
        assert left == neighbours
        assert not said


def _one_vanishes():
    made, found = _made(), torch.zeros(1)
    if made.rank == 1:
        made._drop()
        TorchCollective().all_reduce(found)
        return ""
    said = _until_gone(made)
    if made.rank == 3:
        TorchCollective().all_reduce(found)  # both neighbours of rank 1 have noticed, so neither is told by this rank
    made.close(GoneError(1, "died"))
    if made.rank != 3:
        TorchCollective().all_reduce(found)
    return said


def test_a_rank_that_vanishes_is_named(pools):
    found = pools[4].run(_one_vanishes)
    assert found[0] == found[2] == "rank 1 died: it closed its connection without a word"
    assert found[3] == "rank 1 died"  # as told by a neighbour of both


def _one_fails(failure):
    made = _made()
    if made.rank == 0:
        made.close(failure)
        return ""
    said = _until_gone(made)
    asked = _said(lambda: made.ask(made.peers[0], ASK))
    made.close(GoneError(0, said.removeprefix("rank 0 ")))  # as it was told
    return said, asked


def test_a_failure_is_told(pools):
    _, *found = pools[3].run(_one_fails, ValueError("loss is NaN"))
    assert found == [("rank 0 failed: loss is NaN",) * 2] * 2


def _one_left():
    made = _made()
    if made.rank == 1:
        made.close()
        return ""
    while 1 not in made.left:
        time.sleep(0.01)
    if made.rank == 2:
        time.sleep(0.2)  # until rank 0 knows that as well
        made.close(GoneError(1, "has left"))
        return ""
    return _until_gone(made)


def test_a_rank_that_fails_because_another_has_left_is_named(pools):
    assert pools[3].run(_one_left)[0] == "rank 2 failed: rank 1 has left"


def _asked_for(kind, number, parts, timeout):
    rank = TorchCollective().rank
    made = _made(timeout, KINDS if rank else {**KINDS, ASK: MOST + 1, UNKNOWN: 0})
    said = _said(lambda: made.ask(1, kind, 0, number, parts)) if rank == 0 else _until_gone(made)
    made.close(GoneError(int(said[5]), said[7:]))  # with what was found, which may overtake the answer
    return said


@pytest.mark.parametrize(
    ("question", "asking", "asked"),
    [
        ((SLEEP, 3.0, [], 0.5), "rank 1 does not answer within 0.5 s: it hangs, or the network is gone", "rank 0 "),
        ((RAISE, 0.0, [], 20.0), "rank 1 failed: ArithmeticError: no answer to this", "rank 1 failed: Arithmetic"),
        ((UNKNOWN, 0.0, [], 20.0), f"rank 0 sent a message of kind 99 with 0 bytes{NONE}", "rank 0 sent a message of"),
        ((ASK, 0.0, [torch.zeros(MOST + 1, dtype=torch.uint8)], 20.0), "rank ", f"rank 0 sent a message of kind {ASK}"),
    ],
    ids=["too late", "an error", "no such kind", "too long"],
)
def test_what_is_not_answered(pools, question, asking, asked):
    first, second = pools[2].run(_asked_for, *question)
    assert first.startswith(asking)
    assert second.startswith(asked)


def _sent(kind, size):
    made = _made()
    said = _said(lambda: made.ask(made.peers[0], kind, parts=[torch.zeros(size)]))
    TorchCollective().all_reduce(torch.zeros(1))
    made.close()
    return said


@pytest.mark.parametrize(("kind", "most"), [(UNKNOWN, 0), (ASK, MOST)])
def test_what_may_not_be_sent(pools, kind, most):
    size = MOST // 4 + 1
    said = f"a message of kind {kind} has at most {most} bytes, not {4 * size}"
    assert pools[2].run(_sent, kind, size) == [said] * 2


def _set_up(rank, change):
    """What setting up says where one rank differs from others."""
    before = os.environ.get("GLOO_SOCKET_IFNAME"), connection.PROTOCOL, links._entry, links._read_entry, links.START
    links.START = 3.0
    try:
        if TorchCollective().rank == rank:
            change()
        return _said(_made)
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        if before[0] is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = before[0]
        connection.PROTOCOL, links._entry, links._read_entry, links.START = before[1:]


def _newer():
    connection.PROTOCOL = 2


def _elsewhere():
    os.environ["GLOO_SOCKET_IFNAME"] = "eth99"


def _closed():
    entry = links._entry
    links._entry = lambda server, token: entry(server, token)[:17] + (1).to_bytes(2, "big") + token


def _another():
    read = links._read_entry
    links._read_entry = lambda row: (*read(row)[:2], bytes(16))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_newer, "install the same version of lightning_compress on all hosts"),
        (_elsewhere, "GLOO_SOCKET_IFNAME=eth99: this host has no network interface of that name with an IPv4 address"),
        (_closed, "port 1: Connection refused; ranks talk directly, over ports that the system chooses: open them"),
        (_another, "where rank 0 listens, is no rank of this run"),
    ],
    ids=["another version", "no such interface", "a closed port", "another run"],
)
def test_set_up_fails_on_every_rank(pools, change, said):
    found = pools[3].run(_set_up, 1, change)
    assert all(each for each in found)
    assert any(said in each for each in found)


def test_messages_cost_32_bytes_more_than_their_bodies():
    assert HEADER == 32
