"""The committed state of one rank as tensors and primitives, and back.

    {"format": 1, "method": str, "step": int, "rates": {name: learning rate}, "running": {setting: value},
     "groups": [{"names": [str, ...], "states": {kind: {"holder": "rank", "shared" or "owner", "names": [str, ...],
                                                        "numels": [int, ...], "numbers": float [their sum]}}}, ...],
     "orders": {name: [its dimensions, in the order of memory]},
     "rank": int,
     "in_flight": {"scale": factor of the loss in them, "means": {name: mean gradient [numel]}, "gradients": bool}}

``rank`` is not there if the numbers are a sum or a mean over the ranks. ``in_flight`` is there only if averages are
applied a step late: the next step applies these. They may be non-finite. ``gradients`` says whether they are means of
gradients; otherwise they are steps of the method, which mean nothing to another one.

Groups are saved because a bit-exact resume needs them. A resumed DistributedDataParallel begins with one bucket of all
parameters, in which blocks, shards and transforms would be cut elsewhere.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from lightning_compress.core import blocks
from lightning_compress.core.layout import Layout
from lightning_compress.core.state import State, States

FORMAT = 1

IN_FLIGHT = "in_flight"
"""The key of the averages that no optimizer has applied yet."""
RANK = "rank"
"""The key of the rank whose state it is."""

StateDict = dict[str, Any]
Orders = Mapping[str, Sequence[int]]


def build(
    method: str,
    step: int,
    rates: Mapping[str, float],
    running: Mapping[str, object],
    groups: Iterable[tuple[Sequence[str], States]],
    orders: Orders,
    rank: int,
) -> StateDict:
    """Return the committed state. Its tensors share the states' memory, which later commits replace.

    Args:
        method: the settings, as text.
        step: optimizer steps so far.
        rates: learning rates of the last step, by name.
        running: settings that may have changed since the run began, as primitives: those of the states and, if
            different, those of the next step as "next".
        groups: ordered names and states of each group.
        orders: see ``orders``.
        rank: whose states they are.
    """
    return {
        "format": FORMAT,
        "method": method,
        "step": step,
        "rates": dict(rates),
        "running": dict(running),
        "groups": [
            {"names": list(names), "states": {kind: _saved(state) for kind, state in states.items()}}
            for names, states in groups
        ],
        "orders": {name: list(order) for name, order in orders.items()},
        RANK: rank,
    }


def _saved(state: State) -> StateDict:
    numels = [segment.numel for segment in state.layout.segments]
    return {"holder": state.holder, "names": list(state.layout.names), "numels": numels, "numbers": state.committed}


def orders(parameters: Iterable[tuple[str, torch.Tensor]]) -> Orders:
    """Return the memory order of the dimensions of parameters that are not in C order (channels_last)."""
    by_name = {}
    for name, parameter in parameters:
        order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
        if not parameter.is_contiguous() and parameter.permute(order).is_contiguous():
            by_name[name] = order
    return by_name


def reordered(state: StateDict, shapes: Mapping[str, Sequence[int]], now: Orders) -> list[StateDict]:
    """Return the groups of a validated state, each parameter's values permuted to its current memory order.

    Args:
        state: contains the saved orders; states of earlier versions lack them and are not permuted.
        shapes: of the parameters.
        now: see ``orders``.

    Raises:
        ValueError: an order does not fit the parameter.
    """
    moved, permuted = _permutation(state, shapes, now)

    def change(one: StateDict) -> StateDict:
        if moved.isdisjoint(one["names"]):
            return one
        one = opened(one)
        parts = zip(one["names"], one["numbers"].split(one["numels"]), strict=True)
        return one | {"numbers": torch.cat([permuted(name, values) for name, values in parts])}

    return list(mapped(state, change)["groups"])


def means_in_flight(
    state: StateDict, shapes: Mapping[str, Sequence[int]], now: Orders
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the averages that no optimizer has applied yet, of parameters of this model; see ``reordered``.

    Returns:
        the factor of the loss that is in them, and by name each mean gradient, of its parameter's shape, in the current
        memory order; 1.0 and nothing if nothing was in flight.

    Raises:
        ValueError: one of them does not fit its parameter.
    """
    saved = state.get(IN_FLIGHT, {"scale": 1.0, "means": {}})
    _, permuted = _permutation(state, shapes, now)
    means = {name: mean for name, mean in saved["means"].items() if name in shapes}
    for name, mean in means.items():
        if mean.numel() != math.prod(shapes[name]):
            raise ValueError(f"the average of {name} has {mean.numel()} numbers and its parameter {shapes[name]}")
    return saved["scale"], {name: permuted(name, mean).reshape(tuple(shapes[name])) for name, mean in means.items()}


