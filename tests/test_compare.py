"""What ``compare`` says of gradients, against figures found otherwise."""

import math

import pytest
import torch

from lightning_compress import compare
from lightning_compress.codecs import CODECS, QSGD, Codec, Plan, TopK
from lightning_compress.core.layout import Layout


def gradients(seed=0):
    """A weight worth compressing, another one, and two that the rules keep out."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"body.weight": (64, 48), "body.bias": (2000,), "small.weight": (31, 33), "head.weight": (40, 100)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def compressed(step):
    return torch.cat([step["body.weight"].reshape(-1), step["head.weight"].reshape(-1)])


def test_all_compressors_with_their_defaults():
    result = compare(gradients())
    assert [row.compressor for row in result.rows] == list(CODECS.complete())
    assert result.parameters == ("body.weight", "head.weight")
    assert (result.steps, result.numel, result.dense_numel) == (1, 64 * 48 + 40 * 100, 2000 + 31 * 33)
    for row, codec in zip(result.rows, CODECS.complete().values(), strict=True):
        assert row.error_feedback == row.contractive == codec().contractive
        assert row.safe_with_adam == codec().safe_with_adam
        assert row.sum_error == pytest.approx(row.error, abs=1e-7)
        assert row.encode_ms > 0
        assert row.decode_ms > 0
        assert row.error >= 0
        assert row.error <= 1 or not row.contractive
        assert 0 < row.cosine <= 1 + 1e-9
    by_name = {row.compressor: row for row in result.rows}
    assert (by_name["none"].bits, by_name["none"].error) == (32, 0)
    assert by_name["none"].cosine == pytest.approx(1, abs=1e-12)
    assert by_name["bf16"].bits == 16
    assert 0 < by_name["fp16"].error < by_name["bf16"].error < 2**-8 < by_name["onebit"].error


def test_figures_of_topk():
    given = gradients()
    (row,) = compare(given, [{"name": "topk", "density": 0.25}]).rows
    rest = []
    for name in ("body.weight", "head.weight"):
        part = given[name].double().reshape(-1)
        kept = part.abs().topk(math.ceil(0.25 * len(part))).indices
        rest.append(part.index_fill(0, kept, 0.0))
    left = torch.cat(rest).norm() / compressed(given).double().norm()
    assert row.compressor == "topk density=0.25"
    assert row.bits == 16
    assert row.error == pytest.approx(float(left), rel=1e-6)
    assert row.cosine == pytest.approx(math.sqrt(1 - float(left) ** 2), rel=1e-6)  # what is kept is exact


def test_what_a_correction_sends_has_its_name():
    given = gradients()
    rows = compare(given, ["dgc", {"name": "topk", "density": 0.001}, "onebit_adam"]).rows
    assert [row.compressor for row in rows] == ["dgc: topk density=0.001", "topk density=0.001", "onebit_adam: efsign"]
    assert (rows[0].bits, rows[0].error) == (rows[1].bits, rows[1].error)


@pytest.mark.parametrize("feedback", [True, False])
def test_error_feedback_over_steps(feedback):
    steps = [gradients(0)] * 6
    (row,) = compare(steps, [TopK(0.2)], error_feedback=feedback).rows
    (single,) = compare(steps[0], [TopK(0.2)]).rows
    assert row.error_feedback is feedback
    if feedback:  # of a gradient that stays the same, feedback brings everything sooner or later
        residual, gradient = torch.zeros(7072), compressed(steps[0])
        errors = []
        for _ in steps:
            vector = residual + gradient
            sent = torch.cat([_largest(part) for part in vector.split([64 * 48, 4000])])
            residual = vector - sent
            errors.append(float(residual.norm() / vector.norm()))
        assert row.error == pytest.approx(sum(errors) / 6, rel=1e-5)
        assert row.sum_error == pytest.approx(float(residual.norm() / (6 * gradient).norm()), rel=1e-5)
        assert row.sum_error < 0.5 * single.error
    else:
        assert row.error == pytest.approx(single.error)
        assert row.sum_error == pytest.approx(single.error)


def _largest(part):
    kept = part.abs().topk(math.ceil(0.2 * len(part))).indices
    return torch.zeros_like(part).index_copy(0, kept, part[kept])


def test_steps_and_seeds_draw_different_numbers():
    steps = [gradients(0)] * 16
    assert compare(steps, [QSGD(2)]).rows[0].sum_error < 0.5 * compare(steps[0], [QSGD(2)]).rows[0].error  # unbiased
    same, other = compare(steps, [QSGD(2)]).rows[0], compare(steps, [QSGD(2)], seed=1).rows[0]
    assert compare(steps, [QSGD(2)]).rows[0].error == same.error != other.error


class _Halves(Plan):
    """Sends as many elements as its shared draw says, and keeps the others."""

    variable = True

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.message_size = 4 * layout.numel
        self._count = 0

    @property
    def used(self) -> int:
        return 4 * self._count

    def share(self, key: int) -> None:
        self._count = self.layout.numel // 2

    def encode(self, vector, message, key) -> None:
        message[: self.used].view(torch.float32).copy_(vector[: self._count])
        vector[: self._count] = 0

    def decode(self, messages, out, weight, accumulate) -> None:
        assert messages.shape[1] == self.used
        if not accumulate:
            out.zero_()
        out[: self._count] += weight * messages.view(torch.float32).sum(0)


class Halves(Codec):
    """A method of variable length that draws in common."""

    def plan(self, layout: Layout, device: torch.device, summands: int = 1) -> Plan:
        return _Halves(layout)


def test_variable_length_counts_what_was_used():
    given = gradients()
    (row,) = compare(given, [Halves()]).rows
    vector = compressed(given)
    assert (row.compressor, row.bits) == ("Halves", 16)
    assert row.error == pytest.approx(float(vector[3536:].norm() / vector.norm()), rel=1e-6)


def test_inputs_stay_as_they_are_and_may_be_half_precision():
    given = gradients()
    copies = {name: gradient.clone() for name, gradient in given.items()}
    compare(given, ["topk"])
    assert all(torch.equal(given[name], copies[name]) for name in given)
    half = {name: gradient.to(torch.bfloat16).requires_grad_() for name, gradient in given.items()}
    assert compare(half, ["bf16"]).rows[0].error == 0


@pytest.mark.parametrize("steps", [1, 3])
def test_files(tmp_path, steps):
    given = [gradients(seed) for seed in range(steps)]
    torch.save(given if steps > 1 else given[0], tmp_path / "gradients.pt")
    for path in (tmp_path / "gradients.pt", str(tmp_path / "gradients.pt")):
        result = compare(path, ["onebit"])
        assert result.steps == steps
        assert result.rows[0].error == compare(given, ["onebit"]).rows[0].error


def test_table_is_aligned():
    lines = str(compare([gradients(0), gradients(1)], ["onebit", {"name": "qsgd", "bits": 8}])).splitlines()
    assert lines[0].split()[:2] == ["compressor", "bits"]
    assert lines[1].startswith("onebit       ")
    assert lines[2].startswith("qsgd bits=8  ")
    assert len({len(line) for line in lines[:3]}) == 1
    assert lines[3].startswith("2 gradients of 7,072 elements in 2 parameters; 3,023 elements")


WRONG = {
    "gradients is int": (3, {}),
    "gradients is list": ([torch.ones(2)], {}),
    "gradients is empty": ({}, {}),
    "gradients is empty; use": ([], {}),
    "'a' is NoneType, not a tensor": ({"a": None}, {}),
    "'a' is torch.int64": ({"a": torch.ones(64, 64, dtype=torch.int64)}, {}),
    "'a' is torch.complex64": ({"a": torch.ones(64, 64, dtype=torch.complex64)}, {}),
    "sparse": ({"a": torch.eye(64).to_sparse()}, {}),
    "'a' has NaN": ({"a": torch.full((64, 64), torch.nan)}, {}),
    "'a' of step 1 has NaN": ([{"a": torch.ones(64, 64)}, {"a": torch.full((64, 64), torch.inf)}], {}),
    "beyond float32's range": ({"a": torch.full((64, 64), 1e300, dtype=torch.float64)}, {}),
    "names or shapes of 'a'": ([{"a": torch.ones(64, 64)}, {"a": torch.ones(64, 65)}], {}),
    "names or shapes of 'b'": ([{"a": torch.ones(64, 64)}, {"a": torch.ones(64, 64), "b": torch.ones(1)}], {}),
    "min_numel=1024": ({"a": torch.ones(5000), "b": torch.ones(30, 30)}, {}),
    "of a step are zero": ({"a": torch.zeros(64, 64)}, {}),
    "depends on the link": (gradients(), {"compressors": ["auto"]}),
    "needs several ranks": (gradients(), {"compressors": ["powersgd"]}),
    "is empty; leave it out": (gradients(), {"compressors": []}),
    r"compressors=\['topk'\]": (gradients(), {"compressors": "topk"}),
    "unknown compressor 'zip'": (gradients(), {"compressors": ["zip"]}),
    "min_numel=-1 must be an integer, 0 or more": (gradients(), {"min_numel": -1}),
    "min_numel='x' must be an integer, 0 or more": (gradients(), {"min_numel": "x"}),
    "seed=1.5 must be an integer, 0 or more": (gradients(), {"seed": 1.5}),
    "density must be in": (gradients(), {"compressors": [{"name": "topk", "density": 2}]}),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_compared_is_refused(message):
    given, arguments = WRONG[message]
    with pytest.raises(ValueError, match=message):
        compare(given, **arguments)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("gradients")
    torch.save({"code": print}, tmp_path / "code.pt")  # is not run
    for name in ("notes.txt", "code.pt"):
        with pytest.raises(ValueError, match=f"{name} is not a file of tensors"):
            compare(tmp_path / name)
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    with pytest.raises(ValueError, match="gradients is Tensor"):
        compare(tmp_path / "tensor.pt")


def test_other_ways_of_feedback_are_not_compared():
    with pytest.raises(ValueError, match="error_feedback='loco' must be true, false or null"):
        compare({"w": torch.randn(64, 64)}, ["onebit"], error_feedback="loco")
