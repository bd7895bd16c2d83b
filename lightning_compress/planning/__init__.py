"""One decision: measure the link and the codecs, predict the cost of each exchange, choose one, and say what runs."""

from __future__ import annotations

from lightning_compress.planning.choose import Auto

__all__ = ["Auto"]