def bytes_in_flight(state: StateDict) -> int:
    """Return the bytes of the averages that no optimizer has applied yet."""
    return sum(mean.nbytes for mean in state[IN_FLIGHT]["means"].values()) if IN_FLIGHT in state else 0


def _permutation(
    state: StateDict, shapes: Mapping[str, Sequence[int]], now: Orders
) -> tuple[set[str], Callable[[str, torch.Tensor], torch.Tensor]]:
    """Return the names of parameters whose memory order has changed, and a function that permutes their values."""
    before: Orders = state.get("orders", now)
    moved = {name for name in shapes if before.get(name) != now.get(name)}
    if wrong := [name for name in moved if name in before and len(before[name]) != len(shapes[name])]:
        raise ValueError(
            f"the state has {wrong[0]} in the order {before[wrong[0]]}, which does not fit its shape {shapes[wrong[0]]}"
        )

    def permuted(name: str, values: torch.Tensor) -> torch.Tensor:
        if name not in moved or values.numel() != math.prod(shapes[name]):
            return values
        dimensions = range(len(shapes[name]))
        old, new = list(before.get(name, dimensions)), now.get(name, dimensions)
        return values.view([shapes[name][each] for each in old]).permute([old.index(each) for each in new]).reshape(-1)

    return moved, permuted


def _coded(one: StateDict) -> StateDict:
    """Return the state coded in 8 bits; lossless if its values were decoded from 8 bits."""
    parts = []
    for part in one["numbers"].split(one["numels"]):
        parts.append(torch.zeros(blocks.coded_bytes(len(part)), dtype=torch.uint8, device=part.device))
        blocks.encode(part.float(), parts[-1])
    return one | {"numels": [len(part) for part in parts], "numbers": torch.cat(parts)}


def fill(states: States, saved: StateDict, names: Sequence[str], dispensable: Collection[str] = ()) -> None:
    """Overwrite states with the saved values of the named parameters.

    Args:
        states: of a group.
        saved: a validated element of ``groups``.
        names: of parameters.
        dispensable: kinds of states that are skipped for parameters that no longer have them.

    Raises:
        ValueError: a part of it does not fit.
    """
    for kind, one in saved["states"].items():
        if kind in states and states[kind].committed.dtype == torch.uint8 and one["numbers"].dtype != torch.uint8:
            one = _coded(one)
        numels = {segment.name: segment.numel for segment in states[kind].layout.segments} if kind in states else {}
        sizes = dict(zip(one["names"], one["numels"], strict=True))
        wanted = sizes.keys() & numels.keys() if kind in dispensable else sizes.keys()
        if lost := [name for name in names if name in wanted and numels.get(name) != sizes[name]]:
            raise ValueError(
                f"{kind} of {', '.join(lost[:3])} was saved with other settings and does not fit this run's; resume "
                "with the settings that it was saved with"
            )
        if kind not in states:
            continue
        if one["holder"] != states[kind].holder:
            raise ValueError(f"{kind} was saved with holder {one['holder']!r}, but has {states[kind].holder!r} here")
        layout = Layout.of((name, (numel,)) for name, numel in sizes.items())
        old = State(layout, one["numbers"].device, holder=one["holder"], dtype=one["numbers"].dtype)
        old.committed = one["numbers"]
        states[kind].adopt(old, names)


