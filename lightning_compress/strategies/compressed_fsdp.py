"""``CompressedFSDPStrategy``: compresses the average over the replicas of a model that ``fully_shard`` has sharded."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_compress.codecs import Method
from lightning_compress.collectives import TorchCollective
from lightning_compress.core import errors
from lightning_compress.core.kinds import kinds_of
from lightning_compress.corrections import Corrected
from lightning_compress.engine.compression import Compression
from lightning_compress.engine.optimizers import part_of, unwatched
from lightning_compress.engine.sharded import attach as sharded
from lightning_compress.engine.sharded.checks import Cures, check_optimizers
from lightning_compress.engine.sharded.units import reshard
from lightning_compress.exchanges import Pattern
from lightning_compress.settings.automatic import Automatic
from lightning_compress.settings.parsing import COMPRESSORS
from lightning_compress.strategies.advice import warn
from lightning_compress.strategies.common import register
from lightning_compress.strategies.fit import FitMixin
from lightning_compress.strategies.fsdp_accumulation import SyncFSDPAccumulation
from lightning_compress.strategies.report import Lines, of_fit
from lightning_compress.strategies.resume import restore_compression, save_compression
from lightning_compress.strategies.sidecar import Column

if TYPE_CHECKING:
    _Base = ModelParallelStrategy
else:
    _Base = object

CURES = Cures(
    "self", "self.device_mesh['data_parallel']", "in the LightningModule's configure_model", "CompressedDDPStrategy"
)
DIMENSIONS = ("replicate", "data_parallel", "tensor_parallel")
"""Of the mesh; ``configure_model`` uses the second."""
_DDP = {
    name for each in (DDPStrategy, DistributedDataParallel) for name in inspect.signature(each.__init__).parameters
} - set(inspect.signature(ModelParallelStrategy.__init__).parameters)
_TOGETHER = (
    "a sharded model is saved by all ranks together, and this rank stops by an exception of its own. Go on from the "
    "last checkpoint"
)
_LAYERS = {"MePropMixin": "MeProp", "SufficientFactorsMixin": "SufficientFactors"}
"""Callbacks whose layers work with whole gradients, by their mixins."""


class CompressedFSDPMixin(FitMixin, SyncFSDPAccumulation, _Base):
    """Turn a ``ModelParallelStrategy`` into a compressed one; see ``CompressedFSDPStrategy``."""

    def __init__(
        self,
        compressor: Method | Corrected | Automatic | str | dict[str, Any] = "auto",
        exchange: Pattern | str | dict[str, Any] = "auto",
        *,
        replicate_size: Literal["auto"] | int = "auto",
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        accumulate: Literal["sharded", "unsharded"] = "sharded",
        **kwargs: Any,
    ) -> None:
        _check_arguments(kwargs, tensor_parallel_size, accumulate)
        for name, size in (("replicate_size", replicate_size), ("data_parallel_size", data_parallel_size)):
            if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ValueError(f"{name}={size!r} must be a number of ranks from 1, or 'auto'")
        super().__init__(compressor, exchange, tensor_parallel_size=1, **kwargs)
        self._sizes, self.accumulate = (replicate_size, data_parallel_size), accumulate

    def setup_environment(self) -> None:
        """Set up the process, and the mesh of replicas and shards.

        Raises:
            ValueError: the sizes' product is not the number of ranks.
        """
        self._setup_distributed()
        replicas, shards = self._sizes
        if replicas == "auto":
            replicas = self.num_nodes if shards == "auto" else self.world_size // shards
        if shards == "auto":
            shards = self.world_size // replicas
        if replicas * shards != self.world_size:
            raise ValueError(
                f"replicate_size={replicas} times data_parallel_size={shards} is not the number of ranks, "
                f"{self.world_size} (num_nodes={self.num_nodes} times devices={self.num_processes}): give one of the "
                f"two sizes, a divisor of {self.world_size}, and leave the other out"
            )
        mesh = init_device_mesh(self.root_device.type, (replicas, shards, 1), mesh_dim_names=DIMENSIONS)
        if self._timeout is not None:
            for name in DIMENSIONS:  # which have PyTorch's default otherwise
                _set_pg_timeout(self._timeout, mesh.get_group(name))
        self._device_mesh = mesh
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = mesh

    def setup(self, trainer: Any) -> None:
        """Set up the fit; callbacks that save on an exception do so if it ends all ranks."""
        super().setup(trainer)
        if trainer.state.fn == "fit" and self._rendezvous is not None:
            for each in trainer.callbacks:
                if "OnExceptionCheckpoint" in kinds_of(each) or getattr(each, "save_on_exception", False):
                    self._rendezvous.signals.unless(each, "on_exception", self._refuse_to_save)

    @contextmanager
    def tensor_init_context(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """See ``ModelParallelStrategy``; an error of ``configure_model``'s meshes, inside, says what to write."""
        try:
            with super().tensor_init_context(*args, **kwargs):
                yield
        except ValueError as error:
            if not str(error).startswith("fully_shard expects"):
                raise
            raise ValueError(f"{error}: give it one dimension, the shards, by {CURES.mesh}") from error

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """What a sampler needs to give each rank its own share: every rank of every replica gets other samples."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _check_model(self, ranks: TorchCollective) -> None:
        module = self.lightning_module
        assert module is not None
        trainer: Any = module.trainer
        if any("FullyShardedDataParallel" in kinds_of(each) for each in module.modules()):
            raise ValueError(
                "the model has modules of FSDP1 (torch.distributed.fsdp.FullyShardedDataParallel), whose averages no "
                f"hook can replace: use FSDP2, {CURES.mesh}"
            )
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "precision='16-mixed' scales the loss, and each shard would find its own infinite gradients: use "
                "precision='bf16-mixed', which needs no scaler"
            )
        for callback in trainer.callbacks:
            for name in kinds_of(callback) & _LAYERS.keys():
                raise ValueError(
                    f"{_LAYERS[name]} works with whole gradients of a layer, and a rank of a sharded model has shards: "
                    "leave it out, or use CompressedDDPStrategy"
                )
        reshard(module)  # later, ``model.to`` would do it
        sharded.check(module, self._settings, self.device_mesh["replicate"], (), ranks, CURES)

    def model_to_device(self) -> None:
        """Move the model, and let all replicas begin with the parameters and buffers of the first."""
        super().model_to_device()
        replicas = TorchCollective(self.device_mesh.get_group("replicate"))
        assert self.model is not None
        for each in [*self.model.parameters(), *self.model.buffers()] if replicas.size > 1 else ():
            if (held := part_of(each.detach())).numel():
                replicas.broadcast(held, self.root_device)

    def setup_optimizers(self, trainer: Any) -> None:
        """Let the replicas average compressed gradients, then set up the optimizers."""
        module, settings = self.lightning_module, self._settings
        assert module is not None
        self._compression = sharded.compress(module, settings, self.device_mesh["replicate"], TorchCollective())
        super().setup_optimizers(trainer)
        if self.device_mesh["replicate"].size() == 1 < self.world_size:
            warn(
                f"all {self.world_size} ranks hold one replica, so there is nothing to compress between replicas: set "
                "replicate_size, which is the number of nodes if you leave it out"
            )

    def _check_optimizers(self) -> None:
        check_optimizers(self.optimizers, self._units)
        super()._check_optimizers()

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run backward; where FSDP loses a rank, the error says so."""
        with errors.of_transport("gathering parameters or reducing gradients over the shards", self.global_rank):
            return super().backward(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's ``training_step``; where FSDP loses a rank, the error says so."""
        with errors.of_transport("gathering parameters over the shards", self.global_rank):
            return super().training_step(*args, **kwargs)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state; PyTorch makes a step of no consequence to fill an empty one."""
        with unwatched(self._compression):
            return super().optimizer_state(optimizer)

    def _begin_states(self) -> None:
        replicas, shards = self.device_mesh["replicate"], self.device_mesh["data_parallel"]
        column = Column(shards.get_local_rank(), shards.size())
        self._resume.begin(TorchCollective(), self.root_device, column, TorchCollective(replicas.get_group()))

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the model and the optimizers, then the files beside the checkpoint."""
        with unwatched(self._compression):
            content = super().load_checkpoint(self._beside(checkpoint_path), *args, **kwargs)
        assert self.lightning_module is not None
        if self._compression is not None and self.lightning_module.trainer.state.fn == "fit":
            warn(restore_compression(self._resume, self.checkpoint_io, content, self._compression))
        return content

    def _save_state(self, compression: Compression, checkpoint: dict[str, Any], filepath: str) -> None:
        save_compression(self._resume, self.checkpoint_io, self._beside(filepath), checkpoint, compression)

    @property
    def _ends_alone(self) -> bool:
        """Whether an exception ends the fit on this rank, of which the others may not know, as they do of a SIGTERM."""
        error = sys.exc_info()[1]
        return self.world_size > 1 and self.gives_up and error is not None and "SIGTERMException" not in kinds_of(error)

    def _refuse_to_save(self) -> bool:
        if self._ends_alone:
            warn(f"nothing is saved: {_TOGETHER}")
        return self._ends_alone

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state; Lightning begins to save with it.

        Raises:
            RuntimeError: this rank ends by an exception, and would wait for the others.
        """
        if self._ends_alone:
            raise RuntimeError(f"nothing can be saved: {_TOGETHER}")
        return super().lightning_module_state_dict()

    def _figures(self, compression: Compression) -> Lines:
        return of_fit(compression, self.device_mesh["replicate"].size(), self._clock, hides=False)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``compressed_fsdp`` and one name per compressor."""
        named: dict[str, dict[str, object]] = {"compressed_fsdp": {}}
        named |= {f"compressed_fsdp_{name}": {"compressor": name} for name in COMPRESSORS.offered}
        register(strategy_registry, cls, "Compressed FSDP", named, {"": {}})


def _check_arguments(given: Mapping[str, Any], tensor_parallel_size: object, accumulate: object) -> None:
    """Raise ValueError for arguments of DistributedDataParallel, and for what does not work with sharded models."""
    for name in given.keys() & _DDP:
        raise ValueError(
            f"{name}={given[name]!r} is an argument of DDPStrategy or DistributedDataParallel, which does not wrap a "
            "sharded model. Remove it"
        )
    if tensor_parallel_size not in ("auto", 1):
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size!r} does not work with compression: a parameter would be "
            "sharded over two dimensions. Leave it out, and use a larger data_parallel_size"
        )
    if accumulate not in (ways := get_args(inspect.get_annotations(SyncFSDPAccumulation, eval_str=True)["accumulate"])):
        raise ValueError(f"accumulate={accumulate!r} must be one of {', '.join(map(repr, ways))}")


