"""The command line: ``lightning-compress``, or ``python -m lightning_compress``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from jsonargparse import auto_cli

from lightning_compress import __version__
from lightning_compress.commands.words import Parser, spelled

COMMANDS = {
    "advise": "advise",
    "doctor": "doctor",
    "link": "link",
    "compare": "compared",  # jsonargparse would look for a ``compare`` in our package, and so import torch
    "compressors": "compressors",
    "docs": "docs",
}
"""Commands, and their functions in the module of ``lightning_compress.commands`` that is named like the command. These
modules import what takes long, such as torch, when the function runs: help must come at once."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what is wrong with its arguments is said in one line.

    Args:
        arguments: of the command line; None: ``sys.argv``.
    """
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if words[0] in COMMANDS:
        words = spelled(words, command(words[0]))
    functions: Any = {name: command(name) for name in COMMANDS}
    try:
        auto_cli(functions, args=words, prog="lightning-compress", parser_class=Parser, version=__version__)
        sys.stdout.flush()
    except ValueError as error:
        sys.exit(f"lightning-compress: {error}")
    except BrokenPipeError:  # its reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails to flush at its end
        sys.exit(141)


def command(name: str) -> Callable[..., Any]:
    """Return the function of a command.

    Args:
        name: one of ``COMMANDS``.
    """
    function: Callable[..., Any] = getattr(import_module(f"lightning_compress.commands.{name}"), COMMANDS[name])
    return function


if __name__ == "__main__":
    main()
