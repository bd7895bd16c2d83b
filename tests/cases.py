"""The table of cases: one row per method; every law runs over every row."""

import math
from dataclasses import dataclass

from lightning_compress.codecs import (
    ATOMO,
    BF16,
    DCT,
    FFT,
    FP16,
    QSGD,
    Adaptive,
    Codec,
    Dense,
    EFSign,
    Natural,
    OneBit,
    RandomK,
    RangeFloat,
    Rotated,
    TernGrad,
    Threshold,
    TopK,
    Wangni,
)
from lightning_compress.core.layout import Layout, Segment
from lightning_compress.reducers import PowerSGD, Reducer, SignSGD, Sketch, TernGradShared
from tests import sparse_sizes


@dataclass(frozen=True)
class Case:
    """A method with small settings, and what is true of it.

    Args:
        codec: the method; a codec or a reducer.
        rounding: what summing in the message's own dtype may lose, relative to the largest value.
        lossless: settings at which the method changes nothing, if there are any.
        variable: messages differ in length.
        growth: of two-shot's traffic from 4 to 16 ranks, at most, on a small layout; more where equal shards take
            different numbers of bytes, and where sums of more ranks take many more bits (``Codec.refined``).
    """

    name: str
    codec: Codec | Reducer
    rounding: float = 0.0
    lossless: Codec | Reducer | None = None
    variable: bool = False
    growth: float = 1.35

    def message_size(self, layout: Layout) -> int:
        """The method's formula: bytes without flag and padding; the most that it may take if that varies."""
        return SIZES[self.name](self.codec, layout)


def _randomk_bytes(codec: RandomK, layout: Layout) -> int:
    return sum(4 * max(1, math.ceil(codec.density * segment.numel)) for segment in layout.segments if segment.numel)


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


