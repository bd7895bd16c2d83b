"""Linear layers whose gradients travel as sufficient factors, in a Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info

from lightning_compress.backward.sufficient_factors import Factors, FactorSettings, enable
from lightning_compress.backward.sufficient_factors.decision import Sent
from lightning_compress.callbacks.wrapping import wraps_model
from lightning_compress.planning.cost import Link


class SufficientFactorsMixin:
    """Turns a ``Callback`` into one that sends factors; see ``SufficientFactors``."""

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
            ValueError: a layer cannot travel as factors, or the strategy is none of DistributedDataParallel.
        """
        if stage != "fit":
            return
        if trainer.world_size > 1 and not wraps_model(trainer.strategy):
            raise ValueError(
                "SufficientFactors needs Trainer(strategy=CompressedDDPStrategy(...)) or strategy='ddp', not "
                f"{type(trainer.strategy).__name__}"
            )
        self._close()
        if trainer.world_size == 1:
            rank_zero_info("lightning_compress: sufficient factors are off, because there is one rank")
            return
        self._factors = enable(pl_module, self.settings)
        if self._factors is not None and self._state:
            self._factors.load_state_dict(self._state)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin with what the strategy has wrapped."""
        if self._factors is not None:
            compression = getattr(trainer.strategy, "_compression", None)
            self._factors.begin(trainer.strategy.model, compression, rank_zero_info, at_forward=False)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the model as it was."""
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the model as it was."""
        self._close()

    def _close(self) -> None:
        if self._factors is not None:
            self._state = self._factors.state_dict()
            self._factors.close()
            self._factors = None

    def state_dict(self) -> dict[str, Any]:
        """How each layer travels, which a resumed run keeps to."""
        return self._factors.state_dict() if self._factors is not None else self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See ``state_dict``."""
        self._state = dict(state_dict)
        if self._factors is not None:
            self._factors.load_state_dict(self._state)


class SufficientFactors(SufficientFactorsMixin, Callback):
    """Sends the inputs and output gradients of linear layers in place of their weights' gradients, without loss.

    For a layer of N inputs and M outputs that sees K rows on each of P ranks, K (M + N) (P - 1) numbers a rank travel,
    where an all-reduce of the matrix takes 2 M N (P - 1) / P: less where K P < 2 M N / (M + N), as in wide classifiers
    on small batches. Every rank forms the mean gradient from the same rows in the same order, so that ranks stay
    bit-identical; it equals DistributedDataParallel's to summation order. The bias goes with its weight. For sequences,
    every position is a row, which usually speaks against factors.

    At the first backward each layer's way is chosen: factors where they send less than float32 does and are expected,
    by the measured link and product, to be faster; otherwise the ordinary way, which is that of the strategy, at the
    end of backward. A line says so; checkpoints keep the choice. With accumulation K grows: rows are kept until a
    backward synchronises, unless the gradient is dropped or zeroed before. On one rank nothing is changed. Petuum,
    arXiv:1512.06216; Poseidon, arXiv:1706.03292; Project Adam, OSDI 2014.

    Args:
        layers: shell-style patterns of module names, such as ``["classifier.*"]``; None: every linear layer of 65,536
            weights or more for which so many ranks can pay at all.
        exclude: patterns of module names that are left out.
        dtype: "float32": rows travel in the dtype in which backward has them (half precision under AMP), without loss;
            "bfloat16": in half as many bytes, rounded.
        force: every one of these layers goes by factors, measured or not; an error, at its first backward, where they
            would send more.
        link: what is taken for the ranks' link, ``{latency_s: 1e-4, bytes_per_s: 1.25e8}``; None: it is measured.

    Raises:
        ValueError: a value is none of these.
    """
