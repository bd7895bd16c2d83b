"""Checks before training: raise on every rank if something cannot work."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_compress import kernels
from lightning_compress.collectives import Collective, consensus
from lightning_compress.core import errors, state_check
from lightning_compress.engine.optimizers import Trained, hyperparameters
from lightning_compress.settings.options import check_gone
from lightning_compress.settings.parsing import COMPRESSORS
from lightning_compress.settings.rules import kinds_of
from lightning_compress.settings.run_state import RunState

_STOCK = "or use CompressedDDPStrategy('none') with its default settings, which is DistributedDataParallel itself"
_OWN_HOOK = "it registers a communication hook, and DistributedDataParallel supports only one"
_BYPASS = "these parameters would bypass the compression; use rules=[{'match': [...], 'compressor': 'none'}] instead"
_REFUSED_DDP_ARGUMENTS = {
    "ddp_comm_hook": "compression is itself the communication hook; choose it with compressor=",
    "ddp_comm_state": "compression keeps its own state; remove the argument",
    "ddp_comm_wrapper": "there is no hook to wrap; to send 16 bits use compressor='bf16' or 'fp16'",
    "mixed_precision": f"{_OWN_HOOK}; use Trainer(precision=...) instead",
    "delay_all_reduce_named_params": _BYPASS,
    "param_to_hook_all_reduce": _BYPASS,
}

_GIVEN_BY_LIGHTNING = {"self", "module", "device_ids"}


def check_ddp_arguments(arguments: Mapping[str, object]) -> None:
    """Raise ValueError for arguments of DistributedDataParallel that occupy its communication hook.

    Raises:
        ValueError: one of them is given.
    """
    for name, reason in _REFUSED_DDP_ARGUMENTS.items():
        if arguments.get(name) is not None:
            raise ValueError(f"{name}={arguments[name]!r} cannot be combined with compression: {reason}")


def check_known(
    arguments: Mapping[str, object],
    strategy: type,
    ours: Sequence[str],
    compressor: object = None,
    wrappers: Sequence[type] = (DistributedDataParallel,),
) -> None:
    """Raise ValueError for arguments that neither the strategy's base classes nor the wrappers of the model take.

    Args:
        arguments: arguments that the strategy itself does not have.
        strategy: the class.
        ours: names of the strategy's own arguments, which may be meant.
        compressor: the user's compressor, whose settings may be meant.
        wrappers: classes of modules that the base classes pass arguments on to.

    Raises:
        ValueError: one of them is unknown.
    """
    check_gone(arguments)
    constructors = [*_passing(strategy), *(each.__dict__["__init__"] for each in wrappers)]
    inherited = {name for make in constructors for name in _named(make)} - _GIVEN_BY_LIGHTNING - set(ours)
    for name in arguments:
        if name not in inherited:
            if meant := _setting(name, arguments[name], compressor):
                raise ValueError(f"{strategy.__name__} has no argument {name!r}; write compressor={meant!r}")
            close = difflib.get_close_matches(name, [*ours, *sorted(inherited)], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join([*ours, *sorted(inherited)])}"
            raise ValueError(f"{strategy.__name__} has no argument {name!r}{hint}")


def _setting(name: str, value: object, compressor: object) -> dict[str, object] | None:
    """Return the compressor as a mapping with this setting, if it has one of this name."""
    given = dict(compressor) if isinstance(compressor, Mapping) else {"name": compressor}
    cls = COMPRESSORS.find(str(given["name"])) if isinstance(given.get("name"), str) else None
    fields = [each.name for each in dataclasses.fields(cls) if each.init] if dataclasses.is_dataclass(cls) else []
    return {**given, name: value} if name in fields else None


def _passing(strategy: type) -> Iterator[Callable[..., None]]:
    """Yield the constructors of a class and its bases, up to the first that passes no other arguments on."""
    for make in [vars(base)["__init__"] for base in strategy.__mro__[:-1] if "__init__" in vars(base)]:
        yield make
        if all(each.kind != each.VAR_KEYWORD for each in inspect.signature(make).parameters.values()):
            return


def _named(make: Callable[..., None]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, each in inspect.signature(make).parameters.items() if each.kind in kinds]


def check_accumulation(static_graph: bool, accumulate: int) -> None:
    """Raise ValueError for a static graph with accumulation, which DistributedDataParallel does not support.

    Raises:
        ValueError: both are on.
    """
    if static_graph and accumulate > 1:
        raise ValueError(
            f"static_graph=True with accumulate_grad_batches={accumulate} fails inside DistributedDataParallel "
            "(pytorch#143580); set static_graph=False or accumulate_grad_batches=1"
        )


def check_clipping(settings: RunState, clip: float | None, given: str = "gradient_clip_val") -> None:
    """Raise ValueError if gradient clipping would apply to a method whose output is not a mean of gradients.

    Args:
        settings: of the compression.
        clip: the bound; None or 0 or less: none.
        given: name of the argument that the bound was given as.

    Raises:
        ValueError: it would.
    """
    if not clip or clip < 0 or (by := settings.steps_by) is None:
        return
    raise ValueError(
        f"{given}={clip} cannot be combined with {by}, which gives the optimizer steps instead of mean gradients, so "
        f"clipping would shorten every step. Use the strategy's local_clip_norm={clip}, which clips each rank's "
        f"gradients before compression, and leave {given} out"
    )


def refuse_retuning(settings: RunState) -> None:
    """Raise ValueError because a run that began with float32 has no hook that could compress.

    Raises:
        ValueError: always.
    """
    began = "'auto', which chose float32 here and" if settings.chosen else "'none', which"
    raise ValueError(
        f"the run began with compressor={began} leaves the average to DistributedDataParallel for good; "
        "begin with a compressor whose settings lose nothing, such as {'name': 'topk', 'density': 1.0}"
    )


UNUSED = ("find_unused_parameters", "static_graph")
"""Arguments of DistributedDataParallel with which parameters may be without a gradient in a step."""


def check_delay(settings: RunState, *given: bool) -> None:
    """Raise ValueError if averages are applied a step late and parameters may be without a gradient in a step.

    Args:
        settings: the user's.
        *given: values of the arguments ``UNUSED``.

    Raises:
        ValueError: they may.
    """
    for name, value in zip(UNUSED, given, strict=True):
        if settings.options.delay and value:
            raise ValueError(
                f"delay=1 does not work with {name}=True: a parameter that is used in every second step would never "
                f"get a gradient. Set {name}=False and use every parameter in each step, or use delay=0"
            )


def check_delayed_loop(settings: RunState, automatic: bool) -> None:
    """Raise ValueError if averages are applied a step late and a module does its own backward passes and steps.

    Raises:
        ValueError: it does.
    """
    if settings.options.delay and not automatic:
        raise ValueError(
            "delay=1 does not work with manual optimization, where a step may have any number of backward passes: set "
            "automatic_optimization=True, or use delay=0"
        )


def check_ddp(ddp: DistributedDataParallel) -> None:
    """Raise ValueError if this is not a DistributedDataParallel, or has arguments that ``check_ddp_arguments`` rejects.

    Raises:
        ValueError: it is not, or has.
    """
    if not isinstance(getattr(ddp, "_orig_mod", ddp), DistributedDataParallel):  # torch.compile wraps it
        if hasattr(ddp, "_forward_module"):
            raise ValueError(
                f"{type(ddp).__name__} is Fabric's wrapper, whose checkpoints would lose each rank's residual: use "
                "Fabric(strategy=lightning_compress.fabric.CompressedDDPStrategy(...)) in place of attach"
            )
        raise ValueError(
            f"{type(ddp).__name__} is not a DistributedDataParallel: pass "
            "torch.nn.parallel.DistributedDataParallel(module), on every rank"
        )
    check_ddp_arguments(
        {
            "mixed_precision": ddp.mixed_precision,
            "delay_all_reduce_named_params": getattr(ddp, "_delay_all_reduce_params", None) or None,
        }
    )


def check_module(module: nn.Module, settings: RunState) -> None:
    """Raise ValueError for modules whose gradients cannot be compressed, and for rules that match no parameter.

    Raises:
        ValueError: a module is lazy, an embedding has sparse gradients, an optimizer runs inside backward, a parameter
            is complex, parameters are on several devices, a rule matches no parameter, or ``delay=1`` does not work on
            this device or with sufficient factors. ``none`` leaves some of it to DistributedDataParallel.
    """
    check_initialized(module)
    parameters = trained_parameters(module)
    if not settings.plain:
        _check_gradients(module, parameters)
    optimize_ddp = getattr(torch._dynamo.config, "optimize_ddp", True)
    if isinstance(optimize_ddp, str) and optimize_ddp.startswith("python_reducer"):
        raise ValueError(
            f"torch._dynamo.config.optimize_ddp={optimize_ddp!r} calls hooks with arguments that compression does not "
            "support; set it to True"
        )
    settings.rules.bound(kinds_of(module)).check([name for name, _ in parameters])
    if settings.options.delay:
        _check_delayed(module, parameters)


def _check_delayed(module: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise ValueError if averages cannot travel beside the next step."""
    if others := {parameter.device.type for _, parameter in parameters} - {"cpu"}:
        raise ValueError(
            f"delay=1 works on CPUs over Gloo as yet, and the model is on {min(others)}: use delay=0, or "
            "LocalSGDStrategy with its delay"
        )
    if getattr(module, AVERAGED_ELSEWHERE, ()):
        raise ValueError(
            "delay=1 does not work with sufficient factors, whose average the same step applies. Use delay=0, or "
            "leave SufficientFactors out"
        )


