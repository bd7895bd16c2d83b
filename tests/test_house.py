"""Arrows between modules run one way, files and functions stay small."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_compress"
SOURCES = sorted(
    path for folder in ("lightning_compress", "recipes", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)
# What stands earlier is never allowed to import what stands later.
ROOMS = [
    ("kernels",),
    ("core",),
    ("collectives", "codecs"),
    ("exchanges", "reducers", "corrections"),
    ("settings",),
    ("engine",),
    ("strategies", "callbacks", "compare"),
    ("pytorch_lightning",),
]
LIGHTNING_ALLOWED = {"strategies", "callbacks", "pytorch_lightning"}
COMPILERS = {"numba", "triton", "llvmlite"}


def imports(path):
    """Modules that a file imports, outside of blocks for type checkers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


MODULES = [path for path in SOURCES if PACKAGE in path.parents]


def name_of(path):
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_arrows_run_one_way(path):
    here = room(path)
    if here == "__init__":
        return
    level = next(number for number, row in enumerate(ROOMS) if here in row)
    for module in imports(path):
        top, _, rest = module.partition(".")
        assert top not in {"hydra", "omegaconf", "wandb", "recipes", "benchmarks", "tests"}, module
        assert top not in {"lightning", "pytorch_lightning"} or here in LIGHTNING_ALLOWED, module
        assert not (here == "codecs" and module.startswith("torch.distributed"))
        if top == "lightning_compress" and rest and rest.split(".")[0] != here:
            target = next(number for number, row in enumerate(ROOMS) if rest.split(".")[0] in row)
            assert target < level, f"{path.name} imports {module}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_compilers_stay_with_kernels(path):
    """A method is ``<method>.py``, ``<method>_numba.py`` and ``<method>_triton.py``."""
    used = {module.partition(".")[0] for module in imports(path)} & COMPILERS
    if path.parent.parent.name == "kernels":
        assert used <= {path.parent.name} | ({"llvmlite"} if path.name == "simd.py" else set())
    else:
        assert used <= {path.stem.rpartition("_")[2]}, used


def test_files_and_functions_are_small():
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= 400, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                start = node.body[0].end_lineno if ast.get_docstring(node) else node.lineno
                assert node.end_lineno - start <= 60, f"{path}: {node.name}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_kernels_that_are_asked_for_are_there(path):
    """A sibling with another name would not be found, and tensor operations would do its work without a word."""
    asked = re.findall(r"kernels\.backend\(__name__, [^\n]*?(?:\"(numba|triton)\")?\)(?:\s|$|\))", path.read_text())
    there = {by for by in ("numba", "triton") if path.with_name(f"{path.stem}_{by}.py").exists()}
    for by in asked:
        assert by in there if by else there, path
