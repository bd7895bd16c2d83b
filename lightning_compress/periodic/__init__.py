"""Training in which ranks synchronise every few steps; works in plain loops too, without Lightning."""

from lightning_compress.periodic.gossip import Gossip
from lightning_compress.periodic.local_sgd import LocalSGD
from lightning_compress.periodic.synchroniser import Synchroniser

__all__ = ["Gossip", "LocalSGD", "Synchroniser"]
