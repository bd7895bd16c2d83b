"""The table of cases: one row per method; every law runs over every row."""

import math
from typing import Any

import torch

from lightning_compress.codecs import (
    BF16,
    FFT,
    FP16,
    QSGD,
    Codec,
    Dense,
    EFSign,
    OneBit,
    RangeFloat,
    Rotated,
    Rows,
    SparseLoCo,
    TopK,
)
from lightning_compress.core.layout import Layout, Segment
from lightning_compress.reducers import PowerSGD
from tests import sparse_sizes
from tests.case import Case
from tests.contrib.cases import CONTRIB
from tests.reference import codecs as reference
from tests.reference import sparse as sparse_reference


def _columns(codec: OneBit, segment: Segment) -> int:
    width = math.prod(segment.shape[1:])
    length = math.ceil(codec.min_column / width) * width
    return math.ceil(segment.stop / length) - segment.start // length


def _onebit_bytes(codec: OneBit, layout: Layout) -> int:
    bits = -(-layout.numel // 8)
    if codec.scope == "column":
        return -(-8 * sum(_columns(codec, each) for each in layout.segments) // 16) * 16 + bits
    means = 8 * -(-layout.numel // min(codec.block, 8 * bits))
    return -(-means // 16) * 16 + bits


def _efsign_bytes(codec: EFSign, layout: Layout) -> int:
    bits = -(-layout.numel // 8)
    return -(-4 * -(-layout.numel // min(codec.block, 8 * bits)) // 16) * 16 + bits


def _qsgd_bytes(codec: QSGD, layout: Layout) -> int:
    bucket = min(codec.bucket, 8 * -(-layout.numel // 8))
    return -(-4 * -(-layout.numel // bucket) // 16) * 16 + sparse_sizes.planes(codec.bits, layout.numel)


def _qsgd_entropy_bytes(codec: QSGD, layout: Layout) -> int:
    bucket = min(codec.bucket, 8 * -(-layout.numel // 8))
    buckets = -(-layout.numel // bucket)
    last = -(-(layout.numel - (buckets - 1) * bucket) // 64) * 64
    codes = sparse_sizes.planes(codec.bits, (buckets - 1) * -(-bucket // 64) * 64 + last)
    return -(-5 * buckets // 16) * 16 + 16 + codes + 4 + 8


def _rotated_bytes(codec: Rotated, layout: Layout) -> int:
    block = codec.block
    while block > 8 and block // 2 >= layout.numel:
        block //= 2
    blocks = -(-layout.numel // block)
    return -(-4 * blocks // 16) * 16 + sparse_sizes.planes(codec.bits, blocks * block)


def _range_float_bytes(codec: RangeFloat, layout: Layout) -> int:
    ranges = 16 + 8 * -(-layout.numel // codec.block)
    codes = sparse_sizes.planes(codec.bits, layout.numel)
    return sum(-(-each // 16) * 16 for each in (ranges, codes))


def _floats(size):
    return lambda codec, layout: size * layout.numel


def _plain(slow):
    return lambda codec, vector, layout, message: slow(vector)


def _topk(codec, vector, layout, message):
    segments = [(s.offset, s.end) for s in layout.segments if s.numel]
    return reference.topk(vector, codec.density, segments if codec.scope == "parameter" else [(0, len(vector))])


def _rows(codec, vector, layout, message):
    segments = [(each.numel, each.start, math.prod(each.shape[1:])) for each in layout.segments]
    assert bytes(message.tolist()) == sparse_reference.rows(vector, segments)
    return reference.dense(vector)


def _sparseloco(codec, vector, layout, message):
    return sparse_reference.sparseloco(vector, [(s.offset, s.end) for s in layout.segments if s.numel], codec)


def _onebit(codec, vector, layout, message):
    return reference.onebit(vector, codec.block)


def _onebit_columns(codec, vector, layout, message):
    units = [(s.numel, s.start, math.prod(s.shape[1:])) for s in layout.segments]
    return reference.onebit_columns(vector, units, codec.min_column)


def _efsign(codec, vector, layout, message):
    return reference.efsign(vector, codec.block)


def _range_float(codec, vector, layout, message):
    mantissa = int(message[:4].view(torch.int32))
    assert codec.mantissa in ("auto", mantissa)
    return reference.range_float(vector, codec.bits, mantissa, codec.block, codec.rounding == "nearest")


RANGE_FLOATS = (
    RangeFloat(),
    RangeFloat(2, block=64),
    RangeFloat(5, 1, 72),
    RangeFloat(8, 7, 128),
    RangeFloat(10, 4, 1024, "truncate"),
    RangeFloat(13, 6),
    RangeFloat(16, "auto", 64),
    RangeFloat(32, 23),
    RangeFloat(32, 10, 64),
)

CASES = [
    Case("none", Dense(), _floats(4), lossless=Dense(), reference=_plain(reference.dense), numba=({},), triton=({},)),
    Case(
        "fp16",
        FP16(),
        _floats(2),
        rounding=2.0**-10,
        reference=_plain(reference.fp16),
        triton=({},),
        scales=(1.0, 1.0),
    ),
    Case("bf16", BF16(), _floats(2), rounding=2.0**-7, reference=_plain(reference.bf16), triton=({},)),
    Case(
        "topk",
        TopK(density=0.05),
        sparse_sizes.topk,
        lossless=TopK(density=1.0),
        reference=_topk,
        also=(TopK(0.01), TopK(0.7), TopK(1.0)),
        numba=({"density": 0.02}, {"density": 0.02, "selection": "exact"}),
        triton=({}, {"scope": "group", "values": "fp16", "density": 0.1}),
    ),
    Case(
        "topk_group",
        TopK(density=0.05, scope="group"),
        sparse_sizes.topk,
        lossless=TopK(density=1.0, scope="group"),
        reference=_topk,
        also=(TopK(0.2, "group"),),
    ),
    Case(
        "topk_exact",
        TopK(density=0.05, selection="exact"),
        sparse_sizes.topk,
        lossless=TopK(density=1.0, selection="exact"),
    ),
    Case(
        "topk_fp16",
        TopK(density=0.05, values="fp16"),
        sparse_sizes.topk,
        loses="element",
        scales=(1.0, 1.0),
    ),
    Case("topk_2bit", TopK(density=0.05, values="2bit", indices="int16"), sparse_sizes.topk, loses="element"),
    Case("topk_1bit", TopK(density=0.2, values="1bit", indices="bitmap"), sparse_sizes.topk, loses="element"),
    Case(
        "topk_rice",
        TopK(density=0.05, values="2bit", indices="rice"),
        sparse_sizes.topk,
        loses="element",
        variable=True,
    ),
    Case("rows", Rows(), sparse_sizes.rows, lossless=Rows(), variable=True, reference=_rows, also=(Rows(1.0),)),
    Case(
        "sparseloco",
        SparseLoCo(k=6, block=128),
        sparse_sizes.sparseloco,
        loses="element",
        reference=_sparseloco,
        also=(SparseLoCo(), SparseLoCo(4, 64), SparseLoCo(64, 64)),
    ),
    Case(
        "onebit",
        OneBit(block=64),
        _onebit_bytes,
        loses="block",
        reference=_onebit,
        also=(OneBit(), OneBit(72)),
        numba=({}, {"block": 96}),
        triton=({}, {"block": 96}, {"block": 64}, {"block": 4096}),
    ),
    Case(
        "onebit_column",
        OneBit(block=64, scope="column"),
        _onebit_bytes,
        loses="block",
        growth=1.5,
        reference=_onebit_columns,
        also=(OneBit(scope="column"), OneBit(scope="column", min_column=5)),
    ),
    Case(
        "efsign",
        EFSign(block=64),
        _efsign_bytes,
        loses="block",
        reference=_efsign,
        also=(EFSign(), EFSign(72)),
        numba=({},),
        triton=({}, {"block": 264}),
    ),
    Case(
        "qsgd",
        QSGD(bits=4, bucket=64),
        _qsgd_bytes,
        loses="block",
        scales=(1e-30, 1e30),
        numba=(
            {},
            {"bucket": 72},
            {"bits": 2, "bucket": 1024},
            {"bits": 8, "bucket": 64},
            {"bucket": 2240},
            {"norm": "l2"},
            {"correlated": True},
        ),
        triton=(
            {},
            {"bits": 2, "bucket": 96, "norm": "l2"},
            {"bits": 5, "bucket": 200},
            {"bits": 2, "correlated": True},
        ),
    ),
    Case(
        "qsgd_entropy",
        QSGD(bits=5, bucket=64, coding="entropy"),
        _qsgd_entropy_bytes,
        loses="block",
        variable=True,
        scales=(1e-30, 1e30),
    ),
    Case("qsgd_l2", QSGD(bits=6, bucket=128, norm="l2"), _qsgd_bytes, loses="block", scales=(1e-30, 1e30)),
    Case(
        "rotated",
        Rotated(bits=5, block=64),
        _rotated_bytes,
        loses="vector",
        scales=(1e-30, 1e30),
        numba=({}, {"bits": 5}, {"block": 64}, {"bits": 3, "correlated": True}),
        triton=({}, {"bits": 5, "block": 64}, {"bits": 8, "block": 1024}, {"bits": 2, "correlated": True}),
    ),
    Case(
        "rotated_7",
        Rotated(bits=7, block=128),
        _rotated_bytes,
        loses="vector",
        growth=2.0,
        scales=(1e-30, 1e30),
    ),
    Case(
        "range_float",
        RangeFloat(block=64),
        _range_float_bytes,
        lossless=RangeFloat(bits=32, mantissa=23),
        reference=_range_float,
        also=RANGE_FLOATS,
        numba=(
            {},
            {"bits": 2, "block": 64},
            {"bits": 5, "mantissa": 1, "block": 72},
            {"bits": 7, "block": 1032, "rounding": "truncate"},
            {"bits": 11, "block": 1 << 20},
            {"bits": 16, "block": 64},
            {"bits": 32},
        ),
        triton=(
            {},
            {"bits": 7, "mantissa": 2, "block": 1032, "rounding": "truncate"},
            {"bits": 10, "block": 64, "mantissa": 3},
            {"bits": 13, "mantissa": 6},
            {"bits": 32, "block": 1024},
        ),
    ),
    Case(
        "fft",
        FFT(theta=0.5, block=64),
        sparse_sizes.spectrum,
        loses="block",
        triton=(
            {"block": 512, "mantissa": 4},
            {"block": 64, "theta": 0.97, "bits": 4},
            {"block": 256, "theta": 0.0, "bits": 32, "mantissa": 23},
        ),
        transforms=True,
    ),
    Case("powersgd", PowerSGD(rank=2), lossless=PowerSGD(rank=10**6)),
    *CONTRIB,
]


def unbiased_cases() -> list[Case]:
    """Rows of codecs whose private noise is right on average, but those that have none."""
    noisy = ((case, case.codec) for case in CASES if case.codec != case.lossless)
    return [case for case, codec in noisy if isinstance(codec, Codec) and not (codec.contractive or codec.sum_dtype)]


def case_of(codec: Codec) -> Case:
    """The row of these settings, or else the first one of the method."""
    alike = [case for case in CASES if type(case.codec) is type(codec)]
    return next((case for case in alike if case.codec == codec), alike[0])


def kernel_settings(compiler: str) -> list[tuple[Case, dict[str, Any]]]:
    """Rows of methods that have kernels of a compiler, each with its settings in turn, by name."""
    return [(case, {"name": case.codec.name, **given}) for case in CASES for given in getattr(case, compiler)]
