"""Local steps that average the gradients of some parameters in each step."""

import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_compress import LocalSGDStrategy
from lightning_compress.collectives.counting import all_reduce_bytes
from lightning_compress.periodic import LocalSGD
from lightning_compress.periodic.averaged_gradients import AveragedGradients
from tests.helpers.training import Net, digits, loader, parameters, quiet_trainer
from tests.strategies.test_periodic import ByStep, Stream, fit

SOME = ["*.bias", {"kind": "norm"}]
"""Biases, and the norm's weight."""
TAKEN = ["body.0.bias", "body.1.weight", "body.1.bias", "body.3.bias", "head.0.bias", "head.2.bias"]


def local(**given):
    return LocalSGDStrategy(**{"sync_every": 3, "compressor": "none", "average_gradients": SOME, **given})


class Idle(Net):
    """With a parameter that no batch uses. SGD steps it: Adam would divide the noise of a zero gradient by itself."""

    def __init__(self, _):
        super().__init__("sgd")
        self.idle = torch.nn.Parameter(torch.ones(3))


def _all_but_idle():
    _, ddp = fit(DDPStrategy(find_unused_parameters=True), make=Idle)
    _, ours = fit(local(average_gradients=["body.*", "head.*"]), make=Idle)
    return (parameters(ddp) - parameters(ours)).abs().max().item()


def test_to_average_all_that_is_used_is_ddp(pools):
    assert max(pools[3].run(_all_but_idle)) < 1e-6


class Linear(Net):
    """Stepped by SGD, whose steps of a mean are the mean of steps."""

    def __init__(self, _):
        super().__init__("sgd")


def _rounds_of_one():
    _, ddp = fit(DDPStrategy(), make=Linear)
    _, ours = fit(local(sync_every=1), make=Linear)
    return (parameters(ddp) - parameters(ours)).abs().max().item()


def test_with_sgd_and_rounds_of_one_step_it_is_ddp_whatever_is_averaged(pools):
    assert max(pools[2].run(_rounds_of_one)) < 1e-6


def _nothing():
    plain = parameters(fit(LocalSGDStrategy(sync_every=3, compressor="onebit"))[1])
    ends = [parameters(fit(local(average_gradients=none, compressor="onebit"))[1]) for none in ([], None)]
    return all(each.equal(plain) for each in ends)


def test_to_average_nothing_changes_no_bit(pools):
    assert pools[2].run(_nothing) == [True] * 2


class ByName(Callback):
    """All parameters after each batch, by name."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        self.seen.append({name: each.detach().clone().numpy() for name, each in module.named_parameters()})


def _apart(options, make=Net, **more):
    look = ByName()
    strategy = local(**options)
    _, model = fit(strategy, make=make, callbacks=[look], **more)
    sent = [meter.bytes_sent for meter in strategy.synchroniser.meters]
    return look.seen, parameters(model).numpy(), strategy.comm_stats(), sent


@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 2, "outer": "nesterov"}], ids=str)
def test_what_is_averaged_is_equal_after_each_step_and_the_rest_is_not(pools, options):
    (first, end, stats, sent), (second, other, _, _) = pools[2].run(_apart, options)
    assert np.array_equal(end, other)
    for step, (own, theirs) in enumerate(zip(first, second, strict=True)):
        equal = [name for name in own if np.array_equal(own[name], theirs[name])]
        assert equal == (list(own) if step in (2, 5) and not options else TAKEN), step
    sizes = {name: each.size for name, each in first[0].items()}
    message = sum(sizes[name] for name in TAKEN) + len(TAKEN)  # and whether each was used
    *parts, averaged = sent
    assert 0 <= averaged - 8 * all_reduce_bytes(4 * message, 2) < 400  # the norm's statistics, when the fit ends
    if not options:
        norms = 2 * 16 + 1  # running means travel with the last fragment
        fragments = sum(size for name, size in sizes.items() if name not in TAKEN)
        assert parts == [pytest.approx(3 * all_reduce_bytes(4 * (fragments + norms), 2), rel=0.01)]
    assert stats["total_bytes_sent"] == sum(sent)
    assert stats["total_bytes_dense"] == pytest.approx(8 * 4 * sum(sizes.values()), rel=0.01)
    said = "gradients of 6 parameters (1.1 %) averaged in each step; the others: 3 local steps a round"
    assert stats["summary"].startswith(said)


class OnOne(Net):
    """One layer is used on rank 0 only; one on none."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.some, self.none = torch.nn.Linear(10, 10), torch.nn.Linear(10, 10)

    def forward(self, images):
        found = super().forward(images)
        return self.some(found) if dist.get_rank() == 0 else found


