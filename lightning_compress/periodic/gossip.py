"""Gossip: ranks train on their own, and average their parameters with neighbours alone."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_compress.codecs import Method
from lightning_compress.collectives import Collective, CountingCollective
from lightning_compress.collectives.coalesced import mean_of
from lightning_compress.collectives.counting import Meter, all_reduce_bytes
from lightning_compress.core import errors
from lightning_compress.core.layout import Layout
from lightning_compress.core.vector import squares
from lightning_compress.engine.checks import check_initialized
from lightning_compress.gossip.algorithm import Algorithm, Mixing
from lightning_compress.gossip.build import build_algorithm, build_gossip_compressor
from lightning_compress.gossip.flat import Flat
from lightning_compress.gossip.moniqua import Moniqua
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.states import average_states
from lightning_compress.gossip.topology import TOLERANCE, Topology, build_topology
from lightning_compress.periodic.fragment import forget_nonfinite
from lightning_compress.periodic.module_buffers import STATISTICS
from lightning_compress.periodic.sync_schedule import whole
from lightning_compress.periodic.synchroniser import Synchroniser
from lightning_compress.settings.parsing import truth

NONFINITE = (
    "its model was not finite. It went back to its model of the last round, and takes its neighbours' mean from there; "
    "check its inputs and the learning rate. comm/nonfinite_rounds counts such rounds"
)


class Gossip(Synchroniser):
    """Decentralised data-parallel training: ranks average parameters with their neighbours, and nothing with all.

    Every rank trains a model of its own; after each ``sync_every`` optimizer steps it is averaged with those of its
    neighbours in the topology. The states of the optimizers stay local. Buffers are those of each rank; for evaluation
    BatchNorm's statistics are averaged, and others are rank 0's. The fit ends on the exact mean of all models, on all
    ranks. A rank whose model is not finite before a round goes back to that of the last round, and takes the mean from
    there.

    Args:
        algorithm: "dpsgd"; "d2", for ranks with different data; with compressors: "choco", "dcd", "ecd",
            "deepsqueeze"; a mapping (``{"name": "choco", "gamma": 0.5}``), or an ``Algorithm``.
        topology: "ring", "complete", "star", "exponential", "one_peer" (another neighbour each round; 2, 4, 8, ...
            ranks), a matrix as nested lists, or the path of one in a text or .npy file; symmetric, with rows and
            columns that sum to 1. ``{"name": ..., "lazy": True}`` leaves half of the weight where it is, which "d2"
            does by itself where it must.
        compressor: for "dpsgd" and "d2": "none", or "moniqua" and its settings ("d2": 4 or 8 bits); for "choco" and
            "deepsqueeze" a contractive codec (efsign, onebit, topk, ...), for "dcd" and "ecd" an unbiased one (qsgd,
            rotated, ...). "auto": float32, signs, and 8 bits.
        sync_every: optimizer steps between two rounds, 1 or more.
        evaluate: validation, tests and checkpoints have the "mean" of all models, which is computed when it is asked
            for; or each rank its own, "local", and checkpoints rank 0's.
        buffers: "mean" or "rank0" by shell-style pattern of buffer names, see ``LocalSGD``; for evaluation,
            checkpoints and the end.
        average_states: average momenta and second moments with the neighbours too, as float32.
        meet_every: optimizer steps between two messages of some bytes over all ranks: whether a signal came to any of
            them, and whether all are at the same batch.
        seed: of all randomness, 0 or more.

    Raises:
        ValueError: unknown names or settings, values out of range, or a compressor that the algorithm cannot take.
    """

    kind = "gossip"
    meters: Sequence[Meter] = ()

    def __init__(
        self,
        algorithm: Algorithm | str | dict[str, Any] = "dpsgd",
        topology: Topology | str | dict[str, Any] | list[Any] = "ring",
        compressor: Method | Moniqua | str | dict[str, Any] | None = "auto",
        sync_every: int = 1,
        evaluate: Literal["mean", "local"] = "mean",
        buffers: dict[str, Literal["mean", "rank0"]] | None = None,
        average_states: bool = False,
        meet_every: int = 32,
        seed: int = 0,
    ) -> None:
        for name, count, least in (("sync_every", sync_every, 1), ("meet_every", meet_every, 1), ("seed", seed, 0)):
            whole(name, count, least)
        super().__init__(evaluate, ("mean", "local"), buffers)
        self._averages_states = truth("average_states", average_states)
        self._algorithm = build_algorithm(algorithm)
        self._compressor = build_gossip_compressor(compressor, self._algorithm)
        self._given_topology = topology
        self._sync_every, self._meet_every, self._seed = sync_every, meet_every, seed

    @property
    def method(self) -> str:
        """Algorithm, compressor and topology, whose state goes on."""
        return f"{self._title} with weights {self._topology.checksum:08x}"

    @property
    def _title(self) -> str:
        how = getattr(self._compressor, "name", "none")
        return f"gossip by {self._algorithm.name} with {how} on {self._topology.name}"

    # a fit

    def check(self, model: nn.Module, ranks: Collective, device: torch.device) -> None:
        """See ``Synchroniser``; parameters must be float32."""
        problem, graph = None, None
        try:
            check_initialized(model)
            self._topology = self._built(ranks.size)
            graph = self._topology.name, self._topology.checksum
            self._check_kinds(model)
        except ValueError as error:  # a file may be missing on one rank alone
            problem = error
        numbers = self._sync_every, self._meet_every, self._seed, self.evaluate, self._averages_states, self.rules
        self._compare((self._algorithm, self._compressor, graph, *numbers), problem, ranks, device)
        self.rules.check(dict(model.named_buffers()))

    def _built(self, size: int) -> Topology:
        asked, lazy = self._given_topology, None
        if isinstance(asked, Mapping):  # the algorithm has a say in it
            lazy = asked.get("lazy")
            asked = {name: value for name, value in asked.items() if name != "lazy" or value not in (True, False)}
        made = self._algorithm.fit_topology(build_topology(asked, size), lazy)
        if made.gap < TOLERANCE:
            raise ValueError(
                f"topology {made.name}: its spectral gap is 0, and ranks would swap models and never agree; leave "
                "some weight on the diagonal: topology={'name': ..., 'lazy': True}"
            )
        return made

    def _mixed(self, model: nn.Module) -> dict[str, Tensor]:
        """Parameters that are trained, or may be later."""
        return {name: each for name, each in model.named_parameters() if each.requires_grad or self.thaws}

    def _check_kinds(self, model: nn.Module) -> None:
        if kinds := {str(each.dtype) for each in self._mixed(model).values()} - {"torch.float32"}:
            raise ValueError(
                f"parameters are {', '.join(sorted(kinds))}, and gossip needs float32 ones, which averages are made "
                "of; use precision='32-true', '16-mixed' or 'bf16-mixed'"
            )

    def _start(self) -> None:
        mixed = self._mixed(self.model)
        self._layout = Layout.of((name, tuple(each.shape)) for name, each in mixed.items())
        self._mixes = dict.fromkeys(mixed)  # what a module adds later stays each rank's own
        self._algorithm.check_noise(self._compressor, self._layout, self._topology)
        self.meters = [Meter(self.device)]
        self._apart = self.ranks.apart()
        self.counted = CountingCollective(self._apart, self.meter)
        self._neighbours = Neighbours(self.counted, self._topology)
        self._flat = Flat(self._layout, self.device, STATISTICS)
        self._by_rank, self._left_out, self._consensus = [0] * self.ranks.size, [0] * self.ranks.size, 0.0

    def _rebase(self) -> None:
        """What is known of the others is the model that all have."""
        self._flat.keep(self.named())
        ours = self._flat.vector, self._neighbours, self._compressor, self._layout, self._seed
        self._mixing: Mixing = self._algorithm.begin(*ours)

    def _heal(self, named: Mapping[str, Tensor]) -> None:
        """Go back to the model of the last round where this rank's is not finite; its neighbours then heal it."""
        if self.ranks.size == 1 or not self._flat.heal(named):
            return
        forget_nonfinite(self.optimizers)
        rank = self.ranks.rank
        self._left_out[rank] += 1
        if self._left_out[rank] == 1:
            warnings.warn(f"rank {rank}, step {self.attempts}: {NONFINITE}", stacklevel=2)

    def _after_step(self) -> None:
        """Average with neighbours, every so many steps; meet all others, every so many."""
        meter, step, size = self.meter, self.attempts, self.ranks.size
        meter.begin_step()
        if size > 1 and step % self._sync_every == 0:
            if self.meeting.unsized:
                self.meeting.agree()  # before any of them waits for a neighbour that is done
            with errors.explained(f"step {step}: averaging with neighbours", self.ranks.rank):
                self._mix()
        meter.bytes_dense += all_reduce_bytes(4 * len(self._flat.vector), size)
        meter.end_step()
        if step % self._meet_every == 0:
            self._meet()

    def _mix(self) -> None:
        if any(each.requires_grad and name not in self._mixes for name, each in self.model.named_parameters()):
            raise ValueError(
                "a parameter that was frozen when the fit began is trained now, and is not averaged; train it from the "
                "start, or unfreeze it by a callback derived from BaseFinetuning"
            )
        rates = [float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups]
        number, named = self._mixing.round, self.named()
        self._heal(named)
        self._flat.gather(named)
        self._mixing.mix(self._flat.vector, max(rates, default=0.0))
        self._flat.scatter(named)
        if self._averages_states:
            forget_nonfinite(self.optimizers)
            average_states(self.optimizers, self._neighbours, number)

    def _meet(self) -> None:
        """What each rank has sent, and how often its model was not finite, goes along."""
        size, rank, before = self.ranks.size, self.ranks.rank, self._left_out
        own = [0] * (2 * size)
        own[rank], own[size + rank] = self._neighbours.bytes_sent, before[rank]
        said = self.meeting.agree(own)
        self._by_rank, self._left_out = said[:size], said[size:]
        for other, count in enumerate(self._left_out):
            if count and not before[other] and not rank:
                text = f"rank {other}, {count} of {self._mixing.round} rounds so far: {NONFINITE}"
                warnings.warn(text, stacklevel=2)

    def _averaged(self, plain: bool) -> dict[str, Tensor]:
        """The mean of all models, or each rank's own."""
        if self._alone or (self.evaluate == "local" and not plain):
            return {}
        named = self.named()
        self._heal(named)
        doing = f"averaging all models after {self.attempts} steps"
        means = mean_of({name: named[name] for name in self._mixes}, self.counted, doing)
        apart, norm = torch.zeros(2, 1, dtype=torch.float64, device=self.device)
        for name, mean in means.items():
            apart += squares(named[name].detach(), mean)
            norm += squares(mean)
        with errors.explained(doing, self.ranks.rank):
            self.counted.all_reduce(apart)
        self._consensus = (float(apart) / self.ranks.size / float(norm)) ** 0.5 if norm else 0.0
        return means | self._rest(self._mixes)

    def finish(self) -> None:
        """See ``Synchroniser``: the exact mean."""
        self.put(self.averaged_model(plain=True))

    def state_dict(self) -> dict[str, Any]:
        """See ``Synchroniser``."""
        return {"common": {"attempts": self.attempts}, "mixing": self._mixing.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Synchroniser``."""
        self.attempts = state["common"]["attempts"]
        self._mixing.load_state_dict(state["mixing"])
        self._flat.keep(self.named())

    @property
    def summary(self) -> str:
        """See ``Synchroniser``."""
        keeps = f"keeps {self._algorithm.memory} bytes a parameter between rounds"
        steps = "".join(f"{name} {value:.3g}, " for name, value in self._mixing.steps.items())
        return f"{self._title}, {steps}{keeps}; {self._topology.describe()}"

    def stats(self) -> dict[str, Any]:
        """Traffic of the last step and in total, see ``CommunicationMonitor``; ``summary``: what runs, in a line."""
        links = {f"bytes_to_{peer}": float(sent) for peer, sent in sorted(self._neighbours.sent.items())}
        ranks = {f"bytes_of_{rank}": float(sent) for rank, sent in enumerate(self._by_rank)}
        return {
            **self.meter.read(),
            **links,
            **ranks,
            "rounds": float(self._mixing.round),
            "nonfinite_rounds": float(sum(self._left_out)),
            "consensus_distance": self._consensus,
            **self._mixing.figures(),
            "summary": self.summary,
        }

    def close(self) -> None:
        """See ``Synchroniser``; leave the neighbours."""
        if not self._alone:  # else a rank may still wait in it, and the exit ends that
            self._apart.close()
