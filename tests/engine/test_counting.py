"""What DistributedDataParallel sends where it averages by itself is counted as what our hook sends."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_compress import CompressedDDPStrategy, attach
from tests.helpers.training import Net, digits, quiet_trainer

BATCHES = 8


class Evaluated(Net):
    """With a validation after every fourth batch."""

    def validation_step(self, batch, batch_idx):
        self(batch[0])


class Twice(Net):
    """Two backward passes and two steps in a batch, by hand."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for _ in range(2):
            loss = super().training_step(batch, batch_idx)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()


class Tuned(Net):
    """An optimizer that evaluates the loss several times in a step."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), 1e-3, max_iter=2, tolerance_grad=0, tolerance_change=0)


def _fit(compressor, make, options, settings):
    torch.manual_seed(0)
    strategy = CompressedDDPStrategy(compressor, **settings)
    evaluated = DataLoader(digits(count=16), 16) if make is Evaluated else None
    trainer = quiet_trainer(strategy, max_epochs=1, limit_train_batches=BATCHES, **options)
    model = make()
    trainer.fit(model, DataLoader(digits(), 16, drop_last=True), evaluated)
    stats = strategy.comm_stats()
    total = 4 * sum(each.numel() for each in model.parameters())
    return stats["steps"], stats["total_bytes_dense"] / total


@pytest.mark.parametrize(
    ("make", "options", "settings", "steps", "passes"),
    [
        (Net, {}, {}, BATCHES, BATCHES),
        (Net, {"accumulate_grad_batches": 4}, {}, 2, 2),
        (Evaluated, {"val_check_interval": 4}, {}, BATCHES, BATCHES),
        (Twice, {}, {}, 2 * BATCHES, 2 * BATCHES),
        (Twice, {}, {"find_unused_parameters": True}, 2 * BATCHES, 2 * BATCHES),
        (Tuned, {}, {}, BATCHES, 2 * BATCHES),
    ],
)
def test_as_many_bytes_as_the_hook(pools, make, options, settings, steps, passes):
    plain, ours = (pools[2].run(_fit, name, make, options, settings)[0] for name in ("none", "bf16"))
    assert plain[0] == ours[0] == steps
    assert plain[1] == pytest.approx(passes)  # two ranks send as many bytes as there are
    assert plain[1] == pytest.approx(ours[1])


def _bare(find_unused):
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), find_unused_parameters=find_unused
    )
    compression = attach(model, "none")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        with model.no_sync():
            model(torch.randn(8, 64)).sum().backward()
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = compression.stats()
    compression.close()
    model(torch.randn(8, 64)).sum().backward()
    return stats["steps"], stats["total_bytes_sent"], compression.stats()["total_bytes_sent"]


@pytest.mark.parametrize("find_unused", [False, True])
def test_passes_that_do_not_synchronise_send_nothing(pools, find_unused):
    total = 4 * (64 * 64 + 64 + 64 * 8 + 8)
    assert pools[2].run(_bare, find_unused) == [(3, 3 * total, 3 * total)] * 2


def _static(compressor):
    torch.manual_seed(0)
    model, strategy = Twice(), CompressedDDPStrategy(compressor, static_graph=True)
    quiet_trainer(strategy, max_epochs=1, limit_train_batches=3).fit(model, DataLoader(digits(), 16, drop_last=True))
    return strategy.comm_stats()["steps"], [each.detach().numpy() for each in model.parameters()]


def test_a_static_graph_by_hand(pools):
    """There Lightning averages behind backward; as the same run whose average is DistributedDataParallel's."""
    (steps, stock), *_ = pools[2].run(_static, "none")
    for compressed in pools[2].run(_static, {"name": "topk", "density": 1.0}):
        assert compressed[0] == steps == 6
        for mine, theirs in zip(compressed[1], stock, strict=True):
            assert abs(mine - theirs).max() < 1e-5


def _nonfinite():
    class Spoilt(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 2 else 1.0)

    link = {"latency_s": 1e-7, "bytes_per_s": 1e13}  # so fast that float32 is best
    strategy = CompressedDDPStrategy("auto", exchange={"name": "auto", "link": link}, on_nonfinite="skip")
    model = Spoilt()
    quiet_trainer(strategy, max_epochs=1, limit_train_batches=5).fit(model, DataLoader(digits(), 16, drop_last=True))
    finite = all(bool(each.isfinite().all()) for each in model.parameters())
    return strategy.comm_stats()["summary"], strategy.comm_stats()["nonfinite_steps"], finite


def test_steps_that_are_not_finite_are_skipped_whatever_auto_chooses(pools):
    for summary, count, finite in pools[2].run(_nonfinite):
        assert "compression is off" in summary
        assert (count, finite) == (1, True)
