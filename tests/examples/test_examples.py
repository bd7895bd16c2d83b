"""Files of examples/ run as their README says; what starts the same training sends the same and ends the same."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers import forked
from tests.helpers.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (EXAMPLES / "README.md").read_text()
TYPED = {
    name: typed
    for files, typed in re.findall(r"^\| (.*?) \|.*\| `(.*)` \|$", PAGE, flags=re.MULTILINE)
    for name in re.findall(r"\w+\.\w+", files)
}
"""The command of each file."""
CELLS = """
import json, sys
for module in sys.modules.values():  # Lightning, which is imported here, looks once for what a notebook has
    if "_IS_INTERACTIVE" in vars(module):
        module._IS_INTERACTIVE = True
space = {"__name__": "__main__"}
for cell in json.load(open("notebook.ipynb"))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), space)
"""
SRUN = """
for (( task = 0; task < SLURM_NTASKS; task++ )); do
    SLURM_PROCID=$task SLURM_NODEID=$task SLURM_LOCALID=0 "$@" & tasks+=($!)
done
for task in ${tasks[@]}; do wait $task || exit 1; done
"""


class Place:
    """A folder with the examples, and this Python under the names that commands use."""

    def __init__(self, folder):
        self.folder = folder
        for path in EXAMPLES.glob("*.*"):
            (folder / path.name).write_bytes(path.read_bytes())
        (folder / "bin").mkdir()
        self.command("python", f'exec {sys.executable} "$@"')
        self.command("torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')

    def command(self, name, body):
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def replace(self, name, old, new):
        path = self.folder / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def environment(self, **variables):
        taken = re.compile("SLURM|MASTER|GLOO|NCCL|NODE_RANK|PET_")
        kept = {name: value for name, value in os.environ.items() if not taken.match(name)}
        kept |= {"PATH": f"{self.folder / 'bin'}:{kept['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return kept | variables

    def under_torchrun(self, script, **options):
        """What ranks print that torchrun would have started: here, in forks."""
        options = {"cwd": self.folder, "env": self.environment()} | options
        return "\n".join(forked.ranks([self.folder / script], torchrun=True, **options))

    def start(self, typed, cwd=None, **variables):
        return subprocess.Popen(
            ["bash", "-euc", typed],
            cwd=cwd or self.folder,
            env=self.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def ended(*processes):
    """What they printed, one after the other."""
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return "\n".join(outputs)


def result(output):
    """Megabytes sent, steps, megabytes of float32, and the loss in the end; all as text."""
    sent = re.search(r"sent: (\S+) MB in (\d+) steps; float32 would send (\S+) MB", output)
    assert sent, output
    return *sent.groups(), re.search(r"validation: loss (\S+),", output)[1]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The result of the plain script."""
    plain = Place(tmp_path_factory.mktemp("plain"))
    python, *words = shlex.split(TYPED["plain.py"])
    assert python == "python"
    # its second process is one that Lightning starts, by the command line that it makes of its own
    done = forked.run(*words, cwd=plain.folder, env=plain.environment(MASTER_PORT=free_port()))
    assert done.returncode == 0, done.stderr
    found = result(done.stdout + done.stderr)
    sent, steps, dense, loss = found
    assert steps == "192"
    assert 6 < float(dense) / float(sent) < 8
    assert float(loss) < 1.4
    return found


def test_readme_names_every_file():
    names = {path.name for path in EXAMPLES.glob("*.*")}
    assert {"plain.py", "notebook.ipynb"} < names
    for name in names - {"README.md"}:
        assert name in PAGE, name


@pytest.mark.thorough  # but for its first process's start, the plain script ran already
def test_plain_as_typed(place, expected):
    assert result(ended(place.start(TYPED["plain.py"], MASTER_PORT=free_port()))) == expected


@pytest.mark.thorough  # started as the plain script is
def test_lightning_cli(place, expected):
    assert result(ended(place.start(TYPED["cli.py"], MASTER_PORT=free_port()))) == expected


def test_torchrun_goes_on_from_its_last_checkpoint(place, expected):
    typed = TYPED["torchrun.py"].replace("torchrun ", f"torchrun --master-port {free_port()} ", 1)
    place.replace("torchrun.py", "max_epochs=3", "max_epochs=2")
    place.under_torchrun("torchrun.py")
    place.replace("torchrun.py", "max_epochs=2", "max_epochs=3")
    *_, loss = result(ended(place.start(typed)))
    assert loss == expected[-1]


@pytest.mark.thorough  # started as the plain script is
def test_slurm(place, expected):
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", (place.folder / "slurm.sh").read_text(), re.MULTILINE))
    place.replace("slurm.sh", "eth0", "lo")
    place.command("srun", SRUN)
    place.command("sbatch", 'exec bash "$@"')
    said = ended(
        place.start(
            TYPED["slurm.sh"],
            SLURM_JOB_NAME=options["job-name"],
            SLURM_JOB_ID="4217",
            SLURM_NNODES=options["nodes"],
            SLURM_NTASKS=str(int(options["nodes"]) * int(options["ntasks-per-node"])),
            SLURM_NTASKS_PER_NODE=options["ntasks-per-node"],
            SLURM_NODELIST="localhost",
            MASTER_PORT=free_port(),
        )
    )
    assert "MEMBER: 2/2" in said
    assert result(said) == expected


@pytest.mark.parametrize("start", ["forks", pytest.param("torchrun", marks=pytest.mark.thorough)])
def test_kubernetes(place, expected, start):
    job = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    variables = {each["name"]: each["value"] for each in trainer["env"]}
    assert all(isinstance(value, str) for value in variables.values())
    folders = [place.folder / f"pod{node}" for node in range(trainer["numNodes"])]
    for folder in folders:
        folder.mkdir()
    if start == "forks":
        assert trainer["command"] == ["torchrun", "/examples/torchrun.py"]
        own = place.environment(**variables | {"GLOO_SOCKET_IFNAME": "lo"})
        pods = {"nodes": trainer["numNodes"], "each": trainer["numProcPerNode"], "cwd": folders}
        assert result(place.under_torchrun("torchrun.py", env=own, **pods)) == expected
        return
    # What the runtime torch-distributed sets in each pod
    variables |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
    variables |= {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo"}
    typed = shlex.join(trainer["command"]).replace("/examples/", f"{place.folder}/")
    pods = []
    for node, folder in enumerate(folders):
        pods.append(place.start(typed, cwd=folder, PET_NODE_RANK=str(node), **variables))
    assert result(ended(*pods)) == expected


def test_bare_ddp(place, expected):
    assert TYPED["bare_ddp.py"] == "torchrun --nproc-per-node 2 bare_ddp.py"
    said = place.under_torchrun("bare_ddp.py")
    sent, dense = (int(number.replace(",", "")) for number in re.search(r"sent: (\S+) .* send (\S+)", said).groups())
    assert f"{sent / 1e6:.3g}" == expected[0]
    assert f"{dense / 1e6:.3g}" == expected[2]
    assert float(re.search(r"loss (\S+)", said)[1]) == pytest.approx(float(expected[-1]), rel=1e-5)


def test_notebook(place, expected):
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    (place.folder / "cells.py").write_text(CELLS)
    done = forked.run("cells.py", cwd=place.folder, env=place.environment(MASTER_PORT=free_port()))
    assert done.returncode == 0, done.stderr
    assert result(done.stdout + done.stderr) == expected
    assert "onebit" in done.stdout
