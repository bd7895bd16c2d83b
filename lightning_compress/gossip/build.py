"""Builds gossip algorithms and their compressors from what users write."""

from __future__ import annotations

from lightning_compress.codecs import CODECS, Codec, Dense, Method
from lightning_compress.core.registry import Registry, build
from lightning_compress.gossip import ALGORITHMS, Algorithm
from lightning_compress.gossip.moniqua import Moniqua
from lightning_compress.settings.automatic import Automatic

COMPRESSORS: Registry[Codec | Moniqua] = Registry({**CODECS, "moniqua": Moniqua}, (Codec,))
"""What ``compressor=`` takes by name."""


def build_algorithm(given: object) -> Algorithm:
    """Return the algorithm for a name, ``{"name": ..., **settings}`` or an ``Algorithm``.

    Raises:
        ValueError: the algorithm or a setting is unknown, or a value is out of range.
    """
    built = build("algorithm", given, ALGORITHMS, (Algorithm,))
    assert isinstance(built, Algorithm)
    return built


def build_gossip_compressor(given: object, algorithm: Algorithm) -> Codec | Moniqua | None:
    """Return the compressor for what the user passed as ``compressor=``.

    Args:
        given: "auto", "none" or null, "moniqua", a codec's name, ``{"name": ..., **settings}``, or an object.
        algorithm: that will use it.

    Returns:
        None for exact means.

    Raises:
        ValueError: the compressor or a setting is unknown, a value is out of range, or the algorithm cannot take it.
    """
    compressor: Codec | Moniqua | None = Dense()
    if given == "auto" or isinstance(given, Automatic):
        compressor = algorithm.codec
    elif given is not None and given != "none":
        compressor = _built(given)
    if isinstance(compressor, Dense) and algorithm.codec is None:
        compressor = None
    algorithm.check_compressor(compressor)
    return compressor


def _built(given: object) -> Codec | Moniqua:
    if isinstance(given, Method) and not isinstance(given, Codec):
        raise ValueError(f"compressor={given} needs a collective of all ranks; gossip takes codecs and moniqua")
    built = build("compressor", given, COMPRESSORS, (Codec, Moniqua))
    assert isinstance(built, Codec | Moniqua)
    if isinstance(built, Codec) and built.correlated:
        raise ValueError(
            f"compressor={built}: gossip has no mean over all ranks in which correlated errors could cancel; leave "
            "correlated=True out"
        )
    return built
