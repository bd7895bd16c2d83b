"""The page of the strategies: what each takes, with its defaults, and what each argument means."""

from __future__ import annotations

import inspect

import lightning_compress
from lightning_compress.asynchronous.async_gossip import AsyncGossip
from lightning_compress.periodic import Gossip, LocalSGD
from lightning_compress.strategies.periodic import PeriodicStrategy
from tools.docstring import Docstring

START = """# Strategies

Give one to `Trainer(strategy=...)`. Each is registered by name, too: `"compressed_ddp"`,
`"compressed_ddp_<compressor>"`, `"compressed_fsdp"`, `"compressed_fsdp_<compressor>"`, `"local_sgd"`,
`"post_local_sgd"`, `"diloco"`, `"muloco"`, `"sparseloco"`, `"gossip"`, `"gossip_<algorithm>"`, `"async_gossip"`.

During a fit and after it, each has `comm_stats()`, [the figures](figures.md) of the last step and in total, `report()`,
the lines that it logs at the end, and `compression`, [the handle](plain.md) of what is averaged.
"""
ARGUMENTS: dict[str, tuple[type, ...]] = {
    "CompressedDDPStrategy": (),
    "CompressedFSDPStrategy": (lightning_compress.CompressedDDPStrategy,),
    "SyncFSDPAccumulation": (),
    "LocalSGDStrategy": (LocalSGD, PeriodicStrategy, lightning_compress.CompressedDDPStrategy),
    "GossipStrategy": (Gossip, PeriodicStrategy),
    "AsyncGossipStrategy": (AsyncGossip, PeriodicStrategy),
    "Moniqua": (),
}
"""The classes on the page, and the other ones whose docstrings describe their arguments."""


def strategies(note: str) -> str:
    """Return the page; ``note`` says that it is made."""
    return "\n\n".join([START + "\n" + note.strip(), *(section(name) for name in ARGUMENTS)]) + "\n"


def section(name: str) -> str:
    """Return a class's signature, text, arguments and errors."""
    cls = getattr(lightning_compress, name)
    said = Docstring.of(cls)
    parts = [f"## {name}", said.summary, f"```python\n{signature(cls)}\n```", said.text, table(cls, ARGUMENTS[name])]
    return "\n\n".join(filter(None, [*parts, said.raises and f"Raises {said.raises}", said.sources]))


def signature(cls: type) -> str:
    """Return a class's call as it can be run, with all defaults."""
    given = inspect.signature(cls).parameters.values()
    lines = [f"{each.name}={each.default!r},".replace("'", '"') for each in given if each.default is not each.empty]
    text = "\n    ".join(["", *lines]) + "\n" if lines else ""
    return f"from lightning_compress import {cls.__name__}\n\n{cls.__name__}({text})"


def table(cls: type, others: tuple[type, ...]) -> str:
    """Return the table of a class's arguments, by its own docstring or those of ``others``."""
    meanings: dict[str, str] = {}
    for described in (*reversed(others), cls):
        meanings |= Docstring.of(described).arguments
    rows = []
    for each in inspect.signature(cls).parameters.values():
        meaning = meanings.get(each.name) or meanings.get("kwargs" if each.kind is each.VAR_KEYWORD else "options", "")
        assert meaning, f"{cls.__name__} has an argument {each.name} that no docstring describes"
        rows.append(f"| `{each.name}` | {cell(meaning)} |")
    return "\n".join(["| argument | meaning |", "| --- | --- |", *rows]) if rows else ""


def cell(text: str) -> str:
    """Return text for a cell of a table, with a list's items on lines of their own."""
    return text.replace("|", r"\|").replace(" - ", "<br>- ")
