"""A port for processes to meet at: one that no connection is given by chance between its choice and its use."""

import random
import socket
from contextlib import suppress


def free_port():
    """A free port below those that Linux gives to connections by itself, of which Gloo takes many; as text."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with suppress(OSError), socket.socket() as listener:
            listener.bind(("", port))
            return str(port)
