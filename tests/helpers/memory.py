"""What a step allocates, by torch's account and by NumPy's."""

import tracemalloc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def check_steady(step: Callable[[], None]) -> None:
    """After the first one, a step allocates nothing larger than 1 MiB."""
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert max(event.cpu_memory_usage for event in profiler.events()) <= 1 << 20
    tracemalloc.start()
    step()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= 1 << 20
