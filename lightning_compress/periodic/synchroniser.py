"""The contract of a synchroniser: it keeps models together that each rank trains on its own for some steps.

    synchroniser.start(model, [optimizer])
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        synchroniser.before_step(optimizer)
        optimizer.step()
        synchroniser.after_step()
    synchroniser.finish()
    synchroniser.close()

All ranks run this loop for the same number of steps. Nothing here needs Lightning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_compress.collectives import Collective, TorchCollective, consensus
from lightning_compress.collectives.coalesced import mean_of
from lightning_compress.collectives.counting import Meter
from lightning_compress.core import errors
from lightning_compress.core.state_dict import checksum
from lightning_compress.core.vector import squares
from lightning_compress.engine.checks import check_optimizers_agree
from lightning_compress.periodic.module_buffers import BufferRules, mean_buffers
from lightning_compress.settings.run_state import RunState


class Meeting:
    """What all ranks agree on, at the same step. A training loop can derive from it to agree on more.

    Args:
        ranks: that meet; nothing else is sent in it at that time.
        device: of the exchanged tensors.

    Attributes:
        unsized: ranks may end at different steps, so they must meet before one waits for another.
        joined: checksum of the parameters that this rank has begun to train since the fit began.
    """

    unsized = False

    def __init__(self, ranks: Collective, device: torch.device) -> None:
        self.ranks, self.device, self.joined = ranks, device, 0

    def vote(self) -> Tensor:
        """Return this rank's votes, int64 ``[n]`` on the CPU. The largest over the ranks go to ``apply_votes``."""
        return torch.tensor([self.joined, -self.joined], dtype=torch.int64)

    def apply_votes(self, votes: Tensor) -> None:
        """Act on the largest votes over the ranks.

        Raises:
            ValueError: the ranks are not at the same step, or train different parameters; on all ranks.
        """
        self.check_joined(votes)

    def check_joined(self, votes: Tensor) -> None:
        """Raise ValueError, on all ranks, if they have begun to train different parameters."""
        most, least = votes[:2].tolist()
        if most != -least:
            raise ValueError(
                "the ranks have begun to train different parameters since the fit began; freeze and unfreeze the same "
                "ones before the same step on all ranks"
            )

    def agree(self, own: Sequence[int] = ()) -> list[int]:
        """Exchange the votes and act on them. Collective: every rank must call it.

        Args:
            own: numbers of this rank; as many on all ranks.

        Returns:
            the largest of each number over the ranks.

        Raises:
            ValueError: the ranks are not at the same step; on all ranks.
            ExchangeError: a rank died, or did not come in time.
        """
        votes = torch.cat([torch.tensor(own, dtype=torch.int64), self.vote()]).to(self.device)
        with errors.explained("meeting the others", self.ranks.rank):
            self.ranks.all_reduce(votes, "max")
        votes = votes.cpu()
        self.apply_votes(votes[len(own) :])
        return [int(number) for number in votes[: len(own)]]