def test_a_parameter_that_one_rank_does_not_use_counts_as_zeros_there(pools):
    options = {"average_gradients": ["some.*", "none.*"]}
    (first, *_), (second, *_) = pools[2].run(_apart, options, OnOne)
    for own, theirs in zip(first, second, strict=True):
        assert np.array_equal(own["some.weight"], theirs["some.weight"])
        assert np.array_equal(own["none.weight"], first[0]["none.weight"])
    assert not np.array_equal(first[0]["some.weight"], first[1]["some.weight"])


class BadGradient(ByStep):
    """In one step a gradient of rank 1 is not finite."""

    bad, at = "head.0.bias", 3

    def on_after_backward(self):
        if self.trainer.global_step == self.at and dist.get_rank() == 1 and not hasattr(self, "done"):
            self.done = True
            self.get_parameter(self.bad).grad.fill_(float("nan"))


class BadLocal(BadGradient):
    """It is that of a parameter that trains locally."""

    bad = "head.0.weight"


def _spoilt(make, scaled, policy="skip"):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + dist.get_rank()))
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)] if scaled else []
    look = ByName()
    trainer, model = fit(local(on_nonfinite=policy), make=make, callbacks=[look], plugins=plugins)
    moved = [
        any(not np.array_equal(one[name], other[name]) for name in one)
        for one, other in zip(look.seen, look.seen[1:], strict=False)
    ]
    taken = [[each[name] for name in TAKEN] for each in look.seen]
    finite = bool(parameters(model).isfinite().all())
    return moved, taken, finite, parameters(model).numpy(), trainer.strategy.comm_stats()["nonfinite_steps"]


@pytest.mark.parametrize(("make", "scaled"), [(BadGradient, True), (BadLocal, True), (BadGradient, False)])
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks_and_no_other(pools, make, scaled):
    ranks = pools[2].run(_spoilt, make, scaled)
    for moved, taken, finite, end, skipped in ranks:
        assert moved == [True, True, False, True, True, True, True]
        assert finite
        assert np.array_equal(end, ranks[0][3])
        assert skipped == (0 if scaled else 1)
        for own, theirs in zip(taken, ranks[0][1], strict=True):
            assert all(map(np.array_equal, own, theirs))


