"""Formulas of the table of cases for sparse messages and such that vary in length."""

import math
from itertools import pairwise

from lightning_compress.codecs import FFT, QSGD, Rows, SparseLoCo, TopK
from lightning_compress.contrib.codecs.adaptive import Adaptive
from lightning_compress.contrib.codecs.dct import DCT
from lightning_compress.contrib.codecs.threshold import Threshold
from lightning_compress.contrib.codecs.wangni import Wangni
from lightning_compress.core.layout import Layout


def omega_bits(number: float) -> float:
    """At least the length of the omega code of a number: straight lines between some that have the greatest."""
    corners = [(1, 1), (2, 3), (4, 6), (16, 11), (2**16, 28), (2**32, 44)]
    for (low, few), (high, many) in pairwise(corners):
        if number <= high:
            return few + (number - low) * (many - few) / (high - low)
    raise AssertionError(number)


def qsgd_elias(codec: QSGD, layout: Layout) -> int:
    """Norms and lengths, and codes with the L2 norm: what is expected in the worst case, and four deviations."""
    assert codec.norm == "l2"
    n, s = min(codec.bucket, 8 * -(-layout.numel // 8)), 2 ** (codec.bits - 1) - 1
    buckets = -(-layout.numel // n)
    most = min(n, s * math.sqrt(n))
    counts = [most * i / 256 for i in range(1, 257)]
    expected = max(c * (1 + omega_bits(n / c) + omega_bits(s * math.sqrt(n) / c)) for c in counts)
    levels = {1: 1, 3: 3, 7: 6, 15: 7, 31: 11, 63: 12, 127: 13}
    bits = min(layout.numel * (2 + levels[s]), expected * (buckets + 4 * math.sqrt(buckets / most)))
    return 6 * buckets + math.ceil(math.ceil(bits) / 8)


def rice(numel: int, count: int) -> int:
    """12 bytes, then each number's K bits and a 1, and quotients that add up to numel / 2^K; 5 bytes more."""
    return 17 + min(-(-(count * (1 + k) + numel // 2**k) // 8) for k in range(17))


def positions(kind: str, numel: int, count: int) -> int:
    """At most, for so many positions."""
    return {
        "int32": 4 + 4 * count,
        "int16": 4 * -(-numel // 65536) + 2 * count,
        "bitmap": -(-numel // 8),
        "rice": rice(numel, count),
    }[kind]


def values(kind: str, parts: int, count: int) -> int:
    """For so many values of so many parts."""
    return {
        "fp32": 4 * count,
        "fp16": 2 * count,
        "2bit": 16 * parts + -(-2 * count // 8),
        "1bit": 4 * parts + -(-count // 8),
        "means": 8 * parts + -(-count // 8),
        "signs": -(-count // 8),
    }[kind]


def topk(codec: TopK, layout: Layout) -> int:
    """The k largest of each parameter."""
    lengths = [segment.numel for segment in layout.segments] if codec.scope == "parameter" else [layout.numel]
    count = sum(max(1, math.ceil(codec.density * length)) for length in lengths)
    if codec.indices == "int32" and codec.values in ("fp32", "fp16"):
        return 8 * count if codec.values == "fp32" else 6 * (count + count % 2)
    return positions(codec.indices, layout.numel, count) + values(codec.values, len(lengths), count)


def threshold(codec: Threshold, layout: Layout) -> int:
    """The share that there is room for."""
    most = math.ceil(codec.capacity * layout.numel)
    return 4 + 4 * most if codec.coding == "words" else rice(layout.numel, most) + values("signs", 1, most)


def adaptive(codec: Adaptive, layout: Layout) -> int:
    """Four times the target of each parameter."""
    lengths = [segment.numel for segment in layout.segments]
    most = sum(min(length, 4 * max(2, math.ceil(length / codec.proportion))) for length in lengths)
    return positions(codec.indices, layout.numel, most) + values("means", len(lengths), most)


def wangni(codec: Wangni, layout: Layout) -> int:
    """The most that can be certain, as float32, and four deviations more than the others can be."""
    target = codec.density * layout.numel
    certain, others = math.floor(target) + 1, math.ceil(target + 4 * math.sqrt(target))
    assert others <= layout.numel
    return rice(layout.numel, certain) + 4 * certain + rice(layout.numel, others) + values("1bit", 1, others)


def rows(codec: Rows, layout: Layout) -> int:
    """All of it, and a header."""
    return 8 + 4 * layout.numel


def sparseloco(codec: SparseLoCo, layout: Layout) -> int:
    """Four means of each parameter; of each block a place and two bits for each element that is kept."""
    kept = 0
    for segment in layout.segments:
        for start in range(0, segment.numel, codec.block):
            length = min(codec.block, segment.numel - start)
            kept += min(length, max(4, math.ceil(codec.k * length / codec.block)))
    width = int(math.log2(codec.block))
    planes = sum(-(-kept * each // 8) for each in (16, 8, 4, 2, 1) if width & each)
    return 16 * sum(segment.numel > 0 for segment in layout.segments) + planes + -(-2 * kept // 8)


def planes(bits: int, count: int) -> int:
    """Codes of so many bits, in planes of 32, 16, 8, 4, 2 and 1 of them."""
    return sum(-(-count * width // 8) for width in (32, 16, 8, 4, 2, 1) if bits & width)


def spectrum(codec: FFT | DCT, layout: Layout) -> int:
    """Ranges, places and codes of the whole blocks, and of the rest."""
    whole, rest = divmod(layout.numel, codec.block)
    size = 16
    for blocks, length in ((whole, codec.block), (1, rest)):
        if blocks and length:
            padded = max(8, 2 ** math.ceil(math.log2(length)))
            bins = padded // 2 + 1 if isinstance(codec, FFT) else padded
            keep = max(1, math.ceil((1 - codec.theta) * bins - 1e-9))
            places = 0 if keep == bins else min(2 * keep, math.ceil(bins / 8))
            codes = planes(codec.bits, blocks * keep * (2 if isinstance(codec, FFT) else 1))
            size += sum(16 * math.ceil(each / 16) for each in (blocks * 12, blocks * places, codes))
    return size
