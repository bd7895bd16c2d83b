"""Decentralised algorithms over ranks that are numbers in a loop, from the papers' rules.

Each yields the models ``[size, numel]`` after every round. ``gradient(rank, model)`` is that of a rank;
``matrix(round)`` the mixing matrix; ``compress(vector, rank, round)`` what a receiver makes of a vector. Every replica
that a paper has is kept on its own, by the rank that has it.
"""

import numpy as np


def all_reduce(start, size, rounds, rate, gradient):
    model = start.copy()
    for _ in range(rounds):
        model = model - rate * np.mean([gradient(rank, model) for rank in range(size)], axis=0)
        yield np.stack([model] * size)


def dpsgd(start, size, rounds, rate, gradient, matrix):
    models = [start.copy() for _ in range(size)]
    for number in range(rounds):
        stepped = [model - rate * gradient(rank, model) for rank, model in enumerate(models)]
        models = [sum(matrix(number)[i, j] * stepped[j] for j in range(size)) for i in range(size)]
        yield np.stack(models)


def d2(start, size, rounds, rate, gradient, matrix):
    models = [start.copy() for _ in range(size)]
    before = slopes_before = None
    for number in range(rounds):
        slopes = [gradient(rank, model) for rank, model in enumerate(models)]
        if number == 0:
            halves = [models[i] - rate * slopes[i] for i in range(size)]
        else:
            halves = [2 * models[i] - before[i] - rate * (slopes[i] - slopes_before[i]) for i in range(size)]
        before, slopes_before = models, slopes
        models = [sum(matrix(number)[i, j] * halves[j] for j in range(size)) for i in range(size)]
        yield np.stack(models)


def sgp(start, size, rounds, rate, gradient, matrix, delay=0):
    """Push-sum by mailboxes: what ``j`` sends to ``i`` in a round is in ``i``'s box ``delay`` rounds later."""
    pushed, weights = [start.astype(np.float64) for _ in range(size)], [1.0] * size
    boxes = {}
    for number in range(rounds):
        models = [pushed[i] / weights[i] for i in range(size)]
        halves = [pushed[i] - rate * gradient(i, models[i].astype(np.float32)) for i in range(size)]
        shares = matrix(number)
        for j in range(size):
            assert abs(sum(shares[:, j]) - 1) < 1e-6
            for i in range(size):
                if i != j:
                    boxes.setdefault((number + delay, i), []).append(
                        (shares[i, j] * halves[j], shares[i, j] * weights[j])
                    )
        for i in range(size):
            arrived = boxes.pop((number, i), [])
            pushed[i] = shares[i, i] * halves[i] + sum(vector for vector, _ in arrived)
            weights[i] = shares[i, i] * weights[i] + sum(weight for _, weight in arrived)
        yield np.stack([pushed[i] / weights[i] for i in range(size)])


def choco(start, size, rounds, rate, gradient, matrix, compress, gamma):
    models = [start.copy() for _ in range(size)]
    known = [[start.copy() for _ in range(size)] for _ in range(size)]  # known[i][j]: what i has of j
    for number in range(rounds):
        halves = [model - rate * gradient(rank, model) for rank, model in enumerate(models)]
        sent = [compress(halves[i] - known[i][i], i, number) for i in range(size)]
        for i in range(size):
            for j in range(size):
                known[i][j] = known[i][j] + sent[j]
        weights = matrix(number)
        models = [
            halves[i] + gamma * sum(weights[i, j] * (known[i][j] - known[i][i]) for j in range(size))
            for i in range(size)
        ]
        yield np.stack(models)


def deepsqueeze(start, size, rounds, rate, gradient, matrix, compress, eta):
    models = [start.copy() for _ in range(size)]
    errors = [np.zeros_like(start) for _ in range(size)]
    for number in range(rounds):
        halves = [model - rate * gradient(rank, model) for rank, model in enumerate(models)]
        sent = []
        for i in range(size):
            wanted = halves[i] + errors[i]
            sent.append(compress(wanted, i, number))
            errors[i] = wanted - sent[i]
        identity, weights = np.eye(size), matrix(number)
        models = [
            halves[i] + eta * sum((weights[i, j] - identity[i, j]) * sent[j] for j in range(size)) for i in range(size)
        ]
        yield np.stack(models)


def dcd(start, size, rounds, rate, gradient, matrix, compress):
    models = [start.copy() for _ in range(size)]
    replicas = [[start.copy() for _ in range(size)] for _ in range(size)]
    for number in range(rounds):
        weights, sent = matrix(number), []
        for i in range(size):
            mean = sum(weights[i, j] * replicas[i][j] for j in range(size))
            sent.append(compress(mean - rate * gradient(i, models[i]) - models[i], i, number))
        for i in range(size):
            models[i] = models[i] + sent[i]
            replicas[i] = [replicas[i][j] + sent[j] for j in range(size)]
        yield np.stack(models)


def ecd(start, size, rounds, rate, gradient, matrix, compress):
    models = [start.copy() for _ in range(size)]
    estimates = [[start.copy() for _ in range(size)] for _ in range(size)]
    for number in range(rounds):
        weights, t, sent = matrix(number), number + 1, []
        for i in range(size):
            mean = sum(weights[i, j] * estimates[i][j] for j in range(size))
            after = mean - rate * gradient(i, models[i])
            sent.append(compress((1 - t / 2) * models[i] + t / 2 * after, i, number))
            models[i] = after
        for i in range(size):
            estimates[i] = [(1 - 2 / t) * estimates[i][j] + 2 / t * sent[j] for j in range(size)]
        yield np.stack(models)


def modulo(value, width):
    """The number of ``[-width / 2, width / 2)`` that differs from ``value`` by a multiple of ``width``."""
    return value - width * np.floor(value / width + 0.5)


def moniqua_round(models, weights, bits, width):
    """One round of nearest rounding: section 9.2 of the rules, with real numbers and no integers."""
    levels = 2**bits
    sent = [(np.floor((modulo(x / width, 1) + 0.5) * levels) + 0.5) / levels - 0.5 for x in models]
    own = [q * width - modulo(x, width) + x for q, x in zip(sent, models, strict=True)]
    mixed = []
    for i, x in enumerate(models):
        theirs = [modulo(q * width - x, width) + x for q in sent]
        mixed.append(x + sum(weights[i, j] * (theirs[j] - own[i]) for j in range(len(models)) if j != i))
    return mixed