class Synchroniser(ABC):
    """Keeps the models of the ranks together.

    A subclass implements the steps of a fit: ``_start``, ``_rebase``, ``_after_step``, ``_averaged``, ``finish``.

    Args:
        evaluate: which model ``averaged_model`` returns.
        choices: allowed values of ``evaluate``.
        buffers: see ``BufferRules``; None for its default.

    Attributes:
        kind: what it is, for messages.
        averaging: settings of the one mean that all ranks exchange every ``steps_per_count`` steps, during a fit.
        averaged_steps: steps at the beginning in which gradients are averaged, so that all ranks have one model.
        needs_recount: ``averaged_model`` may be a model that no rank has trained, so that BatchNorm lacks statistics.
        rules: which buffers are averaged.
        may_unfreeze: parameters that are frozen at the start may be trained later. Set it before ``start``.
        steps_per_count: optimizer steps that the meters count as one step.
        epoch: current epoch, for schedules. The training loop sets it.
        attempts: optimizer steps so far, skipped ones included; equal on all ranks that wait for each other.
        model, optimizers, ranks, device, meeting: of the current fit.
        counted: ``ranks``, with a meter that counts the bytes.

    Raises:
        ValueError: a value is not allowed.
    """

    kind: ClassVar[str]
    averaging: RunState | None = None
    averaged_steps = 0
    needs_recount = False
    may_unfreeze = False
    steps_per_count = 1
    epoch = attempts = 0
    model: nn.Module
    optimizers: Sequence[Optimizer]
    ranks: Collective
    counted: Collective
    device: torch.device
    meeting: Meeting

    def __init__(self, evaluate: str, choices: Sequence[str], buffers: Mapping[str, str] | None) -> None:
        if evaluate not in choices:
            raise ValueError(f"evaluate={evaluate!r} must be one of {', '.join(map(repr, choices))}")
        self.evaluate, self.rules = evaluate, BufferRules({} if buffers is None else buffers)
        self._alone = False

    @abstractmethod
    def check(self, model: nn.Module, ranks: Collective, device: torch.device) -> None:
        """Check model and settings, as ``start`` does. Collective: every rank must call it.

        Raises:
            ValueError: they cannot work, or settings differ between the ranks; on every rank.
        """

    def start(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        ranks: Collective | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        """Begin a fit. Collective: every rank must call it.

        Args:
            model: the same on all ranks, on its device.
            optimizers: of the model.
            ranks: to average over; nothing else is sent in it during the fit. None for those of torch.distributed.
            meeting: of the training loop; None for a plain ``Meeting``.

        Raises:
            ValueError: see ``check`` and ``rebase``, or the ranks' optimizers have other settings; on every rank.
        """
        self.model, self.optimizers = model, optimizers
        self.ranks, self.device = ranks or TorchCollective(), next(model.parameters()).device
        self.meeting = meeting or Meeting(self.ranks, self.device)
        self.epoch, self._alone = 0, False
        self.check(model, self.ranks, self.device)
        check_optimizers_agree(optimizers, self.ranks, self.device)
        self._buffers = [name for name, _ in model.named_buffers()]  # later ones, such as caches, stay per-rank
        with torch.no_grad():
            self._start()
        self.rebase(0)

    @abstractmethod
    def _start(self) -> None:
        """Allocate what the fit of ``self.model`` needs."""

    @torch.no_grad()
    def rebase(self, step: int) -> None:
        """Start from the current model, ``step`` optimizer steps into the run. Collective: every rank must call it.

        Raises:
            ValueError: trained parameters differ between the ranks; on every rank.
        """
        trained = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        if names := differing(trained, self.ranks, self.device):
            raise ValueError(
                f"{len(names)} parameters differ over the ranks before the first step, among them {names[0]}. Hooks "
                "such as on_fit_start must leave the same model on all ranks: load one file, or use one seed"
            )
        self.attempts = step
        self._rebase()

    @abstractmethod
    def _rebase(self) -> None:
        """See ``rebase``."""

    def before_step(self, optimizer: Optimizer, scale: Tensor | None = None) -> None:  # noqa: B027  # most do nothing
        """Prepare an optimizer's step, once its gradients are there. Call it before every step.

        Args:
            optimizer: that is about to step.
            scale: the factor of a GradScaler, which skips steps whose gradients are not finite; None: there is none.
        """

    @torch.no_grad()
    def after_step(self) -> None:
        """Count an optimizer step and synchronise if it is due; may change the model.

        Call it after every step, skipped ones included. With several optimizers, call it for the one that steps most.
        """
        self.attempts += 1
        self._after_step()

    @abstractmethod
    def _after_step(self) -> None:
        """See ``after_step``."""

    @errors.called_by_all("averaged_model(), which saving and validating need")
    def averaged_model(self, plain: bool = False) -> dict[str, Tensor]:
        """Return the model that is evaluated and saved. Collective: every rank must call it.

        Safe under inference mode: no tensor that is kept becomes an inference tensor.

        Args:
            plain: return the mean of the ranks' current models, whatever ``evaluate`` says.

        Returns:
            parameters and buffers by name, in the model's dtypes. What is missing keeps each rank's own value.

        Raises:
            ValueError: the ranks' models have different names, shapes or dtypes; on every rank.
            ExchangeError: a rank died, or did not come in time.
        """
        with torch.inference_mode(False), torch.no_grad():
            own = self.named()
            return {name: each.to(own[name].dtype) for name, each in self._averaged(plain).items()}

    @abstractmethod
    def _averaged(self, plain: bool) -> dict[str, Tensor]:
        """See ``averaged_model``."""

    def furthest(self) -> int:
        """Return the largest number of steps of any rank where all ranks have met last."""
        return self.attempts

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state besides model and optimizers. What is under ``"common"`` is equal on all ranks."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``, after model and optimizers are restored. Collective: every rank must call it.

        Raises:
            ValueError: the state has other settings or another model.
        """

    @abstractmethod
    def finish(self) -> None:
        """Leave one model on all ranks after the last step. Collective: every rank must call it."""

    def abandon(self) -> None:
        """Abort the fit: other ranks may be gone, so nothing is communicated from now on."""
        self._alone = True

    @abstractmethod
    def close(self) -> None:
        """End the fit. States and figures stay readable."""

    @property
    @abstractmethod
    def method(self) -> str:
        """Name of the method and its settings; a state can be loaded only if this is equal."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """One line about what runs."""

    @property
    @abstractmethod
    def meters(self) -> Sequence[Meter]:
        """Meters of the bytes that are sent."""

    @property
    def meter(self) -> Meter:
        """The first of the meters."""
        return self.meters[0]

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return the traffic of the last round and in total, and ``summary``. ``bytes_dense``: what stock DDP sends."""

    def measure_every(self, steps: int) -> None:
        """Measure time and error about once every ``steps`` optimizer steps; 0 switches it off."""
        for meter in self.meters:
            meter.sample_every = max(1, steps // self.steps_per_count) if steps else 0

    # for subclasses

    def named(self) -> dict[str, Tensor]:
        """Return this rank's parameters and buffers by name."""
        return dict([*self.model.named_parameters(), *self.model.named_buffers()])

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into the parameters and buffers of the same names.

        Raises:
            ValueError: a buffer is gone, or has another shape; the others were copied.
        """
        named, changed = self.named() if tensors else {}, ""
        for name, tensor in tensors.items():
            target = named.get(name)
            if target is not None and target.shape == tensor.shape:
                target.copy_(tensor)
            else:
                said = "is gone" if target is None else f"became one of shape {tuple(target.shape)}"
                changed = f"the buffer {name!r} of shape {tuple(tensor.shape)} {said}"
        if changed:
            raise ValueError(
                f"{changed}, and models are swapped for evaluation; keep its shape, or use a plain attribute"
            )

    def _compare(self, settings: object, problem: ValueError | None, ranks: Collective, device: torch.device) -> None:
        """Raise on all ranks if one of them has a problem, or if their settings differ."""
        consensus.check({f"settings of {self.kind}": settings}, problem, ranks, device, consensus.SAME_ARGUMENTS)

    def _apart_from(self, means: Mapping[str, Tensor]) -> float:
        """Return how far the ranks' models are from their mean, as a share of its norm. Collective."""
        named = self.named()
        distance, norm = torch.zeros(2, 1, dtype=torch.float64, device=self.device)
        for name, mean in means.items():
            distance += squares(named[name].detach(), mean)
            norm += squares(mean)
        with errors.explained(f"comparing all models after {self.attempts} steps", self.ranks.rank):
            self.counted.all_reduce(distance)
        return (float(distance) / self.ranks.size / float(norm)) ** 0.5 if norm else 0.0

    def _rest(self, averaged: Collection[str], buffers: bool = True) -> dict[str, Tensor]:
        """Return what else differs between ranks: means of frozen parameters, and buffers by the rules. Collective."""
        named = self.named()
        frozen = [name for name, each in self.model.named_parameters() if each.is_floating_point()]
        others = [*(name for name in frozen if name not in averaged), *(self._buffers if buffers else ())]
        names = differing({name: named.get(name) for name in others}, self.counted, self.device)
        parameters = {name: named[name] for name in names}
        changed = {name: parameters.pop(name) for name in self._buffers if name in parameters}
        return mean_of(parameters, self.counted) | mean_buffers(changed, self.counted, self.rules)


def differing(named: Mapping[str, Tensor | None], ranks: Collective, device: torch.device) -> list[str]:
    """Return the names of tensors whose bits differ between ranks. Collective; only checksums are sent.

    Args:
        named: tensors by name; None for one that is gone.
        ranks: that compare.
        device: of the exchanged checksums.

    Raises:
        ValueError: names, dtypes or shapes differ between ranks; on every rank.
        ExchangeError: a rank died, or did not come in time.
    """
    names, first = list(named), ", ".join([*named][:3]) + ", ..." * (len(named) > 3) or "none"
    if not all(_same([names], ranks, device)):
        raise ValueError(
            errors.called_alone()
            or f"the ranks' models are not alike, and cannot be compared: rank {ranks.rank} has {first}, "
            "and another rank has others. Add, freeze and unfreeze the same parameters at the same step on all ranks"
        )
    kinds = ["gone" if each is None else f"{each.dtype} of shape {tuple(each.shape)}" for each in named.values()]
    flags = _same([*kinds, *named.values()], ranks, device) if names else []
    for name, kind, alike in zip(names, kinds, flags, strict=False):
        if not alike:
            raise ValueError(
                f"the models of the ranks cannot be averaged: {name!r} is {kind} on rank {ranks.rank}, and not so on "
                "another one. Keep the same shape and dtype on all ranks, or use a plain attribute for per-rank values"
            )
    return [name for name, equal in zip(names, flags[len(names) :], strict=True) if not equal]


def _same(content: Sequence[object], ranks: Collective, device: torch.device) -> list[bool]:
    own = torch.tensor([checksum(each) for each in content], dtype=torch.int64, device=device)
    with errors.explained("comparing models by checksums", ranks.rank):
        return [bool(flag) for flag in consensus.same(own, ranks).tolist()]


def reset_nonfinite(optimizers: Iterable[Optimizer]) -> None:
    """Reset optimizer states that are not finite: they would spoil the parameters again in every step."""
    for optimizer in optimizers:
        for parameter, state in list(optimizer.state.items()):
            tensors = [each for each in state.values() if isinstance(each, Tensor) and each.is_floating_point()]
            if not all(bool(each.isfinite().all()) for each in tensors):
                del optimizer.state[parameter]
