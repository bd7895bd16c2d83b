"""What an exchange takes of a rank, counted; ``planning`` makes seconds of it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Cost:
    """What one exchange of a vector takes of a rank; nothing by default, and ``+`` is one exchange after the other.

    Attributes:
        bytes_sent: what it hands to the transport, by the method's formula; what that is expected to be where messages
            vary in length.
        rounds: messages that wait for one another: how often a step pays the latency of the link.
        encodes: how many times over a rank encodes the vector.
        decodes: how many times over it decodes it.
        sum_encodes: of ``encodes``, those of sums.
        sum_decodes: of ``decodes``, those of sums.
        copies: how many times over it copies float32 or adds it up beside that.
        calls: how often it calls the codec to encode or to decode.
        inner_bytes: of ``bytes_sent``, those that stay within a node.
        inner_rounds: of ``rounds``, those within a node.
    """

    bytes_sent: int = 0
    rounds: int = 0
    encodes: float = 0.0
    decodes: float = 0.0
    sum_encodes: float = 0.0
    sum_decodes: float = 0.0
    copies: float = 0.0
    calls: int = 0
    inner_bytes: int = 0
    inner_rounds: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Cost)))

    def scaled(self, share: float) -> Cost:
        """The same of a part of the vector, by its share: what is times over the vector; bytes and counts stay."""
        times = ("encodes", "decodes", "sum_encodes", "sum_decodes", "copies")
        return replace(self, **{name: share * getattr(self, name) for name in times})
