"""What cannot work is refused before training, on every rank."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from lightning_compress import kernels
from lightning_compress.collectives import Collective, consensus
from lightning_compress.settings.options import check_gone
from lightning_compress.settings.rules import kinds_of
from lightning_compress.settings.run_state import RunState

_STOCK = "or use CompressedDDPStrategy('none') with its default settings, which is DistributedDataParallel itself"
_OWN_HOOK = "it brings a communication hook of its own, and DistributedDataParallel takes one only"
_BYPASS = "these parameters would bypass the compression; use rules=[{'match': [...], 'compressor': 'none'}] instead"
_REFUSED_DDP_ARGUMENTS = {
    "ddp_comm_hook": "compression is itself the communication hook; choose it with compressor=",
    "ddp_comm_state": "compression keeps its own state; remove the argument",
    "ddp_comm_wrapper": "there is no hook to wrap; for 16 bit on the wire use compressor='bf16' or 'fp16'",
    "mixed_precision": f"{_OWN_HOOK}; use Trainer(precision=...) instead",
    "delay_all_reduce_named_params": _BYPASS,
    "param_to_hook_all_reduce": _BYPASS,
}

_GIVEN_BY_LIGHTNING = {"self", "module", "device_ids"}


def check_ddp_arguments(arguments: Mapping[str, object]) -> None:
    """Refuse arguments of DistributedDataParallel that take its communication hook away.

    Raises:
        ValueError: one of them is given.
    """
    for name, reason in _REFUSED_DDP_ARGUMENTS.items():
        if arguments.get(name) is not None:
            raise ValueError(f"{name}={arguments[name]!r} cannot be combined with compression: {reason}")


def check_known(arguments: Collection[str], strategy: type, ours: Sequence[str]) -> None:
    """Refuse what neither the strategy that ours is made of nor DistributedDataParallel takes.

    Args:
        arguments: names that are none of ours.
        strategy: the class.
        ours: names that are ours, or may be meant.

    Raises:
        ValueError: one of them is unknown.
    """
    check_gone(arguments)
    makers = [
        each.__dict__["__init__"] for each in [*strategy.__mro__, DistributedDataParallel] if "__init__" in vars(each)
    ]
    theirs = {name for make in makers for name in _named(make)} - _GIVEN_BY_LIGHTNING - set(ours)
    for name in arguments:
        if name not in theirs:
            close = difflib.get_close_matches(name, [*ours, *sorted(theirs)], n=1)
            meant = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join([*ours, *sorted(theirs)])}"
            raise ValueError(f"{strategy.__name__} has no argument {name!r}{meant}")


def _named(make: Callable[..., None]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        return [name for name, each in inspect.signature(make).parameters.items() if each.kind in kinds]
    except ValueError:  # object's own
        return []


def check_accumulation(static_graph: bool, accumulate: int) -> None:
    """Refuse a static graph with accumulation, which DistributedDataParallel itself cannot do.

    Raises:
        ValueError: both are on.
    """
    if static_graph and accumulate > 1:
        raise ValueError(
            f"static_graph=True with accumulate_grad_batches={accumulate} fails inside DistributedDataParallel "
            "(pytorch#143580); set static_graph=False or accumulate_grad_batches=1"
        )


def check_clipping(settings: RunState, clip: float | None) -> None:
    """Refuse to clip what the optimizer is given, by norm or by value, where that is no mean of gradients.

    Raises:
        ValueError: it would be clipped.
    """
    if not clip or clip < 0 or (by := settings.steps_by) is None:
        return
    raise ValueError(
        f"gradient_clip_val={clip} cannot be combined with {by}, which gives the optimizer steps and no mean of "
        "gradients: clipping would shorten every step. Clip the gradients of each rank before they are compressed, by "
        f"local_clip_norm={clip} of the strategy, and set gradient_clip_val=None"
    )


def check_ddp(ddp: DistributedDataParallel) -> None:
    """Refuse what is no DistributedDataParallel, or was built with what ``check_ddp_arguments`` refuses.

    Raises:
        ValueError: it is.
    """
    if not isinstance(getattr(ddp, "_orig_mod", ddp), DistributedDataParallel):  # which torch.compile wraps
        raise ValueError(
            f"{type(ddp).__name__} is no DistributedDataParallel: give "
            "torch.nn.parallel.DistributedDataParallel(module), on every rank"
        )
    check_ddp_arguments(
        {
            "mixed_precision": ddp.mixed_precision,
            "delay_all_reduce_named_params": getattr(ddp, "_delay_all_reduce_params", None) or None,
        }
    )


def check_module(module: nn.Module, settings: RunState) -> None:
    """Refuse modules whose gradients cannot be compressed as they reach the communication hook, and idle patterns.

    Raises:
        ValueError: a module is lazy; an embedding has sparse gradients, an optimizer runs inside backward, a parameter
            is complex, or they are on several devices, which ``none`` leaves to DistributedDataParallel; or a rule
            takes nothing.
    """
    check_initialized(module)
    parameters = trained_parameters(module)
    if not settings.plain:
        _check_gradients(module, parameters)
    optimize_ddp = getattr(torch._dynamo.config, "optimize_ddp", True)
    if isinstance(optimize_ddp, str) and optimize_ddp.startswith("python_reducer"):
        raise ValueError(
            f"torch._dynamo.config.optimize_ddp={optimize_ddp!r} calls hooks with other arguments; set it to True"
        )
    settings.rules.bound(kinds_of(module)).check([name for name, _ in parameters])


def check_initialized(module: nn.Module) -> None:
    """Refuse lazy modules that have seen no batch.

    Raises:
        ValueError: there is one; it is named.
    """
    for name, child in module.named_modules():
        own = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
        if any(is_lazy(each) for each in own):
            raise ValueError(
                f"{name or 'the module'} is a {type(child).__name__} whose parameters have no shape yet: run one batch "
                "through the model before the fit"
            )


def _check_gradients(module: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse modules whose gradients do not reach the communication hook as dense real numbers of one device."""
    if len(devices := {str(parameter.device) for _, parameter in parameters}) > 1:
        raise ValueError(
            f"the model is on {', '.join(sorted(devices))}: what one process compresses has to be on one device; put "
            f"it there, {_STOCK}"
        )
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ValueError(f"{name or 'the module'} has sparse gradients; build it with sparse=False")
    for name, parameter in parameters:
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(
                f"{name} is stepped inside backward (_apply_optimizer_in_backward): {_OWN_HOOK}; "
                f"step the optimizer after backward, {_STOCK}"
            )
        if parameter.is_complex():
            raise ValueError(
                f"{name} is {parameter.dtype}, and must be real. Keep it as a real parameter of shape (..., 2) and use "
                f"torch.view_as_complex in forward, {_STOCK}"
            )


