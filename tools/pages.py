"""Write the pages of the documentation, and a picture, that are made from the code: ``python -m tools.pages``."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_compress.__main__ import COMMANDS, command
from lightning_compress.codecs import Codec
from lightning_compress.commands.compressors import described
from lightning_compress.commands.uses import USES
from lightning_compress.corrections import Corrected
from lightning_compress.corrections.loco import LoCo
from lightning_compress.gossip.moniqua import Moniqua
from lightning_compress.reducers import Reducer
from lightning_compress.settings.automatic import Automatic
from lightning_compress.settings.compensation import automatic
from lightning_compress.settings.parsing import COMPRESSORS
from tools import chooser
from tools.docstring import Docstring
from tools.signatures import strategies

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
NOTE = "<!-- Made by `python -m tools.pages` from the code. Do not edit. -->\n\n"
FEEDBACK = {"classical": "a residual", "none": "off"}


def compressor_cards() -> str:
    """Return the page with a card for each compressor."""
    found = COMPRESSORS.choices
    core = [name for name in found if ".contrib." not in COMPRESSORS[name].__module__]
    names = core + sorted(set(found) - set(core))  # those of contrib come in the order of their first use
    cards = {name: card(name, COMPRESSORS[name]) for name in names} | {"moniqua": card("moniqua", Moniqua)}
    lists = [
        " · ".join(f"[`{name}`](#{name})" for name in group)
        for group in ([*core, "moniqua"], [name for name in names if name not in core])
    ]
    return (
        "# Compressor cards\n\n"
        + NOTE
        + "Each card is made from the compressor's class. Which one to take: [Choose a compressor](../choose.md).\n\n"
        + f"Core: {lists[0]}\n\nFor comparison: {lists[1]}\n\n"
        + "Bits are those of a message per element, for a matrix of 1024 x 1024. Losses are the held-out loss above "
        + "float32's of a character LSTM after 300 steps [on 2 ranks](../results/accuracy.md). Those of `onebit` and "
        + "`efsign` are [on 4 ranks](../results/below-four-bits.md), and after 1,500 steps with AdamW. Both are of the "
        + "default settings.\n\n"
        + "\n".join(cards.values())
    )


def card(name: str, cls: type) -> str:
    """Return the card of a compressor."""
    said = Docstring.of(cls)
    facts = facts_of(name, cls)
    first, *others = (f"| {fact} | {value} |" for fact, value in facts.items())
    table = "\n".join([first, "| --- | --- |", *others])
    parts = [f"## {name}", USES.get(name, ""), table, said.summary, settings_of(cls, said), said.text, said.sources]
    return "\n\n".join(filter(None, parts)) + "\n"


def facts_of(name: str, cls: type) -> dict[str, str]:
    """Return what there is to know about a compressor, by fact."""
    built = cls()
    found = {"write": f"`CompressedDDPStrategy({example(name, built)})`", "class": f"`{cls.__module__}.{cls.__name__}`"}
    if cls is Moniqua:
        return found | {"write": f"`GossipStrategy(compressor={example(name, built)})`", "bits": "`bits`, and hashes"}
    if isinstance(built, Automatic):
        return found | {"write": '`CompressedDDPStrategy("auto")`', "bits": "32, 16, 8.1 or 4.1"}
    row = described(name)
    found["bits"] = f"{row['bits']:.3g}" if row["bits"] is not None else "by shape: see below"
    found["kind"] = kind_of(built)
    found["error feedback"] = feedback_of(built)
    losses = {"SGD with momentum": row["sgd"], "AdamW": row["adam"], "Muon": row["muon"]}
    if known := [f"{loss:+g} % ({optimizer})" for optimizer, loss in losses.items() if loss is not None]:
        found["more loss"] = ", ".join(known)
    found["kernels"] = kernels_of(cls)
    return found


def example(name: str, built: object) -> str:
    """Return what to write for a compressor, with its first setting."""
    fields = [each for each in dataclasses.fields(typing.cast(Any, built)) if not each.name.startswith("_")]
    if not fields:
        return f'"{name}"'
    value = getattr(built, fields[0].name)
    plain = isinstance(value, (int, float, str)) or value is None
    return f'{{"name": "{name}", "{fields[0].name}": {value!r}}}'.replace("'", '"') if plain else f'"{name}"'


def kind_of(built: object) -> str:
    """Return in words what exchanges may do with a compressor's messages."""
    if isinstance(built, Reducer):
        return "a reducer: it issues its own collectives, and leaves the mean"
    if isinstance(built, Corrected):
        return "a correction of gradients, and a codec for what it makes of them"
    assert isinstance(built, Codec)
    words = ["biased" if built.contractive else "exact to rounding" if built.sum_dtype else "unbiased"]
    words += ["sparse"] * built.sparse + ["summed by an all-reduce"] * (built.sum_dtype is not None)
    return "a codec: " + ", ".join(words)