def _planes_bytes(bits: int, count: int) -> int:
    return sum(-(-count * width // 8) for width in (32, 16, 8, 4, 2, 1) if bits & width)


def _qsgd_bytes(codec: QSGD, layout: Layout) -> int:
    bucket = min(codec.bucket, 8 * -(-layout.numel // 8))
    return -(-4 * -(-layout.numel // bucket) // 16) * 16 + _planes_bytes(codec.bits, layout.numel)


def _rotated_bytes(codec: Rotated, layout: Layout) -> int:
    block = codec.block
    while block > 8 and block // 2 >= layout.numel:
        block //= 2
    blocks = -(-layout.numel // block)
    return -(-4 * blocks // 16) * 16 + _planes_bytes(codec.bits, blocks * block)


def _natural_bytes(codec: Natural, layout: Layout) -> int:
    buckets = -(-layout.numel // min(codec.bucket, 8 * -(-layout.numel // 8)))
    return -(-buckets // 16) * 16 + layout.numel


def _terngrad_bytes(codec: TernGrad, layout: Layout) -> int:
    scales = 4 * sum(segment.numel > 0 for segment in layout.segments)
    return -(-scales // 16) * 16 + -(-layout.numel // {"2bit": 4, "base3": 5}[codec.packing])


def _range_float_bytes(codec: RangeFloat, layout: Layout) -> int:
    ranges = 16 + 8 * -(-layout.numel // codec.block)
    codes = _planes_bytes(codec.bits, layout.numel)
    return sum(-(-each // 16) * 16 for each in (ranges, codes))


def _spectrum_bytes(codec: FFT | DCT, layout: Layout) -> int:
    whole, rest = divmod(layout.numel, codec.block)
    size = 16
    for blocks, length in ((whole, codec.block), (1, rest)):
        if blocks and length:
            padded = max(8, 2 ** math.ceil(math.log2(length)))
            bins = padded // 2 + 1 if isinstance(codec, FFT) else padded
            keep = max(1, math.ceil((1 - codec.theta) * bins - 1e-9))
            places = 0 if keep == bins else min(2 * keep, math.ceil(bins / 8))
            codes = _planes_bytes(codec.bits, blocks * keep * (2 if isinstance(codec, FFT) else 1))
            size += sum(16 * math.ceil(each / 16) for each in (blocks * 12, blocks * places, codes))
    return size


def _atomo_bytes(codec: ATOMO, layout: Layout) -> int:
    shapes = [(segment.shape[0], math.prod(segment.shape[1:])) for segment in layout.segments]
    return sum(4 * min(rows * columns, codec.rank * (rows + columns)) for rows, columns in shapes)


SIZES = {
    "none": lambda codec, layout: 4 * layout.numel,
    "fp16": lambda codec, layout: 2 * layout.numel,
    "bf16": lambda codec, layout: 2 * layout.numel,
    "topk": sparse_sizes.topk,
    "topk_group": sparse_sizes.topk,
    "topk_exact": sparse_sizes.topk,
    "topk_fp16": sparse_sizes.topk,
    "topk_2bit": sparse_sizes.topk,
    "topk_1bit": sparse_sizes.topk,
    "topk_rice": sparse_sizes.topk,
    "threshold": sparse_sizes.threshold,
    "threshold_words": sparse_sizes.threshold,
    "adaptive": sparse_sizes.adaptive,
    "adaptive_int16": sparse_sizes.adaptive,
    "wangni": sparse_sizes.wangni,
    "randomk": _randomk_bytes,
    "randomk_rescaled": _randomk_bytes,
    "onebit": _onebit_bytes,
    "onebit_column": _onebit_bytes,
    "efsign": _efsign_bytes,
    "qsgd": _qsgd_bytes,
    "qsgd_l2": _qsgd_bytes,
    "qsgd_elias": sparse_sizes.qsgd_elias,
    "rotated": _rotated_bytes,
    "rotated_7": _rotated_bytes,
    "natural": _natural_bytes,
    "terngrad": _terngrad_bytes,
    "terngrad_base3": _terngrad_bytes,
    "range_float": _range_float_bytes,
    "fft": _spectrum_bytes,
    "dct": _spectrum_bytes,
    "atomo": _atomo_bytes,
}

CASES = [
    Case("none", Dense(), lossless=Dense()),
    Case("fp16", FP16(), rounding=2.0**-10),
    Case("bf16", BF16(), rounding=2.0**-7),
    Case("topk", TopK(density=0.05), lossless=TopK(density=1.0)),
    Case("topk_group", TopK(density=0.05, scope="group"), lossless=TopK(density=1.0, scope="group")),
    Case("topk_exact", TopK(density=0.05, selection="exact"), lossless=TopK(density=1.0, selection="exact")),
    Case("topk_fp16", TopK(density=0.05, values="fp16")),
    Case("topk_2bit", TopK(density=0.05, values="2bit", indices="int16")),
    Case("topk_1bit", TopK(density=0.2, values="1bit", indices="bitmap")),
    Case("topk_rice", TopK(density=0.05, values="2bit", indices="rice"), variable=True),
    Case("threshold", Threshold(0.5, 0.7, capacity=0.2), variable=True),
    Case("threshold_words", Threshold(1.0, 1.0, "words", 0.05), variable=True),
    Case("adaptive", Adaptive(16), variable=True),
    Case("adaptive_int16", Adaptive(20, "int16"), variable=True),
    Case("wangni", Wangni(0.05), lossless=Wangni(1.0), variable=True, growth=4.0),
    Case("randomk", RandomK(density=0.05), lossless=RandomK(density=1.0)),
    Case("randomk_rescaled", RandomK(0.05, rescale=True), lossless=RandomK(1.0, rescale=True)),
    Case("onebit", OneBit(block=64)),
    Case("onebit_column", OneBit(block=64, scope="column"), growth=1.5),
    Case("efsign", EFSign(block=64)),
    Case("qsgd", QSGD(bits=4, bucket=64)),
    Case("qsgd_l2", QSGD(bits=6, bucket=128, norm="l2")),
    Case("qsgd_elias", QSGD(bits=3, bucket=64, norm="l2", coding="elias"), variable=True, growth=1.6),
    Case("rotated", Rotated(bits=5, block=64)),
    Case("rotated_7", Rotated(bits=7, block=128), growth=2.0),
    Case("natural", Natural(bucket=64)),
    Case("terngrad", TernGrad()),
    Case("terngrad_base3", TernGrad(None, "base3")),
    Case("terngrad_shared", TernGradShared()),
    Case("signsgd", SignSGD()),
    Case("signsgd_tally", SignSGD("tally", momentum=0.0)),
    Case("range_float", RangeFloat(block=64), lossless=RangeFloat(bits=32, mantissa=23)),
    Case("fft", FFT(theta=0.5, block=64)),
    Case("dct", DCT(theta=0.5, block=64)),
    Case("atomo", ATOMO(rank=2), lossless=ATOMO(rank=10**6)),
    Case("powersgd", PowerSGD(rank=2), lossless=PowerSGD(rank=10**6)),
    Case("sketch", Sketch(density=0.02), lossless=Sketch(density=1.0)),
]


def unbiased_cases() -> list[Case]:
    """Rows of codecs whose private noise is right on average."""
    codecs = ((case, case.codec) for case in CASES)
    return [case for case, codec in codecs if isinstance(codec, Codec) and not (codec.contractive or codec.sum_dtype)]
