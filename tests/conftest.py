import pytest
import torch

from tests.helpers.processes import Pools


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pools():
    """One lasting pool of Gloo processes per world size: an import costs seconds."""
    pools = Pools()
    yield pools
    pools.close()