class UnscalesByHand(Net):
    """Steps a fused optimizer, which Lightning does not unscale itself."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        images, labels = batch
        self.manual_backward(torch.nn.functional.cross_entropy(self(images), labels))
        self.trainer.precision_plugin.scaler.unscale_(self.optimizers().optimizer)
        self.optimizers().step()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)


def _unscaled(averaged):
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    strategy = local(average_gradients=averaged)
    return fit(strategy, make=UnscalesByHand, plugins=[plugin], limit_train_batches=1)[1].trainer.global_step


def test_gradients_that_were_unscaled_by_hand_are_not_averaged(pools):
    assert pools[2].run(_unscaled, []) == [2] * 2
    with pytest.raises(Exception, match=r"scaler.unscale_\(\) was called before the step of AdamW"):
        pools[2].run(_unscaled, SOME)


def test_an_average_that_is_not_finite_may_be_an_error_on_all_ranks(pools):
    with pytest.raises(Exception, match="step 3: the mean of the ranks' gradients is not finite"):
        pools[2].run(_spoilt, BadGradient, False, "raise")


class Drifts(ByStep):
    """Rank 1 changes a bias that is averaged."""

    def on_train_batch_end(self, *_):
        if self.trainer.global_step == 2 and dist.get_rank() == 1:
            self.head[0].bias.data += 1e-3


def test_drift_of_what_is_averaged_is_found_at_the_end_of_the_round(pools):
    with pytest.raises(Exception, match=r"drift: after step 1, head\.0\.bias of rank 1 differ"):
        pools[2].run(_apart, {}, Drifts)


def _unsized():
    with pytest.raises(ValueError, match="different numbers of training batches: rank"):
        fit(local(), data=DataLoader(Stream(2), batch_size=None), limit_train_batches=1.0)
    strategy = local()
    _, model = fit(strategy, data=DataLoader(Stream(0), batch_size=None), limit_train_batches=1.0)
    return strategy.attempts, parameters(model).numpy()


def test_ranks_whose_loaders_have_no_length_meet_and_do_not_hang(pools):
    (attempts, end), (others, other) = pools[2].run(_unsized)
    assert attempts == others == 10
    assert np.array_equal(end, other)


class Unfreezes(Net):
    """Trains its first bias from the third step on."""

    def __init__(self, optimizer, ranks=2):
        super().__init__(optimizer)
        self.ranks = ranks
        self.body[0].bias.requires_grad_(False)

    def on_train_batch_start(self, batch, number):
        if self.trainer.global_step >= 2 and dist.get_rank() < self.ranks:
            self.body[0].bias.requires_grad_(True)


class OnOneRank(Unfreezes):
    """On rank 0 only."""

    def __init__(self, optimizer):
        super().__init__(optimizer, 1)


def test_a_parameter_that_is_unfrozen_is_averaged_from_then_on(pools):
    (first, *_), (second, *_) = pools[2].run(_apart, {}, Unfreezes)
    biases = [seen["body.0.bias"] for seen in first]
    assert all(np.array_equal(one, other["body.0.bias"]) for one, other in zip(biases, second, strict=True))
    assert np.array_equal(biases[0], biases[1])
    assert not np.array_equal(biases[1], biases[2])


def test_to_unfreeze_it_on_one_rank_is_an_error(pools):
    with pytest.raises(Exception, match="the ranks have begun to train different parameters"):
        pools[2].run(_apart, {}, OnOneRank)


WRONG = {
    "nothing": (
        ["head.*.weigth"],
        r"the pattern 'head\.\*\.weigth' takes no trained parameter; did you mean 'head\.[02]\.weight'\?",
    ),
    "second": (["*.bias", "tail"], r"the pattern 'tail' takes no trained parameter"),
    "kind": (
        {"kind": "embedding"},
        r"kind 'embedding' takes no trained parameter; the first names are body\.0\.weight",
    ),
    "all": ("*", r"takes all 10 trained parameters, 'body\.0\.weight' among them, so none would train locally"),
}


def _refuses(given):
    fit(local(average_gradients=given[dist.get_rank()]))


@pytest.mark.parametrize("case", WRONG)
def test_patterns_that_do_not_fit_the_model_are_errors_before_training(pools, case):
    given, said = WRONG[case]
    with pytest.raises(Exception, match=said):
        pools[2].run(_refuses, [given, given])


def test_sparse_gradients_are_an_error():
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=True), torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"takes '0\.weight', whose gradients are sparse"):
        AveragedGradients({"kind": "embedding"}).check(model, may_unfreeze=False)


def _by_hand():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].requires_grad_(False)
    steps = LocalSGD(2, compressor="none", average_gradients="1.*")
    steps.may_unfreeze = True
    with pytest.raises(ValueError, match="LBFGS cannot be combined with averaged_steps or average_gradients"):
        steps.start(model, [torch.optim.LBFGS(model[0].parameters())])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    steps.start(model, [optimizer])
    model[1].requires_grad_(dist.get_rank() == 0)
    with pytest.raises(ValueError, match="the ranks have begun to train different parameters"):
        steps.before_step(optimizer)
    steps.close()


def test_lbfgs_and_to_unfreeze_all_that_is_averaged_on_one_rank_are_errors(pools):
    pools[2].run(_by_hand)


def test_ranks_with_other_patterns_are_an_error(pools):
    with pytest.raises(Exception, match="settings of local steps"):
        pools[2].run(_refuses, [["*.bias"], ["head.*.bias"]])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, r"average_gradients=3 must be a pattern of parameter names, a mapping with match or kind or both, or a"),
        (True, "average_gradients=True must be"),
        ([3], "average_gradients: 3 must be a pattern"),
        ([["head.*"]], r"average_gradients: \['head\.\*'\] must be a pattern"),
        ({"match": "head.*", "compressor": "bf16"}, "must be a pattern of parameter names"),
        ({"kind": "dense"}, "kind='dense' must be one of embedding, conv"),
        ({}, "must be a pattern"),
        ({"match": 3}, "match=3 must be a list of name patterns"),
    ],
)
def test_what_is_no_pattern_is_an_error(given, said):
    with pytest.raises(ValueError, match=said):
        LocalSGDStrategy(average_gradients=given)


def test_one_string_is_one_pattern():
    (rule,) = LocalSGDStrategy(average_gradients="head.*").synchroniser.averaged.rules
    assert rule.match == ("head.*",)


def test_it_does_not_go_with_averaged_steps():
    with pytest.raises(ValueError, match=r"averaged_steps=5 cannot be combined with average_gradients=\['a'\]"):
        LocalSGDStrategy(averaged_steps=5, average_gradients=["a"])


class ClipsApart(Net):
    """Clips what is averaged by its own norm, and the rest by its own."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        taken = [each for name, each in self.named_parameters() if name in TAKEN]
        others = [each for name, each in self.named_parameters() if name not in TAKEN]
        for each in (taken, others):
            torch.nn.utils.clip_grad_norm_(each, gradient_clip_val)


