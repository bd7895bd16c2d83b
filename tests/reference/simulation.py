"""Compressed data-parallel SGD in one process, slowly and plainly: what the real thing must follow."""

import copy
import math
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import nn


def classification(model, images, labels):
    """Mean cross-entropy of a model that takes images."""
    return nn.functional.cross_entropy(model(images), labels)


def simulate(model, batches, groups, method, optimizer, loss=classification, clip=None, min_numel=1024, exclude=()):
    """Train as ``W`` ranks would, one after the other.

    Args:
        model: the module at step 0; left as it is.
        batches: ``batches[step][rank]`` is what ``loss`` takes behind the model, such as (images, labels).
        groups: ``groups[step]`` is a list of lists of parameter names: DDP's buckets of that step.
        method: takes a vector, the lengths of its parameters, and where it is from, (names of the bucket, step, rank);
            returns what is sent of it and what stays.
        optimizer: takes the module.
        loss: takes the model and a batch.
        clip: norm that the averaged gradient is clipped to, all parameters together.
        min_numel: smaller parameters are averaged as they are.
        exclude: patterns of names that are averaged as they are.

    Returns:
        the parameters by name.
    """
    ranks = len(batches[0])
    replicas = [copy.deepcopy(model) for _ in range(ranks)]  # batch norm keeps running means of its own
    residual = [{name: np.zeros(p.numel(), np.float32) for name, p in model.named_parameters()} for _ in range(ranks)]
    optimizers = [optimizer(replica) for replica in replicas]
    for step, buckets in enumerate(groups):
        gradients = [
            gradients_of(replica, *batch, loss=loss) for replica, batch in zip(replicas, batches[step], strict=True)
        ]
        mean = {}
        for names in buckets:
            small = [n for n in names if not _compressed(n, gradients[0][n], min_numel, exclude)]
            large = [n for n in names if n not in small]
            for name in small:
                mean[name] = _mean(gradient[name] for gradient in gradients)
            if large:
                mean |= _average(gradients, residual, large, method, (tuple(names), step))
        for replica, stepping in zip(replicas, optimizers, strict=True):
            for name, parameter in replica.named_parameters():
                parameter.grad = mean[name].clone()
            if clip is not None:
                nn.utils.clip_grad_norm_(replica.parameters(), clip)
            stepping.step()
    return {name: parameter.detach() for name, parameter in replicas[0].named_parameters()}


def _mean(gradients):
    """In float32 and the order of the ranks: training is chaotic, a last bit grows a thousandfold in three steps."""
    gradients = list(gradients)
    total = torch.zeros_like(gradients[0])
    for gradient in gradients:
        total.add_(gradient, alpha=1 / len(gradients))
    return total


def gradients_of(model, *batch, loss=classification):
    model.zero_grad()
    loss(model, *batch).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def _compressed(name, gradient, min_numel, exclude):
    excluded = any(fnmatchcase(name, pattern) for pattern in exclude)
    return gradient.ndim > 1 and gradient.numel() >= min_numel and not excluded


def _average(gradients, residual, names, method, place):
    """Mean over ranks of what is sent of gradient plus residual; the rest is the next residual."""
    lengths = [math.prod(gradients[0][name].shape) for name in names]
    total = np.zeros(sum(lengths), np.float32)
    for rank, (mine, left) in enumerate(zip(gradients, residual, strict=True)):
        vector = np.concatenate([mine[n].numpy().ravel() + left[n] for n in names])
        sent, stays = method(vector, lengths, (*place, rank))
        total += sent * np.float32(1 / len(gradients))
        for name, part in zip(names, np.split(stays, np.cumsum(lengths)[:-1]), strict=True):
            left[name] = part
    parts = np.split(total, np.cumsum(lengths)[:-1])
    return {
        name: torch.from_numpy(part).view(gradients[0][name].shape) for name, part in zip(names, parts, strict=True)
    }
