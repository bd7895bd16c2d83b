"""What a user of the wheel gets, away from the source tree."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from lightning_compress.exchanges import EXCHANGES
from lightning_compress.settings.parsing import COMPRESSORS

ROOT = Path(__file__).resolve().parents[2]

APPLICATION = """
import hydra, sys
from omegaconf import OmegaConf
import lightning_compress_hydra
assert "torch" not in sys.modules

@hydra.main(version_base="1.3", config_path="conf", config_name="app")
def main(cfg):
    import lightning_compress
    print("FROM", lightning_compress.__file__)
    print("BUILT", hydra.utils.instantiate(cfg.strategy)._settings.method)

main()
"""

HOOK = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
"""What pip and build call; each starts five processes to do so."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, and a folder it is installed into."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a git checkout, to know what the source is")
    for name in listed.stdout.splitlines():
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    hook = [sys.executable, "-c", HOOK]
    subprocess.run([*hook, "build_sdist", str(folder)], cwd=source, check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    subprocess.run([*hook, "build_wheel", str(folder)], cwd=unpacked, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    target = folder / "site"
    shutil.unpack_archive(wheel, target, "zip")  # all that an installer does with modules alone
    return wheel, target


def test_what_ships(installed):
    names = set(zipfile.ZipFile(installed[0]).namelist())
    wanted = {f"lightning_compress/conf/compressor/{name}.yaml" for name in COMPRESSORS.offered}
    wanted |= {f"lightning_compress/conf/exchange/{name}.yaml" for name in EXCHANGES.offered}
    wanted |= {"lightning_compress/conf/__init__.py", "lightning_compress/py.typed"}
    wanted |= {"lightning_compress_advise.py", "lightning_compress_hydra.py"}
    wanted |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "lightning_compress").rglob("*.py")}
    assert wanted <= names
    assert not [name for name in names if name.startswith(("recipes", "tests", "benchmarks", "conf/"))]


def test_metadata(installed):
    with zipfile.ZipFile(installed[0]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(wheel.read(name))
    assert metadata["Author"] == "the lightning-compress developers"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert set(metadata.get_all("Provides-Extra")) >= {"cpu", "hydra", "wandb"}
    assert "recipes" not in metadata.get_all("Provides-Extra")
    assert metadata["Description-Content-Type"] == "text/markdown"
    page, description = (ROOT / "README.md").read_text(), metadata.get_payload(decode=True).decode()
    assert re.findall(r"^#+ .*", description, re.MULTILINE) == re.findall(r"^#+ .*", page, re.MULTILINE)
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", description, flags=re.MULTILINE | re.DOTALL))
    assert links
    assert all(link.startswith("https://") for link in links)
    assert "<picture" not in description


@pytest.mark.parametrize(
    ("overrides", "built"),
    [
        (["compressor=topk", "compressor.density=0.3"], "TopK(density=0.3"),
        pytest.param(["strategy.compressor=terngrad"], "TernGrad(clip=2.5", marks=pytest.mark.thorough),  # by its name
    ],
)
def test_another_hydra_application(installed, tmp_path, overrides, built):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "app.yaml").write_text("defaults:\n  - _self_\n  - strategy: compressed_ddp\n")
    (tmp_path / "app.py").write_text(APPLICATION)
    environment = os.environ | {"PYTHONPATH": str(installed[1])}
    run = subprocess.run(
        [sys.executable, "app.py", *overrides, "hydra.run.dir=out"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert f"FROM {installed[1]}" in run.stdout
    assert f"BUILT {built}" in run.stdout
