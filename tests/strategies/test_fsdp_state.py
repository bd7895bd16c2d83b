"""A resumed run of a sharded model is the run that was never interrupted, on each rank of the mesh."""

import os
import signal
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.nn.functional import cross_entropy

from lightning_compress.core import state_dict
from lightning_compress.strategies import sidecar
from tests.helpers.fsdp import Lit, fingerprint, fit, fresh, sharded, stock
from tests.helpers.lives import live
from tests.helpers.sharded import text

FEEDS_BACK = {"error_feedback": True}
METHODS = {
    "loco": ("onebit", {}, "adamw"),
    "residual": ("onebit", FEEDS_BACK, "adamw"),
    "rotated": ({"name": "rotated", "bits": 4}, FEEDS_BACK, "adamw"),
    "plain": ({"name": "rotated", "bits": 4}, {}, "adamw"),
    "topk": ({"name": "topk", "density": 0.1}, {}, "adamw"),
    "powersgd": ("powersgd", {}, "adamw"),
    "dgc": ({"name": "dgc", "density": 0.1}, {"schedule": "none"}, "sgd"),
}


class ByStep(Lit):
    """Each step has a batch of its own number: Lightning begins a resumed epoch's batches elsewhere."""

    optimizer = "adamw"

    def training_step(self, batch, batch_idx):
        generator = torch.Generator().manual_seed(1000 * self.global_step + dist.get_rank())
        pieces = text()[torch.randint(len(text()) - 17, (4, 1), generator=generator) + torch.arange(17)]
        return cross_entropy(self(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())

    def configure_optimizers(self):
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), 3e-3)
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class WithSGD(ByStep):
    """For methods that are an optimizer themselves."""

    optimizer = "sgd"


def found(trainer, model):
    """Of a fit: the hash of the model; of this rank's state, the step, a checksum, and whether it has any numbers."""
    state = trainer.strategy.compression.state_dict()
    numbers = [one["numbers"] for group in state["groups"] for one in group["states"].values()]
    return fingerprint(model.net), state["step"], state_dict.checksum(state), any(bool(each.any()) for each in numbers)


def fitted(name, steps, ckpt_path=None, callbacks=(), more=None, **options):
    """A fit by a method's name; what it is, and what it warned of."""
    compressor, settings, optimizer = METHODS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make, strategy = WithSGD if optimizer == "sgd" else ByStep, sharded(compressor, **settings, **(more or {}))
        trainer, model = fit(
            strategy, steps, make, callbacks=list(callbacks), ckpt_path=ckpt_path, quiet=False, **options
        )
    return trainer, model, [str(each.message) for each in caught if "begins again" in str(each.message)]


def interrupted(folder, cases):
    """Six steps, and three that a checkpoint of three goes on with; by case."""
    fresh()
    answers = {}
    for name, more in cases:
        keep = ModelCheckpoint(folder, f"{name}-{{step}}", every_n_train_steps=3, save_top_k=-1)
        whole = found(*fitted(name, 6, None, [keep], more, enable_checkpointing=True)[:2])
        trainer, model, said = fitted(name, 6, f"{folder}/{name}-step=3.ckpt", (), more)
        answers[name] = whole, found(trainer, model), said
    return answers


FULL = {"save_distributed_checkpoint": False}
QUICK = [("residual", {}), ("powersgd", FULL)]
MORE = [("loco", {}), ("rotated", {}), ("plain", {}), ("topk", FULL), ("dgc", {}), ("loco", FULL), ("dgc", FULL)]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(MORE, marks=pytest.mark.thorough)], ids=["few", "more"])
def test_bit_for_bit(pools, tmp_path, cases):
    ranks = pools[4].run(interrupted, str(tmp_path), cases)
    for name, _ in cases:
        for whole, again, said in (each[name] for each in ranks):
            assert whole == again, name
            assert whole[1] == 6
            assert whole[3] or name == "plain"
            assert not said
        assert len({each[name][0][0] for each in ranks}) == 1
        if name not in ("plain", "powersgd"):
            assert len({each[name][0][2] for each in ranks}) == 4  # every rank has a state of its own


class Ranks(NamedTuple):
    """Of a column."""

    rank: int
    size: int


def of_rank(number):
    """A state with one residual."""
    one = {"holder": "rank", "names": ["w"], "numels": [2], "numbers": torch.full((2,), float(number))}
    running = {"compressor": None, "error_feedback": True, "scheduled": {}}
    groups = [{"names": ["w"], "states": {"residual": one}}]
    return {"format": 1, "method": "m", "step": 3, "rates": {}, "running": running, "groups": groups}


def read(path, manifest, column, ranks):
    """The residual that a rank of a column reads."""
    state = sidecar.read(TorchCheckpointIO(), path, manifest, ["m"], ranks, torch.device("cpu"), column)
    return state["groups"][0]["states"]["residual"]["numbers"][0].item()


