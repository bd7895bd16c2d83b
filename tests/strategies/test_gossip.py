"""Gossip by Lightning: what ranks have at each step, what is saved, and what is refused."""

import os
import re
import time
import warnings
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_compress import CommunicationMonitor, GossipStrategy, Moniqua
from lightning_compress.codecs import QSGD, TopK
from lightning_compress.core.layout import Layout
from lightning_compress.gossip import ALGORITHMS
from lightning_compress.gossip.choco import Choco
from lightning_compress.gossip.modulo import cut
from lightning_compress.gossip.states import _states
from tests.helpers.lives import live
from tests.helpers.training import Net, digits, loader, parameters, quiet_trainer
from tests.helpers.training import fit as fit_digits
from tests.strategies.test_periodic import ByStep, Stream, Validated, Watch, fit, fit_again, fit_with_swa

METHODS = {
    **{name: {"algorithm": name} for name in ALGORITHMS.complete()},
    "moniqua": {"compressor": {"name": "moniqua", "rounding": "dither"}},
    "d2_moniqua": {"algorithm": "d2", "compressor": {"name": "moniqua", "bits": 4}},
    "states": {"average_states": True, "sync_every": 2},
    "sgp_delayed": {"algorithm": {"name": "sgp", "delay": 2}, "topology": "one_peer_exponential"},
}


