"""A JSON file per cell: found again by its settings, and valid as long as the code that made it is the same."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "results" / "time_to_target"
OURS = ("benchmarks", "lightning_compress", "recipes")
IN_KEYS = ("lightning_compress", "benchmarks._target.methods", "benchmarks._target.tasks")
"""Modules left out: the package's top imports all of it, and what the others say of a cell is in its key."""


class Store:
    """The cells in a folder.

    Args:
        folder: made when the first cell is written.
        any_code: cells of earlier code count, too.
    """

    def __init__(self, folder: Path = FOLDER, any_code: bool = False) -> None:
        self._folder, self.any_code = folder, any_code
        self._commit = commit()  # now: while something runs, there may be a new one

    def get(self, kind: str, name: str, settings: Any, code: str) -> dict[str, Any] | None:
        """Return what a cell found, or None if it is missing, or other code made it and ``any_code`` is off.

        Args:
            kind: a folder.
            name: for people; settings decide.
            settings: the cell's key.
            code: of ``digest``.
        """
        digest, found = self.of_any_code(kind, name, settings)
        return found if self.any_code or digest == code else None

    def of_any_code(self, kind: str, name: str, settings: Any) -> tuple[str, dict[str, Any] | None]:
        """Return the digest of the code that made a cell, and what it found; "" and None if there is no cell."""
        path = self._path(kind, name, settings)
        if not path.exists():
            return "", None
        cell: dict[str, Any] = json.loads(path.read_text())
        return cell["digest"], cell["found"]

    def put(self, kind: str, name: str, settings: Any, code: str, found: dict[str, Any]) -> None:
        """Write a cell, all of it or nothing."""
        path = self._path(kind, name, settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        cell = {"name": name, "settings": _plain(settings), "digest": code, "commit": self._commit, "found": found}
        # a number in a line of its own would make long files of curves
        text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda match: f"[{' '.join(match[1].split())}]", _text(cell, 1))
        beside = path.with_suffix(".part")
        beside.write_text(text + "\n")
        os.replace(beside, path)

    def _path(self, kind: str, name: str, settings: Any) -> Path:
        key = hashlib.sha256(_text(settings).encode()).hexdigest()[:8]
        slug = re.sub(r"[^a-z0-9.]+", "_", name.lower()).strip("_")
        return self._folder / kind / f"{slug}.{key}.json"


def _plain(settings: Any) -> Any:
    return json.loads(_text(settings))


def _text(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, sort_keys=indent is None, default=dataclasses.asdict)


def commit() -> str:
    """Return the commit of the working tree, with "+" if files differ from it; "unknown" outside of one."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *OURS)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def _git(*words: str) -> str:
    return subprocess.run(("git", *words), cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


@cache
def digest(*modules: str) -> str:
    """Return a hash of modules and of everything of this repository that they import, but for ``IN_KEYS``.

    Comments, docstrings and layout do not count. Kernels on CPUs, which are loaded by name, do.
    """
    found: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        path = _file(name)
        if path is None or name in found or name in IN_KEYS:
            continue
        tree = ast.parse(path.read_text())
        waiting += [*_imports(tree), f"{name}_numba"]
        found[name] = hashlib.sha256(ast.dump(_without_docstrings(tree)).encode()).hexdigest()
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def _file(name: str) -> Path | None:
    if name.partition(".")[0] not in OURS:
        return None
    path = ROOT / name.replace(".", "/")
    return next((each for each in (path / "__init__.py", path.with_name(f"{path.name}.py")) if each.exists()), None)


def _imports(tree: ast.Module) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return tree


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
