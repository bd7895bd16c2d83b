"""Restoring from files that no save wrote."""

import copy
import pickle
import resource
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import nn

from lightning_compress.collectives import run_threads
from lightning_compress.core import state_check, state_dict
from lightning_compress.engine.checks import trained
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.hook import bucket_of
from lightning_compress.settings.run_state import RunState
from lightning_compress.strategies.resume import Resume, restore_compression, save_compression
from lightning_compress.testing.fuzz import mutate

CPU = torch.device("cpu")
METHODS = ["onebit", "powersgd", {"name": "dgc", "density": 0.05}]
SAVED = 2
ROOM = 1 << 20
"""KiB that the whole of it may take beyond what there was; the files have some 50."""


class Run:
    """One rank's compression of a small model, as a strategy has it."""

    def __init__(self, method, ranks):
        torch.manual_seed(1)
        self.ranks = ranks
        self.model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 40))
        self.compression = Compression(trained(self.model), RunState.of(method), ranks)
        self.compression.active = True

    def step(self, seed):
        """The mean of made-up gradients."""
        parameters = list(self.model.parameters())
        generator = torch.Generator().manual_seed(10 * seed + self.ranks.rank)
        gradients = [torch.randn(each.shape, generator=generator) for each in parameters]
        self.compression.reduce(bucket_of(self.compression, parameters), gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        torch.optim.SGD(parameters, 0.1, momentum=0.9).step()
        return torch.cat([each.flatten() for each in gradients])


def save(method, path, state):
    """What every rank saves; the checkpoint's content."""

    def program(ranks):
        run = Run(method, ranks)
        run.step(1)
        run.step(2)
        content, resume = {"optimizer_states": []}, Resume(state, strict=False)
        resume.begin(ranks, CPU)
        save_compression(resume, TorchCheckpointIO(), path, content, run.compression)
        run.compression.close()
        return content

    return copy.deepcopy(run_threads(SAVED, program)[0])


def restore(method, path, content, size, files=None, strict=False):
    """Go on from it on every rank; what each says, and whether it began anew.

    Raises:
        AssertionError: ranks end differently, or hold a part of what they were to go on from.
        Exception: any that is no ``ValueError``.
    """

    def program(ranks):
        run, resume = Run(method, ranks), Resume("sidecar", strict)
        before = run.compression.settings
        resume.begin(ranks, CPU)
        resume.path = path
        try:
            said = restore_compression(resume, files or TorchCheckpointIO(), content(), run.compression)
        except ValueError as error:
            assert strict
            said = str(error)
        compression = run.compression
        states = [each.committed for each in compression.groups.states() if each.holder != "shared"]
        assert all(each.isfinite().all() for each in states)
        if said:
            assert compression.step == 0
            assert not any(each.any() for each in states), "a part was loaded"
            assert compression.settings == before, "settings were loaded"
        with np.errstate(all="ignore"):
            mean = run.step(3)
        compression.close()
        return said, compression.step, mean

    answers = run_threads(size, program, timeout=30.0)
    assert len({bool(said) for said, *_ in answers}) == 1, "only some ranks begin anew"
    assert len({step for _, step, _ in answers}) == 1, "the ranks are at different steps"
    assert all(torch.equal(mean, answers[0][2]) for *_, mean in answers), "the ranks have different means"
    return [said for said, *_ in answers]


class Code:
    """Runs when a pickle of it is read."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return Path.touch, (Path(self.mark),)


def laughs():
    """A short text for a list that is longer than memory."""
    grown = ["ha"]
    for _ in range(60):
        grown = [grown, grown]
    return grown


VALUES = [
    *(None, True, False, 0, -1, 1, 2**31, 2**62, 10**30, 10**400, 0.5, float("nan"), float("inf"), -1.0, "", "x", ".."),
    *("../other", "/etc", "a::memory", "\0", "x" * 5000, b"x", (), [], [[[[[]]]]], [1, 2], ["0.weight"], {}, {"a": 1}),
    *(laughs(), "rank", "shared", "owner", "onebit", {"name": "topk"}, {"name": "nothing"}, {"name": ["x"]}),
    *(torch.tensor(1), torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.full((4090,), torch.nan)),
    *(torch.zeros(1).expand(10**12), torch.zeros(4, device="meta"), nn.Parameter(torch.zeros(50)), torch.zeros(0)),
    *(torch.full((2000,), 3e38), torch.full((50,), 3e38), torch.zeros(3).to_sparse(), torch.zeros(2, 2)),
]


OURS = set(map(id, VALUES))


def nodes(tree):
    """Every place of a tree, but those in ``VALUES``: what holds it, and where."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list) and id(tree[key]) not in OURS:
            yield from nodes(tree[key])


def spoil(tree, random):
    """Change one place of a tree of dicts and lists."""
    places = list(nodes(tree))
    if not places:
        return
    holder, key = places[random.integers(len(places))]
    way = random.integers(6)
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder, list):
        holder.append(holder[key])
    elif way == 2 and isinstance(holder, list):
        holder.reverse()
    elif way == 3 and isinstance(holder, dict):
        holder[str(random.choice(["summands", "x", "names"]))] = VALUES[random.integers(len(VALUES))]
    elif way == 4 and isinstance(holder[key], int | float | torch.Tensor):
        holder[key] = holder[key] + 1
    else:
        holder[key] = VALUES[random.integers(len(VALUES))]


