"""Arrows between modules run one way, files and functions stay small."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.table import table
from tests.turns import EVERY

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
    ("reducers", "corrections"),
    ("exchanges",),
    ("settings",),
    ("planning",),
    ("engine",),
    ("gossip", "backward"),
    ("periodic",),
    ("strategies", "callbacks", "comparison", "testing"),
    ("commands",),
    ("pytorch_lightning", "fabric", "ray", "asynchronous", "__main__"),
    ("contrib",),  # loaded by name alone, when it is asked for
]
LIGHTNING_ALLOWED = {"strategies", "callbacks", "pytorch_lightning", "fabric", "ray", "contrib"}
NAME_CONTRIB = {"strategies", "pytorch_lightning", "asynchronous"}
"""What imports contrib by name, when a user asks for something that is there; ``__init__`` does as well."""
COMPILERS = {"numba", "triton", "llvmlite"}


@cache
def nodes(path):
    """All of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def _forgotten():
    yield
    nodes.cache_clear()


def imports(path):
    """Modules that a file imports, without those of contrib in blocks for type checkers."""
    typing = [each for each in nodes(path) if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING"]
    typed = [node for block in typing for node in block.body if isinstance(node, ast.ImportFrom)]
    for node in nodes(path):
        if node in typed and node.module.startswith(CONTRIB):
            continue
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def imports_by_name(path):
    """Modules that a file imports by ``import_module("...")``; those of contrib by any text, also kept for later."""
    calls = [each for each in nodes(path) if isinstance(each, ast.Call) and ast.unparse(each.func) == "import_module"]
    called = {each.args[0].value for each in calls if isinstance(each.args[0], ast.Constant)}
    texts = {each.value for each in nodes(path) if isinstance(each, ast.Constant)}
    return BY_NAME.keys() & (called | {each for each in texts if str(each).startswith(CONTRIB)})


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def dotted(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = [path for path in SOURCES if PACKAGE in path.parents]
BY_NAME = {dotted(path): path for path in MODULES}
CONTRIB = "lightning_compress.contrib"


def level(name):
    return next(number for number, row in enumerate(ROOMS) if name in row)


def test_arrows_run_one_way():
    for path in MODULES:
        here = room(path)
        for module in imports(path) if here != "__init__" else ():
            top, _, rest = module.partition(".")
            said = f"{path} imports {module}"
            assert top not in {"hydra", "omegaconf", "wandb", "recipes", "benchmarks", "tests"}, said
            assert top not in {"lightning", "pytorch_lightning"} or here in LIGHTNING_ALLOWED, said
            assert not (here == "codecs" and module.startswith("torch.distributed")), said
            if top == "lightning_compress" and rest and rest.split(".")[0] != here:
                assert level(rest.split(".")[0]) < level(here), said


def test_what_is_imported_by_name_stands_before_or_in_contrib():
    for path in MODULES:
        here = room(path)
        for module in imports_by_name(path) if here not in ("__init__", "contrib") else ():
            there = module.removeprefix("lightning_compress.").split(".")[0]
            allowed = here in NAME_CONTRIB if there == "contrib" else there == here or level(there) < level(here)
            assert allowed, f"{path} imports {module}"
    assert not [module for module in imports(PACKAGE / "__init__.py") if module.startswith(CONTRIB)]


def names(path):
    """Pairs of a module and what a file imports from it, also inside of functions."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def resolved(module, name):
    """The module that defines a name, also where a package's ``__init__`` hands it on; None: none of ours."""
    if f"{module}.{name}" in BY_NAME:
        return f"{module}.{name}"
    if module in BY_NAME and BY_NAME[module].name == "__init__.py":
        for source, each in names(BY_NAME[module]):
            if each == name:
                return resolved(source, each)
    return module if module in BY_NAME else None


def test_no_imports_go_in_circles():
    uses = {name: {resolved(*each) for each in names(path)} - {name, None} for name, path in BY_NAME.items()}
    assert "lightning_compress.exchanges.exchange" in uses["lightning_compress.planning.choose"]
    while uses:
        free = [name for name, each in uses.items() if not each & uses.keys()]
        assert free, f"in a circle, or behind one: {', '.join(sorted(uses))}"
        for name in free:
            del uses[name]


def test_compilers_stay_with_kernels():
    """A method is ``<method>.py``, ``<method>_numba.py`` and ``<method>_triton.py``."""
    for path in MODULES:
        used = {module.partition(".")[0] for module in imports(path)} & COMPILERS
        if path.parent.parent.name == "kernels":
            assert used <= {path.parent.name} | (
                {"llvmlite"} if path.stem in ("llvm", "simd", "simd_codes", "simd_pairs", "spectra") else set()
            ), path
        else:
            assert used <= {path.stem.rpartition("_")[2]}, path


def test_recipes_can_be_copied_without_benchmarks():
    for path in SOURCES:
        if PACKAGE not in path.parents:
            beyond = {"tests"} if path.is_relative_to(ROOT / "benchmarks") else {"benchmarks", "tests"}
            assert not {module.partition(".")[0] for module in imports(path)} & beyond, path


def test_tests_of_the_package_use_public_parts_of_benchmarks():
    """What both share is in ``benchmarks/harness``."""
    for path in (ROOT / "tests").rglob("*.py"):
        if not path.is_relative_to(ROOT / "tests" / "benchmarks"):
            assert not re.search(r"benchmarks\.(\w+\.)*_|from benchmarks import\s_", path.read_text()), path


def test_files_and_functions_are_small():
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= 400, path
        if path.parent == ROOT / "benchmarks":  # what it varies, and what it prints
            assert len(path.read_text().splitlines()) <= 150, path
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef):
                start = node.body[0].end_lineno if ast.get_docstring(node) else node.lineno
                assert node.end_lineno - start <= 60, f"{path}: {node.name}"


CREATORS = {
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_permuted",
    "empty_strided", "eye", "fftfreq", "full", "hamming_window", "hann_window", "kaiser_window", "linspace",
    "logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "range", "rfftfreq", "scalar_tensor",
    "tensor", "zeros",
}  # fmt: skip
"""Functions of torch that take the default dtype, or what their numbers suggest, unless they are told another."""


def test_tensors_say_their_dtype():
    """What is computed must not depend on ``torch.set_default_dtype``; see tests/test_default_dtype.py."""
    found = []
    for path in MODULES:
        assert not {("torch", name) for name in CREATORS} & {*names(path)}, path  # they would go unseen here
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CREATORS:
                said = {each.arg for each in node.keywords}
                if ast.unparse(node.func.value) in ("torch", "torch.fft") and not said & {"dtype", "out"}:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert not found, "\n".join(found)


BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.match_case)


def test_functions_have_few_branches():
    """As ruff counts (PLR0912), and conditional expressions, by which that could be passed."""
    found = set()
    for path in SOURCES:
        if not path.stem.endswith(("_numba", "_triton")) and "kernels" not in path.parts:
            for node in nodes(path):
                if (
                    isinstance(node, ast.FunctionDef)
                    and sum(isinstance(each, BRANCHES) for each in ast.walk(node)) > 12
                ):
                    found.add(f"{path.relative_to(ROOT)}: {node.name}")
    assert not found


def test_kernels_that_are_asked_for_are_there():
    """A sibling with another name would not be found, and tensor operations would do its work without a word."""
    call = re.compile(r"kernels\.backend\(__name__, [^\n]*?(?:\"(numba|triton)\")?\)(?:\s|$|\))")
    for path in MODULES:
        there = {by for by in ("numba", "triton") if path.with_name(f"{path.stem}_{by}.py").exists()}
        for by in call.findall(path.read_text()):
            assert by in there if by else there, path


@table("place", EVERY)
def test_what_runs_by_turns_is_there(place):
    path, _, name = place.partition("::")
    assert (ROOT / "tests" / path).exists()
    assert name in ("", "*") or f"def {name}(" in (ROOT / "tests" / path).read_text()
