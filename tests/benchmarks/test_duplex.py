"""The time of collectives over that of their bytes: measured, in a table, and not of one rank."""

import sys

import pytest

from benchmarks import duplex
from tests.helpers.labs import forked_ranks, root


@root
def test_it_is_measured(capsys, monkeypatch):
    words = ["duplex", "--ranks", "2", "--rates", "50mbit", "--megabytes", "0.3", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", words)
    with forked_ranks():
        duplex.main()
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("50mbit", "all_reduce", "all_to_all", "all_gather"))


def test_one_rank_is_refused():
    with pytest.raises(ValueError, match="one rank sends nothing"):
        duplex.ratios(1, "50mbit", 1000, 1)
