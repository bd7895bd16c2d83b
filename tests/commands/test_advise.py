"""What ``lightning-compress`` prints before there is a run."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from lightning_compress import CompressedDDPStrategy, StepProfile
from lightning_compress.__main__ import COMMANDS, main
from lightning_compress.commands import advise
from lightning_compress.planning import predict
from lightning_compress.planning.cost import CODES, LISTS, Link
from tests.helpers.training import Net, fit

MODEL = [(f"weight {number}", (1024, 1024)) for number in range(12)]


@pytest.fixture(autouse=True)
def _fixed(monkeypatch):
    """Codecs are as fast as elsewhere."""
    monkeypatch.setattr(advise, "time_codec", lambda codec, device, crowd: LISTS if codec.sparse else CODES)


def said(capsys, words):
    main(words.split())
    return capsys.readouterr().out


def test_on_a_slow_link_it_says_what_to_write(capsys):
    text = said(capsys, "advise --params 12.5e6 --ranks 4 --gbit 0.1 --compute-ms 50")
    assert 'Write strategy=CompressedDDPStrategy("qsgd")' in " ".join(text.split())
    assert "If you can accept" in text
    for method in advise.METHODS:
        assert method.name.split(",")[0] in text


def test_on_a_fast_link_nothing_pays(capsys):
    text = said(capsys, "advise --params 1e6 --ranks 2 --gbit 100 --compute-ms 500")
    assert "Keep DistributedDataParallel" in text


def test_it_is_there_as_json(capsys):
    found = json.loads(said(capsys, "advise --params 2e6 --ranks 8 --gbit 1 --compute-ms 10 --json"))
    assert [row["method"] for row in found["rows"]] == [method.name for method in advise.METHODS]
    assert all(row["step_ms"] >= 10 for row in found["rows"])
    assert found["rows"][0]["speedup"] == 1
    assert found["rows"][0]["megabytes"] == pytest.approx(2 * 7 / 8 * 4 * 2, rel=0.01)


def test_quality_follows_the_optimizer():
    rows = {
        optimizer: {row.method: row.loss for row in advise.predicted(MODEL, 2, Link(1e-4, 1e7), 10.0, optimizer)}
        for optimizer in ("sgd", "adamw")
    }
    assert rows["sgd"]["topk, 1 %"] == 14.9
    assert rows["adamw"]["topk, 1 %"] == 21.5
    assert rows["adamw"]["DDP, 4 batches accumulated"] is None


def test_accumulation_and_local_steps_share_an_exchange():
    rows = {row.method: row for row in advise.predicted(MODEL, 2, Link(1e-4, 1e6), 10.0, "sgd")}
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
    rows = advise.predicted(parameters, 8, Link(1e-4, 1e8), 100.0, "sgd")
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


REFUSED = [
    ("advise --ranks 2 --gbit 1 --compute-ms 10", "give one of --params, such as 25e6, --model"),
    ("advise --params 1e6 --ranks 2 --gbit 1", "--compute-ms None: it must be a number above 0"),
    ("advise --params 1e6 --ranks 2 --compute-ms 10", "give --ranks and --gbit, or start it with torchrun"),
    ("advise --profile nosuch.json --ranks 2 --gbit 1", "is not a file that StepProfile wrote"),
    ("advise --params 1e6 --ranks 1 --gbit 1 --compute-ms 10", "--ranks 1: one process sends nothing"),
    ("advise --params 1e6 --ranks 2 --gbit 0 --compute-ms 10", "--gbit 0.0: it must be a number above 0"),
    ("advise --params 1e6 --ranks 2 --gbit 1 --compute-ms -1", "--compute-ms -1.0: it must be a number above 0"),
    ("advise --params 10 --ranks 2 --gbit 1 --compute-ms 10", "--params 10: so few parameters are not compressed"),
    ("advise --model nosuch:Net --ranks 2 --gbit 1 --compute-ms 10", "--model nosuch:Net cannot be made"),
    ("advise --model json:dumps --ranks 2 --gbit 1 --compute-ms 10", "whose arguments all have defaults"),
    ("advise --model torch.nn:ReLU --ranks 2 --gbit 1 --compute-ms 10", "torch.nn:ReLU has no parameter to train"),
    ("advise --params 1e6 --ranks 2 --gbit 1 --compute-ms 10 --cores-per-rank 0", "--cores-per-rank 0.0: it must be"),
    ("advise --model types:SimpleNamespace --ranks 2 --gbit 1 --compute-ms 10", "not a torch.nn.Module"),
    ("link", "is not set; start it with torchrun"),
    ("compare nosuch.pt", "nosuch.pt is neither a file nor a function"),
]


@pytest.mark.parametrize(("words", "text"), REFUSED, ids=[words for words, _ in REFUSED])
def test_wrong_arguments_are_refused_in_a_line(words, text, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
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
