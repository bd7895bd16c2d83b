"""The W&B logger without a server, the layers' table and the picture."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_compress import AsyncGossipStrategy, CompressedDDPStrategy, GossipStrategy
from recipes.tables.portrait import COLUMNS, FAMILIES, Portrait, curves, layers, picture
from recipes.tracking import WandbLogger, flat, why_offline
from tests.helpers.wandb_server import Server

wandb = pytest.importorskip("wandb")


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A user without a login, and without a network."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(wandb.setup().settings, "base_url", "http://127.0.0.1:9")
    return monkeypatch


def test_why_offline(stranger: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "no login for http://127.0.0.1:9 (run `wandb login`" in str(why_offline())
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login user password " + 40 * "a")
    assert "http://127.0.0.1:9 does not answer" in str(why_offline())
    stranger.setattr(wandb.setup().settings, "base_url", "http://wandb.local:8080")
    (tmp_path / ".netrc").write_text("machine wandb.local:8080 login user password " + 40 * "a")
    assert "http://wandb.local:8080 does not answer" in str(why_offline())
    stranger.setenv("WANDB_MODE", "offline")
    assert why_offline() is None


def test_without_a_login_it_says_so_once_and_logs_offline(
    stranger: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = WandbLogger(save_dir=str(tmp_path), project="test")
    with caplog.at_level(logging.WARNING):
        logger.log_hyperparams({"compressor": "topk", "recipe": {"depth": 20}})
        logger.so_far = {"comm/total_bytes_sent": 5.0}
        logger.log_metrics({"val/acc": 0.5}, 3)
    said = [each.getMessage() for each in caplog.records if "W&B" in each.getMessage()]
    assert len(said) == 1
    assert "`wandb sync" in said[0]
    run = logger.experiment
    assert run.settings.mode == "offline"
    assert dict(run.config) == {"compressor": "topk", "recipe.depth": 20}
    assert run.summary["comm/total_bytes_sent"] == 5
    logger.close()
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1


def test_a_refusing_server_is_no_reason_to_stop(
    stranger: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []
    begin = wandb.init

    def init(**kwargs: Any) -> Any:
        calls.append(kwargs.get("mode"))
        if kwargs.get("mode") != "offline":
            raise wandb.errors.CommError("API key verification failed " + 1000 * "<br>")
        return begin(**kwargs)

    stranger.setattr(wandb, "init", init)
    stranger.setattr("recipes.tracking.why_offline", lambda: None)
    logger = WandbLogger(save_dir=str(tmp_path))
    logger.log_metrics({"loss": 1.0})
    logger.close()
    (said,) = [each.getMessage() for each in caplog.records if "W&B" in each.getMessage()]
    assert "API key verification failed" in said
    assert len(said) < 400
    assert calls == [None, "offline"]
    with pytest.raises(ValueError, match=r"no run can begin: API key verification failed.* run `wandb login`"):
        WandbLogger(save_dir=str(tmp_path), offline=False).experiment  # noqa: B018
    stranger.setenv("WANDB_SWEEP_ID", "abc")  # a cell that its sweep would never hear of
    with pytest.raises(ValueError, match="no run can begin"):
        WandbLogger(save_dir=str(tmp_path)).experiment  # noqa: B018


def _asks_the_server(*_: Any) -> None:
    """As a table does, and waits for long."""
    raise wandb.errors.CommError("API key verification failed")


@pytest.mark.parametrize("silent", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_connection_that_is_lost_in_a_run_ends_neither_it_nor_its_log(
    silent: bool, stranger: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger.setenv("WANDB_API_KEY", 40 * "a")
    stranger.setattr("recipes.tracking.FINISH", 2.0)
    with Server() as server:
        stranger.setattr(wandb.setup().settings, "base_url", server.url)
        logger = WandbLogger(save_dir=str(tmp_path), project="test")
        logger.log_metrics({"loss": 3.0}, 0)
        assert logger.experiment.settings.mode == "online"
        server.fall_silent() if silent else server.leave()
        for step in range(1, 100):
            logger.log_metrics({"late": 1.0 * step}, step)
        stranger.setattr("lightning.pytorch.loggers.WandbLogger.log_metrics", _asks_the_server)
        logger.log_table("layers", columns=["bits"], data=[[8]])
        start = time.monotonic()
        logger.close()
    assert time.monotonic() - start < 15
    (said,) = [each.getMessage() for each in caplog.records if "W&B" in each.getMessage()]
    assert "the server answers no more (API key verification failed), and layers is left out; `wandb sync" in said
    (log,) = (tmp_path / "wandb").glob("run-*/*.wandb")
    assert "late" in log.read_bytes().decode(errors="replace")


def test_a_resumed_run_counts_all_bytes_in_every_row(stranger: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A monitor counts from where the run goes on."""
    logger = WandbLogger(offline=True, save_dir=tmp_path)
    logger.so_far = {"comm/total_bytes_sent": 105.0}
    logger.log_metrics({"comm/total_bytes_sent": 5.0, "comm/bits": 4.0}, 3)
    assert logger.experiment.summary["comm/total_bytes_sent"] == 105.0
    logger.close()


