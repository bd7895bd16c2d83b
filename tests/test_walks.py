"""Through which files a gradient goes, and a user's ``compressor=``: few, and each is entered from the one before it.

Folders of primitives (``core``, ``collectives``, ``kernels``) and the kernels beside a method are called from
everywhere and do not count. What else is entered on the way is named as what it is: beside the walk.
"""

import sys
import threading
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import lightning_compress
from lightning_compress import CompressedDDPStrategy
from lightning_compress.collectives import run_threads
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.hook import ThreadHook
from lightning_compress.settings.settings import Settings

PACKAGE = str(Path(lightning_compress.__file__).parent) + "/"
PRIMITIVES = ("core/", "collectives/", "kernels/")
GRADIENT = [
    "engine/hook.py",
    "engine/compression.py",
    "engine/group.py",
    "exchanges/all_gather.py",
    "exchanges/message.py",
    "codecs/sparse/topk.py",
]
BESIDE_A_GRADIENT = {
    "engine/groups.py",  # which group has these parameters
    "engine/accumulation.py",  # which backward pass it is
    "engine/nonfinite.py",  # what the group found
    "engine/drift.py",  # whether ranks are to be compared in this step
    "settings/settings.py",  # a property
    "settings/schedule.py",  # whether settings change in this step
    "engine/gradients.py",  # chooses the kernel that adds a gradient to the residual
    "engine/vectors.py",  # where gradients and means are
    "exchanges/base.py",  # helpers of all exchanges
    "codecs/base.py",  # what codecs inherit
    "codecs/sparse/selection.py",  # chooses the kernel that finds the largest
}
COMPRESSOR = [
    "strategies/compressed_ddp.py",
    "settings/settings.py",
    "settings/arguments.py",
    "codecs/sparse/topk.py",
]
BESIDE_A_COMPRESSOR = {
    "engine/checks.py",  # names of arguments
    "exchanges/auto.py",  # the exchange, which is built likewise
    "exchanges/base.py",  # whether it carries the codec
    "settings/rules.py",  # what other compressors there are
    "settings/schedule.py",  # whether its settings change
    "corrections/clipping.py",  # another setting
    "settings/compensation.py",  # likewise
    "settings/readers.py",  # checks of others
    "settings/conflicts.py",  # whether it goes with them
    "strategies/resume.py",  # likewise
}


def entries(work):
    """(from where, which file) of each call from one of our files into another, in order; primitives left out."""
    found = []

    def ours(frame):
        name = frame.f_code.co_filename.removeprefix(PACKAGE)
        counts = name != frame.f_code.co_filename and not name.startswith(PRIMITIVES)
        return name if counts and not name.endswith(("_numba.py", "_triton.py")) else None

    def watch(frame, event, _):
        here, above = ours(frame) if event == "call" else None, frame.f_back
        while here and above and not ours(above):
            above = above.f_back
        if here and here != (above and ours(above)):
            found.append((above and ours(above), here))

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def check(found, walk, beside):
    """It is the walk, from file to file, and nothing else is entered but what stands beside it."""
    assert [name for name in dict.fromkeys(here for _, here in found) if name not in beside] == walk
    assert {here for _, here in found} == {*walk, *beside}
    steps = {(above, here) for above, here in found if here in walk[1:]}
    assert steps == set(pairwise(walk))


class Bucket:
    """Of DistributedDataParallel: one matrix."""

    def __init__(self, module):
        self._parameters = list(module.parameters())
        self._buffer = torch.randn(64 * 64)

    def buffer(self):
        return self._buffer

    def parameters(self):
        return self._parameters

    def gradients(self):
        return [self._buffer.view(64, 64)]


def averaged(collective):
    module = nn.Linear(64, 64, bias=False)
    compression = Compression(module, Settings.of("topk", "all_gather"), collective, unused=False)
    hook, optimizer = ThreadHook(compression, None), torch.optim.SGD(module.parameters(), 0.1)
    loss = torch.ones(1, requires_grad=True)
    loss.register_hook(lambda _: hook.reduce(None, Bucket(module)) and None)

    def step():
        loss.sum().backward()  # at whose end the hook waits
        module.weight.grad = torch.zeros(64, 64)
        optimizer.step()

    step()  # plans are made
    hook._background = type(hook._background)()  # whose thread begins while somebody watches
    return entries(lambda: loss.sum().backward())


def test_a_gradient_goes_through_six_files_to_the_codec_and_back():
    check(run_threads(1, averaged)[0], GRADIENT, BESIDE_A_GRADIENT)


def test_a_compressor_goes_through_four_files():
    check(entries(lambda: CompressedDDPStrategy("topk")), COMPRESSOR, BESIDE_A_COMPRESSOR)
