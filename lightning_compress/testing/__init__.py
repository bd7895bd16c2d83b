"""The laws that every method keeps, as checks for one of your own: ``check_codec(MyCodec())``; ranks are threads.

The package's own methods are held to the same functions.
"""

from lightning_compress.testing.check import check_codec

__all__ = ["check_codec"]
