"""Muon for hidden matrices and AdamW for the rest, in both forms in which people write it."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

from lightning_compress import CompressedDDPStrategy, LocalSGDStrategy
from lightning_compress.codecs import QSGD
from lightning_compress.exchanges.nodes import Cluster
from lightning_compress.settings.automatic import Chosen
from lightning_compress.settings.run_state import RunState
from lightning_compress.strategies.advice import _costs_beside
from tests.helpers.training import Net, digits, loader, parameters, quiet_trainer

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
BATCHES = 8
REST = "*.bias"


class MuonWithAuxAdam(torch.optim.Optimizer):
    """Both in one class, as Keller Jordan's."""

    def __init__(self, hidden, others):
        super().__init__([{"params": hidden, "lr": 0.02}, {"params": others, "lr": 3e-3}], {"lr": 0.02})
        self._two = None

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        if self._two is None:
            muon, adamw = (group["params"] for group in self.param_groups)
            self._two = [torch.optim.Muon(muon, 0.02), torch.optim.AdamW(adamw, 3e-3)]
            for each in self._two:
                each.state = self.state
        for each in self._two:
            each.step()
        return loss


class Hidden(Net):
    """Linear layers, stepped by one optimizer or by two."""

    def __init__(self, form):
        super().__init__()
        self.automatic_optimization, self.form = form == "one", form
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 144))

    def training_step(self, batch, batch_idx):
        images, labels = digits(3).tensors
        turn = 16 * (2 * self.current_step + self.global_rank)
        places = torch.arange(turn, turn + 16) % len(labels)
        loss = nn.functional.cross_entropy(self(images[places]), labels[places])
        if self.automatic_optimization:
            return loss
        for each in self.optimizers():
            each.zero_grad()
        self.manual_backward(loss)
        for each in self.optimizers():
            each.step()
        return None

    @property
    def current_step(self):
        """Its data follows from the step alone, so that a run may go on in the middle of an epoch."""
        return self.trainer.global_step // (1 if self.form == "one" else 2)

    def configure_optimizers(self):
        hidden = [each for each in self.parameters() if each.dim() == 2]
        others = [each for each in self.parameters() if each.dim() != 2]
        if self.form == "one":
            return MuonWithAuxAdam(hidden, others)
        return [torch.optim.Muon(hidden, 0.02), torch.optim.AdamW(others, 3e-3)]


STRATEGIES = {
    "ddp": partial(CompressedDDPStrategy, "onebit"),
    "ddp of 5 bits": partial(CompressedDDPStrategy, {"name": "qsgd", "bits": 5}),
    "local": partial(LocalSGDStrategy, 3, "nesterov", "rotated"),
    "averaged": partial(LocalSGDStrategy, 3, compressor="rotated", average_gradients=REST),
    "streaming": partial(LocalSGDStrategy, 3, compressor="onebit", fragments=2, delay=1, average_gradients=REST),
}
"""``sync_every`` does not divide an epoch."""