def _follows():
    """Every rank's model after each step, and what it is without gossip."""
    watch, alone = Watch(), []

    class Alone(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            if len(alone) < trainer.global_step + 1:
                rate = optimizer.param_groups[0]["lr"]
                grads = torch.cat([each.grad.reshape(-1) for each in module.parameters()])
                alone.append((parameters(module) - rate * grads).numpy())

    class Sgd(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.05)

    fit(GossipStrategy(topology="ring", sync_every=2), Sgd, callbacks=[watch, Alone()])
    return watch.trained, alone


@pytest.mark.parametrize("size", [3, 4])
def test_models_are_mixed_after_local_steps(pools, size):
    ranks = pools[size].run(_follows)
    for step in range(8):
        alone = np.stack([rank[1][step] for rank in ranks])
        if step % 2:
            mixed = np.stack([sum(alone[(rank + shift) % size] for shift in (-1, 0, 1)) / 3 for rank in range(size)])
        else:
            mixed = alone
        np.testing.assert_allclose(np.stack([rank[0][step] for rank in ranks]), mixed, atol=1e-6)


class Loads(ByStep):
    """A hook loads weights, and nothing is learned."""

    def on_train_start(self):
        with torch.no_grad():
            for each in self.parameters():
                each.mul_(0.5)
        self.loaded = parameters(self).clone()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def _loads(algorithm):
    _, model = fit(GossipStrategy(algorithm, compressor="none"), Loads)
    return (parameters(model) - model.loaded).abs().max().item()


@pytest.mark.parametrize("algorithm", ["choco", "dcd", "ecd"])
def test_weights_that_hooks_load_are_what_others_know(pools, algorithm):
    assert max(pools[3].run(_loads, algorithm)) < 1e-6


def _evaluates(evaluate, folder):
    watch = Watch()
    save = ModelCheckpoint(folder, "last-{step}", every_n_train_steps=5, save_top_k=-1)
    trainer, model = fit(GossipStrategy(topology="star", evaluate=evaluate), Validated, callbacks=[watch, save])
    saved = torch.load(f"{folder}/last-step=5.ckpt", weights_only=True)["state_dict"]
    saved = torch.cat([saved[name].reshape(-1) for name, _ in model.named_parameters()]).numpy()
    mean = model.body[1].running_mean.numpy()
    return watch.trained, watch.evaluated, saved, parameters(model).numpy(), mean, trainer.strategy.comm_stats()


@pytest.mark.parametrize("evaluate", ["mean", "local"])
def test_the_mean_or_the_own_model_is_evaluated_and_saved(pools, tmp_path, evaluate):
    ranks = pools[3].run(_evaluates, evaluate, str(tmp_path))
    trained = np.stack([rank[0] for rank in ranks])
    assert not np.array_equal(trained[0, 3], trained[1, 3])
    for number, step in ((2, 3), (-1, 7)):  # after two batches before the first epoch
        shown = np.stack([rank[1][number] for rank in ranks])
        wanted = np.stack([trained[:, step].mean(0)] * 3) if evaluate == "mean" else trained[:, step]
        np.testing.assert_allclose(shown, wanted, atol=1e-6)
    saved = trained[:, 4].mean(0) if evaluate == "mean" else trained[0, 4]
    np.testing.assert_allclose(ranks[0][2], saved, atol=1e-6)
    for rank in ranks:  # the fit ends on the mean
        np.testing.assert_allclose(rank[3], trained[:, -1].mean(0), atol=1e-6)
        assert np.array_equal(rank[3], ranks[0][3])
        assert np.array_equal(rank[4], ranks[0][4])  # and so do BatchNorm's statistics
    assert ranks[0][5]["consensus_distance"] > 0


def _resumes(settings, folder, steps=(2, 5)):
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    _, whole = fit(GossipStrategy(**settings), ByStep, callbacks=[save])
    again = [fit(GossipStrategy(**settings), ByStep, resume=f"{folder}/step={step}.ckpt")[1] for step in steps]
    return [parameters(each).equal(parameters(whole)) for each in again]


BY_DEFAULT = {(3, "d2_moniqua"), (3, "sgp_delayed"), (4, "choco")}


@pytest.mark.parametrize(
    ("size", "method"),
    [
        pytest.param(size, method, marks=() if (size, method) in BY_DEFAULT else pytest.mark.thorough)
        for size in (3, 4)
        for method in METHODS
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(pools, tmp_path, size, method):
    """From the middle of an epoch, of each algorithm's own state."""
    assert pools[size].run(_resumes, METHODS[method], str(tmp_path)) == [[True] * 2] * size


def test_a_run_that_had_ended_ends_again_on_its_model(pools, tmp_path):
    for ended, again in pools[3].run(fit_again, partial(GossipStrategy, "choco"), str(tmp_path)):
        assert np.array_equal(ended, again)


def test_the_last_checkpoint_is_of_the_model_that_swa_leaves(pools, tmp_path):
    for ended, saved, evaluated, first in pools[2].run(fit_with_swa, GossipStrategy, str(tmp_path)):
        np.testing.assert_allclose(saved, ended, atol=1e-6)
        np.testing.assert_allclose(evaluated, first, atol=1e-6)


RING, STAR = (
    [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]],
    [[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]],
)


def _other_weights(folder):
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
    fit(GossipStrategy("choco", RING), ByStep, callbacks=[save])
    fit(GossipStrategy("choco", RING, strict_state=True), ByStep, resume=f"{folder}/step=4.ckpt")
    with pytest.raises(ValueError, match="with weights") as caught:
        fit(GossipStrategy("choco", STAR, strict_state=True), ByStep, resume=f"{folder}/step=4.ckpt")
    return str(caught.value)


def test_what_is_known_by_other_weights_is_not_gone_on_with(pools, tmp_path):
    for said in pools[3].run(_other_weights, str(tmp_path)):
        assert re.search("choco with efsign on matrix with weights .* this run compresses with .* weights", said)


def _elsewhere(folder):
    with pytest.warns(UserWarning, match="is of 3 ranks, and this run has 2") if dist.get_rank() == 0 else _nothing():
        torch.manual_seed(1)
        trainer = quiet_trainer(GossipStrategy("choco"), max_steps=7)
        trainer.fit(ByStep("adamw"), loader(digits()), ckpt_path=f"{folder}/step=5.ckpt")
    return trainer.global_step


def _nothing():
    return warnings.catch_warnings()


def test_another_number_of_ranks_begins_from_the_mean(pools, tmp_path):
    pools[3].run(_resumes, {"algorithm": "choco"}, str(tmp_path), ())
    assert pools[2].run(_quiet_elsewhere, str(tmp_path)) == [7, 7]


def _quiet_elsewhere(folder):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?!.*is of 3 ranks)")
        return _elsewhere(folder)


def _counts(settings):
    """Bytes by link, by this rank's meter, and what the monitor logs."""
    logged = []

    class Logger(pl.loggers.logger.DummyLogger):
        def log_metrics(self, metrics, step=None):
            logged.append(metrics)

    chosen = GossipStrategy(meet_every=2, **settings)
    _, model = fit_digits(chosen, 6, callbacks=[CommunicationMonitor()], loggers=Logger(), log_every_n_steps=2)
    layout = Layout.of([(name, tuple(each.shape)) for name, each in model.named_parameters()])
    return layout, chosen.comm_stats(), [each for each in logged if "comm/rounds" in each]


@pytest.mark.parametrize("size", [3, 4])
def test_bytes_by_link_and_rank(pools, size):
    ranks = pools[size].run(_counts, {"compressor": {"name": "moniqua", "bits": 4, "theta": 1.0}})
    for rank, (layout, stats, logged) in enumerate(ranks):
        codes, hashes = -(-layout.numel // 2), len(cut(layout))
        each = codes + -codes % 16 + 9 * hashes
        for peer in range(size):
            expected = 6 * each if (peer - rank) % size in (1, size - 1) else None
            assert stats.get(f"bytes_to_{peer}") == expected
        assert stats["bytes_of_0"] == 6 * 2 * each
        assert stats["hash_failures"] == 0
        assert stats["theta"] == 1.0
        assert len(logged) == 3
        assert logged[0]["comm/bytes_sent"] >= 2 * each
        assert logged[0]["comm/exchange_ms"] > 0
        assert "gossip by dpsgd with moniqua on ring" in stats["summary"]


class Learns(Validated):
    def on_validation_epoch_start(self):
        self.right = self.seen = 0

    def validation_step(self, batch, batch_idx):
        self.right += int((self(batch[0]).argmax(1) == batch[1]).sum())
        self.seen += len(batch[1])


def _learns(settings, epochs=5):
    _, model = fit(GossipStrategy(**settings), Learns, max_epochs=epochs, limit_train_batches=1.0)
    return model.right / model.seen


@pytest.mark.parametrize(
    "method", ["d2_moniqua", *(pytest.param(each, marks=pytest.mark.thorough) for each in METHODS)]
)
def test_it_learns(pools, method):
    assert all(score > 0.8 for score in pools[3].run(_learns, METHODS[method]))


class Frozen(Net):
    """Its head is trained from the second epoch on."""

    def __init__(self, _):
        super().__init__()
        self.head.requires_grad_(False)

    def on_train_epoch_start(self):
        if self.current_epoch:
            self.head.requires_grad_(True)


class Constants(Validated):
    """Buffers and a layer that are the same on all ranks, one that is not, and frozen weights of another dtype."""

    def __init__(self, _):
        super().__init__()
        self.register_buffer("least", torch.full((2,), torch.finfo(torch.float32).min))
        self.register_buffer("mask", torch.full((2,), -torch.inf))
        self.register_buffer("own", torch.full((2,), float(dist.get_rank())))
        self.frozen = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
        self.body[0].requires_grad_(False)
        self.first = self.body[0].weight.detach().clone()

    def on_train_batch_end(self, *_):
        self.own.fill_(dist.get_rank())
        self.register_buffer("late", torch.ones(1 + dist.get_rank()), persistent=False)  # as caches are


def _constants():
    trainer, model = fit(GossipStrategy(), Constants)
    same = bool((model.first == model.body[0].weight).all())
    rest = [each.tolist() for each in (model.least, model.mask, model.own)]
    return same, rest, trainer.strategy.comm_stats()["consensus_distance"]


def test_what_is_constant_stays(pools):
    """A mean of three would round it, or overflow; infinite masks are no distance of models."""
    least = torch.finfo(torch.float32).min
    for same, rest, distance in pools[3].run(_constants):
        assert same
        assert rest == [[least] * 2, [-np.inf] * 2, [0.0] * 2]  # the last is rank 0's
        assert 0 < distance < 1


class Queued(Constants):
    """A queue of keys of length 1, where the next one goes, and a codebook that is to be averaged."""

    def __init__(self, _):
        super().__init__(_)
        self.register_buffer("queue", torch.nn.functional.one_hot(torch.arange(8) % 4).float())
        self.register_buffer("place", torch.tensor(0))
        self.register_buffer("codebook", torch.zeros(3))

    def on_train_batch_end(self, *_):
        self.queue.copy_(self.queue.roll(dist.get_rank(), 1))
        self.place += 1 + dist.get_rank()
        self.codebook.fill_(dist.get_rank())


def _queued():
    _, model = fit(GossipStrategy(buffers={"code*": "mean"}), Queued)
    norms = model.body[1].running_mean.tolist()
    return model.queue.norm(dim=1).tolist(), model.place.item(), model.codebook.tolist(), norms


@pytest.mark.parametrize("size", [2, 3])
def test_buffers_end_as_those_of_rank_0_but_for_norms_and_what_is_named(pools, size):
    ranks = pools[size].run(_queued)
    assert all(each == ranks[0] for each in ranks)
    queue, place, codebook, _ = ranks[0]
    assert queue == [1.0] * 8
    assert place == 8
    assert codebook == [(size - 1) / 2] * 3


def _peak(work):
    """Bytes that ``work`` needs while it runs, beyond what there was before."""

    def read(what):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(what))

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = read("VmRSS")
    work()
    return read("VmHWM") - before


class Wide(Net):
    """Of four million parameters in eight layers."""

    def __init__(self, _):
        super().__init__("sgd")
        self.more = nn.Sequential(*(nn.Linear(720, 720) for _ in range(8)))

    @torch.no_grad()
    def on_train_start(self):
        own, numel = self.trainer.strategy.synchroniser, parameters(self).numel()
        self.needs = [_peak(own.finish) / numel, _peak(lambda: setattr(self, "kept", own.averaged_model())) / numel]
        self.kept = None


def _needs():
    return fit(GossipStrategy(), Wide, max_epochs=1, limit_train_batches=1)[1].needs


def test_means_are_made_block_by_block(pools):
    """The end needs some blocks, an evaluation the mean, of 4 bytes a parameter."""
    for needs in pools[2].run(_needs):
        assert max(needs) < 10


class Scaled(Net):
    """With a parameter of no dimensions, as the step count of its optimizer."""

    def __init__(self, _):
        super().__init__("adamw")
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images):
        return self.scale * super().forward(images)


