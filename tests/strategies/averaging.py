"""The smallest strategy on the base of those that leave the model unwrapped: a plain mean every few steps."""

import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_compress.collectives import TorchCollective
from lightning_compress.strategies.unwrapped import UnwrappedMixin


class Averaging(UnwrappedMixin, DDPStrategy):
    """Averages parameters and buffers every ``every`` steps, and evaluates the last mean."""

    def __init__(self, every=3, **kwargs):
        super().__init__(**kwargs)
        self.every = every

    method = "averaging"

    def prepare(self, trainer):
        self.met = []

    def begin(self, trainer):
        self.mean = {name: tensor.detach().clone() for name, tensor in self.replica().items()}

    def after_attempt(self, step):
        if step % self.every == 0:
            self.meeting.agree()
            self.met.append(step)
            self.average_model()

    def average_model(self):
        ranks = TorchCollective()
        for name, tensor in self.replica().items():
            total = tensor.detach().to(torch.float64)
            ranks.all_reduce(total)
            tensor.copy_(total / ranks.size)
            self.mean[name].copy_(tensor)

    def evaluated(self):
        return self.mean

    def own_state(self):
        return {"common": self.mean}

    def load_own_state(self, state):
        for name, tensor in state["common"].items():
            self.mean[name].copy_(tensor)

    def finish(self):
        self.meeting.agree(1)
        self.average_model()
