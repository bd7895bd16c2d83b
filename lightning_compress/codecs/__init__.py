"""Methods that encode a vector into a message and decode it, one per file.

An import here registers a codec under its ``name``. Errors and tables list codecs in this order; those of ``contrib``
and of other packages follow.
"""
# ruff: noqa: I001

from __future__ import annotations

from lightning_compress.core.random import RandomBits as RandomBits, Stream as Stream
from lightning_compress.codecs.codec import Codec as Codec, Method as Method, Plan as Plan
from lightning_compress.codecs.dense import Dense as Dense
from lightning_compress.codecs.cast import FP16 as FP16, BF16 as BF16
from lightning_compress.codecs.sparse.topk import TopK as TopK
from lightning_compress.codecs.sign.onebit import OneBit as OneBit
from lightning_compress.codecs.sign.efsign import EFSign as EFSign
from lightning_compress.codecs.quantize.qsgd import QSGD as QSGD
from lightning_compress.codecs.quantize.rotated import Rotated as Rotated
from lightning_compress.codecs.quantize.range_float import RangeFloat as RangeFloat
from lightning_compress.codecs.spectral.fft import FFT as FFT
from lightning_compress.codecs.sparse.rows import Rows as Rows
from lightning_compress.codecs.sparse.sparseloco import SparseLoCo as SparseLoCo
from lightning_compress.core.registry import Registry, named

CODECS: Registry[Codec] = Registry(named(globals(), Codec), (Codec,))  # type: ignore[type-abstract]
"""Registry that ``compressor=`` accepts."""

__all__ = ["CODECS", "Codec", "Method", "Plan", "RandomBits", "Stream", *(each.__name__ for each in CODECS.values())]