def _averaged_states(plain):
    class Plain(Net):
        def __init__(self, _):
            super().__init__()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.05)

    trainer, model = fit(GossipStrategy(average_states=True), Plain if plain else Scaled, max_epochs=1)
    numels = [each.numel() for kept in _states(trainer.optimizers) for each in kept.values()]
    return sum(numels), parameters(model).numel()


def test_step_counts_are_no_states_to_average(pools):
    assert all(found == 2 * numel for found, numel in pools[2].run(_averaged_states, False))
    assert pools[2].run(_averaged_states, True)[0][0] == 0  # SGD keeps nothing


class Grows(Net):
    """With a cache as long as the longest input of its rank."""

    def __init__(self, _):
        super().__init__()
        self.register_buffer("cache", torch.ones(4), persistent=False)

    def on_train_batch_end(self, *_):
        self.cache = torch.ones(4 + dist.get_rank())


class Halves(Net):
    def __init__(self, _):
        super().__init__()
        self.half()


REFUSED = {
    "syncbn": (lambda: fit(GossipStrategy(), sync_batchnorm=True), "SyncBatchNorm"),
    "unequal": (
        lambda: fit(
            GossipStrategy(),
            data=DataLoader(digits(0, 64 + 64 * dist.get_rank()), 16),
            limit_train_batches=1.0,
            use_distributed_sampler=False,
        ),
        "different numbers of training batches",
    ),
    "stream": (
        lambda: fit(GossipStrategy(), data=DataLoader(Stream(2), batch_size=None), limit_train_batches=1.0),
        "different numbers of training batches: rank",
    ),
    "d2": (lambda: fit(GossipStrategy("d2", {"name": "ring", "lazy": False})), "smallest eigenvalue"),
    "matrix": (lambda: fit(GossipStrategy(topology=np.eye(4).tolist())), "not connected"),
    "directed": (
        lambda: fit(GossipStrategy(topology="directed_ring")),
        "For algorithm dpsgd it must be symmetric, since neighbours answer each other. Use algorithm sgp",
    ),
    "one way": (
        lambda: fit(GossipStrategy("sgp", [[0.5, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0.5, 1]])),
        "nothing of rank 1 comes to rank 0; add edges",
    ),
    "transposed": (
        lambda: fit(GossipStrategy("sgp", [[0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0.5, 0.5], [0.25] * 4])),
        "yours has rows that sum to 1: transpose it",
    ),
    "gives all": (
        lambda: fit(GossipStrategy("sgp", {"name": np.roll(np.eye(4), 1, 0).tolist(), "lazy": False})),
        "rank 0 gives away all of its model in a round",
    ),
    "no answers": (
        lambda: fit(GossipStrategy("sgp", "directed_ring", average_states=True)),
        "average_states=True averages with neighbours that answer, and topology directed_ring is directed",
    ),
    "other delays": (
        lambda: fit(GossipStrategy({"name": "sgp", "delay": dist.get_rank() % 2})),
        "the settings of gossip of rank 1, 3 differ from those of rank 0",
    ),
    "size": (lambda: fit(GossipStrategy(topology=[[0.5, 0.5], [0.5, 0.5]])), "is of 2 ranks, and this run has 4"),
    "one has no file": (
        lambda: fit(GossipStrategy(topology="ring" if dist.get_rank() else "/nowhere.txt")),
        "is no file",
    ),
    "others": (
        lambda: fit(GossipStrategy(topology="ring" if dist.get_rank() else "complete")),
        "the settings of gossip of rank 1, 2, 3 differ from those of rank 0",
    ),
    "atomo": (lambda: fit(GossipStrategy("dcd", compressor="atomo")), "would diverge with ATOMO(rank=3)"),
    "gamma": (
        lambda: fit(GossipStrategy({"name": "choco", "gamma": 0.4}, compressor={"name": "randomk", "density": 0.01})),
        "choco: gamma=0.4 would diverge with RandomK",
    ),
    "grows": (lambda: fit(GossipStrategy(), Grows), "cannot be averaged: 'cache' is torch.float32 of shape ("),
    "unfrozen": (lambda: fit(GossipStrategy(), Frozen), "was frozen when the fit began"),
    "swaps": (
        lambda: fit(GossipStrategy(topology=[[0, 0.5, 0, 0.5], [0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [0.5, 0, 0.5, 0]])),
        "spectral gap is 0",
    ),
    "true": (lambda: fit(GossipStrategy(), precision="bf16-true"), "parameters are torch.bfloat16"),
    "halves": (lambda: fit(GossipStrategy(), Halves), "parameters are torch.float16"),
}


def _refused():
    said = {}
    for case, (run, _) in REFUSED.items():
        with pytest.raises(Exception) as caught:  # noqa: PT011
            run()
        said[case] = str(caught.value)
    return said


def test_refused_on_every_rank(pools):
    for said in pools[4].run(_refused):
        for case, (_, message) in REFUSED.items():
            assert np.any([each in said[case] for each in message.split("|")]), (case, said[case])


BAD = [
    ({"algorithm": "nosuch"}, "unknown algorithm 'nosuch'; there are: dpsgd, d2, choco, sgp, dcd, deepsqueeze, ecd"),
    ({"algorithm": {"name": "choco", "gamma": 0}}, r"gamma=0 must be in \(0, 1\]"),
    ({"algorithm": {"name": "choco", "delta": 1}}, "has no setting 'delta'; it has: gamma"),
    ({"compressor": "nosuch"}, "unknown compressor 'nosuch'.*moniqua"),
    ({"compressor": "powersgd"}, "unknown compressor 'powersgd'"),
    ({"compressor": "topk"}, "averages models, and with TopK"),
    ({"algorithm": "dcd", "compressor": TopK(0.1)}, "dcd needs an unbiased codec, and the errors of TopK"),
    ({"algorithm": "ecd", "compressor": "fp16"}, "ecd needs an unbiased codec"),
    ({"algorithm": "dcd", "compressor": "moniqua"}, "dcd needs an unbiased codec"),
    ({"algorithm": "choco", "compressor": QSGD()}, "choco needs a contractive codec"),
    ({"algorithm": "deepsqueeze", "compressor": "moniqua"}, "deepsqueeze needs a contractive codec"),
    ({"algorithm": "sgp", "compressor": "moniqua"}, "sgp pushes models .* Use compressor='none'"),
    ({"algorithm": {"name": "sgp", "delay": 1.5}}, "sgp: delay=1.5 must be an integer, 0 or more"),
    ({"algorithm": {"name": "dpsgd", "delay": 1}}, "has no setting 'delay'"),
    ({"compressor": {"name": "moniqua", "bits": 1, "rounding": "stochastic"}}, "delta=0.5"),
    ({"algorithm": "d2", "compressor": {"name": "moniqua", "bits": 2}}, "d2 would diverge with moniqua at bits=2"),
    ({"compressor": {"name": "moniqua", "theta": 0}}, "above 0, not 0"),
    ({"sync_every": 0}, "sync_every=0 must be an integer, 1 or more"),
    ({"meet_every": 1.5}, "meet_every=1.5"),
    ({"seed": -1}, "seed=-1"),
    ({"evaluate": "all"}, "'mean', 'local'"),
    ({"average_states": 1}, "true or false"),
    ({"state": "mean"}, "state='mean'"),
    ({"find_unused_parameters": True}, "find_unused_parameters=True"),
    ({"algoritm": "d2"}, "algoritm"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=str)
def test_refused_at_construction(settings, message):
    with pytest.raises(ValueError, match=message):
        GossipStrategy(**settings)


@pytest.mark.parametrize("compressor", ["auto", None, "none", "moniqua", {"name": "moniqua", "bits": 4}, Moniqua(8)])
def test_averaging_takes(compressor):
    GossipStrategy("d2", compressor=compressor)


@pytest.mark.parametrize("compressor", ["auto", "none", "topk", "efsign", "onebit", "fp16", TopK(0.1)])
def test_contractive_codecs_go(compressor):
    GossipStrategy(Choco(0.5), compressor=compressor)
    GossipStrategy("deepsqueeze", compressor=compressor)


@pytest.mark.parametrize("compressor", ["auto", "none", "qsgd", "rotated", "natural", "terngrad", "wangni"])
def test_unbiased_codecs_go(compressor):
    GossipStrategy("dcd", compressor=compressor)
    GossipStrategy("ecd", compressor=compressor)


def test_names():
    registry = pl.strategies.StrategyRegistry
    for name in ("gossip", "gossip_moniqua", "gossip_d2_spawn", "gossip_choco", "gossip_d2_moniqua_fork", "gossip_sgp"):
        assert isinstance(registry.get(name), GossipStrategy)


def test_figures_need_a_fit():
    with pytest.raises(RuntimeError, match=r"begins with trainer.fit\(\)"):
        GossipStrategy().comm_stats()


class Convolution(Net):
    def __init__(self, _):
        super().__init__()
        self.body.to(memory_format=torch.channels_last)


def _other_layouts():
    _, model = fit(GossipStrategy(), Convolution, max_epochs=1)
    return parameters(model).numpy(), isinstance(model.body[0], nn.Conv2d)


def test_other_orders_of_memory(pools):
    ranks = pools[3].run(_other_layouts)
    assert np.array_equal(ranks[0][0], ranks[2][0])


class Dies(ByStep):
    """Rank 1 is gone after the fourth step, or hangs."""

    hangs = False

    def on_train_batch_end(self, *_):
        if self.trainer.global_step == 4 and dist.get_rank() == 1:
            if self.hangs:
                time.sleep(30)
            os._exit(9)


class Hangs(Dies):
    hangs = True


def _killed(kind):
    fit(GossipStrategy("d2", compressor="moniqua"), {"dies": Dies, "hangs": Hangs}[kind])


@pytest.mark.parametrize("kind", ["dies", pytest.param("hangs", marks=pytest.mark.thorough)])
def test_a_rank_that_is_gone_ends_the_run(tmp_path, kind):
    """On those that are no neighbours of it too."""
    seconds, start = 6, time.monotonic()
    codes, said = live(4, tmp_path / "ranks", _killed, kind, seconds=seconds)
    assert codes == [1, 9, 1, 1]
    assert time.monotonic() - start < 90
    for rank in (0, 2, 3):
        assert "ExchangeError" in said[rank]
        assert "averaging with neighbours" in said[rank] or "averaging all models" in said[rank]
        assert any(words in said[rank] for words in ("a rank died", "did not answer within 6 s", "time limit"))
