"""Imported last before processes fork: what every process would do again, and what the collector need not look at."""

import gc
from functools import cache

from lightning.fabric.utilities import registry

registry.entry_points = cache(registry.entry_points)  # every Trainer reads the metadata of all packages
gc.freeze()
gc.set_threshold(10_000, 20, 20)  # a fit makes many objects and few cycles
