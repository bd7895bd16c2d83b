"""The Lightning strategy of decentralised training: ranks average their parameters with neighbours alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_compress.codecs import Method
from lightning_compress.collectives import CountingCollective, TorchCollective
from lightning_compress.collectives.counting import Meter, all_reduce_bytes
from lightning_compress.core import failures
from lightning_compress.core.layout import Layout
from lightning_compress.core.squares import squares
from lightning_compress.engine.checks import check_initialized
from lightning_compress.gossip import ALGORITHMS
from lightning_compress.gossip.arguments import build_algorithm, build_gossip_compressor
from lightning_compress.gossip.base import Algorithm, Mixing
from lightning_compress.gossip.flat import Flat
from lightning_compress.gossip.moniqua import Moniqua
from lightning_compress.gossip.neighbours import Neighbours
from lightning_compress.gossip.states import average_states
from lightning_compress.gossip.topology import TOLERANCE, Topology, build_topology
from lightning_compress.local.inner import forget_nonfinite
from lightning_compress.local.means import means_of
from lightning_compress.local.statistics import STATISTICS, BufferRules
from lightning_compress.strategies import sidecar
from lightning_compress.strategies.alike import check_alike, same
from lightning_compress.strategies.meeting import END
from lightning_compress.strategies.names import register
from lightning_compress.strategies.sidecar import SavedState
from lightning_compress.strategies.unwrapped import UnwrappedMixin

Evaluate = Literal["mean", "local"]
NONFINITE = (
    "its model was not finite. It went back to its model of the last round, and takes its neighbours' mean from there; "
    "check its inputs and the learning rate. comm/nonfinite_rounds counts such rounds"
)


class Traffic(NamedTuple):
    """What a rank sent, and how long it took."""

    meter: Meter


class GossipMixin(UnwrappedMixin):
    """Turns a ``DDPStrategy`` into one that trains by gossip; see ``GossipStrategy``."""

    def __init__(
        self,
        algorithm: Algorithm | str | dict[str, Any] = "dpsgd",
        topology: Topology | str | dict[str, Any] | list[Any] = "ring",
        compressor: Method | Moniqua | str | dict[str, Any] | None = "auto",
        sync_every: int = 1,
        evaluate: Evaluate = "mean",
        buffers: dict[str, Literal["mean", "rank0"]] | None = None,
        average_states: bool = False,
        meet_every: int = 32,
        seed: int = 0,
        state: SavedState = "sidecar",
        strict_state: bool = False,
        **kwargs: Any,
    ) -> None:
        for name, count, least in (("sync_every", sync_every, 1), ("meet_every", meet_every, 1), ("seed", seed, 0)):
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise ValueError(f"{name}={count!r} must be an integer, {least} or more")
        if evaluate not in get_args(Evaluate):
            raise ValueError(f"evaluate={evaluate!r} must be one of {', '.join(map(repr, get_args(Evaluate)))}")
        if not isinstance(average_states, bool):
            raise ValueError(f"average_states={average_states!r} must be true or false")
        super().__init__(state=state, strict_state=strict_state, **kwargs)
        self._algorithm = build_algorithm(algorithm)
        self._compressor = build_gossip_compressor(compressor, self._algorithm)
        self._given_topology = topology
        self._topology: Topology | None = None
        self._sync_every, self._meet_every, self._seed = sync_every, meet_every, seed
        self._evaluate, self._averages_states = evaluate, average_states
        self._rules = BufferRules({} if buffers is None else buffers)
        self._traffic: Traffic | None = None

    @property
    def method(self) -> str:
        """Algorithm, compressor and topology, whose state goes on."""
        return f"{self._title} with weights {self.topology.checksum:08x}"

    @property
    def _title(self) -> str:
        how = getattr(self._compressor, "name", "none")
        return f"gossip by {self._algorithm.name} with {how} on {self.topology.name}"

    @property
    def topology(self) -> Topology:
        """Who averages with whom, in the fit under way.

        Raises:
            RuntimeError: there is none.
        """
        if self._topology is None:
            raise RuntimeError("there is no gossip in this process: it begins with trainer.fit()")
        return self._topology

    @property
    def compression(self) -> Traffic:
        """This rank's traffic in the fit under way, where callbacks look for it.

        Raises:
            RuntimeError: there is none.
        """
        if self._traffic is None:
            raise RuntimeError("there is no gossip in this process: it begins with trainer.fit()")
        return self._traffic

    def prepare(self, trainer: Any) -> None:
        """Build the topology, the same on all ranks, and refuse parameters that are not float32."""
        assert self.lightning_module is not None
        problem, made = "", None
        try:
            check_initialized(self.lightning_module)
            asked, lazy = self._given_topology, None
            if isinstance(asked, Mapping):  # the algorithm has a say in it
                lazy = asked.get("lazy")
                asked = {name: value for name, value in asked.items() if name != "lazy" or value not in (True, False)}
            made = self._algorithm.fit_topology(build_topology(asked, self.world_size), lazy)
            if made.gap < TOLERANCE:
                raise ValueError(
                    f"topology {made.name}: its spectral gap is 0, and ranks would swap models and never agree; leave "
                    "some weight on the diagonal: topology={'name': ..., 'lazy': True}"
                )
        except ValueError as error:  # a file may be missing on one rank alone
            problem = str(error)
        graph = None if made is None else (made.name, made.checksum)
        numbers = self._sync_every, self._meet_every, self._seed, self._evaluate, self._averages_states, self._rules
        described = repr((self._algorithm, self._compressor, graph, *numbers))
        check_alike("gossip", described, self.root_device, problem or self._kinds(trainer))
        self._rules.check(dict(self.lightning_module.named_buffers()))
        self._topology = made

    def _mixed(self, trainer: Any) -> list[str]:
        """Names of the parameters that are trained, or may be later."""
        whole = any("BaseFinetuning" in [kind.__name__ for kind in type(each).__mro__] for each in trainer.callbacks)
        return [name for name, each in self._module_parameters() if each.requires_grad or whole]

    def _kinds(self, trainer: Any) -> str:
        """What is wrong with the dtypes of these, or nothing."""
        named = dict(self._module_parameters())
        kinds = {str(named[name].dtype) for name in self._mixed(trainer)} - {"torch.float32"}
        if not kinds:
            return ""
        return (
            f"parameters are {', '.join(sorted(kinds))}, and gossip needs float32 ones, which averages are made "
            "of; use precision='32-true', '16-mixed' or 'bf16-mixed'"
        )

    def begin(self, trainer: Any) -> None:
        """Make ready for the model's parameters."""
        assert self.lightning_module is not None
        if problem := self._kinds(trainer):  # a precision like 'bf16-true' has converted them by now, on every rank
            raise ValueError(problem)
        self._names = self._mixed(trainer)
        shapes = dict(self.lightning_module.named_parameters())
        layout = Layout.of((name, tuple(shapes[name].shape)) for name in self._names)
        self._mixes = frozenset(self._names)  # what a module adds later, as caches are, stays each rank's own
        self._others = [name for name in self.replica() if name not in self._mixes]
        self._algorithm.check_noise(self._compressor, layout, self.topology)
        device = self.root_device
        meter = Meter(device)
        self._traffic = Traffic(meter)
        self._ranks = TorchCollective().apart()
        self._counted = CountingCollective(self._ranks, meter)
        self._neighbours = Neighbours(self._counted, self.topology)
        self._flat = Flat(layout, device, STATISTICS)
        self._layout = layout
        self.begin_after(0)
        self._by_rank, self._left_out, self._consensus = [0] * self.world_size, [0] * self.world_size, 0.0
        keeps = f"keeps {self._algorithm.memory} bytes a parameter between rounds"
        steps = "".join(f"{name} {value:.3g}, " for name, value in self._mixing.steps.items())
        rank_zero_info(f"{self._title}, {steps}{keeps}; {self.topology.describe()}")

    def begin_after(self, step: int) -> None:
        """What is known of the others is the model that all have."""
        self._flat.keep(self.replica())
        self._mixing: Mixing = self._algorithm.begin(
            self._flat.vector, self._neighbours, self._compressor, self._layout, self._seed
        )

    def _heal(self, named: Mapping[str, Tensor]) -> None:
        """Go back to the model of the last round where this rank's is not finite; its neighbours then heal it."""
        if self.world_size == 1 or not self._flat.heal(named):
            return
        forget_nonfinite(self.optimizers)
        rank = self.global_rank
        self._left_out[rank] += 1
        if self._left_out[rank] == 1:
            warnings.warn(f"rank {rank}, step {self.attempts}: {NONFINITE}", stacklevel=2)

    def after_attempt(self, step: int) -> None:
        """Average with neighbours, every so many steps; meet all others, every so many."""
        meter = self.compression.meter
        meter.begin_step()
        if self.world_size > 1 and step % self._sync_every == 0:
            if self.meeting.unsized:
                self.meeting.agree()  # before any of them waits for a neighbour that is done
            with failures.explained(f"step {step}: averaging with neighbours", self.global_rank):
                self._mix()
        meter.bytes_dense += all_reduce_bytes(4 * len(self._flat.vector), self.world_size)
        meter.end_step()
        if step % self._meet_every == 0:
            self._meet_all()

    def _mix(self) -> None:
        if any(each.requires_grad and name not in self._mixes for name, each in self._module_parameters()):
            raise ValueError(
                "a parameter that was frozen when the fit began is trained now, and is not averaged; train it from the "
                "start, or unfreeze it by a callback derived from BaseFinetuning"
            )
        rates = [float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups]
        number, named = self._mixing.round, self.replica()
        self._heal(named)
        self._flat.gather(named)
        self._mixing.mix(self._flat.vector, max(rates, default=0.0))
        self._flat.scatter(named)
        if self._averages_states:
            forget_nonfinite(self.optimizers)
            average_states(self.optimizers, self._neighbours, number)

    def _module_parameters(self) -> Iterator[tuple[str, Tensor]]:
        assert self.lightning_module is not None
        return self.lightning_module.named_parameters()

    def _meet_all(self) -> None:
        """Signals and batches, and what each rank has sent."""
        asked = self.meeting.ask()
        own = torch.zeros(2, self.world_size, dtype=torch.int64)
        own[:, self.global_rank] = torch.tensor([self._neighbours.bytes_sent, self._left_out[self.global_rank]])
        said = torch.cat([asked, own.flatten()])
        with failures.explained(f"meeting the others after {self.attempts} steps", self.global_rank):
            self.meeting.ranks.all_reduce_max(said)
        before = self._left_out
        self._by_rank, self._left_out = said[len(asked) :].view(2, -1).tolist()
        for rank, count in enumerate(self._left_out):
            if count and not before[rank]:
                rank_zero_warn(f"rank {rank}, {count} of {self._mixing.round} rounds so far: {NONFINITE}")
        self.meeting.heed(said[: len(asked)])

    def evaluated(self) -> Mapping[str, Tensor]:
        """The mean of parameters and of what norms have counted, or nothing for each rank's own."""
        return {} if self._evaluate == "local" or self.gives_up else dict(self._means())

    def _means(self) -> Iterator[tuple[str, Tensor]]:
        """Means, and rank 0's of other buffers, by name; a collective call for each block that is asked for."""
        named, mixed = self.replica(), self._mixes
        self._heal(named)
        frozen = {name for name, each in self._module_parameters() if each.is_floating_point()} - mixed
        others = self._differing(named)
        averaged = [name for name in others if name in frozen or self._rules.averages(name, named[name])]
        apart, norm = torch.zeros(2, dtype=torch.float64, device=self.root_device)
        with failures.explained(f"averaging all models after {self.attempts} steps", self.global_rank):
            for name, mean in means_of({name: named[name] for name in [*self._names, *averaged]}, self._counted):
                if name in mixed:
                    apart += squares(named[name].detach(), mean)
                    norm += squares(mean)
                yield name, mean.to(named[name].dtype)
            for name in sorted({*others} - {*averaged}):
                shared = named[name].detach().clone()
                self._counted.broadcast(shared, self.root_device)
                yield name, shared
            total = apart[None]
            self._counted.all_reduce(total)
        self._consensus = (float(total) / self.world_size / float(norm)) ** 0.5 if norm else 0.0

    def _differing(self, named: Mapping[str, Tensor]) -> list[str]:
        """Frozen parameters and buffers that differ by rank; a mean would round, or overflow, what is constant.

        Raises:
            ValueError: one has another shape or dtype on another rank; on every rank.
        """
        if not self._others:
            return []
        found = [named.get(name) for name in self._others]
        kinds = ["gone" if each is None else f"{each.dtype} of shape {tuple(each.shape)}" for each in found]
        doing = f"averaging all models after {self.attempts} steps"
        flags = same([*kinds, *found], self._counted, self.root_device, doing)
        alike, equal = flags[: len(found)], flags[len(found) :]
        if not all(alike):
            at = alike.index(False)
            raise ValueError(
                f"the models of the ranks cannot be averaged: {self._others[at]!r} is {kinds[at]} on rank "
                f"{self.global_rank}, and not so on another one; keep the same shape and dtype on all ranks, or keep "
                "what is each rank's own in a plain attribute"
            )
        return [name for name, each in zip(self._others, equal, strict=True) if not each]

    def average_model(self) -> None:
        """All ranks have the exact mean."""
        named = self.replica()
        for name, mean in self._means():
            named[name].copy_(mean)

    def finish(self) -> None:
        """One last merge of all ranks."""
        self.meeting.agree(END)
        self.average_model()

    def own_state(self) -> sidecar.Tree:
        """Of the algorithm."""
        return {"mixing": self._mixing.state_dict()}

    def load_own_state(self, state: sidecar.Tree) -> None:
        """Of the algorithm."""
        self._mixing.load_state_dict(state["mixing"])
        self._flat.keep(self.replica())

    def comm_stats(self) -> dict[str, Any]:
        """Traffic of the last step and in total, see ``CommunicationMonitor``; ``summary``: what runs, in a line."""
        figures = self.compression.meter.read()
        links = {f"bytes_to_{peer}": float(sent) for peer, sent in sorted(self._neighbours.sent.items())}
        ranks = {f"bytes_of_{rank}": float(sent) for rank, sent in enumerate(self._by_rank)}
        return {
            **figures,
            **links,
            **ranks,
            "rounds": float(self._mixing.round),
            "nonfinite_rounds": float(sum(self._left_out)),
            "consensus_distance": self._consensus,
            **self._mixing.figures(),
            "summary": f"{self._title}: {self.topology.describe()}",
        }

    def measure_every(self, steps: int) -> None:
        """Have time and error measured on each so-manieth step."""
        self.compression.meter.sample_every = steps

    def close(self) -> None:
        """Leave the neighbours."""
        if not self.gives_up:  # else a rank may still wait in it, and the exit ends that
            self._ranks.close()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``gossip``, one name per algorithm, Moniqua with those that take it, and the variants of each."""
        named: dict[str, dict[str, object]] = {"gossip": {}, "gossip_moniqua": {"compressor": "moniqua"}}
        named |= {f"gossip_{name}": {"algorithm": name} for name in ALGORITHMS.offered}
        named["gossip_d2_moniqua"] = {"algorithm": "d2", "compressor": "moniqua"}
        register(strategy_registry, cls, "Gossip", named)


class GossipStrategy(GossipMixin, DDPStrategy):
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
        buffers: "mean" or "rank0" by shell-style pattern of buffer names, see ``LocalSGDStrategy``; for evaluation,
            checkpoints and the end.
        average_states: average momenta and second moments with the neighbours too, as float32.
        meet_every: optimizer steps between two messages of some bytes over all ranks: whether a signal came to any of
            them, and whether all are at the same batch.
        seed: of all randomness, 0 or more.
        state: "sidecar": beside the checkpoint a file a rank, with its own model, optimizer state and what the
            algorithm keeps, from which the run goes on bit for bit; "none". At another world size all ranks begin from
            the checkpoint's model.
        strict_state: state that cannot be restored stops the run, instead of a warning.
        **kwargs: of Lightning's ``DDPStrategy``: ``timeout``, ``start_method``, ``process_group_backend``, ...

    Raises:
        ValueError: unknown names or settings, values out of range, a compressor that the algorithm cannot take, or an
            argument of DistributedDataParallel, which does not wrap the model here.
    """


GossipStrategy.register_strategies(StrategyRegistry)
