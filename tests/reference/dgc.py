"""Deep Gradient Compression over ranks that are numbers in a loop, from the paper's rules."""

import copy
import math

import numpy as np
import torch

from tests.reference.codecs import topk
from tests.reference.simulation import gradients_of


class Rank:
    """``u`` and ``v`` of one parameter on one rank."""

    def __init__(self, numel):
        self.u = np.zeros(numel, np.float32)
        self.v = np.zeros(numel, np.float32)

    def send(self, gradient, density, momentum, nesterov=False, masking=True, limit=None):
        """What is sent of this rank's v, as a vector; everything for a density of None."""
        if limit is not None:
            norm = math.sqrt(sum(float(x) ** 2 for x in gradient))
            if norm > limit:
                gradient = gradient * np.float32(limit / norm)
        momentum = np.float32(momentum)
        if nesterov:
            self.u = momentum * (self.u + gradient)
            self.v = self.v + (self.u + gradient)
        else:
            self.u = momentum * self.u + gradient
            self.v = self.v + self.u
        if density is None:
            sent, self.v = self.v, np.zeros_like(self.v)
            return sent
        sent, self.v = topk(self.v, density, [(0, len(self.v))])
        if masking:
            self.u[sent != 0] = 0
        return sent


def simulate_dgc(model, batches, density, rate, momentum, dense_steps, min_numel=1024):
    """Train as ``W`` ranks would: ``batches[step][rank]`` is (images, labels); returns the parameters by name."""
    size = len(batches[0])
    replicas = [copy.deepcopy(model) for _ in range(size)]
    ranks = [{name: Rank(p.numel()) for name, p in model.named_parameters()} for _ in range(size)]
    plain = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step, batch in enumerate(batches):
        gradients = [gradients_of(replica, *mine) for replica, mine in zip(replicas, batch, strict=True)]
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and parameter.numel() >= min_numel:
                mean = np.zeros(parameter.numel(), np.float32)
                for mine, gradient in zip(ranks, gradients, strict=True):
                    now = None if step < dense_steps else density
                    mean += mine[name].send(gradient[name].numpy().ravel(), now, momentum) * np.float32(1 / size)
                update = torch.from_numpy(mean).view_as(parameter)
            else:
                mean = torch.zeros_like(parameter)
                for gradient in gradients:
                    mean += gradient[name] * (1 / size)
                plain[name] = update = momentum * plain[name] + mean
            with torch.no_grad():
                for replica in replicas:
                    replica.get_parameter(name).sub_(rate * update)
    return {name: parameter.detach() for name, parameter in replicas[0].named_parameters()}
