"""A chain of ranks in each node, and an exchange between those that lead them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_compress.collectives import Collective
from lightning_compress.exchanges.base import ExchangePlan, gather, scatter
from lightning_compress.exchanges.chain import Chain
from lightning_compress.message import Section


def agreed(
    plan: Callable[[], ExchangePlan] | None, collective: Collective, device: torch.device
) -> ExchangePlan | None:
    """What the leaders plan, and None on the other ranks; all ranks come.

    Raises:
        ValueError: a leader's plan does; on every rank.
    """
    made, problem = None, None
    try:
        made = plan() if plan else None
    except ValueError as error:  # the others would wait for this rank
        problem = error
    refused = torch.tensor([int(problem is not None)], dtype=torch.int32, device=device)
    collective.all_reduce_max(refused)
    if int(refused):
        raise problem or ValueError("the first rank of a node refuses the exchange between nodes, and says why")
    return made


class LeadersPlan(ExchangePlan):
    """Along the chain to its leader, between the leaders, and to all ranks of the node.

    The leader encodes for its node and keeps what was not sent; the vectors of the others are left with zeros.

    Args:
        sections: what the vectors consist of.
        outer: the leaders' exchange of the same sections side by side; None on other ranks, whose price lacks it.
        inside: the ranks of this rank's node.
        share: of all ranks, how many lead.
        device: where vectors are.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        outer: ExchangePlan | None,
        inside: Collective,
        share: float,
        device: torch.device,
    ) -> None:
        self._places = [slice(each.start, each.stop) for each in sections]
        self._numel = sum(each.layout.numel for each in sections)
        self._outer = outer
        self._share = share
        self._chain = Chain(inside, self._numel + 1, device)  # with the flag
        self._mean = torch.empty(self._numel if outer else 0, device=device)
        self.description = f"{outer.description if outer else 'leaders'} between chains of {inside.size}"
        self.inner_bytes, self.inner_rounds = self._chain.bytes_sent, self._chain.rounds
        self.inner_waited_bytes = self._chain.waited_bytes
        self.copies = 5.0  # into the row, its sum, what is left, the mean, out of the row
        self.bytes_sent, self.rounds, self.waited_bytes = self.inner_bytes, self.inner_rounds, self.inner_waited_bytes
        self.encodes, self.decodes, self.calls = 0.0, 0.0, 0
        if outer:
            self.bytes_sent += outer.bytes_sent
            self.waited_bytes += outer.waited_bytes
            self.rounds += outer.rounds
            self.encodes, self.decodes, self.calls = outer.encodes, outer.decodes, outer.calls
            self.sum_encodes, self.sum_decodes, self.sum_ranks = outer.sum_encodes, outer.sum_decodes, outer.sum_ranks

    def mean(self, vector: Tensor, out: Tensor, key: int, flag: Tensor) -> None:
        """See ``ExchangePlan.mean``."""
        row, problem = self._chain.row, None
        gather(vector, self._places, row)
        row[-1] = flag
        self._chain.reduce()
        for place in self._places:
            vector[place] = 0.0
        if self._outer:
            own = row[:-1]
            torch.mul(row[-1], 0.0, out=flag)
            _settle(own, flag)
            try:
                self._outer.mean(own, self._mean, key, flag)
            except ValueError as error:  # the others of the node wait for this one
                problem = error
                flag.fill_(torch.inf)
            scatter(own, self._places, vector)
            torch.mul(self._mean, self._share, out=own)
            row[-1] = flag
        self._chain.share()
        flag.copy_(row[-1])
        if flag.isinf():
            raise problem or ValueError("the first rank of a node was sent a message that it cannot read, and says why")
        flag.mul_(0.0)
        scatter(row, self._places, out)


def _settle(vector: Tensor, flag: Tensor) -> None:
    """Make a sum that is not finite a NaN in the flag and zeros."""
    if len(vector):
        lowest, highest = torch.aminmax(vector)
        flag.add_(lowest * 0.0 + highest * 0.0)
        vector.masked_fill_(flag.isnan(), 0.0)
