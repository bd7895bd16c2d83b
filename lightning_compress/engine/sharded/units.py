"""What FSDP2 has to tell of a sharded model. Only this file uses names that PyTorch keeps private."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_compress.engine.optimizers import Trained, part_of

VERSIONS = "2.7 to 2.13"
"""Of torch, whose private names are as this file expects them. Tests run on 2.13; the others were read."""

_OF_GROUP = ("fsdp_params", "mesh_info", "mp_policy", "offload_policy", "reduce_grads", "all_reduce_grads")
_OF_PARAMETER = ("sharded_param", "sharded_size", "padded_sharded_param_size")


def is_sharded(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to any part of a model."""
    return next(_modules(model), None) is not None


def _modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and modules that ``fully_shard`` was applied to, outer ones first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes seconds, and there is none without it
    kind = getattr(fsdp, "FSDPModule", ())
    return ((name.replace("_orig_mod.", ""), each) for name, each in model.named_modules() if isinstance(each, kind))


class Shard(Trained):
    """A parameter of which this rank holds a shard. FSDP adds up its gradients, and may replace the parameter.

    Args:
        name: as the user knows it.
        handle: what FSDP knows of the parameter.
        dtype: in which FSDP reduces gradients.

    Attributes:
        numel: elements of the shard, which may be 0.
        padded: elements that it takes in FSDP's buffers.
    """

    accumulates: ClassVar[bool] = False

    def __init__(self, name: str, handle: Any, dtype: torch.dtype) -> None:
        super().__init__(name, handle.sharded_param)
        self._handle, self.dtype = handle, dtype
        self.numel, self.padded = handle.sharded_size.numel(), handle.padded_sharded_param_size.numel()

    def parameter(self) -> Tensor:
        """See ``Trained``."""
        found: Tensor = self._handle.sharded_param
        return found

    def held(self) -> Tensor:
        """See ``Trained``."""
        return part_of(self.parameter())

    def gradient(self) -> Tensor | None:
        """See ``Trained``."""
        gradient = self.parameter().grad
        return None if gradient is None else part_of(gradient)

    def planned(self) -> tuple[str, nn.Parameter]:
        """Return the name, and a parameter on no device with the shape and dtype of what this rank averages."""
        return self.name, nn.Parameter(torch.empty(self.held().shape, dtype=self.dtype, device="meta"))


