"""A small problem that differs by rank, solved by gossip over threads."""

import numpy as np
import torch

from lightning_compress.collectives import run_threads
from lightning_compress.core.layout import Layout
from lightning_compress.gossip.build import build_algorithm, build_gossip_compressor
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.topology import build_topology

NUMEL = 301
LAYOUT = Layout.of([("weight", (13, 19)), ("bias", (54,))])
RATE = 0.1


class Problem:
    """``sum of curvature * (x - centre)^2 / 2``: other centres and curvatures on every rank."""

    def __init__(self, size, seed=0, numel=NUMEL):
        generator = np.random.default_rng(seed)
        self.centres = generator.standard_normal((size, numel)).astype(np.float32)
        self.curvatures = (0.5 + generator.random((size, numel))).astype(np.float32)
        self.start = generator.standard_normal(numel).astype(np.float32)

    def gradient(self, rank, model):
        return self.curvatures[rank] * (model - self.centres[rank])

    @property
    def optimum(self):
        return (self.curvatures * self.centres).sum(0) / self.curvatures.sum(0)


class Run:
    """What one rank saw."""

    def __init__(self, models, mixing, neighbours):
        self.models, self.mixing, self.neighbours = models, mixing, neighbours


def run(algorithm, compressor, size, topology="ring", rounds=20, rate=RATE, problem=None, lazy=None, layout=LAYOUT):
    """A ``Run`` for each rank; models ``[rounds, numel]``; ``rate`` may be a function of the round."""
    problem = problem or Problem(size, numel=layout.numel)
    made = build_algorithm(algorithm)
    coding = build_gossip_compressor(compressor, made)
    graph = made.fit_topology(build_topology(topology, size), lazy)

    def rank(collective):
        neighbours = Neighbours(collective, graph)
        vector = torch.from_numpy(problem.start.copy())
        mixing = made.begin(vector.clone(), neighbours, coding, layout, seed=3)
        models = []
        for number in range(rounds):
            now = rate(number) if callable(rate) else rate
            vector -= np.float32(now) * torch.from_numpy(problem.gradient(collective.rank, vector.numpy()))
            mixing.mix(vector, now)
            models.append(vector.numpy().copy())
        return Run(np.stack(models), mixing, neighbours)

    return run_threads(size, rank)


def models_of(ranks):
    """``[rounds, size, numel]``."""
    return np.stack([each.models for each in ranks], axis=1)
