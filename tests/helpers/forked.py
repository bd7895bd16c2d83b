"""Scripts and modules run as ``python`` would run them, in a fork of a process that has imported everything."""

import ctypes
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

from benchmarks.harness.forking import forking
from tests.helpers import loopback
from tests.helpers.ports import free_port
from tests.helpers.processes import PRELOADED

CLONE_NEWNS, MS_SLAVE, MS_REC, MNT_DETACH = 0x20000, 1 << 19, 0x4000, 2
"""Of Linux."""
HERE = ("benchmarks", "recipes", "tests")
"""Packages that a script is to find by its own path."""


def start(words, *, cwd, env, stdout, stderr, network=None):
    """What ``subprocess.Popen([sys.executable, *words])`` would start, as a process of multiprocessing.

    Args:
        words: ``-m module``, ``-c code`` or a script, and its arguments.
        cwd: of the process.
        env: all of its environment; its PYTHONPATH counts.
        stdout: name of the file that it writes to.
        stderr: likewise.
        network: the name of a network namespace that it is in, with a /sys that shows it, as after ``ip netns exec``.
    """
    told = ([str(word) for word in words], str(cwd), dict(env), (str(stdout), str(stderr)), network)
    process = forking(PRELOADED).Process(target=_begin, args=told)
    process.start()
    return process


def run(*words, cwd, env, timeout=120):
    """What ``subprocess.run([sys.executable, *words], capture_output=True, text=True)`` would return.

    Args:
        *words: likewise.
        cwd: likewise.
        env: likewise.
        timeout: seconds after which it is killed.

    Raises:
        subprocess.TimeoutExpired: it was.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        process = start(words, cwd=cwd, env=env, stdout=files[0], stderr=files[1])
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout, *(file.read_bytes() for file in files))
        return subprocess.CompletedProcess(words, process.exitcode, *(file.read_text() for file in files))


def ranks(words, nodes=1, each=2, *, cwd, env, torchrun=False, timeout=200):
    """Start a script's ranks at once, in the environment that a launcher gives each; for what launches are not about.

    Args:
        words: as of ``start``.
        nodes: machines, as far as the ranks are told.
        each: ranks on each of them.
        cwd: of all ranks; with several nodes, a list with one for each.
        env: what all ranks have; the launcher's own is added.
        torchrun: with what torchrun tells its ranks, beside what the Trainer tells those that it starts itself.
        timeout: seconds after which all are killed.

    Returns:
        What each rank printed, in the order of the ranks.
    """
    size, port = nodes * each, free_port()
    with tempfile.TemporaryDirectory() as folder:
        files, started = [Path(folder, f"rank{rank}") for rank in range(size)], []
        for rank, file in enumerate(files):
            node, local = divmod(rank, each)
            told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": node, "LOCAL_RANK": local}
            told |= {"RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": each}
            if torchrun:
                told |= {"GROUP_RANK": node, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": 0}
            own = env | {name: str(value) for name, value in told.items()}
            place = cwd[node] if isinstance(cwd, list) else cwd
            started.append(start(words, cwd=place, env=own, stdout=file, stderr=file))
        end = time.monotonic() + timeout
        try:
            while alive := [rank.sentinel for rank in started if rank.exitcode is None]:
                # where one fails, the others would wait for it
                if any(rank.exitcode for rank in started) or not wait(alive, max(0, end - time.monotonic())):
                    break
        finally:
            for rank in started:
                rank.kill()
                rank.join()
        said = [file.read_text() for file in files]
    assert not any(rank.exitcode for rank in started), "\n".join(said)
    return said


def _begin(words, cwd, env, files, network):
    for number, name in enumerate(files, 1):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    if network is not None:
        loopback.enter(f"/run/netns/{network}")
        _mount_sys()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for name in [name for name in sys.modules if name.split(".")[0] in HERE]:
        del sys.modules[name]
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    kind = words.pop(0) if words[0] in ("-m", "-c") else ""
    first = cwd if kind else str(Path(words[0]).resolve().parent)
    sys.path[:] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    sys.argv = list(words)
    code = 0
    try:
        if kind == "-m":
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv[0] = "-c"
            exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr, flush=True)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.pythonapi.Py_Exit(code)  # as a script ends: multiprocessing would leave out what libraries do then


def _mount_sys():
    """Have /sys show the network of this process, to it alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = [
        libc.unshare(CLONE_NEWNS),
        libc.mount(b"", b"/", b"none", MS_SLAVE | MS_REC, None),
        libc.umount2(b"/sys", MNT_DETACH),
        libc.mount(b"network", b"/sys", b"sysfs", 0, None),
    ]
    assert not any(done), os.strerror(ctypes.get_errno())
