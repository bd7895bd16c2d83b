"""Every code block of the README runs, and those of pages that have no test of their own."""

import contextlib
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from lightning_compress.__main__ import main
from recipes import predict
from recipes.config import whole_paths
from tests.config.composing import composed
from tests.helpers import forked

ROOT = Path(__file__).resolve().parents[1]
OWN = ("extending", "two-machines", "tutorial-two-hosts")
"""Pages with a test of their own: tests/installed/test_extending.py, tests/test_two_machines.py."""
SOURCES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.stem not in OWN)]
PAGES = {str(page.relative_to(ROOT).with_suffix("")): page.read_text() for page in SOURCES}
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", "".join(PAGES.values()), flags=re.MULTILINE | re.DOTALL)
SHELL = [body for kind, body in BLOCKS if kind == "bash"]
SHELL += re.findall(r"^    ((?:python|sudo) .*\n)", "".join(PAGES.values()), flags=re.MULTILINE)
COMMANDS = {
    line.split("  #")[0].strip()
    for body in SHELL
    for line in re.sub(r" *\\\n *", " ", body).splitlines()
    if line.strip()
}
QUICKSTART = "docs/quickstart"
OPTIONAL = ("accelerate", "ray")
"""Packages that not everybody who runs the tests has installed."""
PYTHON = {
    f"{page} {number}": body
    for page, text in PAGES.items()
    if page != QUICKSTART  # it starts processes: a script of its own
    for number, body in enumerate(re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))
}
EVERY_BLOCK = """
import json, os, pathlib, traceback
import lightning.pytorch, torch  # once: it takes seconds
failed = {}
for name, code in json.loads(pathlib.Path("blocks.json").read_text()).items():
    if not (child := os.fork()):
        status = 1
        try:
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            pathlib.Path("said").write_text(traceback.format_exc())
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        failed[name] = pathlib.Path("said").read_text() if os.path.exists("said") else "it died"
pathlib.Path("failed.json").write_text(json.dumps(failed))
"""


def absent(code):
    """Packages that a block imports and that are not installed."""
    imported = [name for name in OPTIONAL if re.search(rf"^(from|import) {name}\b", code, flags=re.MULTILINE)]
    return [name for name in imported if importlib.util.find_spec(name) is None]


def run(command, cwd=ROOT):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """What each Python block printed where it failed, none where it ran; each in a process forked from one."""
    folder = tmp_path_factory.mktemp("blocks")
    here = {name: code for name, code in PYTHON.items() if not absent(code)}
    (folder / "blocks.json").write_text(json.dumps(here))
    done = forked.run("-c", EVERY_BLOCK, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "failed.json").read_text())


@pytest.mark.parametrize("name", PYTHON)
def test_python(name, tried):
    if missing := absent(PYTHON[name]):
        pytest.skip(f"{missing[0]} is not installed")
    assert name not in tried, tried[name]


@pytest.mark.parametrize("text", [body for kind, body in BLOCKS if kind == "yaml"])
@pytest.mark.filterwarnings("ignore")
def test_yaml(text, tmp_path):
    from lightning.pytorch.cli import LightningCLI

    from lightning_compress import CompressedDDPStrategy
    from tests.helpers.training import Net

    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(text)))
    arguments = [f"--config={config}", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    assert isinstance(LightningCLI(Net, args=arguments, run=False).trainer.strategy, CompressedDDPStrategy)


def test_quickstart(tmp_path):
    """The script of the page trains, logs the line that the page shows, and goes on from its checkpoint."""
    script, resumed = re.findall(r"^```python\n(.*?)^```", PAGES[QUICKSTART], flags=re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^```text\n(.*?)^```", PAGES[QUICKSTART], flags=re.MULTILINE | re.DOTALL)
    fit = "trainer.fit(Net(), DataLoader(data, batch_size=32))"
    assert fit in script
    again = script.replace("max_epochs=2", "max_epochs=3").replace(fit, resumed.removeprefix("# ").strip())
    for name, text in (("train.py", script), ("again.py", again)):
        (tmp_path / name).write_text(text)
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        said = forked.ranks([name], cwd=tmp_path, env=env)[0]
        assert shown.strip() in said
    assert "checkpoint at last.ckpt" in said.replace(f"{tmp_path}/", "")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_command(command, capsys):
    words = shlex.split(command.removeprefix("sudo "))
    if words[:3] == ["python", "-m", "recipes.train"]:
        overrides = [each for each in words[3:] if not each.startswith("-") and each != "job"]
        assert "_target_: lightning_compress" in OmegaConf.to_yaml(composed(*whole_paths(overrides)), resolve=True)
    elif words[:3] == ["python", "-m", "recipes.predict"]:  # where there is no such checkpoint, it says so
        assert predict.main(words[3:]) == 1
        assert f"checkpoint {words[3]}: there is no such file" in capsys.readouterr().err
    elif "--script" in words:  # tests/commands/test_advise.py measures one
        own = PAGES["docs/does-it-pay"] + PAGES["README"]
        assert command in " ".join(own.replace("\\\n", " ").split())
    elif words[0] == "python" and words[1].startswith("examples/"):  # tests/examples runs them
        assert (ROOT / words[1]).is_file()
    elif words[0] == "python" and words[2].startswith(("benchmarks.", "tests.")):  # how each is used is tested below
        path = ROOT / words[2].replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
    elif words[0] == "lightning-compress":
        main(words[1:])
        assert capsys.readouterr().out
    elif words[0] in ("export", "torchrun"):
        own = PAGES["docs/reliability"], PAGES["docs/tutorial"], (ROOT / "docs/two-machines.md").read_text()
        assert any(command in page for page in own)  # tests/faults/test_elastic.py, tests/test_two_machines.py
    elif words[0] == "mkdir":
        run(["bash", "-n", "-c", command])
    elif words[0] == "make":
        run([words[0], "--dry-run", *words[1:]])
    elif words[:2] == ["pip", "install"]:
        extras = re.findall(r"\[(\w+)\]", command)
        assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras)
    else:
        pytest.fail(f"there is no way to try {command!r}")


def test_readme_is_short():
    lines = PAGES["README"].splitlines()
    assert len(lines) <= 200
    assert all(len(line) <= 100 for line in lines if not line.startswith(("|", "<picture", "+trainer", "torchrun")))


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")))
def test_every_benchmark_says_how_to_use_it(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with contextlib.suppress(SystemExit):
        importlib.import_module(f"benchmarks.{name}").main()
    assert f"usage: {name} " in capsys.readouterr().out
