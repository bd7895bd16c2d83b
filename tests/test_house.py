"""Arrows between modules run one way, files and functions stay small."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_compress"
SOURCES = sorted(
    path for folder in ("lightning_compress", "recipes", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)
# What stands earlier is never allowed to import what stands later.
LAYERS = [
    ("layout", "keys", "meter", "gradients", "registry", "scratch", "failures", "background", "kernels", "costs"),
    ("state",),
    ("snapshot",),
    ("codecs", "collectives"),
    ("message",),
    ("exchanges", "reducers", "corrections"),
    ("rules", "kinds", "courses", "guards"),
    ("schedule", "automatic"),
    ("arguments",),
    ("settings", "bridge", "feedback", "finite"),
    ("unused",),
    ("accumulation", "group", "checks", "optimizers", "tuning", "drift", "soundness", "forecast"),
    ("groups",),
    ("compression",),
    ("hook",),
    ("entry", "checkpoint", "compare"),
    ("resume",),
    ("monitor", "recovery", "strategy"),
    ("pytorch_lightning",),
]
LIGHTNING_ALLOWED = {"monitor", "recovery", "strategy", "pytorch_lightning"}


def imports(path):
    """Modules that a file imports, outside of blocks for type checkers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", [path for path in SOURCES if PACKAGE in path.parents], ids=lambda path: path.name)
def test_arrows_run_one_way(path):
    here = room(path)
    if here == "__init__":
        return
    level = next(number for number, layer in enumerate(LAYERS) if here in layer)
    for module in imports(path):
        top, _, rest = module.partition(".")
        assert top not in {"hydra", "omegaconf", "wandb", "recipes", "benchmarks", "tests"}, module
        assert top not in {"lightning", "pytorch_lightning"} or here in LIGHTNING_ALLOWED, module
        assert not (here == "codecs" and module.startswith("torch.distributed"))
        if top == "lightning_compress" and rest and rest.split(".")[0] != here:
            target = next(number for number, layer in enumerate(LAYERS) if rest.split(".")[0] in layer)
            assert target < level, f"{path.name} imports {module}"


def test_files_and_functions_are_small():
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= 400, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                start = node.body[0].end_lineno if ast.get_docstring(node) else node.lineno
                assert node.end_lineno - start <= 60, f"{path}: {node.name}"
