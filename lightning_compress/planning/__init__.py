"""One decision: what the link and the codecs can do, what each way would take, and what runs."""

from __future__ import annotations

from lightning_compress.planning.choose import Auto

__all__ = ["Auto"]
