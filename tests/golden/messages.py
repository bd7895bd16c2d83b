"""The messages that are kept, and of what they are."""

import base64
import json
from pathlib import Path

import torch

from lightning_compress.settings.parsing import rebuild_compressor
from tests.codecs.helpers import make

FILE = Path(__file__).with_name("messages.json")
NUMEL, KEY = 300, 7


def vector():
    """What the messages are of: elements of very different size."""
    return make("normal", NUMEL, 3) * make("normal", NUMEL, 4).square()


def saved():
    """``compressor`` with its settings, ``message`` and what it was ``decoded`` to, of each."""
    return json.loads(FILE.read_text()) if FILE.exists() else []


def codec_of(entry):
    """The method with the settings that it had; newer settings have their defaults."""
    return rebuild_compressor(entry["compressor"], ())


def unpack(text, dtype):
    """Numbers that were packed into text."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)
