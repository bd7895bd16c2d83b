"""The strategy in real Gloo processes, on real images."""

from functools import partial

import numpy as np
import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_compress import CompressedDDPStrategy
from tests.cases import CASES
from tests.helpers.training import Net, digits, fit, parameters, quiet_trainer, train


def _stock(steps, **strategy):
    _, model = fit(DDPStrategy(**strategy), steps)
    return parameters(model).numpy()


def _comm_hooks(compressor):
    """Hooks that a fit registers with DistributedDataParallel."""
    seen = []

    class Look(Callback):
        def on_train_start(self, trainer, module):
            seen.extend(trainer.strategy.model._comm_hooks)

    fit(CompressedDDPStrategy(compressor), 1, callbacks=[Look()])
    return len(seen)


@pytest.mark.parametrize(("compressor", "size", "hooks"), [("none", 2, 0), ("topk", 1, 0), ("topk", 2, 1)])
def test_none_and_one_rank_register_no_hook(pools, compressor, size, hooks):
    assert pools[size].run(_comm_hooks, compressor) == [hooks] * size


@pytest.mark.parametrize("size", [2, 3])
def test_none_is_stock_ddp_bit_for_bit(pools, size):
    stock = pools[size].run(_stock, 20)
    none = pools[size].run(train, "none", 20)
    assert all(np.array_equal(mine, theirs) for (mine, _), theirs in zip(none, stock, strict=True))
    assert none[0][1]["ratio"] == 1.0


@pytest.mark.parametrize(
    ("case", "size"),
    [
        pytest.param(
            case,
            size,
            id=f"{case.name}-{size}",
            marks=() if number % 9 in (0, 4, 8) and size == 2 + number % 3 else pytest.mark.thorough,
        )
        for number, case in enumerate(CASES)
        for size in (2, 3, 4)
    ],
)
def test_every_method_trains_and_ranks_stay_identical(pools, case, size):
    """A third of the methods in each run; ranks of all of them are compared where runs are resumed."""
    ranks = pools[size].run(train, case.codec, 6)
    first, stats = ranks[0]
    assert all(np.array_equal(first, other) for other, _ in ranks)
    assert np.isfinite(first).all()
    assert stats["steps"] == 6
    no_empty_row = 0.99 * 2 / size  # here, so that each rank sends all of them to all others
    assert stats["ratio"] > {"none": 0.99, "rows": no_empty_row}.get(case.name, 1.9)


def _uneven(compressor, **options):
    """Six batches on rank 0, and three more on each further rank."""
    trainer = quiet_trainer(CompressedDDPStrategy(compressor), use_distributed_sampler=False, **options)
    data = DataLoader(digits(count=16 * (6 + 3 * dist.get_rank())), 16)
    try:
        trainer.fit(Net(), data)
    except ValueError as error:
        return str(error)
    return trainer.global_step


@pytest.mark.parametrize(("compressor", "size"), [("onebit", 2), ("none", 2), ("onebit", 3)])
def test_different_numbers_of_batches_are_refused_by_that_name(pools, compressor, size):
    for options in ({"max_epochs": 1}, {"max_steps": 7}, {"max_steps": 4, "accumulate_grad_batches": 2}):
        for said in pools[size].run(partial(_uneven, compressor, **options)):
            assert "different numbers of training batches (6, 9" in said, options
            assert "or set limit_train_batches" in said


def test_a_run_that_ends_within_the_first_epoch_needs_no_equal_numbers_of_batches(pools):
    for options, steps in (({"max_steps": 6}, 6), ({"max_steps": 3, "accumulate_grad_batches": 2}, 3)):
        assert pools[2].run(partial(_uneven, "onebit", **options)) == [steps] * 2


def _trace(accumulate):
    """How often the hook ran and the step committed under accumulation."""
    strategy = CompressedDDPStrategy("onebit")
    calls = []
    import lightning_compress.engine.hook as hook

    original = hook.Compression.reduce
    hook.Compression.reduce = lambda self, *bucket: (calls.append(self.step), original(self, *bucket))[1]
    try:
        fit(strategy, 4, accumulate_grad_batches=accumulate)
    finally:
        hook.Compression.reduce = original
    return calls, strategy.compression.step


def test_accumulation_compresses_once_a_step(pools):
    (plain, _), _ = pools[2].run(_trace, 1)
    (accumulated, steps), _ = pools[2].run(_trace, 4)
    assert accumulated == plain
    assert steps == 4


def _buckets(bucket_cap_mb):
    """Names and residuals survive the rebuilding of buckets after the first step."""

    class Watch(Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_end(self, trainer, *args):
            groups = trainer.strategy.compression.groups
            self.seen.append(
                (
                    sorted(name for group in groups for name in group.names),
                    len(groups),
                    sum(float(group.residual.committed.double().square().sum()) for group in groups),
                )
            )

    watch = Watch()
    strategy = CompressedDDPStrategy("onebit", error_feedback=True, bucket_cap_mb=bucket_cap_mb)
    fit(strategy, 3, callbacks=[watch])
    return watch.seen


def test_groups_follow_the_buckets_and_keep_every_parameter_once(pools):
    seen, _ = pools[2].run(_buckets, 0.02)
    names = sorted(name for name, _ in Net().named_parameters())
    assert [each[0] for each in seen] == [names] * 3
    assert seen[0][1] == seen[1][1] > 1  # of the first bucket too, which is the whole model
    assert all(each[2] > 0 for each in seen)


@pytest.mark.parametrize("cap", [0, -1])
def test_without_a_cap_each_parameter_is_a_bucket(pools, cap):
    seen, _ = pools[2].run(_buckets, cap)
    names = sorted(name for name, _ in Net().named_parameters())
    assert [each[:2] for each in seen] == [(names, len(names))] * 3


def _by_name(name):
    trainer, model = fit(name, 2)
    return type(trainer.strategy).__name__, str(trainer.strategy._settings.compressor), parameters(model).numpy()


@pytest.mark.parametrize(
    "name", ["compressed_ddp", "compressed_ddp_topk", "compressed_ddp_find_unused_parameters_true"]
)
def test_by_registered_name(pools, name):
    ranks = pools[2].run(_by_name, name)
    assert ranks[0][0] == "CompressedDDPStrategy"
    assert np.array_equal(ranks[0][2], ranks[1][2])
    assert ranks[0][1].startswith("TopK" if "topk" in name else "Automatic")
