"""AD-PSGD at work on one rank: it asks a neighbour after each step, and answers those that ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lightning_compress.codecs import Dense, Method
from lightning_compress.contrib.asynchronous.links import Links, Message, Reply
from lightning_compress.contrib.asynchronous.modulo_pairs import ModuloAverage, check_settings
from lightning_compress.contrib.asynchronous.pairwise import Askers, PairwiseAverage
from lightning_compress.contrib.asynchronous.shared_model import SharedModel
from lightning_compress.core.registry import build
from lightning_compress.gossip.build import COMPRESSORS
from lightning_compress.gossip.moniqua import Moniqua


@dataclass(frozen=True)
class ADPSGD:
    """Settings of averages of pairs; equal on all ranks.

    Args:
        compressor: None or "none" for exact averages, or "moniqua" and its settings, with 8 or 4 bits.
        seed: of the choice among neighbours, 0 or more.

    Raises:
        ValueError: the compressor is another one, or ranks that do not wait cannot have its settings.

    Lian, Zhang, Zhang, Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018, arXiv
    1710.06952.
    """

    NAMES: ClassVar[tuple[str, ...]] = ()
    compressor: Dense | Moniqua | str | Mapping[str, object] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        given = "none" if self.compressor is None else self.compressor
        built = build("compressor", given, COMPRESSORS, (Method, Moniqua))
        if isinstance(built, Dense):
            object.__setattr__(self, "compressor", None)
            return
        if not isinstance(built, Moniqua):
            raise ValueError(
                f"compressor={self.compressor!r}: models that are averaged at different times have no residual in "
                "common; use 'none' or 'moniqua', or algorithm='ssp', which takes any codec"
            )
        check_settings(built)
        object.__setattr__(self, "compressor", built)


class PairGossip:
    """Averages with neighbours, one at a time, see ``PairwiseAverage`` and ``Askers``.

    Args:
        parameters: that are trained: float32, on the CPU, equal on all ranks.
        settings: equal on all ranks.

    Attributes:
        model: the parameters.
    """

    def __init__(self, parameters: Iterable[Tensor], settings: ADPSGD) -> None:
        self.model, self._seed = SharedModel(parameters), settings.seed
        coded = settings.compressor if isinstance(settings.compressor, Moniqua) else None
        self._pairs = PairwiseAverage(self.model) if coded is None else ModuloAverage(self.model, coded)
        self._pairs.pause()
        self._askers: Askers | None = None

    @property
    def kinds(self) -> Mapping[int, int]:
        """The messages that ``Links`` has to know."""
        return self._pairs.kinds

    def answer(self, rank: int, message: Message) -> Reply:
        """See ``Answer``."""
        return self._pairs.answer(rank, message)

    def connect(self, links: Links) -> None:
        """Have somebody to ask; nobody is asked before ``resume``."""
        seed = self._seed * 1_000_003 + links.rank
        self._askers = Askers(lambda peer: self._pairs.ask(links, peer), links.peers, seed)
        self._askers.pause()

    def begin(self) -> None:
        """See ``SharedModel``."""
        self.model.begin()

    def end(self) -> None:
        """See ``SharedModel``."""
        self.model.end()

    def wait(self, check: Callable[[], object] = lambda: None) -> None:
        """Ask a neighbour after a step. It waits for nobody."""
        if self._askers is not None:
            self._askers.step()
            self.look()

    def look(self) -> None:
        """Raise what has happened in other threads.

        Raises:
            GoneError: a rank is gone.
            ValueError: this rank's model is not finite.
        """
        if self._askers is not None and self._askers.error is not None:
            raise self._askers.error

    def stop(self) -> None:
        """Ask nobody any more; waits for the last answers."""
        if self._askers is not None:
            self._askers.pause()
            self.look()

    def settle(self, check: Callable[[], object] = lambda: None) -> None:
        """Bring into the parameters what others have moved, once all ranks have stopped."""
        self._pairs.pause()
        self.model.begin()
        self.model.end()

    def resume(self) -> None:
        """Ask and answer again."""
        if self._askers is not None:
            self._pairs.resume()
            self._askers.resume()

    def close(self) -> None:
        """End the threads."""
        if self._askers is not None:
            self._askers.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the neighbours."""
        return self._pairs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``."""
        self._pairs.load_state_dict(state)

    def figures(self) -> dict[str, float]:
        """Return answers in all and by neighbour, and mean steps of this rank from a question to its answer."""
        asked = self._pairs.asked
        answers = sum(asked.values())
        return {
            **{f"answers_of_{peer}": float(count) for peer, count in sorted(asked.items())},
            "answers": float(answers),
            "answered": float(self._pairs.answered),
            "staleness": sum(self._pairs.lags.values()) / answers if answers else 0.0,
        }
