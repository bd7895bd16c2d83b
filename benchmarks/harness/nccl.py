"""Ranks that share a GPU over NCCL."""

from __future__ import annotations

import os


def share_a_gpu(rank: int) -> None:
    """Have this process pass for another host, of which NCCL refuses no two on one GPU, and talk over sockets."""
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo", NCCL_NET="Socket")
    os.environ.update(NCCL_NVLS_ENABLE="0", NCCL_MNNVL_ENABLE="0", GLOO_SOCKET_IFNAME="lo")
