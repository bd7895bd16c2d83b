"""Ranks train on their own, and meet every so often; also in loops of one's own, without Lightning."""

from lightning_compress.periodic.gossip import Gossip
from lightning_compress.periodic.local_sgd import LocalSGD
from lightning_compress.periodic.synchroniser import Synchroniser

__all__ = ["Gossip", "LocalSGD", "Synchroniser"]
