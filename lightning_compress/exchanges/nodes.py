"""Which ranks are on which node, and which cluster that is."""

from __future__ import annotations

import hashlib
import socket
from dataclasses import dataclass

import torch

from lightning_compress.collectives import Collective


@dataclass(frozen=True)
class Cluster:
    """Where a run is: what was measured elsewhere does not hold here.

    Args:
        ranks: how many there are.
        nodes: on so many hosts.
        hosts: a digest of the hosts' names, in the order of the ranks.
    """

    ranks: int
    nodes: int
    hosts: str

    @classmethod
    def of(cls, collective: Collective, device: torch.device) -> Cluster:
        """The ranks that come; all of them have to."""
        hosts = hosts_of(collective, device)
        return cls(len(hosts), len(set(hosts)), hashlib.sha256(b"".join(hosts)).hexdigest()[:16])


def hosts_of(collective: Collective, device: torch.device) -> list[bytes]:
    """Each rank's host name, padded to 256 bytes; all ranks come."""
    own = torch.zeros(256, dtype=torch.uint8, device=device)
    name = socket.gethostname().encode()[:256]
    own[: len(name)] = torch.frombuffer(bytearray(name), dtype=torch.uint8)
    everyone = torch.empty(collective.size, 256, dtype=torch.uint8, device=device)
    collective.all_gather(own, everyone)
    return [bytes(row) for row in everyone.tolist()]


def nodes_of(collective: Collective, size: int | None, device: torch.device, one_size: bool = True) -> list[list[int]]:
    """The ranks of each node, in order; all ranks come.

    Raises:
        ValueError: nodes are of several sizes, and have to be of one.
    """
    if size is not None:
        names = [rank // size for rank in range(collective.size)]
    else:
        hosts = hosts_of(collective, device)
        names = [hosts.index(host) for host in hosts]
    nodes = [[rank for rank, name in enumerate(names) if name == node] for node in dict.fromkeys(names)]
    if one_size and len({len(node) for node in nodes}) > 1:
        raise ValueError(
            f"exchange='hierarchical' needs nodes of one size; there are {', '.join(str(len(node)) for node in nodes)} "
            f"of {collective.size} ranks; set node_size to a divisor of it, or inner='chain', or use exchange='auto'"
        )
    return nodes
