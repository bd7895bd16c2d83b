"""The command line: ``lightning-compress``, or ``python -m lightning_compress``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import auto_cli

from lightning_compress.commands.advise import advise
from lightning_compress.commands.compare import compare
from lightning_compress.commands.compressors import compressors
from lightning_compress.commands.doctor import doctor
from lightning_compress.commands.link import link

COMMANDS: dict[str, Callable[..., Any]] = {
    "advise": advise,
    "doctor": doctor,
    "link": link,
    "compare": compare,
    "compressors": compressors,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what is wrong with its arguments is said in one line.

    Args:
        arguments: of the command line; None: ``sys.argv``.
    """
    try:
        auto_cli(
            list(COMMANDS.values()),
            args=spelled(sys.argv[1:] if arguments is None else arguments),
            prog="lightning-compress",
        )
    except ValueError as error:
        sys.exit(f"lightning-compress: {error}")


def spelled(words: Sequence[str]) -> list[str]:
    """Return the words of a command line as jsonargparse reads them.

    It wants a value after each option and underscores in names; people write ``--serve`` and ``--expect-gbit 1``.
    """
    command = COMMANDS.get(words[0]) if words else None
    if command is None:
        return list(words)
    parameters = inspect.signature(command).parameters
    found: list[str] = []
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        name, equals, value = word.partition("=")
        option = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and option in parameters:
            found.append(f"--{option}{equals}{value}")
            if parameters[option].annotation == "bool" and not equals and after.lower() not in ("true", "false"):
                found.append("true")
        else:
            found.append(word)
    return found


if __name__ == "__main__":
    main()
