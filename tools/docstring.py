"""A docstring in Google's style, in parts, as Markdown."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):$")
PAGE = re.compile(r"\bdocs/([\w/-]+)(?:\.md)?\b")
ENTRY = re.compile(r"^    \*{0,2}(\w+): (.*)$")


@dataclass(frozen=True)
class Docstring:
    """The parts of a docstring.

    Args:
        summary: the first line.
        text: the paragraphs before its sections.
        arguments: text of each argument, by name.
        raises: the errors and when they are raised.
        sources: the paragraphs after its sections, such as papers.
    """

    summary: str
    text: str
    arguments: dict[str, str]
    sources: str
    raises: str = ""

    @classmethod
    def of(cls, documented: object) -> Docstring:
        """Read the docstring of a class or a function."""
        before: list[str] = []
        after: list[str] = []
        entries: list[str] = []
        raised: list[str] = []
        section = ""
        for line in (inspect.getdoc(documented) or "").splitlines():
            if SECTION.match(line):
                section = line
            elif section == "Args:" and line.startswith(" "):
                entries.append(line)
            elif section == "Raises:" and line.startswith(" "):
                raised.append(re.sub(r"^(\w+):", r"``\1``:", line.strip()))
            elif not section:
                before.append(line)
            elif line and not line.startswith(" "):
                after.append(line)
        summary, _, text = "\n".join(before).partition("\n")
        parts = markdown(summary), markdown(text.strip()), _arguments(entries), markdown("\n".join(after))
        return cls(*parts, markdown(" ".join(raised)))


def markdown(text: str) -> str:
    """Return a docstring's text with Markdown's marks of code, and without what Markdown would read as marks."""
    parts = re.split(r"(``.+?``)", text, flags=re.DOTALL)
    return "".join(f"`{each[2:-2]}`" if each.startswith("``") else _prose(each) for each in parts)


def _prose(text: str) -> str:
    """Return text without marks of emphasis, except in lines of code and bullets, and with links to pages."""
    lines = [line if re.match(r" {4}|\* ", line) else line.replace("*", r"\*") for line in text.split("\n")]
    return PAGE.sub(r"[\1](../\1.md)", "\n".join(lines))


def _arguments(lines: list[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    name = ""
    for line in lines:
        if entry := ENTRY.match(line):
            name = entry[1]
            found[name] = [entry[2]]
        elif name:
            found[name].append(line.strip())
    return {name: markdown(" ".join(filter(None, text))) for name, text in found.items()}
