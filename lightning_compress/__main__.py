"""The command line: ``lightning-compress``, or ``python -m lightning_compress``."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

COMMANDS = ("advise", "doctor", "link", "compare", "compressors", "docs")
"""Each is a function in the module of ``lightning_compress.commands`` that is named like it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what is wrong with its arguments is said in one line.

    Args:
        arguments: of the command line; None: ``sys.argv``.
    """
    words = sys.argv[1:] if arguments is None else arguments
    first = words[0] if words else "--help"
    needed = [first] if first in (*COMMANDS, "-h", "--help") else COMMANDS  # else a file may name any of them
    try:
        auto_cli(
            [command(name) if name in needed else only_described(name) for name in COMMANDS],
            args=spelled(words),
            prog="lightning-compress",
        )
    except ValueError as error:
        sys.exit(f"lightning-compress: {error}")


def command(name: str) -> Callable[..., Any]:
    """Return the function of a command.

    Args:
        name: one of ``COMMANDS``.
    """
    function: Callable[..., Any] = getattr(import_module(f"lightning_compress.commands.{name}"), name)
    return function


def only_described(name: str) -> Callable[[], None]:
    """Return what stands in the help for a command that does not run. The imports of those that run take seconds.

    Args:
        name: one of ``COMMANDS``.
    """

    def function() -> None: ...

    source = Path(__file__).with_name("commands") / f"{name}.py"
    parts = ast.parse(source.read_text()).body
    real = next(each for each in parts if isinstance(each, ast.FunctionDef) and each.name == name)
    function.__name__, function.__doc__ = name, ast.get_docstring(real)
    return function


def spelled(words: Sequence[str]) -> list[str]:
    """Return the words of a command line as jsonargparse reads them.

    It wants a value after each option and underscores in names; people write ``--serve`` and ``--expect-gbit 1``.
    """
    if not words or words[0] not in COMMANDS:
        return list(words)
    parameters = inspect.signature(command(words[0])).parameters
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