class CompressedFSDPStrategy(CompressedFSDPMixin, ModelParallelStrategy):
    """FSDP2 in replicas (HSDP) with a compressed gradient average over the replicas; all else is Lightning's.

    The ranks form a mesh ("replicate", "data_parallel", "tensor_parallel"), the last of size 1. ``configure_model``
    shards over the second dimension alone, as with ``ModelParallelStrategy``: ``fully_shard(module,
    mesh=self.device_mesh["data_parallel"])``. FSDP2 averages over a replica's shards, this strategy averages the
    results over the replicas. Per rank and step, P parameters of b bytes take ``2 (R - 1) / R P b / S`` bytes without
    compression, with R replicas of S shards; what FSDP2 sends within a replica is unchanged. ``"auto"`` measures the
    link between the replicas.

    Checkpoints are those of ``ModelParallelStrategy``, with a file for each rank beside them. All ranks save together,
    as on a SIGTERM, of which all know. Where an exception ends one rank, nothing is saved.

    Args:
        compressor: See ``CompressedDDPStrategy``. Methods that do a part of the optimizer's work (``onebit_adam``,
            ``adam_mask``, AdaGrad at the owner) are refused, because FSDP2 shards the optimizer's state.
        exchange: See ``CompressedDDPStrategy``.
        replicate_size: Number of replicas: an integer from 1, or "auto"; default "auto". "auto": the number of nodes,
            so that parameters travel within a node only.
        data_parallel_size: Number of shards of a replica: an integer from 1, or "auto"; default "auto". "auto": the
            number of ranks over ``replicate_size``. Their product has to be the number of ranks.
        tensor_parallel_size: 1 or "auto", which is 1.
        accumulate: What is sent in micro-batches that accumulate gradients: "sharded" or "unsharded"; default
            "sharded". "sharded": gradients are averaged over the shards only. "unsharded": nothing is sent, and each
            rank keeps whole gradients. The replicas average once a step with both; see ``SyncFSDPAccumulation``.
        state: Where checkpoints keep residuals and other per-rank state: "sidecar", "mean" or "none"; default
            "sidecar".

            - "sidecar": one file per rank in a folder beside the checkpoint (``epoch=3.ckpt.lc``). The run resumes bit
              for bit. A file has the bytes that ``CompressedDDPStrategy`` names, per parameter of the rank's shard.
            - "mean": the mean over the replicas: one file per shard in that folder. Of one shard, it is inside the
              checkpoint.
            - "none": nothing.

            With another number of replicas, every rank resumes from the mean over those that saved. With another number
            of shards, error feedback begins from zero, and warm-up and schedules at step 0, with a warning.
        strict_state: Whether state that cannot be restored is an error: True or False; default False. False: warn, and
            start from zero.
        **kwargs: The other arguments of ``CompressedDDPStrategy`` but ``local_clip_norm`` and ``delay``, and those of
            Lightning's ``ModelParallelStrategy``: ``save_distributed_checkpoint``, ``process_group_backend``,
            ``timeout``. Rules and ``min_numel`` judge whole parameters, not shards.

    Raises:
        ValueError: a name or setting is unknown, a value is out of range, or an argument does not work with sharded
            models. When the fit begins, on every rank: the sizes do not fit the ranks, or the model is not sharded as
            above.
    """


CompressedFSDPStrategy.register_strategies(StrategyRegistry)
