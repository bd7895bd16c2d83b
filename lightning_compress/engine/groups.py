"""The groups of a model, also after DistributedDataParallel rebuilt its buckets, and the lanes that average them."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import hypot, prod

import torch
from torch import Tensor

from lightning_compress.codecs import Dense
from lightning_compress.collectives import Collective, CountingCollective, OrderedCollective, World
from lightning_compress.collectives.counting import Meter, all_reduce_bytes
from lightning_compress.collectives.turns import TurnCollective
from lightning_compress.core import state_dict
from lightning_compress.core.errors import listed
from lightning_compress.core.state import State
from lightning_compress.core.vector import squares
from lightning_compress.core.workspace import release
from lightning_compress.engine.group import MEMORY, Group, Lane
from lightning_compress.engine.group_plan import LOCO
from lightning_compress.engine.optimizers import Trained
from lightning_compress.settings.run_state import RunState

log = logging.getLogger(__name__)

Parts = tuple[int, list[tuple[Group, list[int]]]]
"""Of a bucket: the bytes that stock DistributedDataParallel sends for it; its groups, and where in it each one's
parameters are."""


class Lanes:
    """All lanes of a model: while the messages of one travel, another computes.

    Each has a transport and scratch memory of its own. Gloo matches collectives by their order, so that a lane's groups
    are averaged one after the other, in the order of the buckets on every rank. Between lanes no order is needed.

    Args:
        transports: the same ranks over a transport for each lane.
        meter: counts what all of them send.
        ordered: add floating-point numbers in rank order.

    Attributes:
        all: the lanes.
        turn: what the thread holds that computes.
    """

    def __init__(self, transports: Sequence[Collective], meter: Meter, ordered: bool) -> None:
        self.turn = threading.RLock()
        if ordered:
            transports = [OrderedCollective(each) for each in transports]
        if len(transports) > 1:
            transports = [TurnCollective(each, self.turn) for each in transports]
        worlds = [World(CountingCollective(each, meter), meter.device, meter) for each in transports]
        self.all = [Lane(world, self.turn) for world in worlds]
        self._turns = itertools.cycle(self.all)

    def next(self) -> Lane:
        """Return the lane of a new group: each in turn, so that neighbours have different ones."""
        return next(self._turns)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have all lanes for oneself inside the context; while waiting for them, others have the turn."""
        with ExitStack() as stack:
            for lane in self.all:
                stack.enter_context(lane)
            yield

    def clear(self) -> None:
        """Free the scratch memory."""
        for lane in self.all:
            lane.workspace.release()


