"""What makes up for errors follows from method and optimizer, unless the user or a checkpoint says otherwise."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_compress import attach
from lightning_compress.corrections.loco import LoCo
from lightning_compress.settings.compensation import KINDS, LOSS, automatic, kind_of, loss_of
from lightning_compress.settings.parsing import COMPRESSORS
from lightning_compress.settings.run_state import RunState
from tests.strategies.test_resume import Net, fit

WEIGHT = [nn.Parameter(torch.zeros(3))]
ADAM = torch.optim.AdamW(WEIGHT)
SGD = torch.optim.SGD(WEIGHT, 0.1)


def of(settings):
    return settings.compensation(settings.method)


def test_the_table_is_of_what_there_is():
    for (label, optimizer), ways in LOSS.items():
        name, *settings = label.split()
        method = COMPRESSORS[name](**{each: int(value) for each, value in (pair.split("=") for pair in settings)})
        assert optimizer in KINDS.values()
        assert ways.keys() <= {"none", "loco", "classical"}
        assert loss_of(method, optimizer, automatic(method, optimizer)) == min(ways.values())


def test_a_figure_is_of_its_settings_only():
    assert loss_of(COMPRESSORS["qsgd"](bits=5), "muon", "none") < loss_of(COMPRESSORS["qsgd"](), "muon", "none")
    assert loss_of(COMPRESSORS["qsgd"](bits=6), "muon", "none") is None
    assert automatic(COMPRESSORS["onebit"](block=64), "muon") == automatic(COMPRESSORS["onebit"](), "muon") == "none"
    assert loss_of(COMPRESSORS["qsgd"](), "adam", "none") == 0.3
    assert loss_of(COMPRESSORS["qsgd"](bits=2), "adam", "none") is None
    assert loss_of(COMPRESSORS["onebit"](), "adam", LoCo(beta=0.3)) == 2.4
    assert loss_of(COMPRESSORS["rotated"](), "adam", "classical") is None


class Own(torch.optim.AdamW):
    """A subclass."""


class PagedAdamW8bit(torch.optim.Optimizer):
    """As bitsandbytes calls it."""

    def __init__(self):
        super().__init__(WEIGHT, {})


class MuonWithAuxAdam(torch.optim.SGD):
    """As Keller Jordan calls it: one class for both."""


class Dion2(PagedAdamW8bit):
    """Of microsoft/dion; here with a base that has Adam in its name."""


class Own2(MuonWithAuxAdam):
    """A subclass."""


@pytest.mark.parametrize(
    ("optimizers", "kind"),
    [
        ([MuonWithAuxAdam(WEIGHT, 0.1)], "muon"),
        ([Own2(WEIGHT, 0.1)], "muon"),
        ([Dion2()], "muon"),
        ([ADAM, Dion2(), SGD], "muon"),
        ([Own(WEIGHT)], "adam"),
        ([PagedAdamW8bit()], "adam"),
        ([torch.optim.Adagrad(WEIGHT)], None),
        ([ADAM], "adam"),
        ([SGD], "sgd"),
        ([SGD, ADAM], "adam"),
        ([], None),
        ([torch.optim.RMSprop(WEIGHT)], None),
    ],
)
def test_kinds(optimizers, kind):
    assert kind_of(optimizers) == kind


@pytest.mark.parametrize("given", [None, "auto"])
def test_it_follows_from_both(given):
    settings = RunState.of("onebit", error_feedback=given)
    assert of(settings) == "classical"
    assert of(settings.stepped_by("sgd")) == LoCo()
    adam = settings.stepped_by("adam")
    assert of(adam) == LoCo()
    assert of(RunState.of("efsign", error_feedback=given).stepped_by("adam")) == "none"
    assert not adam.error_feedback
    assert settings.options.error_feedback.needs_optimizer is (given == "auto")
    assert of(adam.retuned("topk", {})) == "classical"
    assert of(RunState.of("bf16", error_feedback=given).stepped_by("adam")) == "none"


@pytest.mark.parametrize(
    "named",
    [
        {"error_feedback": True},
        {"error_feedback": {"decay": 0.5}},
        {"error_feedback": {"dtype": "bfloat16"}},
        {"compressor": "topk"},
    ],
)
def test_what_the_user_says_is_done(named):
    assert of(RunState.of(**{"compressor": "onebit"} | named).stepped_by("adam")) == "classical"
    assert of(RunState.of("onebit", error_feedback=False).stepped_by("adam")) == "none"


def test_a_correction_keeps_its_residual():
    assert of(RunState.of({"name": "onebit_adam", "quantiser": "onebit"}).stepped_by("adam")) == "classical"


def test_a_run_goes_on_as_it_was():
    plain, adam = RunState.of("onebit"), RunState.of("onebit").stepped_by("adam")
    earlier = plain.running()
    del earlier["compensations"]  # of a version that did not look at the optimizer
    for state in (plain.running(), earlier):
        resumed = adam.resumed(copy.deepcopy(state))
        assert of(resumed) == "classical"
        assert resumed.error_feedback
    assert of(plain.resumed(adam.running())) == LoCo()
    assert of(RunState.of("onebit", error_feedback={"name": "loco", "beta": 0.2}).resumed(adam.running())).beta == 0.2
    loco = RunState.of("onebit", error_feedback={"name": "loco", "beta": 0.2})
    assert of(plain.resumed(loco.running())).beta == 0.2


@pytest.mark.parametrize("wrong", [3, ["loco"], {"OneBit": "nothing"}, {"OneBit": {"name": "loco", "beta": 7}}])
def test_a_state_that_says_nothing_of_the_kind(wrong):
    with pytest.raises(ValueError, match=r"compensation|beta"):
        RunState.of("onebit").resumed(RunState.of("onebit").running() | {"compensations": wrong})


def _attached(optimizer, feedback):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 48))
    made = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}.get(optimizer)
    stepping = made(model.parameters(), 0.01) if made else torch.optim.AdamW(model.parameters(), 0.01)
    compression = attach(model, "onebit", error_feedback=feedback, optimizer=stepping if made else None)
    for _ in range(2):
        stepping.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        stepping.step()
    kinds = {kind for group in compression.groups for kind in group.states}
    summary = compression.summary
    compression.close()
    return kinds, summary


def _all_attached():
    return [_attached(optimizer, None) for optimizer in ("adamw", "sgd", None)]


def test_what_is_attached(pools):
    for *known, (kinds, summary) in pools[2].run(_all_attached):
        for (kept, said), optimizer in zip(known, ("adam", "sgd"), strict=True):
            assert kept == {"loco"}
            assert "error_feedback loco" in said
            assert said.endswith(f"since the optimizer is {optimizer}")
        assert kinds == {"residual"}
        assert "error_feedback" not in summary


def test_asked_for_by_name_it_needs_an_optimizer(pools):
    with pytest.raises(Exception, match=r"pass attach\(\.\.\., optimizer=optimizer\)"):
        pools[2].run(_attached, None, "auto")


class WithAdam(Net):
    """Stepped by AdamW."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def _trained(folder):
    """What a trainer keeps with AdamW; and what goes on from a checkpoint that SGD's residual is in."""
    fit(folder, "onebit", epochs=1, make=WithAdam)
    fit(f"{folder}/residual", "onebit", epochs=1, make=WithAdam, error_feedback=True)
    _, _, said = fit(f"{folder}/again", "onebit", f"{folder}/residual/epoch=0.ckpt", make=WithAdam)
    return said


def test_a_trainer_says_which_optimizer_it_is(pools, tmp_path):
    assert pools[2].run(_trained, str(tmp_path)) == [[], []]
    for folder, last, kind in (("", 0, "loco"), ("again", 1, "residual")):
        path = next((tmp_path / folder).glob(f"epoch={last}.ckpt.lc/*.rank0.pt"))
        groups = torch.load(path, weights_only=True)["tree"]["groups"]
        assert {each for group in groups for each in group["states"]} == {kind}
