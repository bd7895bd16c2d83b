"""Two buffers: commit, roll back, partial commits, and moving by name."""

import pytest
import torch

from lightning_compress.core.layout import Layout
from lightning_compress.core.state import State

LAYOUT = Layout.of([("a", (3,)), ("b", (2, 2)), ("c", (5,))])
SOUND, UNSOUND = torch.tensor(False), torch.tensor(True)


@pytest.fixture
def residual():
    """Committed 0, 1, ... 11; pending 100 more."""
    made = State(LAYOUT, torch.device("cpu"))
    made.committed.copy_(torch.arange(12.0))
    made.pending.copy_(made.committed + 100)
    made.touch()
    return made


def test_a_commit_swaps_references(residual):
    pending = residual.pending
    residual.commit(SOUND, {"a", "b", "c", "other"})
    assert residual.committed is pending
    assert residual.base() is pending


def test_a_rejected_commit_and_a_roll_back_change_nothing(residual):
    residual.commit(UNSOUND, {"a", "b", "c"})
    assert residual.base().tolist() == list(range(12))
    residual.touch()
    residual.roll_back()
    residual.commit(SOUND, {"a", "b", "c"})
    assert residual.committed.tolist() == list(range(12))


def test_what_is_discarded_leaves_the_others_pending(residual):
    residual.discard({"b", "other"})
    assert residual.touched == {"a", "c"}
    assert residual.base().tolist() == [100, 101, 102, 3, 4, 5, 6, 107, 108, 109, 110, 111]
    residual.decay(0.5)
    assert residual.base().tolist() == [100, 101, 102, 1.5, 2, 2.5, 3, 107, 108, 109, 110, 111]
    residual.scale({"a": 3.0})
    assert residual.base().tolist()[:3] == [100, 103, 106]
    assert residual.committed.tolist()[:4] == [0, 3, 6, 3]


def test_each_optimizer_commits_its_own(residual):
    residual.commit(SOUND, {"b"})
    assert residual.committed.tolist() == [0, 1, 2, 103, 104, 105, 106, 7, 8, 9, 10, 11]
    assert residual.base() is residual.pending
    residual.commit(SOUND, {"b"})
    residual.commit(SOUND, {"a", "c"})
    assert residual.committed.tolist() == [100.0 + value for value in range(12)]
    assert not residual.touched


def test_one_optimizer_is_rejected_and_another_is_not(residual):
    residual.commit(UNSOUND, {"a", "c"})
    residual.commit(SOUND, {"b"})
    assert residual.committed.tolist() == [0, 1, 2, 103, 104, 105, 106, 7, 8, 9, 10, 11]
    residual.commit(SOUND, {"a", "c"})
    assert residual.committed.tolist() == [0, 1, 2, 103, 104, 105, 106, 7, 8, 9, 10, 11]


def test_what_no_optimizer_stepped_is_forgotten(residual):
    residual.commit(SOUND, {"a"})
    residual.roll_back()
    assert residual.base().tolist() == [100, 101, 102, 3, 4, 5, 6, 7, 8, 9, 10, 11]


def test_residuals_move_by_name(residual):
    new = State(Layout.of([("c", (5,)), ("b", (2, 2)), ("d", (1,))]), torch.device("cpu"))
    new.adopt(residual, {"b", "c"})
    assert new.committed.tolist() == [7, 8, 9, 10, 11, 3, 4, 5, 6, 0]
    assert new.base().tolist() == [107, 108, 109, 110, 111, 103, 104, 105, 106, 0]
    new.roll_back()
    assert new.base().tolist() == new.committed.tolist()
