"""The likeliest translations: beam search over a batch of sentences, of which greedy search is the narrowest case."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .tokenizer import BOS, EOS, PAD

__all__ = ["Decoder", "beam_search"]


class Decoder(Protocol):
    """What search asks of a model."""

    def start(self, source: Tensor) -> list[Tensor]:
        """Sources [N, S] -> a state, tensors whose first dimension is N."""

    def step(self, pieces: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The last pieces [N] -> logits of the next ones [N, vocabulary], and the new state."""


class Found(NamedTuple):
    """The best translation of each sentence so far."""

    score: Tensor
    """float32 [N]; minus infinity where there is none."""
    pieces: Tensor
    """int64 [N, longest], filled up with ``PAD``."""


@torch.no_grad()
def beam_search(
    model: Decoder, source: Tensor, *, beam: int, longest: int | Tensor, alpha: float = 0.0
) -> list[list[int]]:
    """Translate a batch.

    A translation's score is its log probability over ``((5 + length) / 6) ** alpha`` (Wu et al. 2016,
    arXiv:1609.08144, equation 14), its end counted. At each step the likeliest ``beam`` continuations of a sentence
    are looked at: those that end are translations, and the likeliest ``beam`` that do not end go on. A sentence is done
    when none of them can overtake its best translation, whatever follows. ``beam=1, alpha=0`` is greedy search.

    Args:
        model: in evaluation mode.
        source: pieces, int64 [N, S], filled up with ``PAD``.
        beam: continuations that are kept, at least 1.
        longest: most pieces of a translation, its end counted, or of each sentence's, int64 [N]; what has no end by
            then is cut.
        alpha: reward of length, at least 0.

    Returns:
        Pieces of each translation, without beginning and end.
    """
    count, device = len(source), source.device
    limit = torch.as_tensor(longest, device=device).expand(count)
    most = int(limit.max()) if count else 0
    worst = torch.tensor(-torch.inf, dtype=torch.float32, device=device)  # where parameters are bf16, new tensors are
    found = Found(worst.repeat(count), torch.full((count, most), PAD, device=device))
    here = torch.arange(count, device=device)  # sentences that are not done
    state = [each.repeat_interleave(beam, 0) for each in model.start(source)]
    score = worst.repeat(count, beam)
    score[:, 0] = 0.0  # at first all beams are the same, so one counts
    pieces = torch.full((count, beam, 1), BOS, device=device)
    for length in range(1, most + 1):
        logits, state = model.step(pieces[:, :, -1].flatten(), state)
        logits[:, [PAD, BOS]] = -torch.inf
        logp = logits.float().log_softmax(-1).unflatten(0, (-1, beam)) + score[:, :, None]
        vocabulary = logp.shape[-1]
        top, index = logp.flatten(1).topk(min(2 * beam, beam * vocabulary), 1)  # at most beam of these end
        parent, piece = index // vocabulary, index % vocabulary
        ends = piece == EOS
        _keep(found, here, pieces, parent, torch.where(ends, top, -torch.inf)[:, :beam], ((5 + length) / 6) ** alpha)
        top = top.masked_fill(ends, -torch.inf)
        score, chosen = top.topk(beam, 1)
        parent, piece = parent.gather(1, chosen), piece.gather(1, chosen)
        pieces = torch.cat([pieces.gather(1, parent[:, :, None].expand(-1, -1, length)), piece[:, :, None]], 2)
        # Scores only fall; the longest norm is the kindest to what goes on.
        late = length >= limit[here]
        cut = late & (found.score[here] == -torch.inf)  # nothing has ended
        found.pieces[here[cut], :length] = pieces[cut, 0, 1:]
        goes_on = (score[:, 0] / _norm(limit[here], alpha) > found.score[here]) & ~late
        if not goes_on.any():
            break
        rows = torch.arange(len(here) * beam, device=device).view(-1, beam).gather(1, parent)[goes_on].flatten()
        state = [each[rows] for each in state]
        here, score, pieces = here[goes_on], score[goes_on], pieces[goes_on]
    return [[piece for piece in row if piece != PAD] for row in found.pieces.tolist()]


def _norm(length: Tensor, alpha: float) -> Tensor:
    norm: Tensor = ((5 + length) / 6) ** alpha
    return norm


def _keep(found: Found, here: Tensor, pieces: Tensor, parent: Tensor, score: Tensor, norm: float) -> None:
    """Put in what ends now, where it is better than what was found before."""
    best, which = (score / norm).max(1)
    better = best > found.score[here]
    if better.any():
        beams = parent.gather(1, which[:, None])[better, 0]
        rows = here[better]
        found.score[rows] = best[better]
        found.pieces[rows] = PAD
        found.pieces[rows, : pieces.shape[2] - 1] = pieces[better, beams, 1:]
