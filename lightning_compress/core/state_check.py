"""Validate a state that was read from a file, before anything uses it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import Any, get_args

import torch

from lightning_compress.core.state import Holder
from lightning_compress.core.state_dict import FORMAT, IN_FLIGHT, RANK, Orders, StateDict

MOST_STEPS = 1 << 53
MOST_SETTINGS = 100_000
"""Limit on the values that say what ran: nested lists in a file could otherwise exhaust the memory."""
PARTS = {"format": int, "method": str, "step": int, "rates": dict, "running": dict, "groups": list}


def check(state: object) -> StateDict:
    """Validate a state read from a file, which may hold anything; see ``state_dict``.

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
    checks = {"orders": _checked_orders, IN_FLIGHT: _checked_in_flight, RANK: _checked_rank}
    return {name: parts[name] for name in PARTS} | {
        name: check_part(parts[name]) for name, check_part in checks.items() if name in parts
    }


def check_rank(state: StateDict, rank: int) -> None:
    """Raise ValueError if the state holds what another rank did not send.

    Args:
        state: a validated state.
        rank: that is to go on with it.

    Raises:
        ValueError: it does; for example because only rank 0's state was saved, and all ranks load it.
    """
    saved_by = state.get(RANK, rank)
    shared = all(one["holder"] == "shared" for group in state["groups"] for one in group["states"].values())
    if saved_by != rank and not shared:
        raise ValueError(
            f"rank {rank} got the state of rank {saved_by}, but each rank has its own residual. Save state_dict() to a "
            "file per rank and load that file, or use a strategy of lightning_compress (Trainer, Fabric), which does"
        )


def _checked_rank(given: Any) -> int:
    if type(given) is not int or given < 0:
        raise ValueError(f"the state is of rank {given!r}, which must be an integer from 0")
    return given


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
    if not isinstance(gradients := fields.get("gradients", False), bool):  # earlier versions did not say
        raise ValueError("what was in flight must say with a bool whether it is gradients")
    return {"scale": fields["scale"], "means": fields["means"], "gradients": gradients}


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
