"""Local steps in one process, slowly and plainly: what the real thing must follow."""

import copy

import numpy as np
import torch


def simulate(model, batches, every, outer, average, inner, loss, residual_decay=1.0):
    """Train as ``W`` ranks would, one after the other, and synchronise at the end of each round.

    Args:
        model: the module at step 0; left as it is.
        batches: ``batches[step][rank]``.
        every: local steps in a round.
        outer: lr, momentum, and whether it is Nesterov's.
        average: takes the ranks' vectors (what each has learned, and its residual) and the round's number; returns the
            mean of what is sent and, of each rank, what stays. By name.
        inner: makes an optimizer.
        loss: takes the model and a batch.
        residual_decay: of what stays.

    Returns:
        the anchors after each round, float64 by name; and the laws' sides: ``W mean + sum(e)``, ``sum(delta) + d e``.
    """
    rate, momentum, nesterov = outer
    replicas = [copy.deepcopy(model) for _ in batches[0]]
    optimizers = [inner(replica.parameters()) for replica in replicas]
    anchors = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
    velocity = {name: np.zeros_like(each) for name, each in anchors.items()}
    left = [{name: np.zeros(each.shape, np.float32) for name, each in anchors.items()} for _ in replicas]
    rounds = []
    for step, given in enumerate(batches, 1):
        for replica, optimizer, batch in zip(replicas, optimizers, given, strict=True):
            optimizer.zero_grad()
            loss(replica, batch).backward()
            optimizer.step()
        if step % every:
            continue
        vectors = []
        for replica, own in zip(replicas, left, strict=True):
            learned = {name: anchors[name] - p.detach().double().numpy() for name, p in replica.named_parameters()}
            vectors.append(
                {name: (each + residual_decay * own[name]).astype(np.float32) for name, each in learned.items()}
            )
        mean, left = average(vectors, step // every - 1)
        for name in anchors:
            velocity[name] = momentum * velocity[name] + mean[name]
            moved = mean[name] + momentum * velocity[name] if nesterov else velocity[name]
            anchors[name] = anchors[name] - rate * moved
        with torch.no_grad():
            for replica in replicas:
                for name, parameter in replica.named_parameters():
                    parameter.copy_(torch.from_numpy(anchors[name]))
        rounds.append({name: each.copy() for name, each in anchors.items()})
    return rounds
