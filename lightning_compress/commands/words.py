"""The words of a command line: how people write them, and what is said of wrong ones."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from json import dumps
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

KINDS = {"float": "a number", "int": "a whole number", "bool": "true or false"}
"""What an option takes, by the type's name."""


class Parser(ArgumentParser):
    """Says what is wrong in one line, and no more."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with status 2."""
        parser: ArgumentParser = getattr(ex, "subcommand_parser", None) or self
        prog = parser.prog.replace(" [options]", "")
        options = [each for action in parser._actions for each in action.option_strings]
        self.exit(2, f"{prog}: {in_a_line(message, options)}; see {prog} --help\n")


def in_a_line(message: str, options: Sequence[str]) -> str:
    """Return what jsonargparse says of wrong words, in one line.

    Args:
        message: of several lines.
        options: that exist, for a guess at a misspelt one.
    """
    key = re.search(r'Parser key "([\w.]+)"', message)
    given = re.search(r"(?:Given|Got) value: (.*)", message)
    if key and given:
        option = "--" + key[1].rpartition(".")[2].replace("_", "-")
        choices = re.search(r"Literal\[(.*?)\]", message)
        kind = next((said for name, said in KINDS.items() if f"<class '{name}'>" in message), "written otherwise")
        wanted = f"one of {choices[1]}".replace("'", "") if choices else kind
        return f"{option} {given[1]}: it must be {wanted}"
    if missing := re.search(r"arguments are required: (\w+)\.(\w+)", message):
        return f"{missing[1]}: {missing[2].upper()} is missing"
    if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
        return f"{wrong[1]} is no command; use one of {wrong[2]}".replace("'", "")
    if unknown := re.search(r"[Uu]nrecognized arguments: (.*)", message):
        word = unknown[1].split()[0].partition("=")[0]
        names = [each.replace("_", "-") for each in options]
        near = get_close_matches(word, names, 1) if word.startswith("--") else []
        more = "" if word.startswith("-") else "; several values are separated by commas, without spaces"
        return f"{word} is not known here{more}" + (f"; did you mean {near[0]}?" if near else "")
    return " ".join(message.split())


def spelled(words: Sequence[str], function: Callable[..., Any]) -> list[str]:
    """Return the words of a command line as jsonargparse reads them.

    It wants a value after each option, underscores in names, and lists in brackets; people write ``--serve``,
    ``--expect-gbit 1`` and ``qsgd,onebit``. What stands after ``--`` are the words of a script, if the command has
    ``args``.

    Args:
        words: the first one is the command.
        function: of the command.
    """
    parameters = inspect.signature(function).parameters
    rest: list[str] = []
    if "args" in parameters and "--" in words:
        words, rest = words[: words.index("--")], list(words[words.index("--") + 1 :])
    found: list[str] = []
    taken = False
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        name, equals, value = word.partition("=")
        option = name.removeprefix("--").replace("-", "_")
        if taken:
            taken = False
        elif name.startswith("--") and option in parameters:
            taken = _is_list(parameters, option) and not equals and not after.startswith("--")
            if taken or (equals and _is_list(parameters, option)):
                equals, value = "=", _listed(value if equals else after)
            found.append(f"--{option}{equals}{value}")
            if parameters[option].annotation == "bool" and not equals and after.lower() not in ("true", "false"):
                found.append("true")
        else:
            found.append(word)
    return [*found, f"--args={dumps(rest)}"] if rest else found


def _is_list(parameters: Mapping[str, inspect.Parameter], option: str) -> bool:
    return str(parameters[option].annotation).startswith("list[")


def _listed(value: str) -> str:
    return value if value.startswith("[") else dumps([each for each in value.split(",") if each])


def above_zero(name: str, value: float) -> float:
    """Return a number of the command line.

    Raises:
        ValueError: it is not finite, or not above 0.
    """
    if not 0 < value < float("inf"):
        raise ValueError(f"--{name.replace('_', '-')} {value:g}: it must be a number above 0")
    return value
