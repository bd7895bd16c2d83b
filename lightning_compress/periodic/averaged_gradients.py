"""Gradients that all ranks average in float32 in each step, while other parameters may train locally."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_compress.collectives import Collective
from lightning_compress.collectives.coalesced import sums_of
from lightning_compress.collectives.counting import all_reduce_bytes
from lightning_compress.core import errors
from lightning_compress.engine.optimizers import skip_step
from lightning_compress.settings.parsing import read_rules
from lightning_compress.settings.rules import Rule, kinds_of

NAME = "average_gradients"
_FORMS = "a pattern of parameter names, a mapping with match or kind or both, or a list of these"
_EXAMPLE = "['head.*', {'kind': 'norm'}]"


class AveragedGradients:
    """The parameters of a model whose gradients are averaged in each step, chosen by patterns and kinds.

    Args:
        given: shell-style patterns of names, and mappings ``{"match": pattern(s), "kind": kind}`` as in ``rules``; one
            of them, or a list. A parameter must fit one.

    Raises:
        ValueError: it is something else.
    """

    def __init__(self, given: object) -> None:
        entries = [given] if isinstance(given, str | Mapping) else [] if given is None else given
        if not isinstance(entries, Sequence):
            raise ValueError(f"{NAME}={given!r} must be {_FORMS}, such as {_EXAMPLE}")
        self.rules = tuple(_rule(each) for each in entries)
        self._kinds: Mapping[str, str] = {}
        self._taken: dict[str, bool] = {}
        self._known: Collection[str] = ()

    def __str__(self) -> str:
        return ", ".join(f"{each.kind or ''} {' or '.join(each.match)}".strip() for each in self.rules)

    def start(self, model: nn.Module) -> None:
        """Begin a fit of this model."""
        self._kinds, self._taken = kinds_of(model) if self.rules else {}, {}
        self._known = self.trained(model).keys()

    def takes(self, name: str) -> bool:
        """Return whether the gradient of the parameter of this name is averaged."""
        taken = self._taken.get(name)
        if taken is None:  # kept, because each step asks for all names
            known = name.replace("_orig_mod.", "")
            taken = any(rule.takes(known, self._kinds.get(known, "other")) for rule in self.rules)
            self._taken[name] = taken
        return taken

    def trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return those parameters that are trained now, by name."""
        named = model.named_parameters() if self.rules else ()
        return {name: each for name, each in named if each.requires_grad and self.takes(name)}

    def join(self, model: nn.Module) -> list[str]:
        """Return the names of parameters that are trained since the last call."""
        trained = self.trained(model).keys()
        late, self._known = [name for name in trained if name not in self._known], trained
        return late

    def check(self, model: nn.Module, may_unfreeze: bool) -> None:
        """Raise ValueError if a pattern takes nothing, all parameters are taken, or one has sparse gradients.

        Args:
            model: with all its parameters.
            may_unfreeze: frozen parameters may be trained later.
        """
        self.start(model)
        names = [name.replace("_orig_mod.", "") for name, _ in model.named_parameters()]
        trained = [name for name, each in model.named_parameters() if each.requires_grad]
        found = names if may_unfreeze else [name.replace("_orig_mod.", "") for name in trained]
        for rule in self.rules:
            alone = [Rule(rule.method, (pattern,), rule.kind) for pattern in rule.match] or [rule]
            for each in alone:
                if not any(each.takes(name, self._kinds[name]) for name in found):
                    raise ValueError(f"{NAME}: {_described(each)} takes no trained parameter; {_hint(each, found)}")
        if self.rules and all(map(self.takes, trained)):
            raise ValueError(
                f"{NAME}={str(self)!r} takes all {len(trained)} trained parameters, {found[0]!r} among them, so none "
                "would train locally. Leave the large matrices out, or use CompressedDDPStrategy, which averages all"
            )
        for path, module in model.named_modules():
            sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
            if sparse and self.takes(name := f"{path}.weight".lstrip(".")):
                raise ValueError(
                    f"{NAME}={str(self)!r} takes {name!r}, whose gradients are sparse, and only dense ones are "
                    f"averaged. Set sparse=False in this {type(module).__name__}, or leave it out"
                )

    def of(self, optimizer: Optimizer, model: nn.Module, scaled: bool) -> list[nn.Parameter]:
        """Return an optimizer's parameters whose gradients are to be averaged now.

        Args:
            optimizer: that is about to step.
            model: its model.
            scaled: a GradScaler on each rank skips steps whose gradients are not finite. If another gradient of this
                optimizer is not finite on this rank, one of the returned parameters gets a NaN, so that all ranks skip.
        """
        taken = {id(each) for each in self.trained(model).values()}
        parameters = [each for each in trained_by(optimizer) if id(each) in taken]
        if parameters and scaled:
            _spoil_if_others_overflow(optimizer, parameters)
        return parameters