def test_each_column_reads_what_its_own_ranks_have_saved(tmp_path):
    path, files, content = str(tmp_path / "c"), TorchCheckpointIO(), {}
    columns = [sidecar.Column(shard, 2) for shard in range(2)]
    for once in (False, True):
        save = sidecar.Save(7, int(once), 3)
        for column in columns:
            for place in range(2):
                tree = of_rank(10 ** column.rank(place))
                sidecar.write(files, path, content, save, "m", tree, Ranks(place, 2), column, once)
        manifest = content[sidecar.KEY]
        for column, parts in zip(columns, ([1, 100], [10, 1000]), strict=True):
            same, three = (
                [read(path, manifest, column, Ranks(place, size)) for place in range(size)] for size in (2, 3)
            )
            assert same == ([parts[0]] * 2 if once else parts)
            assert three == ([parts[0]] * 3 if once else [*parts, 0])  # a sum, whose mean follows
    assert len(list(tmp_path.glob("c.lc/*"))) == 6
    for shards in (1, 4):
        with pytest.raises(ValueError, match=r"in 2 shards, and this run has (4|one) shards?"):
            read(path, manifest, sidecar.Column(0, shards), Ranks(0, 4 // shards))
    for wrong in (0, 3, "2", True):
        with pytest.raises(ValueError, match="manifest is damaged"):
            read(path, manifest | {"shards": wrong}, columns[0], Ranks(0, 2))


class Begins(Callback):
    """What a fit begins with: this rank's state, in one vector, and its step."""

    def on_train_start(self, trainer, module):
        state = trainer.strategy.compression.state_dict()
        numbers = [one["numbers"].float() for group in state["groups"] for one in group["states"].values()]
        self.numbers, self.step = torch.cat([torch.zeros(0), *numbers]).clone(), state["step"]


def saved(folder, name, replicas, state="sidecar"):
    """A checkpoint of three steps; this rank's state."""
    fresh()
    trainer, _, _ = fitted(name, 3, more={"replicate_size": replicas, "state": state})
    trainer.save_checkpoint(f"{folder}/three")
    begins = Begins()
    begins.on_train_start(trainer, None)
    return begins.numbers.numpy()


def elsewhere(folder, name, replicas, strict):
    """A fit from there on another mesh: what it begins with, warns of and ends with; what a strict one says."""
    fresh()
    begins, more = Begins(), {"replicate_size": replicas}
    trainer, model, said = fitted(name, 5, f"{folder}/three", [begins], more)
    refused = ""
    if strict:
        with pytest.raises(ValueError, match="strict_state=False") as caught:
            fitted(name, 5, f"{folder}/three", (), more | {"strict_state": True})
        refused = str(caught.value)
    return begins.numbers.numpy(), begins.step, said, refused, found(trainer, model)[:2]


@pytest.mark.thorough
def test_another_number_of_replicas_goes_on_from_the_mean(pools, tmp_path):
    before = pools[2].run(saved, str(tmp_path), "residual", 2)
    for numbers, step, said, _, after in pools[4].run(elsewhere, str(tmp_path), "residual", 4, False):
        assert numbers == pytest.approx((before[0] + before[1]) / 2, abs=1e-7)
        assert numbers.any()
        assert (step, said, after[1]) == (3, [], 5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "replicas", "why"),
    [
        ("residual", 4, "the checkpoint is of a model in 2 shards, and this run has one shard"),
        ("powersgd", 4, "the checkpoint is of a model in 2 shards, and this run has one shard"),
        ("residual", 2, "rank3.pt is missing"),
    ],
)
def test_another_number_of_shards_or_a_missing_file_begins_again(pools, tmp_path, name, replicas, why):
    pools[4].run(saved, str(tmp_path), name, 2)
    for part in tmp_path.glob("three.lc/*.rank3.pt"):
        part.unlink()
    ranks = pools[4].run(elsewhere, str(tmp_path), name, replicas, True)
    for rank, (numbers, step, said, refused, after) in enumerate(ranks):
        assert (numbers.any(), step, after[1]) == (False, 0, 2)
        assert len(said) == (rank == 0)
        assert all(why in each for each in [*said, refused])
    assert len({after[0] for *_, after in ranks}) == 1


class Terminated(Callback):
    """SIGTERM comes to one rank after a step."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2 and dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def kept(folder):
    """What is left of several checkpoints, and how runs go on: from a moved one, a link, and one that SIGTERM made."""
    fresh()
    whole, options = found(*fitted("residual", 12)[:2]), {"enable_checkpointing": True}
    best = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=1, save_last=True)
    fitted("residual", 9, None, [best], **options)
    link = ModelCheckpoint(
        f"{folder}/link", "{step}", every_n_train_steps=3, save_top_k=2, save_last="link", monitor="step", mode="max"
    )
    fitted("residual", 9, None, [link], **options)
    dist.barrier()
    left = sorted(str(each.relative_to(folder)) for each in Path(folder).glob("**/*.ckpt*"))
    parts = {each: len(list(Path(folder, each).glob("*.pt"))) for each in left if each.endswith(".lc")}
    dist.barrier()
    if dist.get_rank() == 0:
        for ending in ("", ".lc"):
            Path(f"{folder}/step=9.ckpt{ending}").rename(f"{folder}/moved{ending}")
    dist.barrier()
    with pytest.raises(SIGTERMException):
        fitted("residual", 12, None, [Terminated(), OnExceptionCheckpoint(folder, "stopped")], **options)
    paths = [f"{folder}/{name}" for name in ("moved", "last.ckpt", "link/last.ckpt", "stopped.ckpt")]
    again = {path: fitted("residual", 12, path) for path in paths}
    return whole, left, parts, [(found(trainer, model), said) for trainer, model, said in again.values()]


@pytest.mark.thorough
def test_files_go_with_their_checkpoints(pools, tmp_path):
    for whole, left, parts, again in pools[4].run(kept, str(tmp_path)):
        assert [each for each in left if "/" not in each] == [
            "last.ckpt",
            "last.ckpt.lc",
            "step=9.ckpt",
            "step=9.ckpt.lc",
        ]
        in_link = [each[5:] for each in left if "/" in each]
        assert in_link == ["last.ckpt", "step=6.ckpt", "step=6.ckpt.lc", "step=9.ckpt", "step=9.ckpt.lc"]
        assert parts["last.ckpt.lc"] == 8  # of this save and the one before
        assert parts["step=9.ckpt.lc"] == parts["link/step=6.ckpt.lc"] == 4
        assert again == [(whole, [])] * 4


def with_stock(folder):
    """Stock's checkpoint goes on in ours, ours in stock's; and ours with the mean, a file for each shard."""
    fresh()
    theirs, _ = fit(stock(), 3, ByStep)
    theirs.save_checkpoint(f"{folder}/theirs")
    first = fitted("residual", 6, f"{folder}/theirs")
    trainer, _, _ = fitted("residual", 3, more={"state": "mean", "save_distributed_checkpoint": False})
    trainer.save_checkpoint(f"{folder}/ours")
    whole, _, _ = fitted("plain", 3)
    whole.save_checkpoint(f"{folder}/plain")
    begins = Begins()
    _, _, said = fitted("residual", 6, f"{folder}/ours", [begins])
    more = [fit(stock(), 6, ByStep, ckpt_path=f"{folder}/{name}") for name in ("ours", "plain")]
    models = [fingerprint(model.net) for _, model in more]
    return (
        first[0].strategy.compression.step,
        first[2],
        begins.numbers.numpy(),
        said,
        models,
        [each.global_step for each, _ in more],
    )


@pytest.mark.thorough
def test_stock_goes_on_with_ours_and_ours_with_stock(pools, tmp_path):
    ranks = pools[4].run(with_stock, str(tmp_path))
    for rank, (step, warned, mean, said, models, steps) in enumerate(ranks):
        assert step == 3
        assert len(warned) == (rank == 0)
        assert all("saved without compression" in each for each in warned)
        assert mean.any()
        assert mean.tolist() == ranks[rank % 2][2].tolist()
        assert said == []
        assert models == ranks[0][4]
        assert steps == [6, 6]
    assert len(list(tmp_path.glob("ours.lc/*"))) == len(list(tmp_path.glob("plain.lc/*"))) == 2


class Fails(Callback):
    """One rank raises in a step."""

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 2 and dist.get_rank() == 2:
            raise ArithmeticError("no more")


class Saves(Callback):
    """A user's callback that saves on an exception."""

    def on_exception(self, trainer, *_):
        trainer.save_checkpoint("never")


def ends(folder, callback):
    saves = isinstance(callback, OnExceptionCheckpoint)
    fit(sharded("onebit"), 6, ByStep, quiet=False, callbacks=[Fails(), callback], enable_checkpointing=saves)


@pytest.mark.thorough
@pytest.mark.parametrize("own", [False, True])
def test_a_rank_that_fails_saves_nothing_and_waits_for_nobody(tmp_path, own):
    callback = Saves() if own else OnExceptionCheckpoint(tmp_path, "stopped")
    codes, said = live(4, tmp_path / "ranks", ends, str(tmp_path), callback, seconds=40)
    assert codes == [1] * 4
    assert "ArithmeticError: no more" in said[2]
    assert "nothing can be saved" in said[2] if own else "nothing is saved" in said[0]
    assert all("did not answer" not in each for each in said)
    assert not list(tmp_path.glob("stopped*"))
