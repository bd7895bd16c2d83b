"""What ``lightning-compress`` prints before there is a run."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_compress import CompressedDDPStrategy, StepProfile
from lightning_compress.__main__ import COMMANDS, main
from lightning_compress.commands import busy, forecast, jobs, script, speeds
from lightning_compress.planning import predict
from lightning_compress.planning.cost import CODES, LISTS, Link
from tests.helpers.training import Net, fit

ROOT = Path(__file__).resolve().parents[2]
MODEL = [(f"weight {number}", (1024, 1024)) for number in range(12)]


@pytest.fixture(autouse=True)
def _fixed(monkeypatch):
    """Codecs are as fast as elsewhere."""
    monkeypatch.setattr(speeds, "time_codec", lambda codec, device, crowd: LISTS if codec.sparse else CODES)
    monkeypatch.setattr(busy.os, "getloadavg", lambda: (30.0, 30.0, 30.0))


def said(capsys, words):
    main(words.split())
    return capsys.readouterr().out


def test_on_a_slow_link_it_says_what_to_write(capsys):
    text = said(capsys, "advise --params 12.5M --ranks 4 --gbit 0.1 --compute-ms 50")
    assert "100 Mbit/s (94 Mbit/s of data)" in text
    words = " ".join(text.split())
    assert 'Write strategy=CompressedDDPStrategy("qsgd"): ' in words
    assert "and in our runs the loss was 0.3 % higher. If you can accept" in words
    assert re.search(r"timed on one core of this CPU; load 30 on \d+ cores: these times are too high", words)
    assert "add --device cuda" in words
    assert "a character LSTM with 424,320 parameters, not of your model" in words
    for method in forecast.METHODS:
        assert method.name.split(",")[0] in text


def test_only_the_same_loss_is_called_so(capsys):
    text = said(capsys, "advise --params 12.5e6 --ranks 4 --gbit 0.1 --compute-ms 50 --optimizer sgd")
    assert ", at the same loss." in " ".join(text.split())


def test_figures_of_a_gpu_are_the_published_ones(capsys):
    found = json.loads(said(capsys, "advise --params 1.5B --ranks 8 --gbit 10 --compute-ms 300 --device cuda --json"))
    assert "Codecs: those published for one H100" in found["notes"][0]
    assert found["rows"][0]["megabytes"] == pytest.approx(2 * 7 / 8 * 4 * 1500, rel=0.01)
    saved = json.loads((ROOT / "docs/results/gpu/codecs_25mb.json").read_text())["rows"]
    published = {row["codec"]: row for row in saved}
    for name, (encode_ms, decode_ms) in speeds.H100_MS.items():
        row = published.get(name)
        assert row is None or row["numel"] == speeds.NUMEL
        kernels = row["kernels"] if row else {}
        known = (kernels["encode_sum"]["ms"], kernels["decode"]["ms"]) if row else [published["qsgd"]["copy_ms"]] * 2
        assert (encode_ms, decode_ms) == pytest.approx(known, abs=1e-4), name


def test_numbers_are_read_as_people_write_them():
    for text, number in (("25M", 25e6), ("1.5B", 1.5e9), ("25e6", 25e6), ("25_000_000", 25e6), ("7 G", 7e9)):
        assert jobs.count_of(text) == number


def test_on_a_fast_link_nothing_pays(capsys):
    text = said(capsys, "advise --params 1e6 --ranks 2 --gbit 100 --compute-ms 500")
    assert "Keep float32 (DDP): " in text


def test_it_is_there_as_json(capsys):
    found = json.loads(said(capsys, "advise --params 2e6 --ranks 8 --gbit 1 --compute-ms 10 --json"))
    assert [row["method"] for row in found["rows"]] == [method.name for method in forecast.METHODS]
    assert all(row["step_ms"] >= 10 for row in found["rows"])
    assert found["rows"][0]["speedup"] == 1
    assert found["rows"][0]["megabytes"] == pytest.approx(2 * 7 / 8 * 4 * 2, rel=0.01)


def test_quality_follows_the_optimizer():
    rows = {
        optimizer: {row.method: row.loss for row in forecast.predicted(MODEL, 2, Link(1e-4, 1e7), 10.0, optimizer)}
        for optimizer in ("sgd", "adamw", "muon")
    }
    assert rows["sgd"]["topk, 1 %"] == 14.9
    assert rows["sgd"]["qsgd, 4 bits"] == 0  # a gain of 0.1 %
    assert [rows[each]["8 local steps, rotated, 4 bits"] for each in rows] == [2.1, 1.8, None]
    assert rows["adamw"]["topk, 1 %"] == 21.5
    assert rows["adamw"]["DDP, 4 batches accumulated"] is None


def test_accumulation_and_local_steps_share_an_exchange():
    rows = {row.method: row for row in forecast.predicted(MODEL, 2, Link(1e-4, 1e6), 10.0, "sgd")}
    dense, accumulated = rows["float32 (DDP)"], rows["DDP, 4 batches accumulated"]
    assert accumulated.step_ms - 10 == pytest.approx((dense.step_ms - 10) / 4)
    short, long = (rows[f"{every} local steps, rotated, 4 bits"] for every in (8, 16))
    assert short.step_ms - 10 == pytest.approx(2 * (long.step_ms - 10))
    wider = 4.125 / 4.0625  # bits an element of rotated and of qsgd, with their scales
    assert short.megabytes == pytest.approx(wider * rows["qsgd, 4 bits"].megabytes / 8, rel=0.01)


def test_a_model_of_ones_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_net.py").write_text("from torch import nn\nclass Net(nn.Linear):\n  def __init__(self):\n"
                                         "    super().__init__(2048, 1024)\n")  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for given in ("own_net", "own_net.py", "./own_net.py", tmp_path / "own_net.py"):
        assert "2.1 M parameters" in said(capsys, f"advise --model {given}:Net --ranks 2 --gbit 1 --compute-ms 10")


def test_buckets_that_are_alike_are_predicted_once(monkeypatch):
    asked, offer = [], predict.Place.offer
    monkeypatch.setattr(predict.Place, "offer", lambda *given: asked.append(given) or offer(*given))
    parameters = [(f"weight {number}", (1024, 1024)) for number in range(200)]
    rows = forecast.predicted(parameters, 8, Link(1e-4, 1e8), 100.0, "sgd")
    assert len(asked) < 5 * len(rows)
    assert rows[0].megabytes == pytest.approx(200 * 2 * 7 / 8 * 4 * 2**20 / 1e6, rel=0.01)


def _one_process(path):
    fit("auto", 6, lambda: Net("adamw"), callbacks=[StepProfile(path, steps=3, warm=2)])


class Unknown(Net):
    """With an optimizer that we have not measured."""

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), 0.001)


def _unknown(path):
    fit("auto", 2, Unknown, callbacks=[StepProfile(path, steps=1, warm=0)])


def test_a_profile_of_an_unknown_optimizer_takes_the_cautious_one(pools, tmp_path):
    path = tmp_path / "new" / "profile.json"
    pools[1].run(_unknown, path)
    assert json.loads(path.read_text())["optimizer"] == "adam"


def test_a_profile_says_what_trains(pools, tmp_path, capsys):
    path = tmp_path / "profile.json"
    pools[1].run(_one_process, path)
    profile = json.loads(path.read_text())
    assert profile["optimizer"] == "adam"
    assert [name for name, _ in profile["parameters"]] == [name for name, _ in Net().named_parameters()]
    text = said(capsys, f"advise --profile {path} --ranks 4 --gbit 0.001")
    assert "more loss (adam)" in " ".join(text.split())
    assert "Write strategy=" in text


def test_a_profile_of_several_processes_is_refused(pools):
    with pytest.raises(Exception, match="StepProfile measures computing alone, and 2 processes also communicate"):
        pools[2].run(_profiled)


def _profiled():
    fit(CompressedDDPStrategy("rotated"), 2, callbacks=[StepProfile()])


def test_replicas_of_a_sharded_model_average_shards(capsys):
    given = "advise --params 8388608 --compute-ms 50 --json"
    whole = json.loads(said(capsys, f"{given} --ranks 2 --gbit 0.25"))["rows"]
    found = json.loads(said(capsys, f"{given} --ranks 8 --replicas 2 --gbit 1"))
    assert (found["ranks"], found["shards"]) == (8, 4)
    rows = {row["method"]: row for row in found["rows"]}
    assert rows["float32 (HSDP)"]["megabytes"] == pytest.approx(4 * 8.388608 / 4, rel=1e-3)
    for old, row in zip(whole, found["rows"], strict=False):  # a fourth, and nothing is hidden on CPUs
        assert row["megabytes"] == pytest.approx(old["megabytes"] / 4, rel=0.02)
    dense = rows["float32 (HSDP)"]["step_ms"]
    assert dense == pytest.approx(50 + 8 * 8.388608 / (0.94 * 0.25), rel=0.01)  # 4 ranks share the host's 1 Gbit/s
    assert rows["HSDP, 4 batches accumulated"]["step_ms"] == pytest.approx(50 + (dense - 50) / 4)
    assert not any("local steps" in name for name in rows)
    assert found["advice"].startswith('Write strategy=CompressedFSDPStrategy("qsgd"): ')
    assert "what FSDP2 sends within a replica" in " ".join(found["notes"])


def test_what_is_compressed_does_not_depend_on_the_shards():
    rows = forecast.predicted([("weight", (64, 32))], 2, Link(1e-4, 1e7), 1.0, "adamw", shards=32)
    assert rows[0].megabytes == pytest.approx(
        4 * 64e-6, abs=32e-6
    )  # a shard has fewer elements than min_numel, but not the whole
    assert next(row for row in rows if row.method == "qsgd, 4 bits").megabytes < rows[0].megabytes / 2


def test_the_title_says_who_shares_the_link(capsys):
    text = " ".join(said(capsys, "advise --params 2e6 --ranks 8 --replicas 2 --gbit 1 --compute-ms 10").split())
    assert "2 replicas of 4 ranks, 1 Gbit/s for the 4 ranks of a host (235 Mbit/s of data for each)" in text


REFUSED = [
    ("advise", "say what trains: --script train.py, or --params 25M --compute-ms 77"),
    ("advise --params 1e6 --model a:b", "give one of --params and --model"),
    ("advise --params 1e6", "missing: --compute-ms, --ranks, --gbit (such as --compute-ms 77 --ranks 4 --gbit 1)"),
    ("advise --params 1e6 --ranks 2 --gbit 1", "missing: --compute-ms ("),
    ("advise --params 1e6 --ranks 2 --compute-ms 10", "missing: --gbit (such as"),
    ("advise --profile nosuch.json --ranks 2 --gbit 1", "is not a file that StepProfile wrote"),
    ("advise --params 1e6 --ranks 1 --gbit 1 --compute-ms 10", "--ranks 1: one process sends nothing"),
    (
        "advise --params 1e6 --ranks 8 --replicas 3 --gbit 1 --compute-ms 10",
        "--replicas 3: use a divisor of --ranks 8,",
    ),
    (
        "advise --params 1e6 --ranks 8 --replicas 1 --gbit 1 --compute-ms 10",
        "--replicas 1: use a divisor of --ranks 8,",
    ),
    (
        "advise --params 1e6 --ranks 8 --replicas 0 --gbit 1 --compute-ms 10",
        "--replicas 0: use a divisor of --ranks 8,",
    ),
    ("advise --params 1e6 --replicas 2 --compute-ms 10", "missing: --ranks, --gbit (such as"),
    ("advise --profile p.json --ranks 4 --replicas 2 --gbit 1", "missing: --compute-ms ("),
    ("advise --script x.py --ranks 4 --replicas 2 --gbit 1", "--script runs in one process, which cannot shard"),
    ("advise --params 1e6 --ranks 2 --gbit 0 --compute-ms 10", "--gbit 0: it must be a number above 0"),
    ("advise --params 1e6 --ranks 2 --gbit 1 --compute-ms -1", "--compute-ms -1: it must be a number above 0"),
    ("advise --params 10 --ranks 2 --gbit 1 --compute-ms 10", "--params 10: so few parameters are not compressed"),
    (
        "advise --params 25X --ranks 2 --gbit 1 --compute-ms 10",
        "--params 25X: it must be a number above 0, such as",
    ),
    ("advise --model nosuch:Net --ranks 2 --gbit 1 --compute-ms 10", "--model nosuch:Net cannot be made"),
    ("advise --model json:dumps --ranks 2 --gbit 1 --compute-ms 10", "whose arguments all have defaults"),
    ("advise --model torch.nn:ReLU --ranks 2 --gbit 1 --compute-ms 10", "torch.nn:ReLU has no parameter to train"),
    ("advise --params 1e6 --ranks 2 --gbit 1 --compute-ms 10 --cores-per-rank 0", "--cores-per-rank 0: it must be"),
    (
        "advise --params 1e6 --ranks 2 --gbit 1 --compute-ms 10 -- --lr 1",
        "--lr 1: words after -- are",
    ),
    ("advise --model types:SimpleNamespace --ranks 2 --gbit 1 --compute-ms 10", "not a torch.nn.Module"),
    ("advise --script nosuch.py --ranks 2 --gbit 1", "--script nosuch.py is neither a file nor a module"),
    ("advise --script x.py --ranks 2 --gbit 1 --compute-ms 7", "--compute-ms 7: --script measures it"),
    ("link", "is not set; start it with torchrun"),
    ("compare nosuch.pt", "nosuch.pt is neither a file nor a function"),
]
MISSPELT = [
    ("advise --params 1e6 --ranks two", "--ranks two: it must be a whole number; see lightning-compress advise --help"),
    ("advise --gbit 1gbit", "--gbit 1gbit: it must be a number; see"),
    ("advise --optimizer lion", "--optimizer lion: it must be one of sgd, adam, adamw, muon; see"),
    ("advise --gbits 3", "--gbits is not known here; did you mean --gbit?; see"),
    ("compare", "compare: SOURCE is missing; see"),
    ("compare g.pt --compressors qsgd onebit", "onebit is not known here; several values are separated by commas"),
    ("doctor --port x", "--port x: it must be a whole number; see lightning-compress doctor --help"),
    ("nosuch", "nosuch is no command; use one of advise, doctor, link, compare, compressors, docs; see"),
]


@pytest.mark.parametrize(("words", "text"), MISSPELT, ids=[words for words, _ in MISSPELT])
def test_misspelt_words_are_refused_in_a_line(words, text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert len(lines) == 1
    assert text in lines[0]


@pytest.mark.parametrize(("words", "text"), REFUSED, ids=[words for words, _ in REFUSED])
def test_wrong_arguments_are_refused_in_a_line(words, text, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert text in str(ended.value)
    assert "\n" not in str(ended.value)


def test_the_command_is_installed():
    command = shutil.which("lightning-compress", path=sys.exec_prefix + "/bin")
    assert command, "pip install makes it"
    shown = subprocess.run([command, "--help"], capture_output=True, text=True, check=True).stdout
    assert all(name in shown for name in COMMANDS)


def test_help_imports_nothing_that_takes_long():
    asked = (
        "import sys\nfrom lightning_compress.__main__ import COMMANDS, main\n"
        "for words in [['--help'], ['--version'], *([name, '--help'] for name in COMMANDS)]:\n"
        "    try: main(words)\n"
        "    except SystemExit as ended: assert not ended.code\n"
        "assert not {'torch', 'numpy', 'lightning', 'rich'} & set(sys.modules)\n"
    )
    shown = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "lightning-compress 0." in shown
    assert shown.count("usage:") == 1 + len(COMMANDS)


def test_a_reader_that_has_seen_enough_is_no_error(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(SystemExit, match="141"):
            main(["compressors", "--json"])


SCRIPT = """
import sys
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    def training_step(self, batch, index):
        return self.last(self.first(batch)).square().mean()
    def on_before_optimizer_step(self, optimizer):
        assert not self.trainer.strategy.model.require_backward_grad_sync
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