def _rule(given: object) -> Rule:
    entry = {"match": given} if isinstance(given, str) else given
    if not isinstance(entry, Mapping) or not entry or not entry.keys() <= {"match", "kind"}:
        raise ValueError(f"{NAME}: {given!r} must be {_FORMS}, such as {_EXAMPLE}")
    try:
        return read_rules([{**entry, "compressor": "none"}])[0]
    except ValueError as error:
        raise ValueError(f"{NAME}: {error}") from None


def _described(rule: Rule) -> str:
    return " and ".join(
        [*(f"the pattern {each!r}" for each in rule.match), *(f"kind {rule.kind!r}",) * bool(rule.kind)]
    )


def _hint(rule: Rule, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(rule.match[0], names, n=1, cutoff=0.3) if rule.match else []
    return f"did you mean {close[0]!r}?" if close else f"the first names are {', '.join(names[:5])}"


def trained_by(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return an optimizer's parameters that require a gradient."""
    return [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]


def average_gradients(parameters: Sequence[nn.Parameter], ranks: Collective, scale: Tensor | None = None) -> int:
    """Replace gradients by their mean over the ranks, computed in float32 for half precision.

    A parameter without a gradient on this rank counts as zeros. One without a gradient on all ranks keeps none, so that
    no optimizer decays or moves it. Collective: every rank must call it.

    Args:
        parameters: the same ones on all ranks, in one order.
        ranks: to average over.
        scale: the factor of this rank's gradients, a scalar; the mean gets it, too. None: 1.

    Returns:
        bytes that stock DDP would have sent.

    Raises:
        ExchangeError: a rank died, or did not come in time.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    dense = 0
    for dtype, alike in by_dtype.items():
        used = [each.grad is not None for each in alike]
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in alike]
        flags = torch.tensor(used, dtype=torch.bool, device=gradients[0].device)
        sent = gradients if scale is None else [each / scale for each in gradients]
        with errors.explained(f"averaging gradients of {len(used)} parameters", ranks.rank):
            *sums, users = sums_of([*sent, flags], ranks, torch.promote_types(dtype, torch.float32))
        anywhere = used if all(used) else users.tolist()
        for parameter, gradient, total, wanted in zip(alike, gradients, sums, anywhere, strict=True):
            if wanted:
                mean = total.div_(ranks.size)
                parameter.grad = gradient.copy_(mean if scale is None else mean.mul_(scale))
        dense += all_reduce_bytes(sum(each.nbytes for each in gradients), ranks.size)
    return dense


def _spoil_if_others_overflow(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Make one of the gradients NaN if another gradient of the optimizer on this rank is not finite."""
    own = {id(each) for each in parameters}
    others = [each.grad for each in trained_by(optimizer) if each.grad is not None and id(each) not in own]
    finite = torch.stack([each.isfinite().all() for each in others]).all() if others else None
    used = [each for each in parameters if each.grad is not None]
    if finite is None or (not used and bool(finite)):
        return
    first = used[0] if used else parameters[0]
    spoilt = torch.zeros_like(first) if first.grad is None else first.grad
    first.grad = spoilt.add_(torch.where(finite, 0.0, torch.nan))


def skip_nonfinite(optimizer: Optimizer, parameters: Sequence[nn.Parameter], policy: str, step: int) -> bool:
    """Make the optimizer skip its next step if averaged gradients are not finite; return whether it will.

    Args:
        optimizer: that is about to step.
        parameters: of the optimizer, whose gradients are the same on all ranks.
        policy: "skip" the step, "raise" an error, or "pass" the gradients on.
        step: for the error.

    Raises:
        FloatingPointError: the gradients are not finite, and the policy is "raise".
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    if policy == "pass" or not gradients:
        return False
    if bool(torch.stack([gradient.isfinite().all() for gradient in gradients]).all()):
        return False
    if policy == "raise":
        raise FloatingPointError(
            f"step {step}: the mean of the ranks' gradients is not finite; on_nonfinite='skip' skips such steps"
        )
    skip_step(optimizer)
    return True