def signed(content):
    """With a checksum that fits, where that can be had."""
    try:
        state = state_check.check(content["tree"])
        content["checksum"] = state_dict.checksum(state)
    except Exception:
        return content
    return content


def bytes_of(path, random, mark):
    """Spoil a file's bytes."""
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    if random.integers(2):
        data = data[: random.integers(len(data))]
    elif random.integers(4) == 0:
        data = np.frombuffer(pickle.dumps(Code(mark)), np.uint8).copy()
    else:
        mutate(data, random)
    path.write_bytes(data.tobytes())


def content_of(path, random, mark):
    """Spoil what a file holds, and write it well."""
    content = torch.load(path, weights_only=True)
    for _ in range(random.integers(1, 4)):
        spoil(content if random.integers(3) == 0 else content["tree"], random)
        if "tree" not in content or not isinstance(content["tree"], dict):
            break
    if random.integers(8) == 0:
        content["code"] = Code(mark)
    torch.save(signed(content) if random.integers(4) else content, path)


KINDS = ("sidecar_bytes", "sidecar_content", "manifest", "inside")


class Loader:
    """A save that is spoilt in one way."""

    def __init__(self, kind, number=0):
        self.kind, self.method = kind, METHODS[number]
        self.folder = tempfile.mkdtemp()
        self.path = f"{self.folder}/last.ckpt"
        self.content = save(self.method, self.path, "mean" if kind == "inside" else "sidecar")
        self.most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + ROOM

    def close(self):
        """Remove the save."""
        shutil.rmtree(self.folder)

    def attempt(self, random):
        """One input; whether it was refused."""
        with tempfile.TemporaryDirectory() as folder:
            mark, path = Path(folder) / "mark", Path(folder) / "last.ckpt"
            content = copy.deepcopy(self.content)
            if Path(f"{self.path}.lc").exists():
                shutil.copytree(f"{self.path}.lc", f"{path}.lc")
            if self.kind.startswith("sidecar"):
                files = sorted(Path(f"{path}.lc").iterdir())
                for file in files if random.integers(4) == 0 else [files[random.integers(len(files))]]:
                    (bytes_of if self.kind == "sidecar_bytes" else content_of)(file, random, mark)
            else:
                for _ in range(random.integers(1, 4)):
                    spoil(content, random)
            size = int(random.choice([SAVED, SAVED, 1, 3]))
            said = restore(
                self.method, str(path), lambda: copy.deepcopy(content), size, strict=bool(random.integers(2))
            )
            assert not mark.exists(), "code in a file ran"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < self.most, "much more memory than the files hold"
        return bool(said[0])