class Groups:
    """All groups of one model, in the order in which they were made.

    Args:
        trained: the parameters.
        lanes: what its groups are averaged in.
        unused: see ``Group``.
        caps: gradient bytes at which a group is full: of the first group, and of all others. None: one group per
            bucket.

    Attributes:
        all: the groups.
        by_bucket: the groups of each known bucket; a bucket is the tuple of its parameters' names.
        orders: see ``state_dict.orders``; DistributedDataParallel has laid the parameters out by now.
    """

    def __init__(
        self,
        trained: Sequence[Trained],
        lanes: Lanes,
        unused: bool = True,
        caps: tuple[int, int] | None = None,
    ) -> None:
        self._unused = unused
        self._caps = caps
        self._shapes = {each.name: tuple(each.held().shape) for each in trained}
        self._dtypes = {each.name: each.dtype for each in trained}
        self.orders = state_dict.orders((each.name, each.held()) for each in trained)
        self._lanes = lanes
        self.all: list[Group] = []
        self._owner: dict[str, Group] = {}
        self.by_bucket: dict[tuple[str, ...], Parts] = {}

    @property
    def _ranks(self) -> Collective:
        return self._lanes.all[0].world.collective

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.all)

    def of(self, bucket: tuple[str, ...], settings: RunState) -> Parts:
        """Return the groups of a bucket under these settings, and make those that are missing.

        Args:
            bucket: the name of each parameter. If its groups exist, they are reused. Otherwise it becomes one group,
                or several if it is above the cap, like the first bucket of a run, which holds all parameters.
            settings: rebuild groups that were made with other settings.
        """
        if bucket not in self.by_bucket:
            with self._lanes.taken():  # planning may be collective
                self._add_bucket(bucket, settings)
        return self.by_bucket[bucket]

    def _add_bucket(self, names: tuple[str, ...], settings: RunState) -> None:
        owners = [group for group in self.all if not set(names).isdisjoint(group.names)]
        if sorted(name for group in owners for name in group.names) != sorted(names):
            owners = [self.add(part, settings) for run in self._runs(names) for part in self._split(run, settings)]
        elif any(group.settings is not settings for group in owners):
            owners = [self.add(part, settings) for each in owners for part in self._split(each.bucket_names, settings)]
        places = {name: place for place, name in enumerate(names)}
        size = sum(prod(self._shapes[name]) * self._dtypes[name].itemsize for name in names)
        parts = [(group, [places[name] for name in group.bucket_names]) for group in owners]
        self.by_bucket[names] = all_reduce_bytes(size, self._ranks.size), parts

    def _runs(self, names: Sequence[str]) -> list[list[str]]:
        """Cut names into groups as DistributedDataParallel cuts its buckets: gradients arrive from the last one on."""
        if self._caps is None or len(self._filled(names, self._caps[1:])) == 1:
            return [list(names)]
        return self._filled(names[::-1], self._caps)

    def _filled(self, names: Sequence[str], caps: Sequence[int]) -> list[list[str]]:
        runs: list[list[str]] = [[]]
        size = 0
        for name in names:
            if runs[-1] and size >= caps[min(len(runs), len(caps)) - 1]:  # a cap may be 0
                runs.append([])
                size = 0
            runs[-1].append(name)
            size += prod(self._shapes[name]) * self._dtypes[name].itemsize
        return runs

    def _split(self, names: Sequence[str], settings: RunState) -> list[list[str]]:
        """Separate float64 parameters that are sent dense from the others, because vectors are float32."""
        if self._dtypes[names[0]] != torch.float64:
            return [list(names)]
        dense = [isinstance(settings.rules.method_of(name, self._shapes[name]), Dense) for name in names]
        parts = [[name for name, each in zip(names, dense, strict=True) if each is kind] for kind in (False, True)]
        return [part for part in parts if part]

    def add(self, names: Sequence[str], settings: RunState, had_residual: bool = False) -> Group:
        """Make a group and copy its parameters' states from their old groups; remove groups left without parameters."""
        shaped = [(name, self._shapes[name]) for name in names]
        lane = self._lanes.next()
        had_residual = had_residual or any(old.residual and not set(names).isdisjoint(old.names) for old in self.all)
        with lane.workspace.used():
            release(*MEMORY)  # two states of some parameters are held below
            group = Group(shaped, settings, lane.world, self._unused, self._dtypes[names[0]], had_residual)
        group.lane = lane
        for old in self.all:
            moving = {name for name in group.names if self._owner.get(name) is old}
            for kind in old.states.keys() & group.states.keys() if moving else ():
                group.states[kind].adopt(old.states[kind], moving)
        if self.all:
            group.adopted()
        self._owner.update(dict.fromkeys(group.names, group))
        self.all = [each for each in [*self.all, group] if each in self._owner.values()]
        self.by_bucket = {
            bucket: (size, parts)
            for bucket, (size, parts) in self.by_bucket.items()
            if all(part in self.all for part, _ in parts)
        }
        return group

    def restore(self, state: state_dict.StateDict, settings: RunState) -> None:
        """Restore the groups and their states from a validated state; LoCo's errors may be missing.

        A group that exists as it was saved keeps its plans.

        Raises:
            ValueError: a part of it does not fit, or all of it is of other parameters.
        """
        saved_names = [name for saved in state["groups"] if saved["states"] for name in saved["names"]]
        dropped = [name for name in saved_names if name not in self._shapes]
        if dropped and len(dropped) == len(saved_names):
            raise ValueError(
                f"the state is of parameters that this model does not train ({', '.join(dropped[:3])}; it trains "
                f"{', '.join(list(self._shapes)[:3])}): give the model's modules the names that they had"
            )
        if dropped and self._ranks.rank == 0:
            log.warning("the checkpoint's state of %s is ignored: the model trains no such parameter", listed(dropped))
        for saved in state_dict.reordered(state, self._shapes, self.orders):
            if names := [name for name in saved["names"] if name in self._shapes]:
                group = self._find(names, settings, saved["states"]) or self.add(names, settings, had_residual=True)
                state_dict.fill(group.states, saved, names, dispensable=(LOCO,))
                group.adopted()

    def _find(self, names: Sequence[str], settings: RunState, kinds: Collection[str]) -> Group | None:
        """Return the group of these parameters, if it has equal settings and these kinds of states."""
        for group in self.all:
            same = list(group.bucket_names) == list(names) and group.states.keys() == set(kinds)
            if same and group.settings == settings:
                group.settings = settings  # or its bucket would rebuild it
                return group
        return None

    def states(self) -> list[State]:
        """Return all states of all groups."""
        return [state for group in self.all for state in group.states.values()]

    def reject(self, found: Callable[[Collection[str]], Tensor]) -> None:
        """Roll back the pending states of groups for which ``found(names)``, a bool scalar, says not finite."""
        for group in self.all:
            if pending := [state for state in group.states.values() if state.touched]:
                rejected = found(group.names)
                for state in pending:
                    state.reject(rejected)

    def nonfinite(self, rank: int) -> str:
        """Return what is not finite in the last gradients, as far as this rank knows; for messages."""
        names = [name for group in self.all for name in group.nonfinite]
        where = f"on rank {rank}, of {', '.join(names[:3])}" if names else "on another rank"
        return f"gradients are not finite {where}"

    def shared(self) -> list[Tensor]:
        """Return the committed states that are the same on all ranks."""
        return [state.committed for state in self.states() if state.holder == "shared"]

    def residuals(self) -> list[State]:
        """Return the residual of each group that has one."""
        return [group.residual for group in self.all if group.residual]

    def scale_residuals(self, factors: Mapping[str, float]) -> None:
        """Multiply the residuals of the named parameters."""
        for residual in self.residuals() if factors else ():
            residual.scale(factors)

    def residual_norm(self) -> float:
        """Return the norm of all committed residuals and LoCo's errors together; waits for the device."""
        norms = [float(squares(residual.committed).sqrt()) for residual in self.residuals()]
        return hypot(*norms, *(float(group.errors.norm()) for group in self.all if group.errors))

    def clear(self) -> None:
        """Free the memory."""
        self.all.clear()
        self._owner.clear()
        self.by_bucket.clear()
