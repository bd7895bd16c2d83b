"""The contract of what keeps the models of ranks together that train on their own for some steps.

    synchroniser.start(model, [optimizer])
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        synchroniser.before_step(optimizer)
        optimizer.step()
        synchroniser.after_step()
    synchroniser.finish()
    synchroniser.close()

All ranks do so, equally often. Nothing here knows Lightning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_compress.collectives import Collective, TorchCollective, consensus
from lightning_compress.collectives.coalesced import mean_of
from lightning_compress.collectives.counting import Meter
from lightning_compress.core import errors
from lightning_compress.core.state_dict import checksum
from lightning_compress.periodic.module_buffers import BufferRules, mean_buffers


class Meeting:
    """Where all ranks meet, at the same step. A training loop may have more to tell the others than is said here.

    Args:
        ranks: that meet, when nothing else is sent.
        device: where to exchange.

    Attributes:
        unsized: ranks may end at different steps, and have to meet before one waits for another.
        joined: of this rank, a checksum of what it has begun to train since the fit began.
    """

    unsized = False

    def __init__(self, ranks: Collective, device: torch.device) -> None:
        self.ranks, self.device, self.joined = ranks, device, 0

    def ask(self) -> Tensor:
        """What this rank has to say, int64 ``[n]`` on the CPU: for ``heed``, when it is the largest over the ranks."""
        return torch.tensor([self.joined, -self.joined])

    def heed(self, said: Tensor) -> None:
        """Act on what all ranks said.

        Raises:
            ValueError: they are not at the same step, or train different parameters; on all of them.
        """
        self.check_joined(said)

    def check_joined(self, said: Tensor) -> None:
        """Compare what the ranks have begun to train.

        Raises:
            ValueError: it differs; on all of them.
        """
        most, least = said[:2].tolist()
        if most != -least:
            raise ValueError(
                "the ranks have begun to train different parameters since the fit began; freeze and unfreeze the same "
                "ones before the same step on all ranks"
            )

    def agree(self, own: Sequence[int] = ()) -> list[int]:
        """Meet the others; a collective call.

        Returns:
            the largest over the ranks of each of this rank's ``own`` numbers.

        Raises:
            ValueError: they are not at the same step; on all of them.
            ExchangeError: a rank died, or did not come in time.
        """
        said = torch.cat([torch.tensor(own, dtype=torch.int64), self.ask()]).to(self.device)
        with errors.explained("meeting the others", self.ranks.rank):
            self.ranks.all_reduce(said, "max")
        said = said.cpu()
        self.heed(said[len(own) :])
        return [int(each) for each in said[: len(own)]]


class Synchroniser(ABC):
    """Keeps the models of ranks together.

    A subclass says what happens in a fit (``_start``, ``_rebase``, ``_after_step``, ``_averaged``, ``finish``).

    Args:
        evaluate: which model ``averaged_model`` gives.
        choices: of it.
        buffers: see ``BufferRules``; None: its default.

    Attributes:
        kind: what it is, for messages.
        averaged_steps: steps before it begins, in which all ranks have one model.
        leaps: ``averaged_model`` may be one that no rank has trained, whose BatchNorm has seen no batch.
        rules: which buffers are averaged.
        thaws: parameters that are frozen when it starts may be trained later; to be set before.
        counts: steps that are one in the meters.
        epoch: for schedules by epochs; to be set when one begins.
        attempts: steps so far, equal on all ranks.
        model, optimizers, ranks, device, meeting: of the fit under way.
        counted: the ranks, with what is sent in a meter.

    Raises:
        ValueError: a value is not allowed.
    """

    kind: ClassVar[str]
    averaged_steps = 0
    leaps = False
    thaws = False
    counts = 1
    epoch = 0
    attempts = 0
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
        """Refuse what cannot work, as ``start`` does; a collective call.

        Raises:
            ValueError: it cannot, or settings differ over the ranks; on every rank.
        """

    def start(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        ranks: Collective | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        """A fit begins; a collective call.

        Args:
            model: the same on all ranks, on its device.
            optimizers: its own.
            ranks: in which nothing else is sent meanwhile; None: those of torch.distributed.
            meeting: of the training loop, or None.

        Raises:
            ValueError: what ``check`` and ``rebase`` refuse.
        """
        self.model, self.optimizers = model, optimizers
        self.ranks, self.device = ranks or TorchCollective(), next(model.parameters()).device
        self.meeting = meeting or Meeting(self.ranks, self.device)
        self.epoch, self._alone = 0, False
        self.check(model, self.ranks, self.device)
        self._buffers = [name for name, _ in model.named_buffers()]  # others, as caches are, stay each rank's own
        with torch.no_grad():
            self._start()
        self.rebase(0)

    @abstractmethod
    def _start(self) -> None:
        """Make ready for the model."""

    @torch.no_grad()
    def rebase(self, step: int) -> None:
        """Begin from the model as it is now, after so many steps of an earlier run; a collective call.

        Raises:
            ValueError: what is trained is not the same on all ranks; on every rank.
        """
        trained = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        if names := differing(trained, self.ranks, self.device):
            raise ValueError(
                f"{len(names)} parameters differ over the ranks before the first step, among them {names[0]}: hooks "
                "such as on_fit_start have to leave the same model on all ranks; load one file, or draw by one seed"
            )
        self.attempts = step
        self._rebase()

    @abstractmethod
    def _rebase(self) -> None:
        """See ``rebase``."""

    def before_step(self, optimizer: Optimizer, scaled: bool = False) -> None:  # noqa: B027  # most do nothing
        """Gradients are there, and the optimizer is about to step.

        Args:
            optimizer: whose gradients.
            scaled: a GradScaler leaves out steps by gradients that are not finite.
        """

    @torch.no_grad()
    def after_step(self) -> None:
        """An optimizer's step was tried; with several optimizers, of the one that steps most. May move the model."""
        self.attempts += 1
        self._after_step()

    @abstractmethod
    def _after_step(self) -> None:
        """See ``after_step``."""

    def averaged_model(self, plain: bool = False) -> dict[str, Tensor]:
        """Parameters and buffers of the model that is evaluated and saved; a collective call.

        Also in an evaluation in inference mode, whose tensors could not be changed after it.

        Args:
            plain: the mean of the ranks' models as they are, whatever is evaluated else.

        Returns:
            by name, in the model's dtypes; what is missing is each rank's own.

        Raises:
            ValueError: the ranks' models are not alike; on every rank.
            ExchangeError: a rank is gone or silent.
        """
        with torch.inference_mode(False), torch.no_grad():
            own = self.named()
            return {name: each.to(own[name].dtype) for name, each in self._averaged(plain).items()}

    @abstractmethod
    def _averaged(self, plain: bool) -> dict[str, Tensor]:
        """See ``averaged_model``."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What this rank has beside model and optimizers; what is ``"common"`` in it is the same on all ranks."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``, when model and optimizers are restored; a collective call.

        Raises:
            ValueError: it is of other settings, or of another model.
        """

    @abstractmethod
    def finish(self) -> None:
        """The last step was made: leave one model on all ranks; a collective call."""

    def abandon(self) -> None:
        """The fit is aborted, and other ranks may be gone: whatever follows communicates no more."""
        self._alone = True

    @abstractmethod
    def close(self) -> None:
        """The fit is over; states and figures stay readable."""

    # what is saved and told

    @property
    @abstractmethod
    def method(self) -> str:
        """What a state has to be of."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """What runs, in a line."""

    @property
    @abstractmethod
    def meters(self) -> Sequence[Meter]:
        """Of what is sent."""

    @property
    def meter(self) -> Meter:
        """The first of them."""
        return self.meters[0]

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Traffic of the last round and in total, and ``summary``; what stock DDP sends is ``bytes_dense``."""

    def measure_every(self, steps: int) -> None:
        """Have time and error measured about once in so many steps."""
        for meter in self.meters:
            meter.sample_every = max(1, steps // self.counts) if steps else 0

    # for subclasses

    def named(self) -> dict[str, Tensor]:
        """Parameters and buffers of this rank by name."""
        return dict([*self.model.named_parameters(), *self.model.named_buffers()])

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy into parameters and buffers of these names.

        Raises:
            ValueError: a buffer is gone, or of another shape; the others were copied.
        """
        named, changed = self.named() if tensors else {}, ""
        for name, tensor in tensors.items():
            found = named.get(name)
            if found is not None and found.shape == tensor.shape:
                found.copy_(tensor)
            else:
                said = "is gone" if found is None else f"became one of shape {tuple(found.shape)}"
                changed = f"the buffer {name!r} of shape {tuple(tensor.shape)} {said}"
        if changed:
            raise ValueError(
                f"{changed}, and models are swapped for evaluation; keep its shape, or keep it in a plain attribute"
            )

    def _compare(self, described: object, problem: ValueError | None, ranks: Collective, device: torch.device) -> None:
        """Stop all ranks where one refuses its settings, or they differ."""
        advice = f"{consensus.SAME_ARGUMENTS}. Rank {ranks.rank} has {described!r}"
        consensus.check({f"settings of {self.kind}": described}, problem, ranks, device, advice)

    def _rest(self, averaged: Collection[str], buffers: bool = True) -> dict[str, Tensor]:
        """What else differs by rank: means of frozen parameters, and buffers by the rules; a collective call."""
        named = self.named()
        frozen = [name for name, each in self.model.named_parameters() if each.is_floating_point()]
        others = [*(name for name in frozen if name not in averaged), *(self._buffers if buffers else ())]
        found = differing({name: named.get(name) for name in others}, self.counted, self.device)
        own = {name: named[name] for name in found}
        kept = {name: own.pop(name) for name in self._buffers if name in own}
        return mean_of(own, self.counted) | mean_buffers(kept, self.counted, self.rules)


def differing(named: Mapping[str, Tensor | None], ranks: Collective, device: torch.device) -> list[str]:
    """Names of what is not the same on all ranks; a collective call, of checksums alone.

    Args:
        named: tensors by name; None for one that is gone.
        ranks: that compare.
        device: where to exchange.

    Raises:
        ValueError: names, dtypes or shapes are not those of the other ranks; on every rank.
        ExchangeError: a rank is gone or silent.
    """
    names, said = list(named), ", ".join([*named][:3]) + ", ..." * (len(named) > 3) or "none"
    if not all(_same([names], ranks, device)):
        raise ValueError(
            f"the ranks' models are not alike, and cannot be compared: rank {ranks.rank} has {said}, "
            "and another one others; add, freeze and unfreeze the same parameters before the same step on all ranks"
        )
    kinds = ["gone" if each is None else f"{each.dtype} of shape {tuple(each.shape)}" for each in named.values()]
    flags = _same([*kinds, *named.values()], ranks, device) if names else []
    for name, kind, alike in zip(names, kinds, flags, strict=False):
        if not alike:
            raise ValueError(
                f"the models of the ranks cannot be averaged: {name!r} is {kind} on rank {ranks.rank}, and not so on "
                "another one; keep the same shape and dtype on all ranks, or keep what is each rank's own in a plain "
                "attribute"
            )
    return [name for name, equal in zip(names, flags[len(names) :], strict=True) if not equal]


def _same(content: Sequence[object], ranks: Collective, device: torch.device) -> list[bool]:
    own = torch.tensor([checksum(each) for each in content], dtype=torch.int64, device=device)
    with errors.explained("comparing models by checksums", ranks.rank):
        return [bool(each) for each in consensus.same(own, ranks).tolist()]
