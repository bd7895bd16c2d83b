"""docs/extending.md: its package is built, installed beside ours, held to the laws and trained with."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import forked

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/extending.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
CODEC, UNBIASED, LAWS, TRAINING, REDUCER = [body for kind, body in BLOCKS if kind == "python"]

RESUMED = """
import torch
from lightning.pytorch.demos.boring_classes import RandomDataset
from train import Model, trainer

class Same(Model):
    def train_dataloader(self):
        torch.manual_seed(7)
        return torch.utils.data.DataLoader(RandomDataset(32, 64))

def trained(epochs, path=None):
    torch.manual_seed(1)
    model, runs = Same(), trainer(epochs)
    runs.fit(model, ckpt_path=path)
    return runs, torch.cat([each.detach().flatten() for each in model.parameters()])

if __name__ == "__main__":
    exec(open("train.py").read(), {"__name__": "__main__"})
    first, before = trained(1)
    first.save_checkpoint("one.ckpt")
    _, resumed = trained(2, "one.ckpt")
    _, whole = trained(2)
    assert torch.equal(resumed, whole) and not torch.equal(before, whole)
    print("THE SAME")
"""
COMPOSED = """
import hydra, lightning_compress_hydra, sys
with hydra.initialize_config_dir(version_base="1.3", config_dir=sys.argv[1]):
    for overrides in (["compressor=linear8", "compressor.levels=63"], sys.argv[2:]):
        strategy = hydra.utils.instantiate(hydra.compose("app", overrides).strategy)
        print("BUILT", strategy._settings.method)
"""


ANEW = "from lightning_compress.core import registry; registry._offered.cache_clear()\n"
"""A new process would look for installed packages; a fork of one that has looked must be told."""


def surroundings(cwd, site):
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (cwd, site, ROOT))), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder that the page's package is installed into, by the page's command."""
    folder = tmp_path_factory.mktemp("extending")
    source, target = folder / "source", folder / "site"
    (source / "lightning_linear8").mkdir(parents=True)
    (source / "lightning_linear8" / "__init__.py").write_text(f"{CODEC}\n\n{UNBIASED}")
    (settings,) = [body for kind, body in BLOCKS if kind == "toml"]
    (source / "pyproject.toml").write_text(settings)
    (typed,) = [body.split() for kind, body in BLOCKS if kind == "bash"]
    apart = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(target)]
    done = subprocess.run([sys.executable, "-m", *typed, *apart], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_every_block_is_tried_here():
    assert sorted(kind for kind, _ in BLOCKS) == ["bash", *5 * ["python"], "toml", "yaml"]
    assert [body for kind, body in BLOCKS if kind == "bash"] == ["pip install .\n"]


def test_it_trains_by_name_and_goes_on(site, tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "resumed.py").write_text(ANEW + RESUMED)
    ranks = forked.ranks(["resumed.py"], cwd=tmp_path, env=surroundings(tmp_path, site))  # which runs the other first
    said = "\n".join(ranks)
    assert "linear8" in said
    assert "THE SAME" in said
    sidecars = list((tmp_path / "first.ckpt.lc").glob("*.pt"))
    assert len(sidecars) == 2
    assert all(b"linear8" in path.read_bytes() for path in sidecars)


def test_it_keeps_the_laws_and_hydra_builds_it(site, tmp_path):
    (tmp_path / "conf" / "compressor").mkdir(parents=True)
    (text,) = [body for kind, body in BLOCKS if kind == "yaml"]
    (tmp_path / "conf" / "compressor" / "linear8.yaml").write_text(text)
    defaults = "defaults:\n  - _self_\n  - strategy: compressed_ddp\n"
    (tmp_path / "conf" / "app.yaml").write_text(defaults)
    (override,) = re.findall(r"Without a file: `'(.*)'`", PAGE)
    script = ANEW + LAWS + REDUCER + COMPOSED
    words = ["-c", script, tmp_path / "conf", override]
    done = forked.run(*words, cwd=tmp_path, env=surroundings(tmp_path, site))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("BUILT Linear8(levels=63)") == 2
