"""The pieces of the error benchmark, on small gradients."""

import gzip

import pytest
import torch

from benchmarks import _sweeps
from benchmarks._plot import draw
from benchmarks.error import each_parameter, methods, orders
from benchmarks.gradients import captured
from lightning_compress import compare
from lightning_compress.codecs import CODECS


def steps(count=3):
    generator = torch.Generator().manual_seed(0)
    shapes = {"conv": (16, 16, 3, 3), "bias": (16,), "linear": (100, 50)}
    return [{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(count)]


def write_text(root):
    """Captions that were made up, where the benchmark looks for real ones."""
    (root / "multi30k").mkdir()
    lines = [f"A man in a {color} shirt rides {count} bikes.\n" for color in ("red", "blue") for count in range(200)]
    for part in ("train", "val"):
        (root / "multi30k" / f"{part}.en.gz").write_bytes(gzip.compress("".join(lines).encode()))


def test_sweep_tries_every_codec(monkeypatch):
    tried = {settings["name"] for family in _sweeps.sweep().values() for settings in family}
    assert tried == set(CODECS.complete()) - _sweeps.LEFT_OUT
    monkeypatch.setitem(_sweeps.SWEEP, "reducer", [{"rank": 4}])
    assert "reducer" not in _sweeps.sweep()


def test_more_bits_leave_less_behind():
    for label, curve in methods(steps(1)).items():
        bits, errors = zip(*curve, strict=True)
        assert list(bits) == sorted(bits), label
        assert list(errors) == sorted(errors, reverse=True), label


def test_sweeps_reach_the_same_bits():
    curves = methods([{"weight": torch.randn(300, 1000)}])
    for wanted in (2, 4, 8):
        for label in ("qsgd", "rotated", "range_float", "topk", "fft", "fft, coarse", "dct, coarse"):
            assert min(abs(bits - wanted) for bits, _ in curves[label]) < 0.15, label


def test_orders_hold_the_same_elements():
    (step,) = steps(1)
    for name, order in _sweeps.ORDERS.items():
        for parameter, gradient in order(step).items():
            assert torch.equal(gradient.reshape(-1).sort().values, step[parameter].reshape(-1).sort().values)
        assert (name == "as is") == torch.equal(order(step)["linear"].reshape(-1), step["linear"].reshape(-1))


@pytest.mark.parametrize("feedback", [False, True])
def test_each_parameter_alone(feedback):
    settings = _sweeps.sweep()["topk"]  # takes its share of each parameter anyway
    together = compare(steps(), settings, feedback).rows
    for (bits, error), row in zip(each_parameter(steps(), settings, feedback), together, strict=True):
        assert bits == pytest.approx(row.bits)
        assert error == pytest.approx(row.sum_error)


def test_picture(tmp_path):
    figures = {"methods": methods(steps()) | {"a new method": [(1.5, 0.5), (3.0, 0.3)]}, **orders(steps())}
    draw({"resnet": figures, "lstm": figures}, tmp_path / "error.png")
    assert 10_000 < (tmp_path / "error.png").stat().st_size < 150_000


def test_gradients_of_the_language_model(tmp_path):
    write_text(tmp_path)
    first, second, third = captured("lstm", tmp_path, 0, 3)
    assert list(captured("lstm", tmp_path, 1, 2)[0]) == list(second)
    assert torch.equal(captured("lstm", tmp_path, 2, 1)[0]["head.weight"], third["head.weight"])
    assert not torch.equal(first["head.weight"], second["head.weight"])
    result = compare([first, second, third], ["bf16"])
    assert (len(result.parameters), result.steps) == (4, 3)


def test_gradients_of_resnet(cifar10):
    (step,) = captured("resnet", cifar10.parent, 1, 1)
    assert len(compare(step, ["bf16"]).parameters) == 18
