"""Print what compressors there are."""

from __future__ import annotations

import inspect
from json import dumps
from typing import Any, Literal

from lightning_compress.commands.uses import USES

KINDS: tuple[Literal["sgd", "adam", "muon"], ...] = ("sgd", "adam", "muon")
SIDE = 1024
"""Rows and columns of the matrix of which the bits are."""


def compressors(contrib: bool = False, json: bool = False) -> None:
    """Print all compressors: bits per element, what they cost in quality, and when to use them.

    Args:
        contrib: also those that stand here for comparison.
        json: print JSON instead of a table.
    """
    from rich.console import Console
    from rich.table import Table

    from lightning_compress.settings.compensation import MEASURED
    from lightning_compress.settings.parsing import COMPRESSORS

    names = [each for each in COMPRESSORS.choices if contrib or ".contrib." not in COMPRESSORS[each].__module__]
    found = [described(name) for name in names]
    if json:
        print(dumps(found, indent=2))
        return
    table = Table()
    for title in ("name", "bits", *(f"loss, {MEASURED[kind]}" for kind in KINDS), "when to use it"):
        table.add_column(title, no_wrap=title != "when to use it")
    for each in found:
        bits = "" if each["bits"] is None else f"{each['bits']:.3g}"
        losses = ("" if loss is None else f"{loss:+g} %" for loss in (each[kind] for kind in KINDS))
        table.add_row(each["name"], bits, *losses, each["use"])
    console = Console()
    console.print(table)
    console.print(
        "bits: of a message, per element, with the default settings. loss: above that of float32 in our runs (a "
        "character LSTM: lightning-compress docs accuracy; with Muon a character GPT: lightning-compress docs choose); "
        "empty: not measured.",
        highlight=False,
    )


def described(name: str) -> dict[str, Any]:
    """Return a row: name, bits per element or None, percent of loss by optimizer or None, and when to use it."""
    import torch

    from lightning_compress.codecs import Codec
    from lightning_compress.core.layout import Layout
    from lightning_compress.corrections import Corrected
    from lightning_compress.settings.compensation import automatic, loss_of
    from lightning_compress.settings.parsing import COMPRESSORS

    cls = COMPRESSORS[name]
    built = cls()
    codec = built.codec if isinstance(built, Corrected) else built
    bits = None
    losses: dict[str, float | None] = dict.fromkeys(KINDS)
    if isinstance(codec, Codec):
        sample = Layout.of([("weight", (SIDE, SIDE))])
        bits = 8 * codec.plan(sample, torch.device("cpu")).expected_size / sample.numel
    if isinstance(built, Codec):
        losses |= {kind: loss_of(built, kind, automatic(built, kind)) for kind in KINDS}
    own = (inspect.getdoc(cls) or "").partition("\n")[0].replace("`", "")  # of a package's own compressor
    return {"name": name, "bits": bits, **losses, "use": USES.get(name, own)}