def check_running(ddp: DistributedDataParallel) -> None:
    """Refuse ``Join``, under which ranks without data would go on exchanging messages of nothing.

    Raises:
        ValueError: the model runs inside ``torch.distributed.algorithms.Join``.
    """
    if ddp._join_config.enable:
        raise ValueError(
            "Join (uneven inputs) cannot be combined with compression; give all ranks the same number of batches "
            "(a DistributedSampler does), or use compressor='none'"
        )


def check_ranks_agree(
    settings: RunState, module: nn.Module, problem: ValueError | None, collective: Collective, device: torch.device
) -> None:
    """Compare settings and parameters over the ranks, and let all of them stop where one has to.

    Args:
        settings: this rank's.
        module: this rank's.
        problem: why this rank cannot train, or None.
        collective: the ranks.
        device: where to exchange.

    Raises:
        ValueError: on every rank, naming those that differ from rank 0, or this rank's problem, or whose it is.
    """
    named = trained_parameters(module)
    try:
        used = kernels.compiler(device)
    except ValueError as error:  # the rank whose problem it is raises it
        used = str(error)
    said = {
        "compression settings": settings,
        "trained parameters (names, shapes, dtypes)": [
            (name, None if is_lazy(each) else tuple(each.shape), str(each.dtype)) for name, each in named
        ],
        # on an accelerator they add up in another order than tensor operations do
        f"kernels (numba or Triton is installed, or not; {kernels.VARIABLE})": used,
    }
    consensus.check(said, problem, collective, device, f"{consensus.ALIKE}. Rank {collective.rank} has {settings}")


def trained_parameters(module: nn.Module, ignored: Collection[str] = ()) -> list[tuple[str, nn.Parameter]]:
    """Parameters that get gradients, by the names a user knows them under."""
    return [
        (name.replace("_orig_mod.", ""), parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]


BESIDE = "_averaged_beside"
"""Attribute of a module: names of parameters that leave DistributedDataParallel, and are averaged all the same."""


def averaged_beside(module: nn.Module) -> set[str]:
    """Names of parameters that something else averages, as ``BESIDE`` says."""
    return set(getattr(module, BESIDE, ()))


def frozen_parameters(module: nn.Module, ignored: Collection[str], collective: Collective) -> dict[int, str]:
    """Names of parameters that are not averaged, though that was not asked for, by their ``id``; none on one rank."""
    named = module.named_parameters() if collective.size > 1 else ()
    return {
        id(parameter): name.replace("_orig_mod.", "")
        for name, parameter in named
        if not parameter.requires_grad and name not in ignored
    }
