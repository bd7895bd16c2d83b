"""What needs a CUDA device: ``pytest -m gpu``; elsewhere it is skipped."""

import pytest
import torch

from tests.helpers.processes import Pool


@pytest.fixture(autouse=True)
def _device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def ranks():
    """Two processes that share the GPU, over NCCL or Gloo: ``ranks("nccl").run(function, ...)``."""
    made = {}

    def pool(backend):
        if backend in made and made[backend].broken:
            made.pop(backend).close()
        if backend not in made:
            made[backend] = Pool(2, backend)
        return made[backend]

    yield pool
    for each in made.values():
        each.close()
