"""Whether ranks agree: one answer on all of them."""

import pytest
import torch

from lightning_compress.collectives import consensus, run_threads
from lightning_compress.collectives.consensus import PROBLEM_BYTES

CPU = torch.device("cpu")
SIZES = [1, 2, 5]


def on_ranks(size, program):
    """What ``program(rank, ranks)`` returns on each rank, or the error it raises."""

    def run(ranks):
        try:
            return program(ranks.rank, ranks)
        except ValueError as error:
            return error

    return run_threads(size, run, timeout=20.0)


@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_agree_go_on(size):
    said = {"settings": {"bits": 4}, "layers": ["a", "b"]}
    assert on_ranks(size, lambda _, ranks: consensus.check(said, None, ranks, CPU, "")) == [None] * size


@pytest.mark.parametrize("size", [2, 5])
def test_who_differs_in_what_is_told_to_all(size):
    def program(rank, ranks):
        said = {"settings": "alike", "layers": rank == size - 1}
        consensus.check(said, None, ranks, CPU, f"; rank {rank} has them")

    found = on_ranks(size, program)
    told = f"the layers of rank {size - 1} differ from those of rank 0"
    assert [str(each) for each in found] == [f"{told}; rank {rank} has them" for rank in range(size)]


@pytest.mark.parametrize("place", [0, 7, 299])
def test_all_are_told_what_differs(place):
    def program(rank, ranks):
        layers = [("layer", (number, 64 + (rank == 1 and number == place))) for number in range(300 + rank)]
        return consensus.disagreement({"settings": "alike", "layers": layers}, None, ranks, CPU, "; start alike")

    for found in on_ranks(3, program):
        assert found.startswith("the layers of rank 1, 2 differ from those of rank 0 (rank 1 has ... ")
        assert found.index(f"({place}, 65)") < found.index("rank 0 has ... ") < found.index(f"({place}, 64)")
        assert found.endswith(" ...); start alike")
        assert len(found) < 400


def test_several_that_differ_are_all_named():
    found = on_ranks(5, lambda rank, ranks: consensus.disagreement({"files": rank % 2}, None, ranks, CPU))
    assert found == ["the files of rank 1, 3 differ from those of rank 0"] * 5


@pytest.mark.parametrize("bad", [{0}, {2}, {1, 2}])
def test_a_problem_of_one_rank_is_told_to_all_and_comes_before_what_differs(bad):
    problems = {rank: ValueError(f"no disk on {rank}: größer") for rank in bad}

    def program(rank, ranks):
        consensus.check({"settings": rank}, problems.get(rank), ranks, CPU, "")

    found = on_ranks(3, program)
    for rank, error in enumerate(found):
        assert (
            error is problems[rank] if rank in bad else str(error) == f"rank {min(bad)}: no disk on {min(bad)}: größer"
        )


def test_a_problem_without_words_and_one_with_too_many():
    errors = [None, KeyError(), ValueError("é" * PROBLEM_BYTES)]
    for bad, told in ((1, "KeyError"), (2, "é" * (PROBLEM_BYTES // 2))):
        program = lambda rank, ranks, bad=bad: consensus.disagreement(  # noqa: E731
            {}, errors[bad] if rank == bad else None, ranks, CPU
        )
        found = on_ranks(3, program)
        assert found[0] == f"rank {bad}: {told}"
        assert not found[bad].startswith("rank")


@pytest.mark.parametrize("size", SIZES)
def test_numbers_that_are_the_same(size):
    large = consensus.digest(b"x")
    rows = on_ranks(size, lambda rank, ranks: consensus.same(torch.tensor([7, -large, rank, large + rank]), ranks))
    assert [row.tolist() for row in rows] == [[True, True, size == 1, size == 1]] * size


def test_flags_and_what_every_rank_has():
    flags = on_ranks(3, lambda rank, ranks: consensus.anywhere([rank == 1, False, True], ranks, CPU))
    assert flags == [[True, False, True]] * 3
    rows = on_ranks(3, lambda rank, ranks: consensus.gathered(torch.tensor([rank, 10 * rank]), ranks).tolist())
    assert rows == [[[0, 0], [1, 10], [2, 20]]] * 3