def _fit(strategy, form, epochs=2, callbacks=(), resume=None):
    torch.manual_seed(1)
    model = Hidden(form)
    options = {"max_epochs": epochs, "limit_train_batches": BATCHES, "callbacks": [*callbacks]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(strategy(), enable_checkpointing=bool(callbacks), **options)
        trainer.fit(model, loader(digits()), ckpt_path=resume)
    return trainer, model, [str(each.message) for each in caught]


def _resumes(name, form, folder):
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    _, whole, said = _fit(STRATEGIES[name], form, callbacks=[save])
    same = []
    for step in (2, 4, 8):
        path = f"{folder}/step={step if form == 'one' else 2 * step}.ckpt"
        same.append(parameters(_fit(STRATEGIES[name], form, resume=path)[1]).equal(parameters(whole)))
    told = [each for each in said if "AdamW" in each or "Adam takes" in each]
    return parameters(whole).numpy().tobytes(), same, told, [each for each in said if "in our runs" in each]


@pytest.mark.parametrize("form", ["one", "two"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_ranks_end_on_one_model_and_a_run_resumes_in_the_middle_of_a_round(pools, tmp_path, name, form):
    (end, same, told, costs), (other, others, *_) = pools[2].run(_resumes, name, form, str(tmp_path))
    assert end == other
    assert same == others == [True] * 3
    assert not told
    assert len(costs) == (name == "ddp")
    assert all("onebit (block 1024) with Muon raised the loss by 4.1 % in our runs" in each for each in costs)
    assert all("Use compressor={'name': 'qsgd', 'bits': 5} (+0.4 %)" in each for each in costs)


def _two_epochs(form, folder):
    strategy = partial(LocalSGDStrategy, 4, "nesterov", "rotated")
    trainer, whole, _ = _fit(strategy, form)
    first, *_ = _fit(strategy, form, epochs=1)
    first.save_checkpoint(f"{folder}/first.ckpt")
    again, second, _ = _fit(strategy, form, resume=f"{folder}/first.ckpt")
    ends = [parameters(each).numpy().tobytes() for each in (whole, second)]
    return ends, [each.strategy.comm_stats()["steps"] for each in (trainer, again)], trainer.strategy.attempts


@pytest.mark.parametrize("form", ["one", "two"])
def test_one_fit_of_two_epochs_is_two_fits_of_one(pools, tmp_path, form):
    for ends, rounds, attempts in pools[2].run(_two_epochs, form, str(tmp_path)):
        assert ends[0] == ends[1]
        assert rounds == [4, 2]  # with two optimizers, no round more
        assert attempts == 2 * BATCHES


def _in_step():
    """The one-class form and two optimizers by hand: the same parameters after each batch."""

    class Seen(Callback):
        def __init__(self):
            self.found = []

        def on_train_batch_end(self, trainer, module, *_):
            self.found.append(parameters(module).numpy().tobytes())

    seen = [Seen(), Seen()]
    for form, each in zip(("one", "two"), seen, strict=True):
        _fit(partial(LocalSGDStrategy, 4, "nesterov", "rotated"), form, callbacks=[each])
    return [one == other for one, other in zip(*(each.found for each in seen), strict=True)]


def test_a_round_falls_behind_the_last_optimizer_of_a_step_as_if_there_was_one(pools):
    assert pools[2].run(_in_step) == [[True] * 2 * BATCHES] * 2


class InTurn(Hidden):
    """Two optimizers, each with a forward and a backward pass of its own, by turns twice in a batch."""

    def training_step(self, batch, batch_idx):
        images, labels = batch
        for each in [*self.optimizers()] * 2:
            each.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self(images), labels))
            each.step()


def _in_turn():
    torch.manual_seed(1)
    trainer = quiet_trainer(LocalSGDStrategy(1, compressor="none"), max_epochs=1, limit_train_batches=BATCHES)
    model = InTurn("two")
    trainer.fit(model, loader(digits()))
    return trainer.strategy.attempts, trainer.strategy.comm_stats()["steps"], parameters(model).numpy().tobytes()


def test_a_round_between_two_forward_passes_of_a_batch_falls_before_the_second(pools):
    """Else backward would find parameters that a round has changed since its forward pass."""
    (attempts, rounds, end), (*_, other) = pools[2].run(_in_turn)
    assert (attempts, rounds) == (2 * BATCHES + 1, 2 * BATCHES + 1)  # the second optimizer's last step is its own round
    assert end == other


MATRIX = [nn.Parameter(torch.zeros(64, 64))]


class Dion2(torch.optim.Optimizer):
    """A name like microsoft/dion's."""

    def __init__(self):
        super().__init__(MATRIX, {"lr": 0.1})


MADE = {
    "muon": lambda: torch.optim.Muon(MATRIX, 0.02),
    "adamw": lambda: torch.optim.AdamW(MATRIX),
    "dion": Dion2,
}
QSGD_4 = "qsgd (bits 4) with Muon raised the loss by 1.4 % in our runs. Use compressor={'name': 'qsgd', 'bits': 5}"


@pytest.mark.parametrize(
    ("compressor", "optimizers", "said"),
    [
        ("qsgd", ["muon"], QSGD_4),
        ("qsgd", ["adamw", "muon"], QSGD_4),
        ("qsgd", ["dion"], QSGD_4),
        ("qsgd", ["adamw"], ""),
        ({"name": "qsgd", "bits": 5}, ["muon", "adamw"], ""),
        ({"name": "qsgd", "bits": 6}, ["muon"], ""),
        ("bf16", ["muon"], ""),
        ({"name": "qsgd", "bits": 3}, ["muon"], "qsgd (bits 3) with Muon may raise the loss; we have not measured it"),
        ({"name": "qsgd", "bucket": 256}, ["muon"], "qsgd (bits 4, bucket 256) with Muon may raise the loss"),
        ({"name": "qsgd", "bucket": 256}, ["adamw"], ""),
        ("none", ["muon"], ""),
        ({"name": "topk", "density": 0.02}, ["dion"], "with Dion2 may raise the loss; we have not measured it"),
        ("onebit", ["muon", "adamw"], "onebit (block 1024) with Muon raised the loss by 4.1 %"),
        ("onebit", ["adamw"], "onebit (block 1024) with AdamW raised the loss by 2.4 %"),
    ],
    ids=str,
)
def test_what_costs_beside_muon(compressor, optimizers, said):
    made = [MADE[each]() for each in optimizers]
    kind = "adam" if optimizers == ["adamw"] else "muon"
    text = _costs_beside(RunState.of(compressor).stepped_by(kind), made)
    assert text.startswith(said) if said and "Dion" not in said else said in text
    assert bool(text) == bool(said)
    assert "AdamW" not in text or kind == "adam"
    assert not text or text.endswith("in 'lightning-compress docs choose'")


def test_where_auto_took_four_bits_the_argument_to_write_is_told():
    chosen = replace(RunState.of(QSGD(4)), chosen=Chosen(QSGD(4), Cluster(2, 2, "")))
    text = _costs_beside(chosen.stepped_by("muon"), [MADE["muon"](), MADE["adamw"]()])
    assert text.startswith(f"compressor='auto' took {QSGD_4}")
    float32 = replace(RunState.of("none"), chosen=Chosen(QSGD(8), Cluster(2, 2, "")))
    assert not _costs_beside(float32.stepped_by("muon"), [MADE["muon"]()])
