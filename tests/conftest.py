import gc
import os

import pytest
import torch
import torch.distributed as dist

os.environ["OMP_NUM_THREADS"] = "1"  # else a Trainer of one process sets its own number, and it stays for later tests
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, as torch.compile does

from tests.helpers import labs, link
from tests.helpers.data import public_data
from tests.helpers.processes import Pools
from tests.turns import TURN, VARIABLE, mark_thorough


def pytest_report_header():
    """Which of the cases run that turn with the week."""
    return f"turn {TURN}: {VARIABLE}={TURN} repeats it in another week"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes():
    """Workers, which each would import everything, are forks; but CUDA takes no fork."""
    if not torch.cuda.is_available():
        from tests.helpers.workers import fork_workers

        fork_workers()


@pytest.hookimpl(tryfirst=True)  # before those that are not wanted are left out
def pytest_collection_modifyitems(items):
    mark_thorough(items)


def pytest_collection_finish():
    """Collections of garbage, of which some tests ask for many, need not look at thousands of tests and modules."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _link():
    link.pretend()


@pytest.fixture(autouse=True)
def _surroundings():
    """What a Trainer of one process leaves behind, a process group and a launcher's variables, misleads later tests."""
    before = os.environ.copy()
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def pools():
    """One lasting pool of Gloo processes per world size: an import costs seconds."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def only_lab():
    """See ``tests.helpers.labs``."""
    with labs.only_lab():
        yield


@pytest.fixture(scope="session")
def cifar10(tmp_path_factory):
    """The folder of CIFAR-10's binary files."""
    return public_data("cifar10", tmp_path_factory.mktemp("data")) / "cifar-10-batches-bin"
