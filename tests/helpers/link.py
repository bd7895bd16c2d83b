"""A link of 1 Gbit/s, as far as ``exchange="auto"`` can tell: what it chooses in a test is always the same."""

from lightning_compress.codecs import Dense
from lightning_compress.costs import CODES, COPIES, UNKNOWN
from lightning_compress.exchanges import probe


def pretend():
    """Have this process measure that, from now on; where ranks share memory, nothing but dense would pay."""
    probe.time_link = lambda collective, device: UNKNOWN
    probe.time_codec = lambda codec, device: COPIES if isinstance(codec, Dense) else CODES
