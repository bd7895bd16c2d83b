"""Compressors on gradients that a command line names, and the table of all."""

import json

import pytest
import torch
from torch import nn

from lightning_compress.__main__ import main
from lightning_compress.commands.gradients import gradients_of
from lightning_compress.settings.parsing import COMPRESSORS


def _trained(optimizer):
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    stepper = optimizer(model.parameters())
    model(torch.randn(8, 64)).square().mean().backward()
    stepper.step()
    return model, stepper


def test_gradients_of_a_file(tmp_path, capsys):
    model, _ = _trained(torch.optim.AdamW)
    torch.save({name: each.grad for name, each in model.named_parameters()}, tmp_path / "gradients.pt")
    main(["compare", str(tmp_path / "gradients.pt"), "--compressors", "topk,rotated", "--json"])
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert "measuring" in shown.err
    assert [row["compressor"] for row in found["rows"]] == ["topk", "rotated"]
    assert found["numel"] == 64 * 64


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, lambda given: torch.optim.SGD(given, 0.1, momentum=0.9)])
def test_momentum_of_a_checkpoint(tmp_path, optimizer):
    model, stepper = _trained(optimizer)
    torch.save({"state_dict": model.state_dict(), "optimizer_states": [stepper.state_dict()]}, tmp_path / "a.ckpt")
    moments = gradients_of(str(tmp_path / "a.ckpt"))
    ratio = moments["optimizer 0, parameter 0"] / model.weight.grad
    assert ratio.std() < 1e-4 * ratio.mean()


def test_a_checkpoint_without_momentum_is_refused(tmp_path):
    _, stepper = _trained(lambda given: torch.optim.SGD(given, 0.1))
    torch.save({"optimizer_states": [stepper.state_dict()]}, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="keep no mean of gradients"):
        gradients_of(str(tmp_path / "a.ckpt"))


def test_a_file_of_other_objects_says_which(tmp_path):
    torch.save({"gradient": torch.ones(2), "folder": tmp_path}, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"it also holds a pathlib\S*; save the gradients alone"):
        gradients_of(str(tmp_path / "a.ckpt"))


def test_a_function_of_ones_own(tmp_path, monkeypatch):
    lines = ["model = torch.nn.Linear(64, 64)", "model(torch.ones(2, 64)).sum().backward()", "return model"]
    (tmp_path / "own_gradients.py").write_text(
        "import torch\ndef make():\n" + "".join(f"    {each}\n" for each in lines)
    )
    monkeypatch.chdir(tmp_path)
    assert set(gradients_of("own_gradients:make")) == {"weight", "bias"}


def test_all_compressors_are_listed(capsys):
    main(["compressors", "--contrib", "true", "--json", "true"])
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(found) == COMPRESSORS.choices
    assert found["rotated"]["bits"] == pytest.approx(4.125)
    assert found["onebit"]["adam"] == 2.4
    assert found["auto"]["bits"] is None
    main(["compressors"])
    shown = capsys.readouterr().out
    assert "rotated" in shown
    assert "natural" not in shown
