"""What a run of the tests leaves to other weeks runs in one of them."""

from itertools import product

import pytest

from tests import turns


class Item:
    """A test as pytest collects it."""

    fixturenames = ()

    def __init__(self, nodeid):
        self.nodeid = nodeid
        self.marks = []

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark):
        self.marks.append(mark)


def run_in(turn, names, monkeypatch):
    """Which of the cases run in a turn."""
    monkeypatch.setattr(turns, "TURN", turn)
    items = [Item(name) for name in names]
    turns.mark_thorough(items)
    return [item.nodeid for item in items if not item.marks]


@pytest.mark.parametrize(
    ("cases", "share", "runs"), [(7, 3, {2, 3}), (2, 3, {1}), (1, 3, {1}), (5, 1, {5}), (4, 0, {0})]
)
def test_every_case_has_its_turn(monkeypatch, cases, share, runs):
    monkeypatch.setattr(turns, "EVERY", {"folder": share})
    names = [f"tests/folder/test_it.py::test_it[{number}]" for number in range(cases)]
    taken = [run_in(turn, names, monkeypatch) for turn in range(12)]
    assert {len(each) for each in taken} == runs
    assert {name for each in taken for name in each} == (set(names) if share else set())


def test_the_tests_of_a_file_may_take_turns(monkeypatch):
    monkeypatch.setattr(turns, "EVERY", {"a.py::*": 2, "a.py::test_always": 1})
    always, one, two, again, other = (
        f"tests/{name}"
        for name in ("a.py::test_always", "a.py::test_1", "a.py::test_2[x]", "a.py::test_2[y]", "b.py::t")
    )
    taken = [run_in(turn, [always, one, two, again, other], monkeypatch) for turn in range(2)]
    assert taken == [[always, one, again, other], [always, two, other]]


def test_every_size_has_its_turn(monkeypatch):
    taken = set()
    for turn in range(4):
        monkeypatch.setattr(turns, "TURN", turn)
        now = [tuple(each.values) for each in turns.by_turns("abc", (2, 3, 4, 8), 1) if not each.marks]
        assert [name for name, _ in now] == ["a", "b", "c"]
        taken.update(now)
    assert taken == set(product("abc", (2, 3, 4, 8)))


def test_any_two_values_meet_in_every_turn_and_turns_differ(monkeypatch):
    rows = [*product("abcd", range(5), (True, False))]
    covers = []
    for turn in range(3):
        monkeypatch.setattr(turns, "TURN", turn)
        covers.append(turns.pairwise(rows))
    for cover in covers:
        assert {row[:2] for row in cover} == set(product("abcd", range(5)))
        assert {row[::2] for row in cover} == set(product("abcd", (True, False)))
        assert {row[1:] for row in cover} == set(product(range(5), (True, False)))
        assert len(cover) <= 24
    assert covers[0] != covers[1]


@pytest.mark.parametrize(("share", "count"), [*product([2, 3, 4, 6, 12], [2, 3, 4])])
def test_every_size_of_every_name_has_its_turn(monkeypatch, share, count):
    """Of names that take turns themselves, too."""
    monkeypatch.setattr(turns, "EVERY", {"folder": share})
    names, sizes, taken = [f"tests/folder/test_it.py::test_it[{each}]" for each in range(24)], range(count), set()
    for turn in range(144):
        run = run_in(turn, names, monkeypatch)
        pairs = turns.by_turns(names, sizes, 1)
        taken |= {each.values for each in pairs if not each.marks and each.values[0] in run}
    assert taken == {*product(names, sizes)}