def total(states: Iterable[StateDict]) -> StateDict:
    """Sum the per-rank values over the ranks; shared values are taken from the first rank.

    Args:
        states: one per rank, at least one; each has to stay valid until the next is requested.

    Raises:
        ValueError: they are of different steps or groups.
    """
    result: StateDict = {}
    first = 0
    for state in states:
        if not result:
            first, result = checksum(common(state)), zeroed(state)
        if checksum(common(state)) != first:
            raise ValueError("the ranks' files are of different steps or groups")
        for group, addend in zip(result["groups"], state["groups"], strict=True):
            for kind, one in group["states"].items():
                if one["holder"] != "shared":
                    one["numbers"] += opened(addend["states"][kind])["numbers"]
    return result


def mapped(state: StateDict, change: Callable[[StateDict], StateDict]) -> StateDict:
    """Return a copy with ``change`` applied to every state of every group, ordered by name."""
    groups = [
        group | {"states": {kind: change(one) for kind, one in sorted(group["states"].items())}}
        for group in state["groups"]
    ]
    return state | {"groups": groups}


def of_all(state: StateDict) -> StateDict:
    """Return a copy that is of no rank, for numbers that are a sum or a mean over the ranks."""
    return {name: part for name, part in state.items() if name != RANK}


def zeroed(state: StateDict) -> StateDict:
    """Return a copy with zeros for all per-rank values, of no rank."""

    def change(one: StateDict) -> StateDict:
        if one["holder"] == "shared":
            return one
        one = opened(one)
        return one | {"numbers": torch.zeros_like(one["numbers"], dtype=torch.float32)}

    return mapped(of_all(state), change)


def opened(one: StateDict) -> StateDict:
    """Return one state with float32 values, decoded if they were coded in 8 bits."""
    if one["numbers"].dtype != torch.uint8:
        return one
    parts = [blocks.decode(part) for part in one["numbers"].split(one["numels"])]
    nothing = torch.zeros(0, dtype=torch.float32, device=one["numbers"].device)
    return one | {"numels": [len(part) for part in parts], "numbers": torch.cat([nothing, *parts])}


def common(state: StateDict) -> StateDict:
    """Return what is the same on all ranks: all but the rank, the per-rank values, and what was in flight.

    If a rank fails, another one may have applied what is in flight on that rank.
    """
    state = {name: part for name, part in of_all(state).items() if name != IN_FLIGHT}
    return mapped(state, lambda one: one if one["holder"] == "shared" else one | {"numbers": None})


def moved(tree: Any, device: torch.device) -> Any:
    """Return a tree of mappings and lists with its tensors on ``device``."""
    if isinstance(tree, dict):
        return {name: moved(each, device) for name, each in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(moved(each, device) for each in tree)
    return tree.to(device) if isinstance(tree, torch.Tensor) else tree


def checksum(tree: object, value: int = 0) -> int:
    """Return the CRC-32 of tensors and primitives in mappings and lists."""
    if isinstance(tree, Mapping):
        for name in sorted(tree, key=repr):
            value = checksum(tree[name], zlib.crc32(repr(name).encode(), value))
    elif isinstance(tree, list | tuple):
        for each in tree:
            value = checksum(each, value)
        value = zlib.crc32(b"%d" % len(tree), value)
    elif isinstance(tree, torch.Tensor):
        value = zlib.crc32(repr((tree.shape, tree.dtype)).encode(), value)
        numbers = tree.detach().cpu().contiguous().view(-1).view(torch.uint8)
        value = zlib.crc32(numbers.numpy().data, value)
    else:
        value = zlib.crc32(repr(tree).encode(), value)
    return value
