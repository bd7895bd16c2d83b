"""Check that a method of yours keeps the laws: ``check_codec(MyCodec())``. Ranks are threads.

The package's own methods are tested with the same functions.
"""

from lightning_compress.testing.check import check_codec

__all__ = ["check_codec"]
