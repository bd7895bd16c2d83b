"""Mixing matrices, and what is refused."""

import numpy as np
import pytest

from lightning_compress.gossip.build import build_algorithm
from lightning_compress.gossip.topology import TOPOLOGIES, Topology, build_topology, metropolis

SIZES = [1, 2, 3, 4, 5, 8, 16]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_agrees_in_the_end(name, size):
    if name == "one_peer" and size & (size - 1):
        with pytest.raises(ValueError, match=r"pairs 2, 4, 8, .* ranks"):
            build_topology(name, size)
        return
    made = build_topology(name, size)
    product = np.eye(size)
    for number in range(400):
        product = made.matrices[number % len(made.matrices)] @ product
    assert np.abs(product - 1 / size).max() < 1e-3
    assert made.gap > 0
    assert made.directed == (size > 2 and name in ("directed_ring", "one_peer_exponential"))
    for rank in range(size):
        for number in range(len(made.matrices)):
            senders = made.weights(rank, number)
            assert all(rank in made.targets(peer, number) for peer in senders)
            assert made.kept(rank, number) == pytest.approx(1 - sum(senders.values()))
            if not made.directed:
                assert made.targets(rank, number) == list(senders)
                assert all(made.weights(peer, number)[rank] == weight for peer, weight in senders.items())


def test_known_gaps():
    ring = build_topology("ring", 8)
    assert ring.gap == pytest.approx(1 - (1 + 2 * np.cos(np.pi / 4)) / 3)
    assert ring.least == pytest.approx(-1 / 3)
    assert build_topology("complete", 5).gap == pytest.approx(1)
    assert build_topology("one_peer", 8).gap == pytest.approx(1)  # the mean after three rounds
    assert "spectral gap 0.195" in ring.describe()
    assert [len(build_topology("exponential", 8).weights(rank, 0)) for rank in range(8)] == [5] * 8
    assert build_topology("star", 6).weights(3, 0).keys() == {0}


def test_weights_of_any_graph():
    edges = np.zeros((4, 4))
    for one, other in ((0, 1), (1, 2), (2, 3), (1, 3)):
        edges[one, other] = edges[other, one] = 1
    assert build_topology(metropolis(edges), 4).gap > 0


def test_matrices_from_files(tmp_path):
    matrix = build_topology("star", 3).matrices[0]
    np.savetxt(tmp_path / "star.txt", matrix)
    np.savetxt(tmp_path / "star.csv", matrix, delimiter=",")
    np.save(tmp_path / "two.npy", np.stack([matrix, np.eye(3)]))
    for name, rounds in (("star.txt", 1), ("star.csv", 1), ("two.npy", 2)):
        made = build_topology(str(tmp_path / name), 3)
        assert len(made.matrices) == rounds
        np.testing.assert_allclose(made.matrices[0], matrix)
    lazy = build_topology({"name": str(tmp_path / "star.txt"), "lazy": True}, 3)
    np.testing.assert_allclose(lazy.matrices[0], (matrix + np.eye(3)) / 2)


HALF = [[0.5, 0.5], [0.5, 0.5]]
BAD = {
    "no such": ("nosuch", "is no file, and none of ring"),
    "columns": ([[0.6, 0.5], [0.5, 0.5]], "column 0 sums to 1.1, and must sum to 1 .* divides what it sends$"),
    "rows": ([[0.9, 0.1], [0.2, 0.8]], "column 0 sums to 1.1.* yours has rows that sum to 1: transpose it"),
    "negative": ([[1.5, -0.5], [-0.5, 1.5]], "0 or more"),
    "nan": ([[float("nan"), 1], [1, 0]], "finite"),
    "not connected": ([[1, 0], [0, 1]], "not connected.* nothing of rank 0 comes to rank 1; add edges"),
    "not there": ([[1, 0.5], [0, 0.5]], "not connected.* nothing of rank 0 comes to rank 1"),
    "not back": ([[0.5, 0], [0.5, 1]], "not connected.* nothing of rank 1 comes to rank 0"),
    "not square": ([[0.5, 0.5]], "must be square"),
    "no numbers": ([["a", "b"], ["b", "a"]], "no numbers"),
    "a vector": ([0.5, 0.5], "two dimensions"),
    "settings": ({"name": "ring", "lazy": "very"}, "true or false"),
    "unknown": ({"name": "ring", "lasy": True}, "give 'name'"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case):
    given, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        build_topology(given, len(given) if isinstance(given, list) else 2)


def test_directed_graphs_are_for_algorithms_that_take_them():
    swaps = build_topology([[0, 1, 0], [0, 0, 1], [1, 0, 0]], 3)
    with pytest.raises(
        ValueError, match=r"weight of 0 and 1 is 1 one way and 0 the other. For algorithm dpsgd it must"
    ):
        build_algorithm("dpsgd").fit_topology(swaps, None)
    assert swaps.gap == pytest.approx(0, abs=1e-9)  # models would go round for ever


def test_refused_files(tmp_path):
    (tmp_path / "words.txt").write_text("one two\n")
    with pytest.raises(ValueError, match="cannot be read as a matrix"):
        build_topology(tmp_path / "words.txt", 2)
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="cannot be read as a matrix"):
        build_topology(tmp_path / "objects.npy", 2)


def test_both_sides_of_an_edge_see_it():
    """What an optimiser of matrices leaves of an edge, one way: nobody may wait for an answer to it."""
    matrix = build_topology("ring", 4).matrices[0].copy()
    matrix[0, 2], matrix[1, 0] = 5e-10, matrix[1, 0] + 3e-10
    made = build_topology(matrix, 4)
    for rank in range(4):
        assert all(made.weights(peer, 0)[rank] == weight for peer, weight in made.weights(rank, 0).items())
        assert len(made.weights(rank, 0)) == 2


def test_an_empty_file(tmp_path):
    (tmp_path / "empty.npy").touch()
    with pytest.raises(ValueError, match="cannot be read as a matrix"):
        build_topology(tmp_path / "empty.npy", 2)


def test_another_number_of_ranks():
    with pytest.raises(ValueError, match="is of 2 ranks, and this run has 3"):
        build_topology(HALF, 3)
    with pytest.raises(ValueError, match="at least one matrix"):
        Topology("nothing", ())


def test_d2_needs_more_than_minus_a_third():
    d2, ring = build_algorithm("d2"), build_topology("ring", 8)
    with pytest.raises(ValueError, match=r"smallest eigenvalue is -0\.33.* 'lazy': True"):
        d2.fit_topology(ring, False)
    assert d2.fit_topology(ring, None).least >= -1e-9  # made lazy, as it must be
    assert d2.fit_topology(build_topology("ring", 3), None).name == "ring"


@pytest.mark.parametrize("name", ["d2", "choco", "dcd", "ecd"])
def test_sums_over_neighbours_need_the_same_ones(name):
    with pytest.raises(ValueError, match="has others in each round"):
        build_algorithm(name).fit_topology(build_topology("one_peer", 4), None)
