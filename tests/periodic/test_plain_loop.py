"""Local steps and gossip in a loop of one's own, without Lightning, on ranks that are threads."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from lightning_compress.collectives import run_threads
from lightning_compress.periodic import Gossip, LocalSGD

MODEL = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def train(ranks, synchroniser, steps=12):
    """What a user writes; a rank's data have a mean of their own."""
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    synchroniser.start(model, [optimizer], ranks)
    data = torch.Generator().manual_seed(1 + ranks.rank)
    for _ in range(steps):
        optimizer.zero_grad()
        (
            model(torch.randn(16, 8, generator=data, dtype=torch.float32) + ranks.rank) - ranks.rank
        ).square().mean().backward()
        synchroniser.before_step(optimizer)
        optimizer.step()
        synchroniser.after_step()
    synchroniser.finish()
    synchroniser.close()
    return [each.detach() for each in model.state_dict().values()], synchroniser.stats()


KINDS = {
    "local steps": lambda: LocalSGD(sync_every=4),
    "streaming": lambda: LocalSGD(4, "nesterov", {"name": "rotated", "bits": 8}, fragments=2, delay=2),
    "after averaged steps": lambda: LocalSGD(4, averaged_steps=3, compressor="onebit", evaluate="mean"),
    "gossip": lambda: Gossip(meet_every=4),
    "choco": lambda: Gossip("choco", average_states=True),
    "sgp": lambda: Gossip({"name": "sgp", "delay": 2}, "one_peer_exponential"),
    "d2 by Moniqua": lambda: Gossip("d2", compressor="moniqua", sync_every=2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_end_on_one_model(size, kind):
    found = run_threads(size, lambda ranks: train(ranks, KINDS[kind]()))
    for model, stats in found:
        assert all(own.equal(other) for own, other in zip(model, found[0][0], strict=True))
        assert all(each.isfinite().all() for each in model)
        assert (stats["total_bytes_sent"] > 0) == (size > 1)


def test_lightning_is_not_imported():
    script = "import sys, lightning_compress.periodic; assert not {'lightning', 'pytorch_lightning'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_on_exactly(kind):
    """Saved in the middle of a round, with this rank's model and optimizer."""

    def run(ranks):
        torch.set_num_threads(1)
        draw = torch.Generator().manual_seed(ranks.rank)
        data = [torch.randn(16, 8, generator=draw) for _ in range(10)]

        def begin():
            model = copy.deepcopy(MODEL)
            optimizer, synchroniser = torch.optim.AdamW(model.parameters(), 0.01), KINDS[kind]()
            synchroniser.start(model, [optimizer], ranks)
            return model, optimizer, synchroniser

        def steps(model, optimizer, synchroniser, batches):
            for batch in batches:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                synchroniser.before_step(optimizer)
                optimizer.step()
                synchroniser.after_step()

        whole = begin()
        steps(*whole, data[:6])
        saved = copy.deepcopy([each.state_dict() for each in whole])
        steps(*whole, data[6:])
        again = begin()
        for each, state in zip(again, saved, strict=True):
            each.load_state_dict(state)
        steps(*again, data[6:])
        ends = [{**each[2].averaged_model(), **dict(each[0].named_parameters())} for each in (whole, again)]
        return all(own.equal(ends[1][name]) for name, own in ends[0].items())

    assert run_threads(2, run) == [True] * 2


def test_ranks_that_begin_with_other_models_or_settings_are_refused():
    def run(ranks, differs):
        model = copy.deepcopy(MODEL)
        with torch.no_grad():
            model[0].weight += ranks.rank * (differs == "model")
        LocalSGD(4 + ranks.rank * (differs == "settings")).start(model, (), ranks)

    with pytest.raises(ValueError, match=r"1 parameters differ over the ranks .*, among them 0\.weight"):
        run_threads(2, lambda ranks: run(ranks, "model"))
    with pytest.raises(ValueError, match="settings of local steps of rank 1 differ from those of rank 0"):
        run_threads(2, lambda ranks: run(ranks, "settings"))
    with pytest.raises(ValueError, match="LocalSGD has no setting 'local_clip_norm'"):
        LocalSGD(local_clip_norm=3.0)
    with pytest.raises(ValueError, match="warmup_rounds= is gone: write warmup_steps=5"):
        LocalSGD(warmup_rounds=3)
