"""Methods that turn a vector into a message and back, one to a file."""

from __future__ import annotations

from lightning_compress.codecs.atomo import ATOMO
from lightning_compress.codecs.base import Codec, Method, Plan
from lightning_compress.codecs.cast import BF16, FP16
from lightning_compress.codecs.dense import Dense
from lightning_compress.codecs.quantize.natural import Natural
from lightning_compress.codecs.quantize.qsgd import QSGD
from lightning_compress.codecs.quantize.range_float import RangeFloat
from lightning_compress.codecs.quantize.rotated import Rotated
from lightning_compress.codecs.quantize.terngrad import TernGrad
from lightning_compress.codecs.sign.efsign import EFSign
from lightning_compress.codecs.sign.onebit import OneBit
from lightning_compress.codecs.sparse.adaptive import Adaptive
from lightning_compress.codecs.sparse.randomk import RandomK
from lightning_compress.codecs.sparse.threshold import Threshold
from lightning_compress.codecs.sparse.topk import TopK
from lightning_compress.codecs.sparse.wangni import Wangni
from lightning_compress.codecs.spectral.dct import DCT
from lightning_compress.codecs.spectral.fft import FFT

CODECS: dict[str, type[Codec]] = {
    "none": Dense,
    "fp16": FP16,
    "bf16": BF16,
    "topk": TopK,
    "onebit": OneBit,
    "efsign": EFSign,
    "qsgd": QSGD,
    "rotated": Rotated,
    "natural": Natural,
    "terngrad": TernGrad,
    "randomk": RandomK,
    "range_float": RangeFloat,
    "fft": FFT,
    "dct": DCT,
    "threshold": Threshold,
    "adaptive": Adaptive,
    "wangni": Wangni,
    "atomo": ATOMO,
}
"""What ``compressor=`` takes by name."""

__all__ = [
    "ATOMO",
    "BF16",
    "CODECS",
    "DCT",
    "FFT",
    "FP16",
    "QSGD",
    "Adaptive",
    "Codec",
    "Dense",
    "EFSign",
    "Method",
    "Natural",
    "OneBit",
    "Plan",
    "RandomK",
    "RangeFloat",
    "Rotated",
    "TernGrad",
    "Threshold",
    "TopK",
    "Wangni",
]
