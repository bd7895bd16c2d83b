"""Print what compressors there are."""

from __future__ import annotations

import inspect
from json import dumps
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lightning_compress.codecs import Codec
from lightning_compress.core.layout import Layout
from lightning_compress.corrections import Corrected
from lightning_compress.settings.compensation import MEASURED, Optimizer, automatic, loss_of
from lightning_compress.settings.parsing import COMPRESSORS

KINDS: tuple[Optimizer, ...] = ("sgd", "adam", "muon")
SAMPLE = Layout.of([("weight", (1024, 1024))])


def compressors(contrib: bool = False, json: bool = False) -> None:
    """Print all compressors: bits per element, what they cost in quality, and what they are.

    Args:
        contrib: also those that stand here for comparison.
        json: print JSON instead of a table.
    """
    names = [each for each in COMPRESSORS.choices if contrib or ".contrib." not in COMPRESSORS[each].__module__]
    found = [described(name) for name in names]
    if json:
        print(dumps(found, indent=2))
        return
    table = Table()
    for title in ("name", "bits", *(f"loss, {MEASURED[kind]}" for kind in KINDS), "what it does"):
        table.add_column(title, no_wrap=title != "what it does")
    for each in found:
        bits = "" if each["bits"] is None else f"{each['bits']:.3g}"
        losses = ("" if loss is None else f"{loss:+g} %" for loss in (each[kind] for kind in KINDS))
        table.add_row(each["name"], bits, *losses, each["text"])
    console = Console()
    console.print(table)
    console.print(
        "bits: of a message, per element, with the default settings. loss: above that of float32 in our runs (a "
        "character LSTM: lightning-compress docs accuracy; with Muon a character GPT: lightning-compress docs choose); "
        "empty: not measured.",
        highlight=False,
    )


def described(name: str) -> dict[str, Any]:
    """Return a row: name, bits per element or None, percent of loss by optimizer or None, and a line of text."""
    cls = COMPRESSORS[name]
    built = cls()
    codec = built.codec if isinstance(built, Corrected) else built
    bits = None
    losses: dict[str, float | None] = dict.fromkeys(KINDS)
    if isinstance(codec, Codec):
        bits = 8 * codec.plan(SAMPLE, torch.device("cpu")).expected_size / SAMPLE.numel
    if isinstance(built, Codec):
        losses |= {kind: loss_of(built, kind, automatic(built, kind)) for kind in KINDS}
    text = (inspect.getdoc(cls) or "").partition("\n")[0]
    return {"name": name, "bits": bits, **losses, "text": text}