def check_initialized(module: nn.Module) -> None:
    """Raise ValueError for lazy modules that have not seen a batch.

    Raises:
        ValueError: there is one; the message names it.
    """
    for name, child in module.named_modules():
        tensors = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
        if any(is_lazy(tensor) for tensor in tensors):
            raise ValueError(
                f"{name or 'the module'} is a {type(child).__name__} whose parameters have no shape yet: run one batch "
                "through the model before training"
            )


def _check_gradients(module: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise ValueError if gradients do not reach the hook as dense real numbers on one device."""
    if len(devices := {str(parameter.device) for _, parameter in parameters}) > 1:
        raise ValueError(
            f"the model is on {', '.join(sorted(devices))}, but compression needs one device per process: move the "
            f"model to one device, {_STOCK}"
        )
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ValueError(f"{name or 'the module'} has sparse gradients; build it with sparse=False")
    for name, parameter in parameters:
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(
                f"the optimizer of {name} runs inside backward (_apply_optimizer_in_backward): {_OWN_HOOK}; "
                f"step the optimizer after backward, {_STOCK}"
            )
        if parameter.is_complex():
            raise ValueError(
                f"{name} is {parameter.dtype}, but must be real. Use a real parameter of shape (..., 2) and "
                f"torch.view_as_complex in forward, {_STOCK}"
            )


def check_running(ddp: DistributedDataParallel) -> None:
    """Raise ValueError inside ``Join``, where ranks without data would keep exchanging messages.

    Raises:
        ValueError: the model runs inside ``torch.distributed.algorithms.Join``.
    """
    if ddp._join_config.enable:
        raise ValueError(
            "Join (uneven inputs) cannot be combined with compression; give all ranks the same number of batches, as "
            "DistributedSampler does, or use compressor='none'"
        )


def check_ranks_agree(
    settings: RunState, module: nn.Module, problem: ValueError | None, collective: Collective, device: torch.device
) -> None:
    """Compare settings and parameters over the ranks, and raise on all ranks if one has a problem.

    Args:
        settings: this rank's.
        module: this rank's.
        problem: why this rank cannot train, or None.
        collective: the ranks.
        device: of the tensors that are exchanged.

    Raises:
        ValueError: on every rank. It is this rank's own problem, the problem of the first rank that has one, or the
            list of ranks that differ from rank 0.
    """
    named = trained_parameters(module)
    try:
        used = kernels.compiler(device)
    except ValueError as error:  # check_setup has caught it as this rank's problem
        used = str(error)
    compared = {
        "compression settings": settings,
        "trained parameters (names, shapes, dtypes)": [
            (name, None if is_lazy(parameter) else tuple(parameter.shape), str(parameter.dtype))
            for name, parameter in named
        ],
        # on an accelerator, kernels sum in another order than tensor operations do
        f"kernels (numba or Triton is installed, or not; {kernels.VARIABLE})": used,
    }
    consensus.check(compared, problem, collective, device, consensus.SAME_ARGUMENTS)


def check_optimizers_agree(optimizers: Sequence[Optimizer], collective: Collective, device: torch.device) -> None:
    """Compare the optimizers' classes and hyperparameters over the ranks. Collective.

    Raises:
        ValueError: on every rank: they differ. The message has the values and the ranks.
    """
    values, ranks = hyperparameters(optimizers), collective.uncounted
    kinds = [(type(each).__name__, len(each.param_groups)) for each in optimizers]
    advice = "; give the optimizers of all ranks the same settings, or the ranks train different models"
    consensus.check({"optimizers": [*kinds, *sorted(values)]}, None, ranks, device, advice)
    consensus.check({f"values of {name}": each for name, each in sorted(values.items())}, None, ranks, device, advice)


@errors.called_by_all("compression.retune()")
def check_retuning(
    compressor: object, changes: Mapping[str, object], collective: Collective, device: torch.device
) -> None:
    """Compare the arguments of ``Compression.retune`` over the ranks. Collective.

    Raises:
        ValueError: on every rank: they differ, so that ranks could not read each other's messages.
    """
    given = {"arguments of retune()": (compressor, sorted(changes.items()))}
    consensus.check(given, None, collective, device, consensus.SAME_ARGUMENTS)


def check_state(state: object, collective: Collective, device: torch.device) -> None:
    """Validate a rank's state that was read from a file. Collective.

    Raises:
        ValueError: on every rank: on one of them it is not a state, or another rank's.
    """
    problem = None
    try:
        state_check.check_rank(state_check.check(state), collective.rank)
    except ValueError as error:  # the other ranks wait for this rank's answer
        problem = error
    consensus.check({}, problem, collective, device, "")


def trained_parameters(module: nn.Module, ignored: Collection[str] = ()) -> list[tuple[str, nn.Parameter]]:
    """Return parameters that require a gradient, with the names that a user knows (without ``_orig_mod.``)."""
    return [
        (name.replace("_orig_mod.", ""), parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]


def trained(module: nn.Module, ignored: Collection[str] = ()) -> list[Trained]:
    """Return ``trained_parameters`` of a module whose ranks hold them as a whole."""
    return [Trained(*each) for each in trained_parameters(module, ignored)]


AVERAGED_ELSEWHERE = "_averaged_elsewhere"
"""Attribute of a module: names of parameters that DistributedDataParallel ignores but something else averages."""


def frozen_parameters(module: nn.Module, ignored: Collection[str], collective: Collective) -> dict[int, str]:
    """Return names of parameters that are not averaged although not ignored, by their ``id``; none on one rank."""
    named = module.named_parameters() if collective.size > 1 else ()
    return {
        id(parameter): name.replace("_orig_mod.", "")
        for name, parameter in named
        if not parameter.requires_grad and name not in ignored
    }
