"""``AsyncGossip`` under its documented name; it is imported from contrib on first use."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_compress.contrib.asynchronous.async_gossip import AsyncGossip

__all__ = ["AsyncGossip"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("lightning_compress.contrib.asynchronous.async_gossip"), name)
