"""The commands of docs/two-machines.md, and the tutorial's, run on two hosts: network namespaces."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment

from benchmarks.harness.lab import Lab
from benchmarks.harness.launch import first_failed
from tests.helpers.labs import root

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/two-machines.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
FILES = {name: body for _, body in BLOCKS for name in re.findall(r"\A(?:#!/bin/bash\n)?# (\w+\.\w+)\n", body)}
SAID = [body for kind, body in BLOCKS if kind == "text"]
ERROR = next(text for text in SAID if "connectFullMesh" in text)
DEBIAN = next(text for text in SAID if text.startswith("127.0.0.1 localhost\n"))
VARIABLES = dict(re.findall(r"^\| `(SLURM_\w+)` \|.*\| (\S+) \|$", PAGE, flags=re.MULTILINE))
NODES = ("node1", "node2")
ALONE, TOGETHER = (
    re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / f"docs/{name}.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    for name in ("tutorial", "tutorial-two-hosts")
)


def launches(blocks=BLOCKS):
    """What is to be typed in turn: the command of each host, or of one, and what the page shows below it."""
    found = []
    for number, (kind, body) in enumerate(blocks):
        after = blocks[number + 1][1] if number + 1 < len(blocks) and blocks[number + 1][0] == "text" else ""
        if kind != "bash" or body.startswith("#!"):
            continue
        if body.startswith("# node1\n"):
            found.append(([body], after))
        else:
            assert body.startswith("# node2\n"), f"where is this to be typed?\n{body}"
            assert len(found[-1][0]) == 1
            found[-1] = ([*found[-1][0], body], after)
    return found


class Hosts:
    """Two hosts on a link of 100 Mbit/s, whose names stand for what Debian writes into /etc/hosts."""

    def __init__(self, lab, folder):
        self._lab, self._folder = lab, folder
        self._etc = [Path("/etc/netns", lab.namespace(rank)) for rank in (0, 1)]  # ip netns exec puts it over /etc
        self._started = []
        self.names()

    def names(self, loopback=True):
        """Write /etc/hosts of both: a host's own name, and the other's address."""
        for rank, etc in enumerate(self._etc):
            etc.mkdir(parents=True, exist_ok=True)
            address = "127.0.1.1" if loopback else self._lab.address(rank)
            text = DEBIAN.replace("127.0.1.1 node1", f"{address} {NODES[rank]}")
            (etc / "hosts").write_text(f"{text}{self._lab.address(1 - rank)} {NODES[1 - rank]}\n")

    def close(self):
        for process in self._started:
            process.kill()
            process.wait()
        for etc in self._etc:
            shutil.rmtree(etc, ignore_errors=True)
        with contextlib.suppress(OSError):  # others use it
            self._etc[0].parent.rmdir()

    def write(self, name, body):
        """Write a file that both have, and return its folder."""
        (self._folder / name).write_text(body)
        return self._folder

    def start(self, script, rank, **environment):
        """Type a script on a host."""
        inside = f'echo {NODES[rank]} > /proc/sys/kernel/hostname; exec bash -eu -c "$0"'
        kept = {name: value for name, value in os.environ.items() if not re.match("SLURM|MASTER|GLOO|NCCL|NODE", name)}
        path = {"PATH": f"{self._folder / 'bin'}:{kept['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with self._log(rank).open("w") as log:
            process = subprocess.Popen(
                self._lab.command(rank, "unshare", "--uts", "bash", "-c", inside, script),
                cwd=self._folder,
                env=kept | path | environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def _log(self, rank):
        return self._folder / f"log{rank}"

    def said(self, rank):
        return self._log(rank).read_text()

    def run(self, *scripts, environments=({}, {})):
        """Type one on each, wait for both, and give what they said."""
        processes = [self.start(script, rank, **environments[rank]) for rank, script in enumerate(scripts)]
        failed = first_failed(processes)
        assert failed is None, f"{NODES[failed]} said\n{self.said(failed)}"
        return [self.said(rank) for rank in range(len(scripts))]


@pytest.fixture
def hosts(tmp_path):
    """Two hosts with the files of the page, and this Python under the names that its commands use."""
    (tmp_path / "bin").mkdir()
    modules = {"python": "", "torchrun": "-m torch.distributed.run", "lightning-compress": "-m lightning_compress"}
    for name, words in modules.items():
        command(tmp_path, name, f'exec {sys.executable} {words} "$@"')
    command(tmp_path, "srun", 'exec "$@"')  # each host plays the task that SLURM would start there
    for name, body in FILES.items():
        (tmp_path / name).write_text(body)
    with Lab(2, "100mbit") as lab:  # whose end also ends what runs there
        made = Hosts(lab, tmp_path)
        try:
            yield made
        finally:
            made.close()


def command(folder, name, line):
    path = folder / "bin" / name
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


KEPT = r"\d+(?:\.\d+){3}|[A-Za-z_]\w*"
"""Addresses and words; what else begins with a digit is a figure of one run."""


def shows(output, shown):
    """Whether each line that the page shows was printed, with other figures."""
    lines = [" ".join(line.split()) for line in output.splitlines()]
    for line in shown.splitlines():
        masked = re.sub(r"(?<=weights )\w+", "0", re.sub(r"/\S*/(?=gloo/)", "PATH", " ".join(line.split())))
        masked = re.sub(rf"({KEPT})|\d[\d.]*(?:e[+-]?\d+)?", lambda found: found[1] or "FIGURE", masked)
        pattern = re.escape(masked).replace("PATH", r"\S*").replace("FIGURE", r"[\w.+-]+")
        assert any(re.search(f"{pattern}$", each) for each in lines), f"{line}\nis not in\n{output}"


def digests(outputs):
    """Of the weights, of each rank."""
    return [re.search(rf"rank {rank} of 2: .* weights (\w{{12}})\n", said)[1] for rank, said in enumerate(outputs)]


def id_of(launch):
    return " ".join(launch[0][0].splitlines()[-1].split()[:2] + launch[0][0].split()[-1:])


@root
@pytest.mark.parametrize(
    "launch",
    [pytest.param(each, id=id_of(each), marks=pytest.mark.thorough) for each in launches()],
)
def test_commands(hosts, launch):
    scripts, shown = launch
    outputs = hosts.run(*scripts)
    if shown:
        shows("\n".join(outputs), shown)
    if "train.py" in scripts[0]:
        assert len(set(digests(outputs))) == 1
        assert "by all_gather, 7.8 x fewer bytes" in outputs[0]
    if scripts[0].endswith(" link\n"):
        assert 50 < float(re.search(r"(\d+) Mbit/s", outputs[0])[1]) <= 110


@root
@pytest.mark.thorough
def test_tutorial(hosts):
    """One machine first, then both: the lines that it shows, and one W&B run for each training."""
    (script,) = (body for kind, body in ALONE if kind == "python")
    (typed,) = (body for kind, body in ALONE if kind == "bash")
    said, files = (body for kind, body in ALONE if kind == "text")
    folder = hosts.write("train.py", script)
    shows(hosts.run(typed)[0], said)
    assert all((folder / name).read_text().startswith("comm/") for name in files.split())
    for scripts, _ in launches(TOGETHER):
        hosts.run(*scripts)
    assert len(list(folder.glob("wandb/offline-run-*"))) == 2


def test_the_page_has_the_commands_of_a_newcomer():
    typed = [word for scripts, _ in launches() if len(scripts) == 2 for word in scripts[0].splitlines()[-1].split()]
    assert {"torchrun", "python", "train.py", "lightning-compress"} <= set(typed)
    assert set(FILES) == {"train.py", "job.sh"}
    assert "docs/two-machines.md" in (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)", PAGE):
        assert target.startswith("http") or (ROOT / "docs" / target).exists(), target


def without_interface(scripts):
    return [re.sub(r"GLOO_SOCKET_IFNAME=\w+", "", script) for script in scripts]


def by_lightning():
    return next(scripts for scripts, _ in launches() if scripts[0].endswith("\npython train.py\n"))


@root
@pytest.mark.thorough
def test_a_name_for_loopback_is_the_error_of_the_page(hosts):
    processes = [hosts.start(script, rank) for rank, script in enumerate(without_interface(by_lightning()))]
    failed = first_failed(processes)
    assert failed is not None
    shows(hosts.said(failed), ERROR)
    assert processes[1 - failed].poll() is None  # it waits, as the page warns


@root
@pytest.mark.thorough
def test_a_name_for_the_real_address_needs_no_interface(hosts):
    hosts.names(loopback=False)
    outputs = hosts.run(*without_interface(by_lightning()))
    assert len(set(digests(outputs))) == 1


def slurm(rank):
    """What SLURM sets for the task on a node, one task each; the page shows it for the second."""
    return VARIABLES | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)}


@root
@pytest.mark.thorough
def test_slurm_job(hosts):
    outputs = hosts.run("bash job.sh", "bash job.sh", environments=(slurm(0), slurm(1)))
    assert len(set(digests(outputs))) == 1


def test_slurm_script_asks_for_what_the_page_says(tmp_path):
    (tmp_path / "job.sh").write_text(FILES["job.sh"])
    subprocess.run(["bash", "-n", "job.sh"], cwd=tmp_path, check=True)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", FILES["job.sh"], flags=re.MULTILINE))
    assert options["nodes"] == VARIABLES["SLURM_NNODES"]
    assert options["ntasks-per-node"] == VARIABLES["SLURM_NTASKS_PER_NODE"]
    assert options["job-name"] == VARIABLES["SLURM_JOB_NAME"]
    assert int(options["nodes"]) * int(options["ntasks-per-node"]) == int(VARIABLES["SLURM_NTASKS"])


def test_lightning_reads_the_variables_of_the_page(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # which Lightning sets
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in slurm(1).items():
        monkeypatch.setenv(name, value)
    assert SLURMEnvironment.detect()
    found = SLURMEnvironment()
    assert (found.world_size(), found.global_rank(), found.local_rank(), found.node_rank()) == (2, 1, 0, 1)
    assert (found.main_address, found.main_port) == ("node1", 15000 + 4217)
    found.validate_settings(num_devices=1, num_nodes=2)
    with pytest.raises(ValueError, match="ntasks-per-node"):
        found.validate_settings(num_devices=2, num_nodes=2)
    with pytest.raises(ValueError, match="num_nodes"):
        found.validate_settings(num_devices=1, num_nodes=1)
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    assert not SLURMEnvironment.detect()
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    with pytest.raises(RuntimeError, match="--ntasks"):
        SLURMEnvironment()
