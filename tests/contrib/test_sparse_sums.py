"""Sums of few elements by exchanges that ``auto`` never takes."""

from itertools import product

import pytest

from lightning_compress.codecs import TopK
from lightning_compress.collectives import run_threads
from lightning_compress.contrib.codecs.randomk import RandomK
from lightning_compress.contrib.exchanges import Butterfly, OkTopK, RecursiveDoubling, RunLength
from tests.exchanges.test_exchanges import LAYOUT, _over_sockets, check, mean, partly
from tests.fuzz.exchanging import Liar
from tests.turns import by_turns

SPARSE = {
    "recursive_doubling": RecursiveDoubling(),
    "butterfly": Butterfly(),
    "ok_topk": OkTopK(),
    "run_length": RunLength(),
}
SELECTING = [TopK(0.01), TopK(0.2), TopK(0.02, values="fp16", indices="rice"), RandomK(0.05)]


@pytest.mark.parametrize(("pair", "size"), by_turns(product(SELECTING, SPARSE), (6, 8, 9, 16), 2, repr))
def test_sparse_sums_at_many_ranks(pair, size):
    codec, exchange = pair
    check(run_threads(size, lambda collective: mean(collective, SPARSE[exchange], codec)))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("exchange", SPARSE)
def test_all_of_it_is_the_dense_mean(exchange, size):
    ranks = run_threads(size, lambda collective: mean(collective, SPARSE[exchange], TopK(1.0)))
    dense = sum(before.double() for before, *_ in ranks) / size
    assert all((out.double() - dense).abs().max() <= 1e-6 for _, _, out, *_ in ranks)
    assert not any(after.any() for _, after, *_ in ranks)


@pytest.mark.parametrize("empty", [{0}, {2}, {0, 1, 3, 4}, {0, 1, 2, 3, 4}])
@pytest.mark.parametrize("exchange", SPARSE)
def test_ranks_with_nothing_to_say(exchange, empty):
    ranks = run_threads(5, lambda collective: partly(collective, SPARSE[exchange], empty))
    inside = slice(7, 7 + LAYOUT.numel)
    assert all((out[:7] == 7).all() and (out[inside.stop :] == 7).all() for _, _, out, *_ in ranks)
    check([(before[inside], after[inside], out[inside]) for before, after, out, *_ in ranks])


@pytest.mark.parametrize("exchange", SPARSE)
def test_sparse_sums_over_sockets(pools, exchange):
    sockets = pools[4].run(_over_sockets, SPARSE[exchange], TopK(0.05))
    threads = run_threads(4, lambda collective: mean(collective, SPARSE[exchange], TopK(0.05)))
    check(sockets)
    assert all(socket[2].equal(thread[2]) for socket, thread in zip(sockets, threads, strict=True))


class Deaf(Liar):
    """Changes what rank 0 sends to one rank."""

    def swap(self, sends, receives):
        if self.rank == 0:
            sends = {peer: tensor.clone() for peer, tensor in sends.items()}
            for tensor in sends.values():
                tensor[20] ^= 1
        self.inner.swap(sends, receives)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("exchange", [each for each in SPARSE if each != "ok_topk"])  # which sends to all alike
def test_a_damaged_message_is_an_error_on_every_rank(exchange, size):
    def program(collective):
        try:
            mean(Deaf(collective, None), SPARSE[exchange], TopK(0.05))
        except ValueError as error:
            return str(error)
        return "went on"

    said = run_threads(size, program, timeout=30.0)
    assert "the message of rank 0 was changed on the way" in " ".join(said)
    assert all("damaged" in each or "received a message that it cannot read" in each for each in said)
