"""Gossip: each rank trains its own model and averages its parameters with its neighbours only."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_compress.codecs import Method
from lightning_compress.collectives import Collective, CountingCollective
from lightning_compress.collectives.coalesced import mean_of
from lightning_compress.collectives.counting import Meter, all_reduce_bytes
from lightning_compress.core import errors
from lightning_compress.core.layout import Layout
from lightning_compress.engine.checks import check_initialized
from lightning_compress.gossip.algorithm import LARGEST, Algorithm, Mixing
from lightning_compress.gossip.build import build_algorithm, build_gossip_compressor
from lightning_compress.gossip.moniqua import Moniqua
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.states import average_states
from lightning_compress.gossip.topology import TOLERANCE, Topology, build_topology
from lightning_compress.periodic.module_buffers import STATISTICS
from lightning_compress.periodic.sync_schedule import check_integer
from lightning_compress.periodic.synchroniser import Synchroniser, reset_nonfinite
from lightning_compress.settings.parsing import read_seed, truth

NONFINITE = (
    "its model was not finite. It went back to its model of the last round, and takes its neighbours' mean from there; "
    "check its inputs and the learning rate. comm/nonfinite_rounds counts such rounds"
)


class Gossip(Synchroniser):
    """Decentralised data-parallel training: ranks average their parameters with their neighbours only.

    Every rank trains its own model. After every ``sync_every`` optimizer steps, it averages it with the models of its
    neighbours in the topology. Optimizer states and buffers stay per-rank. For evaluation, BatchNorm's statistics are
    averaged, and other buffers are copied from rank 0. The fit ends on the exact mean of all models, on all ranks. A
    rank whose model is not finite before a round goes back to its model of the last round, and averages from there.

    Args:
        algorithm: "dpsgd"; "d2", for ranks with different data; "sgp", for directed graphs, and for messages that
            travel beside the next steps (``{"name": "sgp", "delay": 1}``); with compressors: "choco", "dcd", "ecd",
            "deepsqueeze"; a mapping (``{"name": "choco", "gamma": 0.5}``), or an ``Algorithm``.
        topology: "ring", "complete", "star", "exponential", "one_peer" (another neighbour in each round; 2, 4, 8, ...
            ranks), a matrix as nested lists, or the path of a matrix in a text or .npy file. A matrix must be
            symmetric, with rows and columns that sum to 1. ``{"name": ..., "lazy": True}`` keeps half of the weight on
            the rank itself; "d2" and "sgp" do so automatically where they must. "sgp" also takes "directed_ring",
            "one_peer_exponential" (sends to another rank in each round; any number of ranks), and matrices of which
            only the columns sum to 1.
        compressor: for "dpsgd" and "d2": "none", or "moniqua" and its settings ("d2": 4 or 8 bits); for "sgp": "none";
            for "choco" and "deepsqueeze" a contractive codec (efsign, onebit, topk, ...); for "dcd" and "ecd" an
            unbiased one (qsgd, rotated, ...). "auto": float32, signs and 8 bits, respectively.
        sync_every: optimizer steps between two rounds, 1 or more.
        evaluate: the model that is validated, tested and saved. "mean": the mean of all models, computed on demand.
            "local": each rank's own; checkpoints hold rank 0's.
        buffers: "mean" or "rank0" by shell-style pattern of buffer names, see ``LocalSGD``; for evaluation,
            checkpoints and the end of the fit.
        average_states: also average momenta and second moments with the neighbours, in float32.
        meet_every: optimizer steps between two messages of a few bytes over all ranks, by which they agree on pending
            signals and on the batch index.
        seed: of all randomness, 0 or more; None is 0.

    Raises:
        ValueError: a name or setting is unknown, a value is out of range, or the algorithm cannot take the compressor.
    """

    kind = "gossip"
    meters: Sequence[Meter] = ()
    _mixing: Mixing

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
        seed: int | None = 0,
    ) -> None:
        for name, count, least in (("sync_every", sync_every, 1), ("meet_every", meet_every, 1)):
            check_integer(name, count, least)
        super().__init__(evaluate, ("mean", "local"), buffers)
        self._averages_states = truth("average_states", average_states)
        self._algorithm = build_algorithm(algorithm)
        self._compressor = build_gossip_compressor(compressor, self._algorithm)
        self._given_topology = topology
        self._sync_every, self._meet_every, self._seed = sync_every, meet_every, read_seed("seed", seed)

    @property
    def method(self) -> str:
        """See ``Synchroniser``: algorithm, compressor and topology."""
        return f"{self._title} with weights {self._topology.checksum:08x}"

    @property
    def _title(self) -> str:
        how = getattr(self._compressor, "name", "none")
        return f"gossip by {self._algorithm.title} with {how} on {self._topology.name}"

    # a fit

    def check(self, model: nn.Module, ranks: Collective, device: torch.device) -> None:
        """See ``Synchroniser``; parameters must be float32."""
        problem, graph = None, None
        try:
            check_initialized(model)
            self._topology = self._build_topology(ranks.size)
            graph = self._topology.name, self._topology.checksum
            mixed_parameters(model, self.may_unfreeze)
        except ValueError as error:  # a file may be missing on one rank only
            problem = error
        numbers = self._sync_every, self._meet_every, self._seed, self.evaluate, self._averages_states, self.rules
        self._compare((self._algorithm, self._compressor, graph, *numbers), problem, ranks, device)
        self.rules.check(dict(model.named_buffers()))

    def _build_topology(self, size: int) -> Topology:
        setting, lazy = self._given_topology, None
        if isinstance(setting, Mapping):  # the algorithm decides about "lazy", too
            lazy = setting.get("lazy")
            setting = {name: value for name, value in setting.items() if name != "lazy" or value not in (True, False)}
        topology = self._algorithm.fit_topology(build_topology(setting, size), lazy)
        if topology.gap < TOLERANCE:
            raise ValueError(
                f"topology {topology.name}: its spectral gap is 0, so ranks would swap models and never agree. Keep "
                "some weight on the diagonal: topology={'name': ..., 'lazy': True}"
            )
        if self._averages_states and topology.directed:
            raise ValueError(
                f"average_states=True averages with neighbours that answer, and topology {topology.name} is directed. "
                "Leave it out, or use a symmetric topology: ring, star, exponential or complete"
            )
        return topology

    def _start(self) -> None:
        mixed = mixed_parameters(self.model, self.may_unfreeze)
        self._layout = Layout.of((name, tuple(each.shape)) for name, each in mixed.items())
        self._mixes = dict.fromkeys(mixed)  # parameters of modules that are added later stay per-rank
        self._algorithm.check_noise(self._compressor, self._layout, self._topology)
        self.meters = [Meter(self.device)]
        self._apart = self.ranks.apart()
        self.counted = CountingCollective(self._apart, self.meter)
        self._neighbours = Neighbours(self.counted, self._topology)
        self._flat = _FlatModel(self._layout, self.device)
        self._by_rank, self._healed, self._consensus = [0] * self.ranks.size, [0] * self.ranks.size, 0.0

    def _rebase(self) -> None:
        if hasattr(self, "_mixing"):  # a learning rate finder has trained before the fit
            self._mixing.land()
        self._flat.keep(self.named())
        arguments = self._flat.vector, self._neighbours, self._compressor, self._layout, self._seed
        self._mixing = self._algorithm.begin(*arguments)

    def _heal(self, named: Mapping[str, Tensor]) -> None:
        """Go back to the model of the last round if this rank's is not finite; its neighbours then heal it."""
        if self.ranks.size == 1 or not self._flat.heal(named):
            return
        reset_nonfinite(self.optimizers)
        rank = self.ranks.rank
        self._healed[rank] += 1
        if self._healed[rank] == 1:
            warnings.warn(f"rank {rank}, step {self.attempts}: {NONFINITE}", stacklevel=2)

    def _after_step(self) -> None:
        meter, step, size = self.meter, self.attempts, self.ranks.size
        meter.begin_step()
        if size > 1 and step % self._sync_every == 0:
            if self.meeting.unsized:
                self.meeting.agree()  # before a rank waits for a neighbour that has ended
            with errors.explained(f"step {step}: averaging with neighbours", self.ranks.rank):
                self._mix()
        meter.bytes_dense += all_reduce_bytes(4 * len(self._flat.vector), size)
        meter.end_step()
        if step % self._meet_every == 0:
            self._meet()

    def _mix(self) -> None:
        if any(each.requires_grad and name not in self._mixes for name, each in self.model.named_parameters()):
            raise ValueError(
                "a parameter that was frozen when the fit began is trained now, and is not averaged. Train it from the "
                "start, or unfreeze it by a callback derived from BaseFinetuning"
            )
        rates = [float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups]
        number, named = self._mixing.round, self.named()
        self._heal(named)
        self._flat.gather(named)
        self._mixing.mix(self._flat.vector, max(rates, default=0.0))
        self._flat.scatter(named)
        if self._averages_states:
            reset_nonfinite(self.optimizers)
            average_states(self.optimizers, self._neighbours, number)

    def _meet(self) -> None:
        """Meet all ranks; also exchange the bytes that each has sent, and how often its model was not finite."""
        size, rank, before = self.ranks.size, self.ranks.rank, self._healed
        own = [0] * (2 * size)
        own[rank], own[size + rank] = self._neighbours.bytes_sent, before[rank]
        largest = self.meeting.agree(own)
        self._by_rank, self._healed = largest[:size], largest[size:]
        for other, count in enumerate(self._healed):
            if count and not before[other] and not rank:
                text = f"rank {other}, {count} of {self._mixing.round} rounds so far: {NONFINITE}"
                warnings.warn(text, stacklevel=2)

    def _averaged(self, plain: bool) -> dict[str, Tensor]:
        if self._alone or (self.evaluate == "local" and not plain):
            return {}
        return self._mean(plain)

    def _mean(self, plain: bool = False) -> dict[str, Tensor]:
        """Return the mean of all models by name, and the other tensors that go with it. Collective.

        Args:
            plain: leave out what an algorithm holds besides the models.
        """
        named = self.named()
        self._heal(named)
        doing = f"averaging all models after {self.attempts} steps"
        models = {name: named[name] for name in self._mixes}
        with errors.explained(doing, self.ranks.rank):
            surplus = None if plain else self._mixing.surplus()
        means = mean_of(models, self.counted, doing) if surplus is None else self._mean_with(models, *surplus, doing)
        self._consensus = self._apart_from(means)
        return means | self._rest(self._mixes)

    def _mean_with(self, models: Mapping[str, Tensor], vector: Tensor, weight: float, doing: str) -> dict[str, Tensor]:
        """Return the sum of models and surplus, divided by the sum of the weights; see ``Mixing.surplus``."""
        totals = {name: view.add_(models[name]) for name, view in views_of(vector, self._layout).items()}
        weights = torch.tensor([weight], dtype=torch.float64, device=self.device)
        means = mean_of(totals, self.counted, doing)
        with errors.explained(doing, self.ranks.rank):
            self.counted.all_reduce(weights)
        return {name: each.mul_(self.ranks.size / float(weights)) for name, each in means.items()}

    def finish(self) -> None:
        """See ``Synchroniser``: all ranks get the exact mean."""
        if self._alone:
            return
        with torch.no_grad():
            self.put(self._mean())
            self._flat.keep(self.named())
            self._mixing.restart(self._flat.vector)

    def abandon(self) -> None:
        """See ``Synchroniser``; messages that cannot arrive any more are dropped."""
        super().abandon()
        if hasattr(self, "_mixing"):
            self._mixing.abandon()

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
        """See ``Synchroniser``; also bytes by neighbour and by rank, and the algorithm's figures."""
        links = {f"bytes_to_{peer}": float(sent) for peer, sent in sorted(self._neighbours.sent.items())}
        ranks = {f"bytes_of_{rank}": float(sent) for rank, sent in enumerate(self._by_rank)}
        return {
            **self.meter.read(),
            **links,
            **ranks,
            "rounds": float(self._mixing.round),
            "nonfinite_rounds": float(sum(self._healed)),
            "consensus_distance": self._consensus,
            **self._mixing.figures(),
            "summary": self.summary,
        }

    def close(self) -> None:
        """See ``Synchroniser``; closes the transport to the neighbours."""
        if not self._alone:  # after an abort a rank may still wait in it, until the process exits
            self._mixing.abandon()  # a fit that does not finish leaves messages
            self._apart.close()


