"""What is in flight, in a state: averages by parameter, in any memory order; a file may hold anything."""

import pytest
import torch
import torch.distributed as dist

from lightning_compress import attach
from lightning_compress.core import state_check, state_dict
from tests.core.test_memory_format import LAST, PLAIN, model, step


def means_of(state, ddp):
    """What is in flight of each parameter, as a tensor of its shape."""
    shapes = {name: each.shape for name, each in ddp.module.named_parameters()}
    found = {}
    for name, mean in state["in_flight"]["means"].items():
        order = state["orders"].get(name, list(range(len(shapes[name]))))
        back = [order.index(each) for each in range(len(order))]
        found[name] = mean.view([shapes[name][each] for each in order]).permute(back).contiguous()
    return found


def _moved(before, after):
    """Averages of a model in one memory order, as they are in a model of another one, and the true means."""
    first = model(before)
    compression = attach(first, "none", delay=1)
    own = step(first, torch.optim.SGD(first.parameters(), 0.0), 0)
    state = compression.state_dict()
    second = model(after)
    other = attach(second, "none", delay=1)
    other.load_state_dict(state)
    for each in own:
        dist.all_reduce(each)
    saved, loaded = means_of(state, first), means_of(other.state_dict(), second)
    compression.close()
    other.close()
    names = [name for name, _ in first.module.named_parameters()]
    same = all(saved[name].equal(loaded[name]) for name in names)
    return same, max(float((saved[name] - each / 2).abs().max()) for name, each in zip(names, own, strict=True))


@pytest.mark.parametrize(("before", "after"), [(LAST, PLAIN), (PLAIN, LAST), (LAST, LAST)], ids=str)
def test_memory_order(pools, before, after):
    for same, wrong in pools[2].run(_moved, before, after):
        assert same
        assert wrong < 1e-7


def state(**changed):
    running = {"compressor": None, "error_feedback": False, "scheduled": {}}
    groups = [{"names": ["a"], "states": {}}]
    plain = {"format": 1, "method": "BF16", "step": 3, "rates": {}, "running": running, "groups": groups, "orders": {}}
    return plain | {"in_flight": {"scale": 8.0, "means": {"a": torch.ones(6)}} | changed}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"scale": 0.0}, "the scale 0.0, which must be finite and above 0"),
        ({"scale": float("inf")}, "the scale inf"),
        ({"scale": 1}, "has no 'scale' of type float"),
        ({"means": [torch.ones(6)]}, "has no 'means' of type dict"),
        ({"means": {3: torch.ones(6)}}, "floating-point tensors, by name"),
        ({"means": {"a": torch.ones(6, dtype=torch.int64)}}, "floating-point tensors, by name"),
        ({"means": {"a": torch.ones(6).to_sparse()}}, "floating-point tensors, by name"),
        ({"means": {"a": [1.0]}}, "floating-point tensors, by name"),
        ({"means": {"a": torch.ones(1).expand(6)}}, "contiguous and one-dimensional"),
        ({"means": {"a": torch.ones(2, 3)}}, "contiguous and one-dimensional"),
        ({"gradients": 1}, "must say with a bool whether it is gradients"),
    ],
    ids=str,
)
def test_a_file_may_hold_anything(changed, said):
    with pytest.raises(ValueError, match=said):
        state_check.check(state(**changed))


def test_non_finite_averages_are_kept():
    checked = state_check.check(state(means={"a": torch.full((6,), float("nan"))}))
    scale, means = state_dict.means_in_flight(checked, {"a": (2, 3)}, {})
    assert scale == 8.0
    assert means["a"].shape == (2, 3)
    assert means["a"].isnan().all()
    assert state_dict.bytes_in_flight(checked) == 24


def test_averages_of_other_parameters_are_dropped_and_of_other_shapes_refused():
    checked = state_check.check(state())
    assert state_dict.means_in_flight(checked, {"b": (6,)}, {}) == (8.0, {})
    with pytest.raises(ValueError, match="the average of a has 6 numbers and its parameter"):
        state_dict.means_in_flight(checked, {"a": (5,)}, {})


def test_what_is_in_flight_may_differ_between_the_ranks_of_a_run_that_failed():
    """A rank that did not take the last step has one more than rank 0, whose model the checkpoint holds."""
    ours, theirs = state(), state()
    del ours["in_flight"]
    assert state_dict.common(ours) == state_dict.common(theirs)
