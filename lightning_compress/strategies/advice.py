"""Warnings about choices that cost accuracy in our runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_compress.codecs import Method, Rotated
from lightning_compress.core.kinds import kinds_of
from lightning_compress.engine.checks import trained_parameters
from lightning_compress.periodic.synchroniser import Synchroniser
from lightning_compress.planning.summary import label
from lightning_compress.settings.compensation import LOCAL_LOSS, LOSS, MEASURED, Optimizer, kind_of, loss_of
from lightning_compress.settings.run_state import RunState

FEW_STEPS = 1000
"""Optimizer steps below which error feedback has too little time."""


def warn(text: str | None) -> None:
    """Warn on rank 0, unless the text is empty."""
    if text:
        rank_zero_warn(text)


def untested(device: torch.device) -> str:
    """Return a warning about devices on which this package has hardly or never run, or nothing."""
    if device.type == "cpu":
        return ""
    ran = "with several GPUs and a network between them" if device.type == "cuda" else f"on {device.type}"
    return (
        f"lightning_compress was measured on CPUs over Gloo and has never run {ran}; 'python -m benchmarks.gpu' in its "
        "repository tests it on yours"
    )


LEAST: dict[Optimizer, float] = {"muon": 1.0, "adam": 1.0, "sgd": math.inf}
"""Percent of loss, above which a measured method warns. With SGD, a long run loses little; see ``few_steps``."""
_INSTEAD: dict[Optimizer, str] = {
    "muon": (
        f"compressor={{'name': 'qsgd', 'bits': 5}} (+{LOSS['qsgd bits=5', 'muon']['none']:g} %), or for fewer bits "
        "LocalSGDStrategy(sync_every=4, compressor='rotated', average_gradients=...) "
        f"(+{LOCAL_LOSS[4, 'muon']:g} %): see 'Muon'"
    ),
    "adam": (
        f"compressor='qsgd' (+{LOSS['qsgd', 'adam']['none']:g} %), or for fewer bits "
        f"LocalSGDStrategy(sync_every=8, compressor='rotated') (+{LOCAL_LOSS[8, 'adam']:g} %): "
        "see 'Below four bits with AdamW'"
    ),
}


def warn_beside(settings: RunState, optimizers: Collection[object], module: nn.Module) -> None:
    """Warn on rank 0 if Muon or an Adam-like optimizer steps parameters whose method costs accuracy beside it."""
    warn(_costs_beside(settings, optimizers))
    warn(_embeddings_beside_adam(settings, optimizers, module))


def _costs_beside(settings: RunState, optimizers: Iterable[object]) -> str:
    """Return a warning about a method that costs accuracy with these optimizers, or nothing."""
    named = {kind_of([each]): type(each).__name__ for each in reversed([*optimizers])}
    kind: Optimizer | None = "muon" if "muon" in named else "adam" if "adam" in named else None
    if kind is None:
        return ""
    for method in settings.methods:
        lost = loss_of(method, kind, settings.compensation(method))
        if lost is None and not _safe(method, kind):
            text = f"{label(method)} with {named[kind]} may raise the loss; we have not measured it"
        elif lost is not None and lost > LEAST[kind]:
            text = f"{label(method)} with {MEASURED[kind]} raised the loss by {lost:g} % in our runs"
        else:
            continue
        took = "compressor='auto' took " * (settings.chosen is not None and settings.chosen.codec == method)
        return f"{took}{text}. Use {_INSTEAD[kind]} in 'lightning-compress docs choose'"
    return ""


def _safe(method: Method, kind: Optimizer) -> bool:
    """Return whether a method that was not measured should do no harm; Muon needs more bits than Adam."""
    enough = kind != "muon" or method.elementwise or getattr(method, "bits", 0) > 4
    return method.safe_with_adam and enough


def _embeddings_beside_adam(settings: RunState, optimizers: Iterable[object], module: nn.Module) -> str:
    """Return a warning if an embedding is rotated and an Adam-like optimizer steps it, or nothing.

    A rotation gives all elements of a block an error of the same size, rare rows the same as frequent ones. Adam
    divides it by the root of the small variance of the rare rows, and takes a full step.
    """
    if not any(kind_of([each]) == "adam" or "Adam" in type(each).__name__ for each in optimizers):
        return ""
    embeddings = settings.rules.of_kind("embedding")
    for name, parameter in trained_parameters(module):
        method = settings.rules.method_of(name, tuple(parameter.shape)) if name in embeddings else None
        if isinstance(method, Rotated) and method.bits < 8:
            return (
                f"{label(method)} mixes rows of the embedding {name!r}, and Adam takes full steps from the error of "
                "its rare rows: a Transformer with 10,000 pieces of words had 5 % more loss. Use compressor='qsgd', or "
                "send embeddings in bf16: rules=[{'kind': 'embedding', 'compressor': 'bf16'}]"
            )
    return ""


def frozen_early(callbacks: Iterable[object], module: nn.Module) -> str:
    """Return a warning if a fine-tuning callback froze parameters that cannot be averaged once it unfreezes them.

    Args:
        callbacks: of the Trainer.
        module: that DistributedDataParallel has just wrapped.
    """
    frozen = [name for name, each in module.named_parameters() if not each.requires_grad]
    by = [type(each).__name__ for each in callbacks if "BaseFinetuning" in kinds_of(each)]
    if not frozen or not by:
        return ""
    return (
        f"{by[0]} has frozen {len(frozen)} parameters, such as {frozen[0]}, before DistributedDataParallel was built, "
        "which never averages them: unfreezing them will raise an error. Freeze them in on_fit_start and set "
        "find_unused_parameters=True, as 'lightning-compress docs unsupported' shows"
    )


def steps_of(trainer: Any) -> float:
    """Return the steps of a fit; -1: nobody knows, or a LearningRateFinder trains before it."""
    return -1 if finds_rate(trainer.callbacks) else float(trainer.estimated_stepping_batches)


def finds_rate(callbacks: Iterable[Any]) -> bool:
    """Return whether a LearningRateFinder trains now."""
    return any("_LRCallback" in kinds_of(each) for each in callbacks)


def few_steps(settings: RunState, steps: float) -> str:
    """Return a warning if a run ends before coarse methods have sent what they leave for later steps, or nothing.

    Args:
        settings: of the run.
        steps: see ``steps_of``.
    """
    coarse = [method for method in settings.methods if method.contractive and not method.safe_with_adam]
    if not coarse or steps < 0 or steps >= FEW_STEPS:
        return ""
    method, kind = coarse[0], settings.optimizer or "sgd"
    lost = loss_of(method, kind, settings.compensation(method))
    measured = "We have not measured how much"
    if lost is not None:
        measured = f"In our runs with {MEASURED[kind]} it had {lost:g} % more loss ('lightning-compress docs accuracy')"
    return (
        f"{label(method)} may cost accuracy in a run of {steps:g} steps: later steps send what a step leaves out. "
        f"{measured}. Use compressor='qsgd', or train for {FEW_STEPS:,} steps or more"
    )


def short_round(synchroniser: Synchroniser, steps: float) -> str:
    """Return a warning if a fit of so many steps ends before its first round does, or nothing; see ``steps_of``."""
    every = synchroniser.steps_per_count
    if steps < 0 or steps - synchroniser.averaged_steps >= every:
        return ""
    return (
        f"this fit has {steps:g} steps, fewer than a round of sync_every={every}: the ranks average once, when it ends."
        " Lower sync_every, or train for longer"
    )


def name_ours(exception: BaseException, strategy: str) -> None:
    """Replace the names of Lightning's strategy by ours where it advises to find unused parameters.

    Args:
        exception: of a fit; its text is changed.
        strategy: the class's name.
    """
    names = {"'ddp_find": "'compressed_ddp_find", "=DDPStrategy(find": f"={strategy}(..., find"}
    for theirs, ours in names.items():
        exception.args = tuple(each.replace(theirs, ours) if isinstance(each, str) else each for each in exception.args)
