"""Write messages of the methods and settings that have none yet."""

import base64
import json

import torch

from lightning_compress.codecs import CODECS
from lightning_compress.core.registry import describe
from tests.codecs.helpers import CODECS as CHOSEN
from tests.codecs.helpers import CPU, layout
from tests.golden.messages import FILE, KEY, NUMEL, codec_of, saved, vector


def entry(codec):
    """A message of the codec and what it is read as."""
    plan = codec.plan(layout(NUMEL), CPU)
    message, decoded = torch.zeros(plan.message_size, dtype=torch.uint8), torch.zeros(NUMEL)
    plan.share(KEY)
    plan.encode(vector(), message, KEY)
    message = message[: plan.used]
    plan.decode(message[None], decoded, 1.0, False)
    return {
        "compressor": describe(codec, CODECS),
        "message": base64.b64encode(message.numpy().tobytes()).decode(),
        "decoded": base64.b64encode(decoded.numpy().tobytes()).decode(),
    }


def main():
    """Add to the file."""
    entries = saved()
    known = [codec_of(each) for each in entries]
    entries += [entry(codec) for codec in CHOSEN if codec not in known]
    FILE.write_text(json.dumps(entries, indent=1) + "\n")


main()
