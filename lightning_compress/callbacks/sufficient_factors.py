"""Send the gradients of linear layers as sufficient factors, in a Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info

from lightning_compress.backward.sufficient_factors import Factors, FactorSettings, enable
from lightning_compress.backward.sufficient_factors.decision import Sent
from lightning_compress.callbacks import wraps_model
from lightning_compress.planning.cost import Link


class SufficientFactorsMixin:
    """Makes a ``Callback`` send factors; see ``SufficientFactors``."""

    def __init__(
        self,
        layers: Sequence[str] | str | None = None,
        exclude: Sequence[str] | str = (),
        dtype: Sent = "float32",
        force: bool = False,
        link: Link | Mapping[str, Any] | None = None,
    ) -> None:
        self.settings = FactorSettings(layers, exclude, dtype, force, link)
        self._factors: Factors | None = None
        self._state: dict[str, Any] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the layers out of what the strategy will wrap.

        Raises:
            ValueError: a layer cannot travel as factors, or the strategy does not use DistributedDataParallel.
        """
        if stage != "fit":
            return
        if trainer.world_size > 1 and not wraps_model(trainer.strategy):
            raise ValueError(
                "SufficientFactors needs Trainer(strategy=CompressedDDPStrategy(...)) or strategy='ddp', not "
                f"{type(trainer.strategy).__name__}"
            )
        self.teardown(trainer, pl_module, stage)
        if trainer.world_size == 1:
            rank_zero_info("lightning_compress: sufficient factors are off, because there is one rank")
            return
        self._factors = enable(pl_module, self.settings)
        if self._factors is not None and self._state:
            self._factors.load_state_dict(self._state)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin with the wrapped model."""
        if self._factors is not None:
            compression = getattr(trainer.strategy, "_compression", None)
            self._factors.begin(trainer.strategy.model, compression, rank_zero_info, at_forward=False)

    def teardown(self, trainer: Any, pl_module: Any, stage: object) -> None:
        """Restore the model, at the end or after an error, and remember how each layer travels."""
        if self._factors is not None:
            self._state = self._factors.state_dict()
            self._factors.close()
            self._factors = None

    on_exception = teardown

    def state_dict(self) -> dict[str, Any]:
        """Return how each layer travels, for a resumed run."""
        return self._factors.state_dict() if self._factors is not None else self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See ``state_dict``."""
        self._state = dict(state_dict)
        if self._factors is not None:
            self._factors.load_state_dict(self._state)


class SufficientFactors(SufficientFactorsMixin, Callback):
    """Sends the inputs and output gradients of linear layers in place of their weights' gradients, without loss.

    A layer has N inputs and M outputs, and sees K rows on each of P ranks. Then a rank sends K (M + N) (P - 1) numbers,
    where an all-reduce of the matrix sends 2 M N (P - 1) / P. That is less if K P < 2 M N / (M + N), as in wide
    classifiers on small batches. For sequences, every position is a row, so that factors rarely pay. Every rank forms
    the mean gradient from the same rows in the same order: ranks stay bit-identical, and the mean equals
    DistributedDataParallel's up to the order of summation. The bias goes with its weight.

    The first backward chooses each layer's way: factors if they send less than float32 and are expected to be faster,
    by the measured link and product. Otherwise the strategy averages the gradient at the end of backward. A line says
    so, and checkpoints keep the choice. With accumulation K grows: rows are kept until a backward synchronises, unless
    the gradient is dropped or zeroed before. On one rank nothing changes. Petuum, arXiv:1512.06216; Poseidon,
    arXiv:1706.03292; Project Adam, OSDI 2014.

    Args:
        layers: shell-style patterns of module names, such as ``["classifier.*"]``. None: every linear layer of 65,536
            weights or more for which factors can pay at this number of ranks.
        exclude: patterns of module names that are left out.
        dtype: "float32": rows travel without loss, in the dtype in which backward has them (half precision under AMP).
            "bfloat16": they are rounded, and take half as many bytes.
        force: all these layers go by factors, without a measurement. The first backward refuses a layer for which
            factors would send more.
        link: the ranks' link, ``{latency_s: 1e-4, bytes_per_s: 1.25e8}``. None: it is measured.

    Raises:
        ValueError: a value is not allowed.
    """
