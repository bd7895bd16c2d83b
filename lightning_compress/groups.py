"""The groups of a model: which bucket is made up of which, and what happens when DDP builds its buckets anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from lightning_compress import snapshot
from lightning_compress.collectives import World
from lightning_compress.group import Group
from lightning_compress.rules import Shape
from lightning_compress.scratch import Scratch
from lightning_compress.settings import Settings
from lightning_compress.state import State

Parts = list[tuple[Group, list[int]]]
"""The groups of a bucket, and where in the bucket each one's parameters are."""


class Groups:
    """All groups of one model, in the order in which they were made.

    Args:
        names: of the parameters, by their ``id``.
        shapes: of the parameters, by their names.
        world: the ranks to average over.
        unused: see ``Group``.
    """

    def __init__(
        self, names: Mapping[int, str], shapes: Mapping[str, Shape], world: World, unused: bool = True
    ) -> None:
        self._unused = unused
        self._names = names
        self._shapes = shapes
        self._world = world
        self._scratch = Scratch(world.device)
        self._groups: list[Group] = []
        self._owner: dict[str, Group] = {}
        self._by_bucket: dict[tuple[int, ...], Parts] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def of(self, parameters: Sequence[Tensor], settings: Settings) -> Parts:
        """What a bucket is made up of, under these settings.

        A bucket is one new group, unless it is made up of groups that there are, as the first bucket of a resumed run.
        """
        bucket = tuple(map(id, parameters))
        if bucket not in self._by_bucket:
            names = [self._names[each] for each in bucket]
            owners = [group for group in self._groups if not set(names).isdisjoint(group.names)]
            if sorted(name for group in owners for name in group.names) != sorted(names):
                owners = [self.add(names, settings)]
            elif any(group.settings is not settings for group in owners):
                owners = [self.add(group.given, settings) for group in owners]
            places = {name: place for place, name in enumerate(names)}
            self._by_bucket[bucket] = [(group, [places[name] for name in group.given]) for group in owners]
        return self._by_bucket[bucket]

    def add(self, names: Sequence[str], settings: Settings) -> Group:
        """A new group, with the state that its parameters have so far; groups that have none left go."""
        shaped = [(name, self._shapes[name]) for name in names]
        self._scratch.clear()
        group = Group(shaped, settings, self._world, self._scratch, self._unused)
        for old in self._groups:
            moving = {name for name in group.names if self._owner.get(name) is old}
            for kind in old.states.keys() & group.states.keys() if moving else ():
                group.states[kind].adopt(old.states[kind], moving)
        if self._groups:
            group.adopted()
        self._owner.update(dict.fromkeys(group.names, group))
        self._groups = [each for each in [*self._groups, group] if each in self._owner.values()]
        self._by_bucket = {
            bucket: parts for bucket, parts in self._by_bucket.items() if all(part in self._groups for part, _ in parts)
        }
        return group

    def restore(self, groups: Sequence[snapshot.Snapshot], settings: Settings) -> None:
        """Make the groups of a checked snapshot anew, with their states.

        Raises:
            ValueError: there is no place for some of it.
        """
        for saved in groups:
            if names := [name for name in saved["names"] if name in self._shapes]:
                group = self.add(names, settings)
                snapshot.fill(group.states, saved, names)
                group.adopted()

    def look_again(self) -> None:
        """Settings have changed: the groups of each bucket are made anew when it comes."""
        self._by_bucket.clear()

    def states(self) -> list[State]:
        """Everything that is kept from step to step."""
        return [state for group in self._groups for state in group.states.values()]

    def shared(self) -> list[Tensor]:
        """What is kept and the same on all ranks."""
        return [state.committed for state in self.states() if state.holder == "shared"]

    def residuals(self) -> list[State]:
        """What encoding left behind."""
        return [group.residual for group in self._groups if group.residual]

    def clear(self) -> None:
        """Give the memory back."""
        self._groups.clear()
        self._owner.clear()
        self._by_bucket.clear()
        self._scratch.clear()