class Unit:
    """A module that FSDP gathers and whose gradients it reduces at once.

    Args:
        name: of the module.
        module: that ``fully_shard`` was applied to.
        names: of the model's parameters, by their ``id``.

    Attributes:
        name: as given; "the model" for its root.
        trained: the module's trained parameters, in the order of their gradients.

    Raises:
        RuntimeError: this version of PyTorch keeps FSDP's state elsewhere.
        ValueError: parameters of the module have several meshes.
    """

    def __init__(self, name: str, module: Any, names: dict[int, str]) -> None:
        self.name, self._module = name or "the model", module
        self._group: Any
        self._group, *others = _groups(module)
        if others:
            raise ValueError(
                f"{self.name} has parameters on {len(others) + 1} meshes (shard_placement_fn), and PyTorch calls no "
                "hook there: give all its parameters one mesh, the shards"
            )
        self.trained = [self._shard(each, names) for each in self._parameters()]

    def _parameters(self) -> list[Any]:
        return [each for each in self._group.fsdp_params if each.sharded_param.requires_grad]

    def _shard(self, handle: Any, names: dict[int, str]) -> Shard:
        policy, parameter = self._group.mp_policy, handle.sharded_param
        if id(parameter) not in names:
            raise ValueError(
                f"a parameter of {self.name} is gathered, or was replaced after fully_shard: call attach before the "
                "first forward, or model.reshard() before it, and tie or replace parameters before fully_shard"
            )
        return Shard(names[id(parameter)], handle, policy.reduce_dtype or policy.param_dtype or parameter.dtype)

    @property
    def mesh(self) -> Any:
        """What FSDP averages over: a DeviceMesh of one dimension, or several."""
        return self._group.mesh_info.mesh

    @property
    def replicates(self) -> bool:
        """Whether FSDP averages over replicas itself."""
        return getattr(self._group.mesh_info, "replicate_mesh_dim", None) is not None

    @property
    def shards(self) -> bool:
        """Whether FSDP shards; ``replicate`` does not."""
        return getattr(self._group.mesh_info, "shard_mesh_dim", None) is not None

    @property
    def divides_by(self) -> float | None:
        """The factor by which the user has FSDP divide sums, or None."""
        older = getattr(self._group, "reduce_scatter_divide_factor", None)  # its name in torch 2.7
        factor: float | None = getattr(self._group, "gradient_divide_factor", older)
        return factor

    @property
    def only_sums(self) -> bool:
        """Whether FSDP divides after the hook."""
        return bool(getattr(self._group, "force_sum_reduction_for_comms", False))

    @property
    def offloads(self) -> bool:
        """Whether shards are on the CPU while the model computes elsewhere."""
        return "CPUOffload" in type(self._group.offload_policy).__name__

    @property
    def hooked(self) -> object:
        """The hook that was set, or None."""
        return getattr(self._group, "_all_reduce_hook", None)

    @property
    def averages(self) -> bool:
        """Whether this backward pass averages over replicas; see ``FSDPModule.set_requires_all_reduce``."""
        return bool(self._group.all_reduce_grads)

    @property
    def allows_unused(self) -> bool:
        """Whether parameters without a gradient are reduced as zeros."""
        return bool(getattr(self._group, "reduce_scatter_unused_params", False))

    def reduce_unused(self) -> None:
        """Let parameters without a gradient be reduced as zeros, from torch 2.13 on."""
        if setter := getattr(self._module, "set_reduce_scatter_unused_params", None):
            setter(True, recurse=False)

    def hook(self, hook: Callable[[Tensor], None], stream: torch.cuda.Stream | None = None) -> None:
        """Let FSDP call a hook with what it reduced, on a stream."""
        self._module.set_all_reduce_hook(hook, **({} if stream is None else {"stream": stream}))

    def pieces(self, reduced: Tensor) -> list[Tensor]:
        """Return the gradients of ``trained`` in what FSDP reduced, which is flat and padded.

        Raises:
            RuntimeError: a parameter got no gradient, or another one was unfrozen.
        """
        present = [each.sharded_param for each in self._parameters()]
        if len(present) != len(self.trained):
            raise RuntimeError(
                f"{self.name} trains {len(present)} parameters, and trained {len(self.trained)} when attach or "
                "trainer.fit() began to compress: freeze and unfreeze before that"
            )
        sizes = [each.padded for each in self.trained]
        if sum(sizes) != reduced.numel():
            raise RuntimeError(
                f"FSDP reduced {reduced.numel():,} gradients of {self.name}, which trains {sum(sizes):,}: a parameter "
                f"got none in this backward. torch {torch.__version__} leaves such parameters out: use every one in "
                "each step, or torch 2.13, which reduces them as zeros"
            )
        return [piece[: each.numel] for piece, each in zip(reduced.split(sizes), self.trained, strict=True)]

    @contextmanager
    def unsynchronised(self, sharded: bool) -> Iterator[None]:
        """Average nothing over replicas inside the context, and if not ``sharded``, nothing over shards either."""
        group = self._group
        before = group.reduce_grads, group.all_reduce_grads
        group.reduce_grads, group.all_reduce_grads = before[0] and sharded, False
        try:
            yield
        finally:
            group.reduce_grads, group.all_reduce_grads = before


def _groups(module: Any) -> Sequence[Any]:
    """Return what FSDP keeps of a module's parameters, one for each mesh.

    Raises:
        RuntimeError: this version of PyTorch keeps it elsewhere.
    """
    try:
        state = module._get_fsdp_state()
        if hasattr(state, "_fsdp_param_groups"):  # from torch 2.12 on
            found = list(state._fsdp_param_groups)
        else:
            found = [state._fsdp_param_group] if state._fsdp_param_group else []
        for group in found:
            for name in _OF_GROUP:
                getattr(group, name)
            for parameter in group.fsdp_params:
                for name in _OF_PARAMETER:
                    getattr(parameter, name)
        _ = module.set_all_reduce_hook
    except AttributeError as error:
        raise RuntimeError(
            f"torch {torch.__version__} keeps the state of fully_shard elsewhere ({error}): compression of sharded "
            f"models works with torch {VERSIONS}"
        ) from error
    return found


def units_of(model: nn.Module) -> list[Unit]:
    """Return the parts of a model that ``fully_shard`` was applied to and that have trained parameters.

    Raises:
        RuntimeError: see ``Unit``.
        ValueError: see ``Unit``.
    """
    names = {id(each): name.replace("_orig_mod.", "") for name, each in model.named_parameters()}
    units = [Unit(name, module, names) for name, module in _modules(model) if _groups(module)]
    return [unit for unit in units if unit.trained]


def reshard(model: nn.Module) -> None:
    """Let go of the parameters that an evaluation has left gathered."""
    for _, each in _modules(model):
        each.reshard()


def roots_of(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that ``fully_shard`` was applied to."""
    found = [each for _, each in _modules(model)]
    inner = {id(child) for each in found for child in each.modules() if child is not each}
    return [each for each in found if id(each) not in inner]
