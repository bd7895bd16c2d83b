"""The command line: ``lightning-compress``, or ``python -m lightning_compress``."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from jsonargparse import auto_cli

from lightning_compress.commands.advise import advise
from lightning_compress.commands.compare import compare
from lightning_compress.commands.compressors import compressors
from lightning_compress.commands.link import link

COMMANDS = {"advise": advise, "link": link, "compare": compare, "compressors": compressors}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what is wrong with its arguments is said in one line.

    Args:
        arguments: of the command line; None: ``sys.argv``.
    """
    given = sys.argv[1:] if arguments is None else arguments
    words = [re.sub(r"^--[\w-]+", lambda match: "--" + match[0][2:].replace("-", "_"), word) for word in given]
    try:
        auto_cli(COMMANDS, args=words, prog="lightning-compress")
    except ValueError as error:
        sys.exit(f"lightning-compress: {error}")


if __name__ == "__main__":
    main()
