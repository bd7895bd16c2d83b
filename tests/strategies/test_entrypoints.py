"""Every door a user comes in by: names, command line, YAML, both Lightning namespaces, spawned processes."""

import inspect
import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_compress import AsyncGossipStrategy, CompressedDDPStrategy, GossipStrategy, LocalSGDStrategy
from lightning_compress.codecs import OneBit, TopK
from lightning_compress.contrib.asynchronous.async_gossip import AsyncGossip
from lightning_compress.periodic.gossip import Gossip
from lightning_compress.periodic.local_sgd import OPTIONS, LocalSGD
from lightning_compress.settings.parsing import COMPRESSORS
from tests.helpers.ports import free_port
from tests.helpers.processes import PRELOADED, forking
from tests.helpers.table import table
from tests.helpers.training import Net, digits, loader, parameters

BARE = {"PYTHONPATH": ".", "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
CLASS_PATH = "lightning_compress.CompressedDDPStrategy"


@table("name", ["compressed_ddp", *(f"compressed_ddp_{name}" for name in COMPRESSORS.offered)])
@table("variant", ["", "_find_unused_parameters_true", "_spawn", "_fork", "_notebook"])
def test_registered(name, variant):
    strategy = StrategyRegistry.get(name + variant)
    assert isinstance(strategy, CompressedDDPStrategy)
    if variant.startswith("_find"):
        assert strategy._ddp_kwargs["find_unused_parameters"] is True


@pytest.mark.parametrize(
    ("strategy", "builds"),
    [(LocalSGDStrategy, LocalSGD), (GossipStrategy, Gossip), (AsyncGossipStrategy, AsyncGossip)],
)
def test_a_strategy_has_the_arguments_of_what_it_builds(strategy, builds):
    own, theirs, ddp = (inspect.signature(each).parameters for each in (builds, strategy, CompressedDDPStrategy))
    named = {name: each.default for name, each in own.items() if each.kind != each.VAR_KEYWORD}
    if builds is LocalSGD:
        named |= {name: ddp[name].default for name in OPTIONS}
    assert named | {"state": "sidecar", "strict_state": False} == {
        name: each.default for name, each in theirs.items() if each.kind != each.VAR_KEYWORD
    }
    assert list(theirs)[: len(named)] == list(named)


def test_registering_twice_changes_nothing():
    before = len(StrategyRegistry)
    CompressedDDPStrategy.register_strategies(StrategyRegistry)
    assert len(StrategyRegistry) == before


@pytest.mark.parametrize(
    ("arguments", "codec"),
    [
        ([f"--trainer.strategy={CLASS_PATH}", "--trainer.strategy.compressor=onebit"], OneBit()),
        (
            [f"--trainer.strategy={CLASS_PATH}", '--trainer.strategy.compressor={"name": "topk", "density": 0.2}'],
            TopK(density=0.2),
        ),
        ([f"--trainer.strategy={CLASS_PATH}", "--trainer.strategy.find_unused_parameters=true"], None),
        (["--trainer.strategy=compressed_ddp_topk"], TopK()),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_lightning_cli(arguments, codec):
    cli = LightningCLI(Net, args=[*arguments, "--trainer.accelerator=cpu", "--trainer.logger=false"], run=False)
    assert isinstance(cli.trainer.strategy, CompressedDDPStrategy)
    assert codec is None or cli.trainer.strategy._settings.method == codec


@pytest.mark.filterwarnings("ignore")
def test_lightning_cli_yaml(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer:\n  accelerator: cpu\n  logger: false\n  strategy:\n"
        f"    class_path: {CLASS_PATH}\n    init_args:\n"
        "      compressor:\n        class_path: lightning_compress.codecs.TopK\n        init_args: {density: 0.3}\n"
        "      rules: [{match: ['head.*'], compressor: none}]\n"
    )
    cli = LightningCLI(Net, args=[f"--config={config}"], run=False)
    assert cli.trainer.strategy._settings.method == TopK(density=0.3)
    assert cli.trainer.strategy._settings.options.rules[0].match == ("head.*",)


def test_an_unused_strategy_can_be_pickled():
    strategy = CompressedDDPStrategy({"name": "topk", "density": 0.5}, rules=[{"match": "a", "compressor": "none"}])
    assert pickle.loads(pickle.dumps(strategy))._settings == strategy._settings


def _other_namespace(strategy):
    import warnings

    import pytorch_lightning as pl
    import torch

    import lightning_compress.pytorch_lightning as ours

    class Learner(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = Net()

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.05)

    learner = Learner()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=strategy if isinstance(strategy, str) else ours.CompressedDDPStrategy(**strategy),
            max_steps=3,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[ours.CommunicationMonitor()],
        )
        trainer.fit(learner, loader(digits()))
    return trainer.strategy.comm_stats()["ratio"], parameters(learner).numpy()


@pytest.mark.parametrize("strategy", ["compressed_ddp_onebit", {"compressor": "topk"}, "sparseloco"])
def test_pytorch_lightning(pools, strategy):
    (ratio, first), (_, second) = pools[2].run(_other_namespace, strategy)
    assert ratio > 5
    assert (first == second).all()


def _spawned(said):
    """A run whose two processes are spawned by Lightning."""
    strategy = "compressed_ddp_topk_spawn"
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=3, callbacks=[Says(said)], **quiet)
    trainer.fit(Net(), loader(digits()))


class Says(pl.Callback):
    """Writes down what each rank sent."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, module):
        sent = trainer.strategy.comm_stats()["total_bytes_sent"]
        Path(self.folder, f"rank{trainer.global_rank}").write_text(f"{trainer.global_step} {sent}")


@pytest.mark.filterwarnings("ignore")
def test_processes_spawn(tmp_path, monkeypatch):
    """All that a spawned process is sent is pickled, but it is a fork of a server that has imported everything."""
    contexts = multiprocessing.get_context

    def get_context(method=None):
        return forking(PRELOADED) if method == "spawn" else contexts(method)

    monkeypatch.setattr(multiprocessing, "get_context", get_context)
    monkeypatch.setattr(torch.multiprocessing, "get_context", get_context)
    monkeypatch.setenv("MASTER_PORT", free_port())
    _spawned(str(tmp_path))
    said = [(tmp_path / f"rank{rank}").read_text().split() for rank in (0, 1)]
    assert [steps for steps, _ in said] == ["3", "3"]
    assert all(float(sent) > 0 for _, sent in said)


SPAWNED = """
import sys
from tests.strategies.test_entrypoints import _spawned
if __name__ == "__main__":
    _spawned(sys.argv[1])
"""


@pytest.mark.thorough  # three new processes, each of which imports everything
def test_new_processes_spawn(tmp_path):
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    run = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, env=BARE, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    assert (tmp_path / "rank1").exists()
