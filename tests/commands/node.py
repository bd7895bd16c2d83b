"""A host of a lab that runs a command: ``python -m tests.commands.node NAME FILE WORDS``, in a mount namespace."""

import ctypes
import os
import socket
import sys

CLONE_NEWUTS, MS_BIND = 0x4000000, 0x1000


def become(name, hosts):
    """Give this process a host name and an /etc/hosts of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = [libc.unshare(CLONE_NEWUTS), libc.mount(hosts.encode(), b"/etc/hosts", None, MS_BIND, None)]
    assert not any(done), os.strerror(ctypes.get_errno())
    socket.sethostname(name)


if __name__ == "__main__":
    from lightning_compress.__main__ import main

    become(*sys.argv[1:3])
    sys.argv = ["lightning-compress", *sys.argv[3:]]
    main()