def mixed_parameters(model: nn.Module, may_unfreeze: bool) -> dict[str, Tensor]:
    """Return the parameters that gossip averages, by name.

    Args:
        model: of this rank.
        may_unfreeze: parameters that are frozen may be trained later.

    Raises:
        ValueError: one of them is not float32.
    """
    mixed: dict[str, Tensor] = {
        name: each for name, each in model.named_parameters() if each.requires_grad or may_unfreeze
    }
    if kinds := {str(each.dtype) for each in mixed.values()} - {"torch.float32"}:
        raise ValueError(
            f"parameters are {', '.join(sorted(kinds))}, and gossip averages float32 parameters only; use "
            "precision='32-true', '16-mixed' or 'bf16-mixed'"
        )
    return mixed


class _FlatModel:
    """A rank's parameters as one vector. Between two rounds it holds the model that the last round left.

    Args:
        layout: of the parameters, in order.
        device: of the parameters.

    Attributes:
        vector: float32 ``[numel]``.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._names = layout.names
        self.vector = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        self._views = list(views_of(self.vector, layout).values())
        self._statistics: dict[str, Tensor] = {}

    def keep(self, named: Mapping[str, Tensor]) -> None:
        """Store a model to go back to. Norms' statistics are stored too: a batch that is not finite ruins them."""
        self.gather(named)
        self._statistics = {name: each.clone() for name, each in named.items() if name.endswith(STATISTICS)}

    def gather(self, named: Mapping[str, Tensor]) -> None:
        """Copy the parameters into the vector."""
        if self._views:
            torch._foreach_copy_(self._views, self._parameters(named))

    def scatter(self, named: Mapping[str, Tensor]) -> None:
        """Copy the vector into the parameters."""
        if self._views:
            torch._foreach_copy_(self._parameters(named), self._views)

    def heal(self, named: Mapping[str, Tensor]) -> bool:
        """Restore the last round's parameters, or norms' statistics, if the current ones are not finite.

        Neighbours never see them, and the algorithm's state is as if this rank had not moved.

        Returns:
            whether anything was restored.
        """
        counted = {name: named[name] for name in self._statistics if name in named}
        healthy = _finite(counted.values())
        for name, current in counted.items():
            stored = self._statistics[name]
            stored.copy_(current) if healthy else current.copy_(stored)
        if _finite(self._parameters(named)):
            return not healthy
        self.scatter(named)
        return True

    def _parameters(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        return [named[name].detach() for name in self._names]


def views_of(vector: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Return the parts of a vector by name, in the parameters' shapes; they share its memory."""
    return {each.name: vector[each.span].view(each.shape) for each in layout.segments}


def _finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no number is NaN, infinite, or so large that a mean with neighbours could overflow."""
    filled = [each for each in tensors if each.numel()]
    if not filled:
        return True
    largest = torch.stack([each.float() for each in torch._foreach_norm(filled, math.inf)]).max()
    return bool(largest < LARGEST)  # false for NaN, too
