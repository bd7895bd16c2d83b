"""Settings of bounded staleness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from lightning_compress.codecs import Codec
from lightning_compress.corrections import Corrected
from lightning_compress.exchanges.message import Section
from lightning_compress.settings import parsing
from lightning_compress.settings.automatic import Automatic
from lightning_compress.settings.options import OF_CODECS
from lightning_compress.settings.parsing import CompressorLike, written
from lightning_compress.settings.run_state import RunState

_BOUND = parsing.count(
    "an integer, 0 or more: by how many steps a rank may be ahead of the slowest. 0 waits for all ranks in every step"
)


@dataclass(frozen=True, init=False)
class SSP:
    """Settings of bounded staleness (stale synchronous parallel); equal on all ranks.

    Args:
        staleness: by how many steps a rank may be ahead of the slowest; 0: all ranks wait for each other in every step.
        compressor: of the updates: the name, settings or object of a codec.
        seed: of the codecs' random numbers, 0 or more.
        **options: those of ``OF_CODECS``, see ``CompressedDDPStrategy``; error feedback is all of it, or none.

    Raises:
        ValueError: a value is not allowed, or the compressor is not a codec.
    """

    NAMES: ClassVar = ("staleness", *OF_CODECS)
    staleness: int
    compressor: CompressorLike
    seed: int
    options: Mapping[str, object]

    def __init__(
        self, staleness: int = 4, compressor: CompressorLike = "none", seed: int = 0, **options: object
    ) -> None:
        given = {"staleness": staleness, "compressor": compressor, "seed": seed, "options": options}
        for name, value in given.items():
            object.__setattr__(self, name, value)
        if unknown := options.keys() - set(OF_CODECS):
            raise ValueError(f"ssp has no {sorted(unknown)[0]!r}; it has {list(self.NAMES)}")
        _BOUND("staleness", staleness)
        feedback = options.get("error_feedback")
        if feedback not in (None, True, False):
            raise ValueError(
                f"error_feedback={feedback!r} must be true, false or null: updates keep the whole of what "
                "was not sent, or nothing"
            )
        state = self.compression
        if isinstance(state.compressor, Automatic):
            raise ValueError(
                "compressor='auto' chooses by the time of averages that all ranks make together, and here there are "
                "none. Name a codec, such as 'qsgd', or 'none'"
            )
        if isinstance(state.compressor, Corrected):
            raise ValueError(
                f"compressor={written(state.compressor)} does a part of the optimizer's work on gradients, and what is "
                "sent here are changes that the optimizer has made. Use a codec, such as 'topk' or 'onebit'"
            )
        for method in state.methods:
            if not method.conserves:
                raise ValueError(
                    f"compressor={written(method)} sends votes, and votes that arrive at different times cannot be "
                    "counted. Use 'efsign' or 'onebit'"
                )
            if not isinstance(method, Codec):
                raise ValueError(
                    f"compressor={written(method)} needs all ranks at the same step, because they talk more than once "
                    "in an average. Use a codec, such as 'qsgd', 'rotated' or 'topk', or 'none'"
                )

    @cached_property
    def compression(self) -> RunState:
        """Which parameter takes which codec, and what happens to what it does not send."""
        return RunState.of(self.compressor, seed=self.seed, **self.options)

    def sections(
        self, parameters: Mapping[str, Tensor], kinds: Mapping[str, str]
    ) -> tuple[tuple[int, ...], list[Section]]:
        """Return the order of the parameters in a vector, and the vector's sections; see ``Rules.sections``.

        Raises:
            ValueError: a rule takes none of these parameters.
        """
        compression = self.compression.bound(kinds)
        compression.rules.check(list(parameters))
        order, sections = compression.rules.sections([(name, tuple(each.shape)) for name, each in parameters.items()])
        return order, [compression.fed(each) for each in sections]
