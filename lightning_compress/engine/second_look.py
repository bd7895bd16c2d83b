"""``compressor="auto"`` looks twice: what it picked by prediction is timed against float32 in the run's first steps."""

from __future__ import annotations

import logging
import statistics
import time

import torch

from lightning_compress.codecs import Codec, Dense
from lightning_compress.collectives import Collective
from lightning_compress.planning.link import agreed
from lightning_compress.planning.summary import label
from lightning_compress.settings.parsing import written
from lightning_compress.settings.run_state import RunState

log = logging.getLogger("lightning_compress")

WARM = 10
"""Steps before the first one that is timed: kernels are compiled and buckets rebuilt."""
BLOCK, SKIPPED, BLOCKS = 8, 2, 4
"""Steps of a block, those at its beginning that do not count, and the blocks, which take turns to send float32."""
END = WARM + BLOCK * BLOCKS
FASTER = 0.95
"""What was picked stays only if its steps take less than this share of float32's: it costs a few more steps."""
CLEAR = 2.0
"""Nothing is tried where float32's exchange alone is expected to take so many times a step with what was picked."""


class SecondLook:
    """Time the first steps, by turns with what ``auto`` picked and in float32, and go on with the faster.

    All ranks ask for the settings of every step. They change at the same steps on all of them; rank 0's times decide.

    Args:
        settings: after the pick; ``chosen.float32_s`` is above 0.
        collective: the ranks.
        device: of the gradients.

    Attributes:
        over: whether the compressor stays from now on.
    """

    def __init__(self, settings: RunState, collective: Collective, device: torch.device) -> None:
        assert settings.chosen is not None
        self._chosen, self._collective, self._device = settings.chosen, collective, device
        self._times: dict[bool, list[float]] = {False: [], True: []}
        self._before: tuple[int, float] | None = None
        self.over = False

    def settings(self, step: int, following: RunState) -> RunState:
        """Return the settings of a step that begins.

        Args:
            step: its number.
            following: the settings that it would have without this.
        """
        now = time.perf_counter()
        if self._before is not None and self._before[0] == step - 1 and self._counts(step - 1):
            self._times[self._dense(step - 1)].append(now - self._before[1])
        decided = self._before is None and step >= END  # before a state was saved, which was loaded
        retuned = following.compressor != self._codec(step - 1)  # by the user, or by another run
        self.over |= decided or retuned or (step == WARM + BLOCK and self._pays_clearly())
        self._before = step, now
        if self.over:
            return following
        codec = self._codec(step)
        if step >= END:
            self.over = True
            codec = Dense() if self._float32_wins() else codec
        return following if following.compressor == codec else following.retuned(codec, {})

    def begin_again(self) -> None:
        """Go on where a state was loaded."""
        self._before, self.over = None, False

    def _codec(self, step: int) -> Codec:
        return Dense() if self._dense(step) else self._chosen.codec

    def _dense(self, step: int) -> bool:
        return step >= WARM and (step - WARM) // BLOCK % 2 == 1 and step < END

    def _counts(self, step: int) -> bool:
        return WARM <= step < END and (step - WARM) % BLOCK >= SKIPPED

    def _pays_clearly(self) -> bool:
        times = self._times[False]
        clear = bool(times) and self._chosen.float32_s > CLEAR * statistics.median(times)
        return bool(agreed([float(clear)], self._collective, self._device)[0])

    def _float32_wins(self) -> bool:
        """Return whether float32's steps are about as fast; without times of both, as after a resume, they are not."""
        times = [statistics.median(each) if each else 0.0 for each in self._times.values()]
        picked, dense = agreed(times, self._collective, self._device)
        wins = dense > 0 and picked > FASTER * dense
        if self._collective.rank == 0 and dense > 0:
            stays = Dense() if wins else self._chosen.codec
            log.info(
                "auto: a step takes %.3g ms with %s, %.3g ms in float32; goes on with %s. To keep this choice, write "
                "compressor=%s",
                *(1e3 * picked, label(self._chosen.codec), 1e3 * dense, label(stays), written(stays)),
            )
        return wins
