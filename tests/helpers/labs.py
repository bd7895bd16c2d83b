"""Network labs: one at a time on this machine, since they take down what killed ones left; their ranks are forks."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from filelock import FileLock

from benchmarks.harness import launch
from tests.helpers import forked


def only_lab():
    """A lock around a lab, over all workers of all runs."""
    return FileLock(Path(tempfile.gettempdir()) / "lightning_compress_lab.lock")


able = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc") or not shutil.which("unshare"),
    reason="needs root, iproute2 and unshare for network namespaces",
)


def root(test):
    """Mark a test that makes network namespaces."""
    waiting = pytest.mark.timeout(900)  # for the others, too
    return able(waiting(pytest.mark.usefixtures("only_lab")(test)))


class _Rank:
    """In place of ``subprocess.Popen`` for a rank that ``benchmarks.harness.launch`` starts."""

    def __init__(self, words, env, stdout, stderr, **_):
        namespace = words[words.index("exec") + 1]
        module = words[words.index("-m") :]
        files = {"stdout": (stdout or stderr).name, "stderr": stderr.name}
        self._process = forked.start(module, cwd=Path.cwd(), env=env, network=namespace, **files)

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def kill(self):
        self._process.kill()

    def wait(self):
        self._process.join()


@contextmanager
def forked_ranks():
    """Labs of this process fork their ranks from a server that has imported everything."""
    with mock.patch.object(launch, "subprocess", SimpleNamespace(Popen=_Rank)):
        yield
