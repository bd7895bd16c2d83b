"""The committed state of one rank as tensors and primitives, and back.

    {"format": 1, "method": str, "step": int, "rates": {name: learning rate}, "running": {setting: value},
     "groups": [{"names": [str, ...], "states": {kind: {"holder": "rank", "shared" or "owner", "names": [str, ...],
                                                        "numels": [int, ...], "numbers": float [their sum]}}}, ...],
     "orders": {name: [its dimensions, in the order of memory]},
     "in_flight": {"scale": factor of the loss in them, "means": {name: mean gradient [numel]}}}

``in_flight`` is there only if averages are applied a step late: the next step applies these. They may be non-finite.

Groups are saved because a bit-exact resume needs them. A resumed DistributedDataParallel begins with one bucket of all
parameters, in which blocks, shards and transforms would be cut elsewhere.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, get_args

import torch

from lightning_compress.core import blocks
from lightning_compress.core.layout import Layout
from lightning_compress.core.state import Holder, State, States

FORMAT = 1
MOST_STEPS = 1 << 53
MOST_SETTINGS = 100_000
"""Limit on the values that say what ran: nested lists in a file could otherwise exhaust the memory."""
PARTS = {"format": int, "method": str, "step": int, "rates": dict, "running": dict, "groups": list}

IN_FLIGHT = "in_flight"
"""The key of the averages that no optimizer has applied yet."""

StateDict = dict[str, Any]
Orders = Mapping[str, Sequence[int]]


def build(
    method: str,
    step: int,
    rates: Mapping[str, float],
    running: Mapping[str, object],
    groups: Iterable[tuple[Sequence[str], States]],
    orders: Orders,
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


def zeroed(state: StateDict) -> StateDict:
    """Return a copy with zeros for all per-rank values."""

    def change(one: StateDict) -> StateDict:
        if one["holder"] == "shared":
            return one
        one = opened(one)
        return one | {"numbers": torch.zeros_like(one["numbers"], dtype=torch.float32)}

    return mapped(state, change)


def opened(one: StateDict) -> StateDict:
    """Return one state with float32 values, decoded if they were coded in 8 bits."""
    if one["numbers"].dtype != torch.uint8:
        return one
    parts = [blocks.decode(part) for part in one["numbers"].split(one["numels"])]
    nothing = torch.zeros(0, device=one["numbers"].device)
    return one | {"numels": [len(part) for part in parts], "numbers": torch.cat([nothing, *parts])}


def common(state: StateDict) -> StateDict:
    """Return what is the same on all ranks: all but the per-rank values, and what was in flight.

    If a rank fails, another one may have applied what is in flight on that rank.
    """
    state = {name: part for name, part in state.items() if name != IN_FLIGHT}
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


def check(state: object) -> StateDict:
    """Validate a state read from a file, which may hold anything.

    Returns:
        its known parts.

    Raises:
        ValueError: a part is missing or of the wrong type, or values and names do not fit together.
    """
    parts = _fields(state, "the state", PARTS)
    if parts["format"] != FORMAT:
        raise ValueError(f"the state has format {parts['format']!r}, but this version reads format {FORMAT}")
    if not {"compressor", "error_feedback", "scheduled"} <= parts["running"].keys():
        raise ValueError("the state does not say what ran")
    _check_running(parts["running"])
    if not 0 <= parts["step"] < MOST_STEPS:
        raise ValueError(f"the state's step {parts['step']} must be in [0, {MOST_STEPS})")
    rates = parts["rates"].items()
    if not all(isinstance(name, str) and type(rate) is float and 0 < rate < math.inf for name, rate in rates):
        raise ValueError("the state's learning rates must be finite floats above 0, by name")
    for group in parts["groups"]:
        fields = _fields(group, "a group", {"names": list, "states": dict})
        if not all(isinstance(name, str) for name in fields["names"]):
            raise ValueError("the state has a group with names that are not text")
        for kind, one in fields["states"].items():
            _check_one(kind, one, set(fields["names"]))
    names = [name for group in parts["groups"] for name in group["names"]]
    if len(set(names)) != len(names):
        raise ValueError("the state has a parameter in two groups")
    checks = {"orders": _checked_orders, IN_FLIGHT: _checked_in_flight}
    return {name: parts[name] for name in PARTS} | {
        name: check_part(parts[name]) for name, check_part in checks.items() if name in parts
    }


def _checked_in_flight(given: Any) -> StateDict:
    fields = _fields(given, "what was in flight", {"scale": float, "means": dict})
    if not 0 < fields["scale"] < math.inf:
        raise ValueError(f"what was in flight has the scale {fields['scale']}, which must be finite and above 0")
    for name, mean in fields["means"].items():
        plain = type(mean) is torch.Tensor and mean.layout == torch.strided and not mean.is_meta
        if not isinstance(name, str) or not plain or not mean.is_floating_point() or mean.requires_grad:
            raise ValueError("what was in flight must be floating-point tensors, by name")
        if mean.dim() != 1 or not mean.is_contiguous():  # a strided view of one value can exceed the memory
            raise ValueError(f"what was in flight of {name} must be contiguous and one-dimensional")
    return {"scale": fields["scale"], "means": fields["means"]}


def _checked_orders(orders: Any) -> Orders:
    fits = isinstance(orders, dict) and all(isinstance(name, str) for name in orders)
    if not fits or not all(_is_order(order) for order in orders.values()):
        raise ValueError("the state does not say in which order the numbers of its parameters are")
    checked: Orders = orders
    return checked


def _is_order(order: Any) -> bool:
    integers = isinstance(order, list) and all(type(dimension) is int for dimension in order)
    return integers and sorted(order) == list(range(len(order)))


def _check_running(running: Mapping[object, object]) -> None:
    """Raise ValueError unless these are primitives in mappings and lists, and not too many: other code prints them."""
    feedback, scheduled, compressor = (running[name] for name in ("error_feedback", "scheduled", "compressor"))
    fits = isinstance(feedback, bool) and isinstance(scheduled, dict) and isinstance(compressor, dict | None)
    values: list[object] = [running]
    for value in values:  # grows inside the loop
        if isinstance(value, dict):
            fits = fits and all(isinstance(name, str) for name in value)
            values += islice(value.values(), MOST_SETTINGS + 1)
        elif isinstance(value, list | tuple):
            values += value[: MOST_SETTINGS + 1]
        else:
            fits = fits and (value is None or isinstance(value, bool | int | float | str))
        if not fits or len(values) > MOST_SETTINGS:
            raise ValueError("the state does not say what ran in numbers and texts")


def _check_one(kind: object, one: object, owners: set[str]) -> None:
    if not isinstance(kind, str):
        raise ValueError(f"a state's name is {type(kind).__name__}, not text")
    wanted = {"holder": str, "names": list, "numels": list, "numbers": torch.Tensor}
    fields = _fields(one, f"state {kind!r}", wanted)
    names, numels, numbers = fields["names"], fields["numels"], fields["numbers"]
    if not all(isinstance(name, str) and name in owners for name in names) or len(set(names)) != len(names):
        raise ValueError(f"the {len(names)} parameters of state {kind!r} must be different ones of its group")
    if fields["holder"] not in get_args(Holder):
        raise ValueError(
            f"state {kind!r} has the holder {fields['holder']!r}; it must be one of {', '.join(get_args(Holder))}"
        )
    if len(numels) != len(names) or not all(type(each) is int and each >= 0 for each in numels):
        raise ValueError(f"state {kind!r} must have a length of at least 0 for each of its {len(names)} parameters")
    dense = numbers.dtype in (torch.float32, torch.bfloat16, torch.uint8) and numbers.layout == torch.strided
    plain = type(numbers) is torch.Tensor and not numbers.requires_grad and not numbers.is_meta
    if not dense or not plain or not numbers.is_contiguous():  # a strided view of one value can exceed the memory
        raise ValueError(f"state {kind!r} must be a contiguous float32, bfloat16 or uint8 tensor")
    if numbers.shape != (sum(numels),):
        raise ValueError(f"state {kind!r} is {numbers.dtype} of shape {tuple(numbers.shape)}, not ({sum(numels)},)")
    if not bool(numbers.isfinite().all()):
        raise ValueError(f"state {kind!r} has values that are not finite")


def _fields(part: object, what: str, wanted: Mapping[str, type]) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise ValueError(f"{what} is {type(part).__name__}, not a mapping")
    for name, kind in wanted.items():
        if not isinstance(part.get(name), kind) or isinstance(part[name], bool):
            raise ValueError(f"{what} has no {name!r} of type {kind.__name__}")
    return part
