"""The smallest synchroniser, and its strategy: a plain mean every few steps."""

import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_compress.collectives import CountingCollective
from lightning_compress.collectives.counting import Meter
from lightning_compress.periodic import Synchroniser
from lightning_compress.strategies.periodic import PeriodicMixin


class Mean(Synchroniser):
    """Averages parameters and buffers every ``every`` steps, and evaluates the last mean."""

    kind = method = summary = "averaging"
    meters = ()

    def __init__(self, every=3):
        super().__init__("last", ("last",), None)
        self.every = every

    def check(self, model, ranks, device):
        self.met = []

    def _start(self):
        self.meters = (Meter(self.device),)
        self.counted = CountingCollective(self.ranks, self.meters[0])

    def shared(self):
        return self.named()

    def _rebase(self):
        self.mean = {name: tensor.detach().clone() for name, tensor in self.shared().items()}

    def _after_step(self):
        if self.attempts % self.every == 0:
            self.meeting.agree()
            self.met.append(self.attempts)
            self.finish()

    def _averaged(self, plain):
        if plain:
            self.finish()
        return self.mean

    @torch.no_grad()
    def finish(self):
        for name, tensor in self.shared().items():
            total = tensor.detach().to(torch.float64)
            self.counted.all_reduce(total)
            tensor.copy_(total / self.ranks.size)
            self.mean[name].copy_(tensor)

    def state_dict(self):
        return {"common": {"mean": self.mean, "attempts": self.attempts}}

    def load_state_dict(self, state):
        self.attempts = state["common"]["attempts"]
        for name, tensor in state["common"]["mean"].items():
            self.mean[name].copy_(tensor)

    def stats(self):
        return self.meters[0].read()

    def measure_every(self, steps):
        pass

    def close(self):
        pass


class Averaging(PeriodicMixin, DDPStrategy):
    """Over it."""

    def __init__(self, every=3, **kwargs):
        super().__init__(Mean(every), **kwargs)