def test_flat() -> None:
    assert flat({"a": {"b": {"c": 1}, "d": [1, 2]}, "e": None}) == {"a.b.c": 1, "a.d": [1, 2], "e": None}


@pytest.mark.parametrize("compressor", ["topk", "powersgd", "bf16", "none"])
def test_layers(compressor: str) -> None:
    torch.manual_seed(0)
    gradients = {"fc.weight": torch.randn(64, 64), "fc.bias": torch.randn(64)}
    settings = CompressedDDPStrategy(compressor=compressor)._settings
    shapes = {name: tuple(each.shape) for name, each in gradients.items()}
    weight, bias = layers(gradients, shapes, settings, ranks=2)
    assert len(weight) == len(COLUMNS)
    ratio = {"topk": 50, "powersgd": 16, "bf16": 2, "none": 1}[compressor]
    assert weight[4] == pytest.approx(ratio, rel=0.3)
    assert bias[4] == pytest.approx(2 if compressor == "bf16" else 1, rel=0.1)


class Shown:
    """In place of W&B's logger: names of what it was given."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def log_table(self, name: str, *_: Any, **__: Any) -> None:
        self.names.append(name)

    log_image = log_table  # type: ignore[assignment]


@pytest.mark.parametrize("kind", ["gossip", "asynchronous", "averages"])
def test_gossip_has_no_table_since_it_sends_no_gradients(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.tables.portrait.WandbLogger", Shown)
    for each in (GossipStrategy, AsyncGossipStrategy):
        monkeypatch.setattr(each, "compression", None)
    strategy = {"gossip": GossipStrategy, "asynchronous": AsyncGossipStrategy}.get(kind, SimpleNamespace)()
    trainer = SimpleNamespace(loggers=[Shown()], is_global_zero=True, strategy=strategy, world_size=2)
    trainer.global_step, trainer.estimated_stepping_batches = 100, 105
    module, portrait = torch.nn.Linear(8, 8), Portrait()
    portrait.on_train_start(trainer, module)  # type: ignore[arg-type]
    assert portrait._step == 104  # the run goes on, and ends soon
    portrait.gradients = {name: torch.randn(each.shape) for name, each in module.named_parameters()}
    portrait.on_train_end(trainer, module)  # type: ignore[arg-type]
    assert trainer.loggers[0].names == ["comm/layers", "comm/error_vs_bits"][kind != "averages" :]


def test_picture() -> None:
    torch.manual_seed(0)
    own = CompressedDDPStrategy(compressor="topk")._settings.method
    drawn = curves({"weight": torch.randn(128, 64), "bias": torch.randn(64)}, own)
    assert set(drawn) == {*FAMILIES, "this run"}
    assert drawn["rotated"][0][1] > drawn["rotated"][-1][1]
    assert picture(drawn).size[0] > 300
