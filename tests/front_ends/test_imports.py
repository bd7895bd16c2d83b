"""Each public name can be the first that a program imports, and Lightning may come before it or after it."""

import ast
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_compress
from lightning_compress import CompressedDDPStrategy, GossipStrategy, LocalSGDStrategy, compare
from tests.test_house import PACKAGE, ROOT

FRONT_ENDS = {
    "asynchronous.async_gossip": "AsyncGossip",
    "contrib.pytorch_lightning": "AsyncGossipStrategy, MeSimp, MinibatchSize, ThetaRecovery",
    "fabric": "CompressedDDPStrategy",
    "pytorch_lightning": "AsyncGossipStrategy, CommunicationMonitor, CompressedDDPStrategy, GossipStrategy, "
    "LocalSGDStrategy, MeProp, MeSimp, MinibatchSize, StepProfile, SufficientFactors, ThetaRecovery",
    "ray": "RayCompressedDDPStrategy",
    "testing": "check_codec",
}
TRAINERS = "\n".join(
    f"assert type(Trainer(strategy={name!r}, accelerator='cpu', devices=1, logger=False).strategy) is {cls}"
    for name, cls in {
        "compressed_ddp": "lightning_compress.CompressedDDPStrategy",
        "diloco": "lightning_compress.LocalSGDStrategy",
        "gossip_d2": "lightning_compress.GossipStrategy",
        "async_gossip": "lightning_compress.AsyncGossipStrategy",
    }.items()
)
CONTRIB_WAITS = """
import sys
registry = lightning.strategies.StrategyRegistry
lightning.Trainer(strategy="diloco", accelerator="cpu", devices=1, logger=False)
assert {"async_gossip", "async_gossip_moniqua_spawn"} <= {*registry}
assert "lightning_compress.contrib" not in sys.modules
made = registry.get("async_gossip_moniqua_fork")
assert type(made) is ours.AsyncGossipStrategy and made._start_method == "fork"
assert made.synchroniser._settings.compressor
ours.AsyncGossipStrategy.register_strategies(registry)
"""
ALONE = """
import sys
from lightning_compress import attach, compare
assert not {"lightning", "pytorch_lightning", "wandb", "hydra"} & {*sys.modules}
"""
INSTANTIATED = """
from hydra.utils import instantiate
codec = {"_target_": "lightning_compress.codecs.TopK", "density": 0.1}
instantiate({"_target_": "lightning_compress.LocalSGDStrategy", "sync_every": 4, "compressor": codec})
"""


PARTS = 3
"""Of all statements, each in a test of its own."""


def homes():
    """Public names by their modules, as type checkers know them."""
    block = next(each for each in ast.parse((PACKAGE / "__init__.py").read_text()).body if isinstance(each, ast.If))
    return {each.module: [alias.name for alias in each.names] for each in block.body}


def firsts():
    """Statements, each of which a program may begin with."""
    lazy = [f"from lightning_compress import {', '.join(names)}" for names in homes().values()]
    direct = [f"from lightning_compress.{module} import {names}" for module, names in FRONT_ENDS.items()]
    pickled = [pickle.dumps(made) for made in (CompressedDDPStrategy(), LocalSGDStrategy(), GossipStrategy("d2"))]
    return [
        *lazy,
        *direct,
        *(f"import pickle; pickle.loads({each})" for each in pickled),
        INSTANTIATED,
        "from lightning_compress import *; attach, AsyncGossipStrategy, compare.__call__",
        "import lightning_compress; lightning_compress.codecs.TopK, lightning_compress.exchanges.TwoShot",
    ]


@pytest.mark.parametrize("part", range(PARTS))
def test_every_name_may_be_imported_first(tmp_path, part):
    (tmp_path / "ray" / "train").mkdir(parents=True)
    (tmp_path / "ray" / "train" / "lightning.py").write_text(
        "from lightning.pytorch.strategies import DDPStrategy as RayDDPStrategy"
    )
    path = [ROOT] if importlib.util.find_spec("ray") else [ROOT, tmp_path]
    statements = [
        *firsts(),
        "\n".join(["import lightning", *firsts()]),
        ALONE,
        f"import lightning_compress\nfrom lightning.pytorch import Trainer\n{TRAINERS}",
        f"from lightning.pytorch import Trainer\nimport lightning_compress\n{TRAINERS}",
        "from pytorch_lightning import Trainer\nimport lightning_compress\n"
        "Trainer(strategy='compressed_ddp', accelerator='cpu', devices=1, logger=False)",
        f"from lightning import pytorch as lightning\nimport lightning_compress as ours\n{CONTRIB_WAITS}",
        f"import pytorch_lightning as lightning\nimport lightning_compress.pytorch_lightning as ours\n{CONTRIB_WAITS}",
    ]
    statements = statements[part::PARTS]
    script = Path(__file__).with_name("importing.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONWARNINGS": "ignore"}
    run = subprocess.run(
        [sys.executable, script, *statements], capture_output=True, text=True, env=environment, timeout=280, check=True
    )
    said = json.loads(run.stdout)
    assert len(said) == len(statements)
    assert not {statement: text for statement, text in said.items() if text}


LIGHT = """
import sys
import lightning_compress
assert "CompressedDDPStrategy" in dir(lightning_compress) and "__version__" in dir(lightning_compress)
def light(): assert not {"torch", "lightning", "pytorch_lightning", "numpy"} & {*sys.modules}
light()
from lightning_compress.__main__ import main
for words in [], ["-h"], ["--help"]:
    try: main(words)
    except SystemExit: light()
"""


def test_torch_and_lightning_wait_until_a_name_is_used():
    run = subprocess.run([sys.executable, "-c", LIGHT], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "Predict the step time" in run.stdout


def test_type_checkers_know_the_names():
    found = {name: module for module, names in homes().items() for name in names}
    assert found == {name: f"lightning_compress.{home}" for name, home in lightning_compress._HOMES.items()}
    assert sorted(found) == lightning_compress.__all__
    assert {*found} <= {*dir(lightning_compress)}


def test_compare_is_the_function():
    """A module of that name would hide it once it is imported."""
    assert lightning_compress.compare is compare
    assert callable(compare)
    assert not {path.stem for path in PACKAGE.iterdir()} & {*lightning_compress.__all__}


def test_what_is_not_there_says_so():
    assert not hasattr(lightning_compress, "Kompression")
    assert not hasattr(lightning_compress, "__wrapped__")
    assert not hasattr(lightning_compress, "made.<locals>.inside")  # as jsonargparse asks for a function in a function
