"""What the compressed strategies of the Trainer, of Fabric and of Ray share: their arguments, names and figures."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_compress.codecs import Method
from lightning_compress.corrections import Corrected
from lightning_compress.engine import checks
from lightning_compress.engine.attach import own_bucket_cap_mb
from lightning_compress.engine.compression import Compression
from lightning_compress.exchanges import Pattern
from lightning_compress.planning.choose import Auto
from lightning_compress.settings.automatic import Automatic
from lightning_compress.settings.parsing import COMPRESSORS, written
from lightning_compress.settings.run_state import RunState
from lightning_compress.strategies.common import VARIANTS, register
from lightning_compress.strategies.resume import Resume
from lightning_compress.strategies.sidecar import SavedState

if TYPE_CHECKING:

    class _Base:
        """What the ``DDPStrategy`` of each class tree has."""

        _ddp_kwargs: dict[str, Any]

        def __init__(self, **kwargs: Any) -> None: ...

        @property
        def root_device(self) -> torch.device: ...

        @property
        def num_processes(self) -> int: ...

else:
    _Base = object

_UNUSED: dict[str, dict[str, object]] = {"_find_unused_parameters_true": {"find_unused_parameters": True}}


class CompressionMixin(_Base):
    """Take the arguments of a gradient compression; see ``CompressedDDPStrategy``."""

    _resume: Resume
    _wrappers: ClassVar[tuple[type, ...]] = ()
    """Classes whose arguments the base class passes on."""

    def __init__(
        self,
        compressor: Method | Corrected | Automatic | str | dict[str, Any] = "auto",
        exchange: Pattern | str | dict[str, Any] = "auto",
        error_feedback: bool | str | dict[str, Any] | None = None,
        warmup_steps: int | None = None,
        min_numel: int = 1024,
        seed: int | None = 0,
        state: SavedState = "sidecar",
        strict_state: bool = False,
        schedule: str | dict[str, Any] | None = None,
        rules: Sequence[dict[str, Any]] | None = (),
        local_clip_norm: float | dict[str, Any] | None = None,
        deterministic: bool = False,
        on_nonfinite: Literal["pass", "skip", "raise"] = "pass",
        on_drift: Literal["error", "resync"] = "error",
        check_drift_every: int = 100,
        delay: int = 0,
        **kwargs: Any,
    ) -> None:
        checks.check_known(kwargs, type(self), _OURS, compressor, self._wrappers)
        settings = RunState.of(
            compressor,
            exchange=exchange,
            error_feedback=error_feedback,
            warmup_steps=warmup_steps,
            min_numel=min_numel,
            seed=seed,
            schedule=schedule,
            rules=rules,
            local_clip_norm=local_clip_norm,
            deterministic=deterministic,
            on_nonfinite=on_nonfinite,
            on_drift=on_drift,
            check_drift_every=check_drift_every,
            delay=delay,
        )
        self._check_given(settings, kwargs)
        super().__init__(**kwargs)
        self._settings, self._resume = settings, Resume(state, strict_state)

    def _check_given(self, settings: RunState, given: Mapping[str, Any]) -> None:
        """Raise ValueError if arguments of the base class do not work with compression."""

    @property
    @abstractmethod
    def compression(self) -> Compression:
        """The compression of the model that is trained."""

    def comm_stats(self) -> dict[str, Any]:
        """Return the traffic of the last step and in total (``Compression.stats``), with a one-line ``summary``.

        Raises:
            RuntimeError: no training is running.
        """
        return self.compression.stats() | {"summary": self.compression.summary}

    def measure_every(self, steps: int) -> None:
        """Measure time and compression error every ``steps`` steps."""
        self.compression.meter.sample_every = steps

    def __repr__(self) -> str:
        given = self._settings.options
        exchange = "" if given.exchange == Auto() else f", exchange={written(given.exchange)}"
        return f"{type(self).__name__}(compressor={written(given.compressor)}{exchange})"


class DDPArgumentsMixin(CompressionMixin):
    """Take the arguments of DistributedDataParallel, too, and choose its buckets."""

    _wrappers = (DistributedDataParallel,)

    def _check_given(self, settings: RunState, given: Mapping[str, Any]) -> None:
        checks.check_ddp_arguments(given)
        checks.check_delay(settings, *(bool(given.get(name)) for name in checks.UNUSED))

    def _choose_bucket_cap(self) -> None:
        """Choose buckets for DistributedDataParallel, unless the user has."""
        if not self._settings.plain and self._ddp_kwargs.get("bucket_cap_mb") is None:
            self._ddp_kwargs["bucket_cap_mb"] = own_bucket_cap_mb(self.num_processes, self.root_device.type)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``compressed_ddp`` and one name per compressor, each with its variants."""
        named: dict[str, dict[str, object]] = {"compressed_ddp": {}}
        named |= {f"compressed_ddp_{name}": {"compressor": name} for name in COMPRESSORS.offered}
        register(strategy_registry, cls, "Compressed DDP", named, VARIANTS | _UNUSED)


_OURS = [name for name in inspect.signature(CompressionMixin.__init__).parameters if name not in ("self", "kwargs")]
