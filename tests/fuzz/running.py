"""Trying inputs in a process of their own, until the time is over."""

import multiprocessing
import time
import traceback
from collections import Counter

import torch

from tests.fuzz.decoding import LAYOUTS, NAMES, Target, randomness
from tests.fuzz.exchanging import WAYS, exchange
from tests.fuzz.loading import KINDS, METHODS, Loader

PATIENCE = 60
"""Seconds that one input may take."""


class Exchanging:
    """A method by an exchange, at a world size."""

    def __init__(self, way, size):
        self.way, self.size = way, size

    def attempt(self, random):
        return exchange(self.way, self.size, random)

    def close(self):
        pass


def makers():
    """What tries an input, by what is tried and a number of it."""
    found = {(name, number): Target for name in NAMES for number in range(len(LAYOUTS))}
    found |= dict.fromkeys(WAYS, Exchanging)
    return found | {(kind, number): Loader for kind in KINDS for number in range(len(METHODS))}


def work(seed, seconds, done, label):
    """Try all of them in turn until the time is over."""
    torch.set_num_threads(1)
    made = {}
    end, round = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        for key in makers():
            if key not in made:
                made[key] = makers()[key](*key)
            for _ in range(8 if isinstance(made[key], Target) else 1):
                label.value = f"{key[0]} {key[1]} {round}".encode()
                try:
                    done.put((key[0], made[key].attempt(randomness(seed, *key, round))))
                except BaseException:
                    done.put((key[0], f"--seed {seed} --again {label.value.decode()}\n{traceback.format_exc()}"))
                round += 1
            if time.monotonic() > end:
                break
    for each in made.values():
        each.close()
    done.put(None)


def run(seed, seconds):
    """Inputs, those that were refused, and failures, by name; a crash or a hang of the process is one."""
    context = multiprocessing.get_context("spawn")
    done, label = context.Queue(), context.Array("c", 200)
    process = context.Process(target=work, args=(seed, seconds, done, label), daemon=True)
    process.start()
    tried, refused, failures = Counter(), Counter(), []
    while True:
        try:
            each = done.get(timeout=PATIENCE)
        except Exception:
            failures.append(f"--seed {seed} --again {label.value.decode()}: the process crashed, or did not come back")
            break
        if each is None:
            break
        name, outcome = each
        tried[name] += 1
        refused[name] += outcome is True
        if isinstance(outcome, str):
            failures.append(outcome)
            print(outcome, flush=True)
    process.kill()
    process.join()
    return tried, refused, failures
