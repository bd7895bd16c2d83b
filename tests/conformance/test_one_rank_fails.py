"""An exception in one rank: all stop, each saves what it has, and a run that goes on from it goes on exactly."""

import numpy as np
import pytest
import torch.distributed as dist

from tests.conformance.test_interrupted import AT, STEPS, Kept, until, whole_run
from tests.conformance.training import ByStep, outcome
from tests.helpers.lives import live


class FailsOnOne(ByStep):
    """Rank 1 raises in the middle of an epoch, while rank 0 waits for its gradients."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == AT and dist.get_rank() == 1:
            raise ArithmeticError("no more")
        return loss


def _fails(compressor, folder):
    until(compressor, FailsOnOne, callbacks=[Kept(folder)], enable_checkpointing=True)


def _goes_on(compressor, folder):
    again = outcome(*until(compressor, resume=f"{folder}/on_exception.ckpt"))
    return again, whole_run(compressor)


@pytest.mark.parametrize("compressor", ["onebit", pytest.param("powersgd", marks=pytest.mark.thorough)])
def test_an_exception_in_one_rank(pools, tmp_path, compressor):
    codes, said = live(2, tmp_path / "ranks", _fails, compressor, str(tmp_path), seconds=10)
    assert codes == [1, 1], said
    assert "ArithmeticError: no more" in said[1]
    assert "terminate called" not in said[0] + said[1]
    assert len(list(tmp_path.glob("on_exception.ckpt.lc/*.rank?.pt"))) == 2
    for again, whole in pools[2].run(_goes_on, compressor, str(tmp_path)):
        assert again["committed"] == whole["committed"] == STEPS
        assert np.array_equal(again["parameters"], whole["parameters"])
