"""The command line: ``lightning-compress``, or ``python -m lightning_compress``."""

from __future__ import annotations

import sys

from jsonargparse import auto_cli

from lightning_compress.commands.advise import advise

COMMANDS = {"advise": advise}


def main() -> None:
    """Run a command; what is wrong with its arguments is said in a line."""
    try:
        auto_cli(COMMANDS, as_positional=False, prog="lightning-compress")
    except ValueError as error:
        sys.exit(f"lightning-compress: {error}")


if __name__ == "__main__":
    main()
