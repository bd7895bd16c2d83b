"""One allocator for scratch memory: who shares it, how long it is valid, and when it is freed."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_compress.core.workspace import Workspace, release, scratch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def workspace():
    with (made := Workspace()).used():
        yield made


def take(name, numel):
    return scratch(name, numel, torch.float32, CPU)


def test_users_of_a_name_share_memory_and_it_grows():
    first = take("a", 100)
    assert take("a", 60).data_ptr() == first.data_ptr()
    assert len(take("a", 60)) == 60
    assert take("b", 60).data_ptr() != first.data_ptr()
    larger = take("a", 200)
    assert len(larger) == 200
    assert len(first) == 100
    assert take("a", 100).data_ptr() == larger.data_ptr() != first.data_ptr()


def test_the_smaller_memory_is_free_before_there_is_a_larger_one(monkeypatch):
    held = StorageWeakRef(take("a", 100).untyped_storage())
    empty = torch.empty

    def watched(*given, **options):
        assert held.expired()
        return empty(*given, **options)

    monkeypatch.setattr(torch, "empty", watched)
    assert len(take("a", 200)) == 200


@pytest.mark.parametrize(("names", "kept"), [(["a"], {"b"}), (["a", "c"], {"b"}), ([], set())])
def test_release(names, kept):
    before = {name: take(name, 100) for name in "ab"}
    release(*names)
    assert {name for name, memory in before.items() if take(name, 100).data_ptr() == memory.data_ptr()} == kept


def test_workspaces_are_of_models_and_otherwise_of_threads():
    ours = take("a", 100)
    with Workspace().used():
        theirs = take("a", 100)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        of_threads = [each.submit(take, "a", 100).result() for each in (one, other)]
    assert len({each.data_ptr() for each in (ours, theirs, *of_threads)}) == 4
    assert take("a", 100).data_ptr() == ours.data_ptr()