def _clips(make, algorithm):
    look = ByName()
    options = {"gradient_clip_val": 1e-2, "gradient_clip_algorithm": algorithm, "callbacks": [look]}
    fit(local(), make=make, **options)
    return [[each[name] for name in TAKEN] for each in look.seen]


@pytest.mark.parametrize(("make", "algorithm"), [(Net, "value"), (ClipsApart, "norm")])
def test_clipping_that_leaves_averages_equal(pools, make, algorithm):
    for own, theirs in zip(*pools[2].run(_clips, make, algorithm), strict=True):
        assert all(map(np.array_equal, own, theirs))


@pytest.mark.parametrize("algorithm", ["norm", None])
def test_clipping_by_each_ranks_norm_is_an_error(pools, algorithm):
    with pytest.raises(Exception, match=r"gradient_clip_val=0\.01 cannot be combined with average_gradients"):
        pools[2].run(_clips, Net, algorithm)


def _other_patterns(folder):
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
    fit(local(), make=ByStep, callbacks=[save], max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = local(average_gradients="*.bias")
        torch.manual_seed(1)
        quiet_trainer(strategy, max_steps=6).fit(ByStep("adamw"), loader(digits()), ckpt_path=f"{folder}/step=4.ckpt")
    return [str(each.message) for each in caught if "begin from the checkpoint's own model" in str(each.message)]


def test_with_other_patterns_a_run_begins_from_the_checkpoints_model(pools, tmp_path):
    (said,), others = pools[2].run(_other_patterns, str(tmp_path))
    assert "gradients of *.bias, norm averaged" in said
    assert not others