devices = int(sys.argv[1])
saving = ModelCheckpoint("saved", every_n_train_steps=1, save_last="link")
quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[saving])
settings = dict(strategy="ddp_fork", max_epochs=9, accumulate_grad_batches=2)
trainer = Trainer(accelerator="cpu", devices=devices, **settings, **quiet)
trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(64, 64), 4))
print("THE FIT ENDED")
"""


def registered(folder, monkeypatch):
    """Install, for child processes too, the entry points of pyproject.toml; this environment may have older ones."""
    text = (ROOT / "pyproject.toml").read_text()
    points = re.findall(r'^\[project\.entry-points\."(.*?)"\]\n(.*?)\n\n', text, re.MULTILINE | re.DOTALL)
    assert {"lightning.pytorch.callbacks_factory", "pytorch_lightning.callbacks_factory"} < {name for name, _ in points}
    info = folder / "lightning_compress-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-compress\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("".join(f"[{name}]\n{rows}\n".replace('"', "") for name, rows in points))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")


def test_a_script_is_measured(tmp_path, monkeypatch, capfd):
    registered(tmp_path, monkeypatch)
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "LEAVING", 0.5)  # a parent of forks waits in vain
    main(["advise", "--script", "train.py", "--ranks", "4", "--gbit", "0.001", "--json", "--", "2"])
    shown = capfd.readouterr()
    found = json.loads(shown.out)
    assert found["notes"][0] == (
        "Computing: the median of 30 steps of train.py, each of 2 batches, on the CPU, without averaging."
    )
    assert found["rows"][0]["megabytes"] == pytest.approx(2 * 3 / 4 * 4 * 2 * 65 * 64 / 1e6, rel=0.01)
    assert found["rows"][2]["loss"] == 0.0
    assert "running train.py for about 35 steps" in shown.err
    assert "THE FIT ENDED" not in shown.err
    assert not (tmp_path / "saved").exists() or not list((tmp_path / "saved").iterdir())


def test_a_measured_link_is_taken_unless_one_is_given():
    job = jobs.Job(MODEL, 10.0, "sgd", ranks=3, link=Link(2e-4, 1e7))
    assert jobs.where(job, None, None, 100.0) == jobs.Where(3, job.link, "80 Mbit/s and 200 us (measured)")
    given = jobs.where(job, 8, 0.1, 50.0)
    assert (given.ranks, given.link.bytes_per_s) == (8, pytest.approx(0.94 * 1.25e7))
    assert "the memory of this machine" in jobs.where(replace(job, one_machine=True), None, None, 100.0).words


def test_a_script_that_does_not_train_is_refused(tmp_path, monkeypatch):
    registered(tmp_path, monkeypatch)
    (tmp_path / "train.py").write_text("import sys; sys.exit(3)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"train\.py ended with status 3 before a training step ended"):
        main(["advise", "--script", "train.py", "--ranks", "4", "--gbit", "1"])