def feedback_of(built: Any) -> str:
    """Return what happens by default to the part that is not sent, by optimizer."""
    if isinstance(built, Corrected):
        return "part of the method"
    ways = [automatic(built, kind) for kind in (None, "sgd", "adam")]
    words = ["LoCo" if isinstance(way, LoCo) else FEEDBACK[str(way)] for way in ways]
    if len(set(words)) == 1:
        return words[0]
    return f"{words[1]} with SGD, {words[2]} with Adam, else {words[0]}"


def kernels_of(cls: type) -> str:
    """Return which compiled kernels lie beside a class."""
    own = Path(inspect.getfile(cls))
    found = [
        said for kind, said in (("numba", "CPU (numba)"), ("triton", "GPU (Triton)")) if beside(own, kind).exists()
    ]
    return ", ".join(found) or "none: tensor operations"


def beside(module: Path, kind: str) -> Path:
    """Return where the kernels of a module would be."""
    return module.with_name(f"{module.stem}_{kind}.py")


def settings_of(cls: type, said: Docstring) -> str:
    """Return the table of a compressor's settings."""
    fields = [each for each in dataclasses.fields(cls) if each.name in said.arguments]
    rows = [f"| `{each.name}` | `{default_of(each)}` | {cell(said.arguments[each.name])} |" for each in fields]
    return "\n".join(["| setting | default | meaning |", "| --- | --- | --- |", *rows]) if rows else ""


def default_of(field: dataclasses.Field[Any]) -> object:
    """Return a field's default as it is written."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return repr(field.default) if field.default is not dataclasses.MISSING else "required"


def cell(text: str) -> str:
    """Return text that stays inside of its cell; in code a bar does no harm."""
    parts = re.split(r"(`.+?`)", text)
    return "".join(each if each.startswith("`") else each.replace("|", r"\|") for each in parts)


def command_line() -> str:
    """Return the page of the command line."""
    parts = [
        "# Command line",
        NOTE.strip(),
        "`lightning-compress COMMAND`, or `python -m lightning_compress COMMAND`. `--help` lists the options.",
        "\n".join(
            ["| command | what it does |", "| --- | --- |"]
            + [f"| [`{name}`](#{name}) | {Docstring.of(command(name)).summary} |" for name in COMMANDS]
        ),
    ]
    return "\n\n".join([*parts, *map(command_of, COMMANDS)]) + "\n"


def command_of(name: str) -> str:
    """Return the section of a command."""
    said = Docstring.of(command(name))
    rows = []
    for each in inspect.signature(command(name)).parameters.values():
        given = each.default is not inspect.Parameter.empty
        option = f"--{each.name.replace('_', '-')}" if given else each.name.upper()
        default = "required" if not given else "" if each.default in (None, False) else f"`{each.default}`"
        rows.append(f"| `{option}` | {default} | {cell(said.arguments.get(each.name, ''))} |")
    table = "\n".join(["| option | default | meaning |", "| --- | --- | --- |", *rows])
    return "\n\n".join(filter(None, [f"## {name}", said.summary, said.text, table]))


def contributing() -> str:
    """Return CONTRIBUTING.md, with links as they are within docs/."""
    return re.sub(r"\]\(docs/", "](", (ROOT / "CONTRIBUTING.md").read_text())


PAGES: dict[str, Callable[[], str]] = {
    "reference/compressors.md": compressor_cards,
    "reference/command-line.md": command_line,
    "reference/strategies.md": lambda: strategies(NOTE),
    "contributing.md": contributing,
    "chooser.svg": chooser.picture,
}
"""What makes each page, by its path under docs/."""


def main() -> int:
    """Write all pages.

    Returns:
        the exit status.
    """
    for path, made in PAGES.items():
        (DOCS / path).write_text(made())
        print(f"docs/{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
