"""Files beside a checkpoint: under the checkpoint's name on every rank, gone with it, and read one at a time."""

import weakref

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_compress import LocalSGDStrategy
from lightning_compress.codecs import OneBit, TopK
from lightning_compress.collectives.local import LocalCollective
from lightning_compress.core import state_dict
from lightning_compress.strategies import sidecar
from tests.helpers import training
from tests.helpers.training import Net
from tests.strategies.test_resume import fit


class Apart(Net):
    """Logs a metric that differs between ranks, as without ``sync_dist``."""

    def training_step(self, batch, batch_idx):
        self.log("own", float(self.global_rank), sync_dist=False)
        return super().training_step(batch, batch_idx)


def by_metric(folder):
    return ModelCheckpoint(folder, "{epoch}-{own:.0f}", save_top_k=-1)


def named_apart(folder):
    whole, _, _ = fit(folder, TopK(0.05), make=Apart, callbacks=[by_metric(folder)])
    first = f"{folder}/epoch=0-own=0.ckpt"
    again, _, said = fit(f"{folder}/again", TopK(0.05), first, make=Apart, callbacks=[by_metric(f"{folder}/again")])
    return np.array_equal(whole, again), said


def test_names_that_differ_by_rank(pools, tmp_path):
    assert pools[2].run(named_apart, str(tmp_path)) == [(True, [])] * 2
    assert not list(tmp_path.rglob("*own=1*"))
    assert len(list(tmp_path.glob("epoch=1-own=0.ckpt.lc/*"))) == 2


def named_apart_alone(folder):
    strategy = LocalSGDStrategy(sync_every=2, compressor="topk")
    training.fit(strategy, 4, Apart, [by_metric(folder)], enable_checkpointing=True, limit_train_batches=4)


def test_names_that_differ_where_ranks_train_models_of_their_own(pools, tmp_path):
    pools[2].run(named_apart_alone, str(tmp_path))
    assert not list(tmp_path.rglob("*own=1*"))
    assert len(list(tmp_path.glob("epoch=0-own=0.ckpt.lc/*"))) == 2


def on_disks_apart():
    import fsspec

    best = ModelCheckpoint("memory://apart", "{epoch}", save_top_k=1, monitor="epoch", mode="max")
    fit("", OneBit(), epochs=3, callbacks=[best])
    return sorted({path.split("/")[2] for path in fsspec.filesystem("memory").find("/apart")})


def test_each_rank_removes_its_own_from_a_disk_of_its_own(pools):
    first, second = pools[2].run(on_disks_apart)
    assert first == ["epoch=2.ckpt", "epoch=2.ckpt.lc"]
    assert second == ["epoch=2.ckpt.lc"]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_removes(tmp_path, rank):
    (tmp_path / "a.ckpt.lc").mkdir()
    for each in (0, 1, 11):
        (tmp_path / f"a.ckpt.lc/x.rank{each}.pt").touch()
    (tmp_path / "a.ckpt").touch()
    if rank:  # the checkpoint is still there
        sidecar.remove(str(tmp_path / "a.ckpt"), rank)
        assert len(list(tmp_path.glob("a.ckpt.lc/*"))) == 3
    (tmp_path / "a.ckpt").unlink()
    for _ in range(2):
        sidecar.remove(str(tmp_path / "a.ckpt"), rank)
        left = sorted(path.name for path in tmp_path.glob("a.ckpt.lc/*"))
        assert left == (["x.rank0.pt", "x.rank11.pt"] if rank else [])


def state(step=3, **kinds):
    states = {
        kind: {"holder": holder, "names": ["w"], "numels": [8], "numbers": torch.full((8,), value)}
        for kind, (holder, value) in kinds.items()
    }
    return {"step": step, "rates": {}, "running": {}, "method": "topk", "groups": [{"names": ["w"], "states": states}]}


class Listening(LocalCollective):
    def __init__(self):
        self.devices = []

    def all_reduce(self, tensor, operation="sum"):
        self.devices.append(tensor.device.type)


def test_a_mean_is_made_where_the_ranks_talk_and_leaves_the_state_as_it_was():
    ranks, own, checkpoint = Listening(), state(residual=("rank", 1.0), kept=("shared", 2.0)), {}
    sidecar.write_inside(checkpoint, own, ranks, torch.device("meta"))
    (states,) = (group["states"] for group in checkpoint[sidecar.KEY]["tree"]["groups"])
    assert ranks.devices == ["meta"]
    assert states["residual"]["numbers"].is_meta
    assert states["kept"]["numbers"].eq(2).all()
    assert own["groups"][0]["states"]["residual"]["numbers"].eq(1).all()


def test_parts_are_summed_one_at_a_time():
    alive, most = weakref.WeakSet(), 0

    def parts():
        nonlocal most
        for number in range(5):
            made = state(residual=("rank", float(number)), kept=("shared", 2.0))
            alive.add(made["groups"][0]["states"]["residual"]["numbers"])
            most = max(most, len(alive))
            yield made
            del made

    states = state_dict.total(parts())["groups"][0]["states"]
    assert most <= 2
    assert states["residual"]["numbers"].eq(10).all()
    assert states["kept"]["numbers"].eq(2).all()
    with pytest.raises(ValueError, match="of different steps or groups"):
        state_dict.total(iter([state(residual=("rank", 1.0)), state(4, residual=("rank", 1.0))]))
