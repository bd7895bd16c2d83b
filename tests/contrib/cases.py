"""Rows of methods that stand for completeness; every law runs over every row, by turns."""

import math

from lightning_compress.contrib.codecs.adaptive import Adaptive
from lightning_compress.contrib.codecs.atomo import ATOMO
from lightning_compress.contrib.codecs.dct import DCT
from lightning_compress.contrib.codecs.natural import Natural
from lightning_compress.contrib.codecs.qsgd_elias import QSGDElias
from lightning_compress.contrib.codecs.randomk import RandomK
from lightning_compress.contrib.codecs.terngrad import TernGrad
from lightning_compress.contrib.codecs.threshold import Threshold
from lightning_compress.contrib.codecs.wangni import Wangni
from lightning_compress.contrib.reducers.adam_mask import AdamMask
from lightning_compress.contrib.reducers.signsgd import SignSGD
from lightning_compress.contrib.reducers.sketch import Sketch
from lightning_compress.contrib.reducers.terngrad_shared import TernGradShared
from lightning_compress.core.layout import Layout
from tests import sparse_sizes
from tests.case import Case
from tests.reference import codecs as reference


def _natural_bytes(codec: Natural, layout: Layout) -> int:
    buckets = -(-layout.numel // min(codec.bucket, 8 * -(-layout.numel // 8)))
    return -(-buckets // 16) * 16 + layout.numel


def _terngrad_bytes(codec: TernGrad, layout: Layout) -> int:
    scales = 4 * sum(segment.numel > 0 for segment in layout.segments)
    return -(-scales // 16) * 16 + -(-layout.numel // {"2bit": 4, "base3": 5}[codec.packing])


def _randomk_bytes(codec: RandomK, layout: Layout) -> int:
    return sum(4 * max(1, math.ceil(codec.density * segment.numel)) for segment in layout.segments if segment.numel)


def _atomo_bytes(codec: ATOMO, layout: Layout) -> int:
    shapes = [(segment.shape[0], math.prod(segment.shape[1:])) for segment in layout.segments]
    return sum(4 * min(rows * columns, codec.rank * (rows + columns)) for rows, columns in shapes)


def _natural(codec, vector, layout, message):
    return reference.natural(vector, codec.bucket, key=1)


CONTRIB = [
    Case(
        "threshold",
        Threshold(0.5, 0.7, capacity=0.2),
        sparse_sizes.threshold,
        loses="element",
        variable=True,
        scales=(1.0, 1.0),
    ),
    Case(
        "threshold_words",
        Threshold(1.0, 1.0, "words", 0.05),
        sparse_sizes.threshold,
        loses="element",
        variable=True,
        scales=(1.0, 1.0),
    ),
    Case("adaptive", Adaptive(16), sparse_sizes.adaptive, loses="element", variable=True),
    Case("adaptive_int16", Adaptive(20, "int16"), sparse_sizes.adaptive, loses="element", variable=True),
    Case("wangni", Wangni(0.05), sparse_sizes.wangni, loses="element", lossless=Wangni(1.0), variable=True, growth=4.0),
    Case(
        "qsgd_elias",
        QSGDElias(bits=3, bucket=64, norm="l2"),
        sparse_sizes.qsgd_elias,
        loses="block",
        variable=True,
        growth=1.6,
        scales=(1e-30, 1e30),
    ),
    Case(
        "natural",
        Natural(bucket=64),
        _natural_bytes,
        scales=(1e-30, 1e30),  # its sums are qsgd's
        reference=_natural,
        also=(Natural(), Natural(72)),
    ),
    Case(
        "terngrad",
        TernGrad(),
        _terngrad_bytes,
        loses="vector",
        scales=(1e-30, 1e30),
    ),
    Case("terngrad_base3", TernGrad(None, "base3"), _terngrad_bytes, loses="vector", scales=(1e-30, 1e30)),
    Case("terngrad_shared", TernGradShared(), scales=(1e-30, 1e30)),
    Case("signsgd", SignSGD(), scales=None),
    Case("signsgd_tally", SignSGD("tally", momentum=0.0), scales=None),
    Case(
        "dct",
        DCT(theta=0.5, block=64),
        sparse_sizes.spectrum,
        loses="block",
    ),
    Case("randomk", RandomK(density=0.05), _randomk_bytes, lossless=RandomK(density=1.0)),
    Case(
        "randomk_rescaled",
        RandomK(0.05, rescale=True),
        _randomk_bytes,
        loses="added",
        lossless=RandomK(1.0, rescale=True),
    ),
    Case("atomo", ATOMO(rank=2), _atomo_bytes, lossless=ATOMO(rank=10**6)),
    Case("adam_mask", AdamMask(0.05), lossless=AdamMask(1.0), variable=True),  # the first step is dense
    Case("adam_mask_moment", AdamMask(0.05, rest="moment"), variable=True),
    Case("sketch", Sketch(density=0.02), lossless=Sketch(density=1.0)),
]
