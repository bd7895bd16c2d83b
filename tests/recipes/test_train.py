"""The command line, in real processes."""

from __future__ import annotations

import math
import os
import pickle
import re
import shlex
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from hydra.errors import InstantiationException
from hydra.types import RunMode
from lightning.pytorch.loggers import CSVLogger
from torch.multiprocessing.spawn import ProcessRaisedException

from recipes.config import (
    build,
    in_a_line,
    null_for_none,
    refuse_multirun,
    refuse_unknown_choice,
    refuse_unwritable,
    whole_paths,
)
from recipes.tables.idle import Outlasted, refuse_idle
from recipes.tables.lineage import PARENT
from recipes.tables.record import read_result, report
from recipes.tracking import go_on_writing
from recipes.train import train as run_recipe
from tests.config.composing import ROOT, composed
from tests.helpers import forked
from tests.helpers.ports import free_port
from tests.helpers.wandb_server import Server
from tests.recipes.test_sweep import gone

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def alone() -> dict[str, str]:
    """The environment of a run that no launcher started."""
    launched = ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED", PARENT)
    ours = {"OMP_NUM_THREADS": "1", "MASTER_PORT": free_port()}
    return {key: value for key, value in os.environ.items() if key not in launched} | ours


def train(*overrides: str, folder: Path, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run ``python -m recipes.train`` as a user does; a hang is a failure."""
    folders = [f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}"]
    return subprocess.run(
        [sys.executable, *launcher, "-m", "recipes.train", *overrides, *folders],
        cwd=ROOT,
        env=alone(),
        capture_output=True,
        text=True,
        timeout=120,
    )


def forked_train(*overrides: str, folder: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    """The same in forks: of one rank, which starts the other as ever, or of both."""
    words = ["-m", "recipes.train", *overrides, f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}"]
    env = alone() | {"PYTHONPATH": str(ROOT)}
    if ranks == 1:
        return forked.run(*words, cwd=ROOT, env=env)
    said = forked.ranks(words, each=ranks, cwd=ROOT, env=env)
    return subprocess.CompletedProcess(words, 0, "\n".join(said), "")


def files_of(folder: Path) -> str:
    """What is readable in the log of the one W&B run below a folder."""
    (log,) = folder.glob("wandb/offline-run-*/*.wandb")
    return log.read_bytes().decode(errors="replace")


@pytest.mark.parametrize(
    "start", ["popen", *(pytest.param(it, marks=pytest.mark.thorough) for it in ("spawn", "torchrun"))]
)
def test_two_processes_with_a_compressor(start: str, tmp_path: Path) -> None:
    overrides = ["debug=fast", "logger=[csv,wandb]", "logger.wandb.offline=true", "trainer=cpu_2proc"]
    overrides += ["compressor=topk", "compressor.density=0.05"]
    if start == "torchrun":
        done = train(*overrides, folder=tmp_path, launcher=TORCHRUN)
    elif start == "popen":
        done = forked_train(*overrides, folder=tmp_path, ranks=1)
    else:
        done = train(*overrides, f"strategy.start_method={start}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy") == 1  # rank 0 speaks for all
    assert "x fewer bytes than float32" in done.stdout
    hparams = next(tmp_path.rglob("hparams.yaml")).read_text()
    assert "density: 0.05" in hparams
    header = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()[0].split(",")
    assert {"comm/ratio", "comm/bytes_sent", "train/loss", "test/acc", "time/seconds", "time/step_ms"} <= set(header)
    result = read_result(tmp_path)
    assert result is not None
    assert (result["recipe"], result["ranks"], result["steps"], result["choices"]["compressor"]) == (
        "resnet",
        2,
        3,
        "topk",
    )
    assert result["total_bytes_dense"] / result["total_bytes_sent"] == pytest.approx(result["ratio"])
    assert result["score"]["value"] == result["metrics"]["test/acc"]
    logged = files_of(tmp_path)  # exactly one run
    for word in ("compressor.density", "comm/total_bytes_sent", "time/seconds", "val/acc", "test/acc", "comm/ratio"):
        assert word in logged, word
    assert len(list(tmp_path.rglob("files/media/table/comm/layers*.json"))) == 1
    assert len(list(tmp_path.rglob("files/media/images/comm/error_vs_bits*.png"))) == 1


def by_agent(overrides: list[str]) -> tuple[list[str], dict[str, str]]:
    """A command as W&B's agent makes it of a sweep file of ours and a cell of its, and what it adds to the environment.

    Args:
        overrides: further ones, as if the cell had them.
    """
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    sweep = yaml.safe_load((ROOT / "recipes/resnet/sweeps/topk_density.yaml").read_text())
    cell = {
        name: {"value": axis.get("value", axis.get("values", [None])[0])} for name, axis in sweep["parameters"].items()
    }
    cell |= {name: {"value": value} for name, _, value in (each.partition("=") for each in overrides)}
    known = utils.create_sweep_command_args({"args": cell}) | {"env": ["/usr/bin/env"], "interpreter": ["python"]}
    words = [known.get(word[2:-1], [word]) for word in utils.create_sweep_command(sweep["command"])]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return [word for each in words for word in each], {"PATH": path, "WANDB_SWEEP_ID": "abc", "WANDB_MODE": "offline"}


@pytest.mark.parametrize("start", ["popen by W&B's agent", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_killing_the_first_process_ends_the_others(start: str, tmp_path: Path) -> None:
    overrides = ["trainer.max_epochs=100000", f"strategy.start_method={start.split()[0]}", f"hydra.run.dir={tmp_path}"]
    overrides += ["trainer.accelerator=cpu", "trainer.devices=2", "data=digits"]
    command, environment = [sys.executable, "-m", "recipes.train", "logger=none", *overrides], {}
    if "agent" in start:
        command, environment = by_agent(overrides)
    with (tmp_path / "out").open("w") as out:
        parent = subprocess.Popen(command, cwd=ROOT, env=alone() | environment, stdout=out, stderr=out)
        end = time.monotonic() + 90
        while "All distributed processes registered" not in (tmp_path / "out").read_text():
            assert time.monotonic() < end, (tmp_path / "out").read_text()
            assert parent.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.2)
        ranks = children(parent.pid)
        assert ranks
        parent.kill()
        parent.wait()
    assert gone(ranks, 5)


def children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(each) for each in listed.stdout.split()]


@pytest.mark.thorough
@pytest.mark.parametrize("silent", [False, True])
def test_a_run_outlives_the_server_of_its_log(silent: bool, tmp_path: Path) -> None:
    """W&B answers when it begins, and no more once the first rows are there."""
    overrides = [
        "trainer=cpu_2proc",
        "compressor=topk",
        "logger=wandb",
        "trainer.max_epochs=1",
        f"hydra.run.dir={tmp_path}",
    ]
    command = [sys.executable, "-m", "recipes.train", *overrides, "trainer.log_every_n_steps=1"]
    with Server() as server, (tmp_path / "out").open("w") as out:
        account = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": 40 * "a", "HOME": str(tmp_path)}
        environment = alone() | account | {"WANDB_FINISH_TIMEOUT": "2"}
        environment.pop("WANDB_MODE", None)
        parent = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
        server.wait_for("file_stream", 90)
        ranks = children(parent.pid)
        assert parent.poll() is None
        if silent:
            server.fall_silent()
        else:
            server.leave()
        code = parent.wait(180)
    said = (tmp_path / "out").read_text()
    assert code == 0, said
    assert ranks
    assert gone(ranks, 5)
    assert said.count("test accuracy") == 1
    assert said.count("W&B: ") == 1
    assert "`wandb sync" in said
    (log,) = tmp_path.glob("wandb/run-*/*.wandb")
    assert "test/acc" in log.read_bytes().decode(errors="replace")


def test_none_is_null() -> None:
    cfg = composed("exchange.node_size=None", "+recipe.more={a: None, b: [None, 1]}")
    null_for_none(cfg)
    assert cfg.exchange.node_size is None
    assert cfg.recipe.more == {"a": None, "b": [None, 1]}


def test_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file/run"
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/file is no folder; choose another")):
        refuse_unwritable(["seed=1", f"hydra.run.dir='{folder}'"])
    refuse_unwritable([f"hydra.run.dir={tmp_path}/new/er"])
    refuse_unwritable(["hydra.run.dir=${oc.env:HOME}/x"])
    refuse_unwritable([f"hydra.run.dir={tmp_path}/some/exp_${{seed}}"])
    refuse_unwritable(["--cfg", "job", f"hydra.run.dir={tmp_path}/other"])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "new"]
    with pytest.raises(ValueError, match="is no folder"):
        refuse_unwritable([f"output_dir={folder}", f"hydra.run.dir={tmp_path}"])
    with pytest.raises(ValueError, match=r"/proc takes no folder \(.*\); choose another"):
        refuse_unwritable(["hydra.run.dir=/proc/x"])


def test_an_unknown_choice_is_one_line() -> None:
    refuse_unknown_choice(["recipe=nmt", "compressor=topk,onebit", "logger=[csv,wandb]", "+x.y=1", "compressor.bits=4"])
    with pytest.raises(ValueError, match=r"compressor=topkk: did you mean topk\? choose from adam_mask, "):
        refuse_unknown_choice(["recipe=nmt", "compressor=onebit,topkk"])
    with pytest.raises(ValueError, match="experiment=zzz: choose from alexnet"):
        refuse_unknown_choice(["experiment=zzz"])
    with pytest.raises(ValueError, match="minibatch=null: choose from search, or leave it out by ~minibatch"):
        refuse_unknown_choice(["experiment=speech_onebit_whole", "minibatch=null"])
    with pytest.raises(ValueError, match=r"logger=null: choose from [a-z, ]+$"):  # every run has one
        refuse_unknown_choice(["logger=null"])
    for elsewhere in ("--config-dir=mine", "hydra.searchpath=[file://mine]"):
        refuse_unknown_choice([elsewhere, "compressor=linear8"])


def test_errors_in_a_line() -> None:
    with pytest.raises(InstantiationException) as info:
        build(composed("recipe.depth=21").recipe)
    assert in_a_line(info.value).startswith("ValueError: depth=21")
    for overrides, node, words in (
        (
            ["recipe=lstm_speech", "data=spoken", "+data.leave_out=theo"],
            "data",
            "data.leave_out is no setting of recipes.",
        ),
        (
            ["recipe=alexnet", "+recipe.depth=20"],
            "recipe",
            "recipe.depth is no setting of recipes.resnet.module.AlexNet",
        ),
    ):
        with pytest.raises(InstantiationException) as info:
            build(composed(*overrides)[node])
        assert in_a_line(info.value).startswith(f"ValueError: {words}")
        assert "\n" not in in_a_line(info.value)
    assert in_a_line(RuntimeError("?")) == ""
    reader = ValueError(
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback:\n  x\nValueError: a.png: no"
    )
    assert in_a_line(reader).startswith("ValueError: a.png: no (")
    rank = ProcessRaisedException("\n-- Process 1 terminated:\nTraceback\n  x\nValueError: data.root: no\n", 1, 2)
    assert in_a_line(rank).startswith("ValueError: data.root: no (")
    assert in_a_line(ProcessRaisedException("Traceback\nRuntimeError: ?\n", 1, 2)) == ""


@pytest.mark.parametrize("gpus", [0, 1])
def test_more_gpus_than_there_are_is_a_line(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(InstantiationException) as info:
        build(composed("trainer.accelerator=gpu", "trainer.devices=2").trainer)
    said = in_a_line(info.value)
    assert "trainer=cpu_2proc" in said
    assert "\n" not in said


def test_checkpoints_are_named_whole() -> None:
    given = ["seed=1", "ckpt_path=a/epoch=9-step=390.ckpt", "ckpt_path='a=b'", "ckpt_path=last.ckpt", "x=ckpt_path=1"]
    assert whole_paths(given) == [given[0], "ckpt_path='a/epoch=9-step=390.ckpt'", *given[2:]]
    assert whole_paths(whole_paths(given)) == whole_paths(given)  # ranks are started by the line as it became
    assert composed(*whole_paths(given)[:2]).ckpt_path == "a/epoch=9-step=390.ckpt"


def test_a_checkpoint_of_another_recipe_is_refused_before_anything_takes_its_time(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "recipe": "nmt"}, tmp_path / "a.ckpt")
    cfg = composed(f"ckpt_path={tmp_path}/a.ckpt", f"output_dir={tmp_path}/run", "data=cifar10", "data.root=nowhere")
    with pytest.raises(ValueError, match=r"a.ckpt is of recipe=nmt, not of recipe=resnet"):
        run_recipe(cfg)


def test_a_checkpoint_is_scored_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = ["trainer=cpu", "debug=fast", "trainer.enable_checkpointing=true"]
    with pytest.raises(ValueError, match="test_only=true: give the checkpoint"):
        run_recipe(composed(*run, "test_only=true"))
    _, trained = run_recipe(composed(*run))
    (path,) = tmp_path.rglob("*.ckpt")
    said = capsys.readouterr().out.splitlines()[0]
    (tmp_path / "again").mkdir()
    monkeypatch.chdir(tmp_path / "again")
    _, again = run_recipe(composed(*run, *whole_paths([f"ckpt_path={path}"]), "test_only=true"))
    assert again == trained
    assert capsys.readouterr().out == f"{said}\n"


def test_a_run_says_how_to_try_what_it_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = {"ratio": 1.0, "score": {"label": "accuracy"}, "written": "50.00 %"}
    report(result, tmp_path, f"{Path.cwd()}/outputs/epoch=9.ckpt")
    assert capsys.readouterr().out == (
        "test accuracy 50.00 %\ntry it: python -m recipes.predict outputs/epoch=9.ckpt INPUT\n"
    )
    report(result, tmp_path, "")  # nothing was kept
    assert "predict" not in capsys.readouterr().out


@pytest.mark.thorough
def test_one_process(tmp_path: Path) -> None:
    done = train("debug=fast", "trainer=cpu", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy") == 1


@pytest.mark.thorough
def test_missing_data_stops_every_rank(tmp_path: Path) -> None:
    done = train("debug=fast", "trainer=cpu_2proc", "data=cifar10", f"data.root={tmp_path}", folder=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("ValueError: data.root=") == 2
    assert "data.download=true" in done.stderr


@pytest.mark.thorough
def test_multirun_of_several_processes_is_refused(tmp_path: Path) -> None:
    done = train("--multirun", "debug=fast", "trainer=cpu_2proc", "compressor=none,bf16", folder=tmp_path)
    assert done.returncode != 0
    assert "ValueError: --multirun with trainer.devices=2" in done.stderr


@pytest.mark.parametrize(
    ("mode", "overrides", "refused"),
    [
        (RunMode.RUN, ["trainer.devices=2"], False),
        (RunMode.MULTIRUN, ["trainer.devices=1"], False),
        (RunMode.MULTIRUN, ["trainer.devices=[0]"], False),
        (RunMode.MULTIRUN, ["trainer.devices='1,'"], False),
        (RunMode.MULTIRUN, ["trainer.devices=[0,1]"], True),
        (RunMode.MULTIRUN, ["trainer.devices='0,1'"], True),
        (RunMode.MULTIRUN, ["trainer.devices=auto"], True),
        (RunMode.MULTIRUN, ["trainer.devices=2", "strategy.start_method=spawn"], False),
        (RunMode.MULTIRUN, ["trainer.devices=-1"], True),
        (RunMode.MULTIRUN, ["trainer.devices=1", "trainer.num_nodes=2"], True),
    ],
)
def test_what_multirun_refuses(mode: RunMode, overrides: list[str], refused: bool) -> None:
    cfg = composed(*overrides)
    if not refused:
        refuse_multirun(cfg, mode)
        return
    with pytest.raises(ValueError, match=r"torchrun|W&B agents"):
        refuse_multirun(cfg, mode)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["compressor=topk", "trainer.strategy=ddp"], "compressor=topk has no effect"),
        (["exchange=two_shot", "trainer.strategy=auto"], "exchange=two_shot has no effect"),
        (
            ["compressor=topk"],
            "compressor=topk has no effect: one process sends no gradients",
        ),
        (["exchange=two_shot"], "exchange=two_shot has no effect: one process"),
        *(
            (
                ["trainer=cpu_2proc", "strategy=sparseloco", f"compressor={each}"],
                "has no effect: the strategy has its own, strategy.compressor=sparseloco; leave compressor out",
            )
            for each in ("topk", "none")
        ),
        (
            ["trainer=cpu_2proc", "compressor=fft", "recovery=theta"],
            "recovery has no effect: it is none of trainer.callbacks",
        ),
        (
            ["trainer=cpu_2proc", "experiment=resnet_recovery", "data.val_size=0"],
            "recovery has no effect: nothing is validated",
        ),
    ],
)
def test_what_has_no_effect_is_refused(overrides: list[str], words: str) -> None:
    cfg = composed("trainer=cpu", *overrides)
    with pytest.raises(ValueError, match=re.escape(words)):
        refuse_idle(cfg, build(cfg.trainer))


@pytest.mark.parametrize(
    ("backward", "words"),
    [
        (["backward=sufficient_factors"], "backward=sufficient_factors has no effect: one process sends no gradients"),
        (["backward=meprop", "backward.share=true"], "backward.share=true has no effect: one process has no others"),
        (["backward=mesimp", "backward.share=true"], "backward.share=true has no effect: one process has no others"),
    ],
)
def test_backward_passes_of_several_ranks_are_refused_on_one(backward: list[str], words: str) -> None:
    for devices, refused in (("trainer=cpu", True), ("trainer=cpu_2proc", False)):
        cfg = composed(devices, *backward)
        trainer = build(cfg.trainer)
        trainer.callbacks.insert(0, build(cfg.backward))
        with pytest.raises(ValueError, match=re.escape(words)) if refused else nullcontext():
            refuse_idle(cfg, trainer)


def test_heads_are_of_the_transformer() -> None:
    """Refused where the user named them, and not where a file of settings for both models did."""
    cfg = composed("trainer=cpu", "experiment=nmt_lstm")
    trainer = build(cfg.trainer)
    refuse_idle(cfg, trainer, ["recipe.model", "recipe.hidden"])
    with pytest.raises(ValueError, match=r"recipe\.heads has no effect: the LSTM's attention has one"):
        refuse_idle(cfg, trainer, ["recipe.model", "recipe.heads"])
    refuse_idle(composed("trainer=cpu", "recipe=nmt"), trainer, ["recipe.heads"])


@pytest.mark.parametrize(
    "page", [ROOT / "docs/recipes.md", *ROOT.glob("recipes/*/README.md")], ids=lambda page: page.parent.name
)
def test_what_a_page_shows_has_an_effect(page: Path) -> None:
    commands = re.findall(r"^python -m recipes\.train (.*?)(?:  #|$)", page.read_text(), flags=re.MULTILINE)
    assert len(commands) >= 5
    shown = re.findall(r"^python -m recipes\.train (.*)", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert shown
    for command in [*commands, *shown]:
        cfg = composed(*whole_paths([each for each in shlex.split(command) if "=" in each]))
        refuse_idle(cfg, build(cfg.trainer))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["compressor=none"],
        ["trainer.strategy=ddp"],
        ["trainer=cpu_2proc", "compressor=topk", "exchange=two_shot"],
        ["experiment=resnet_recovery"],
        ["trainer=cpu_2proc", "strategy=sparseloco"],
        ["trainer=cpu_2proc", "strategy=sparseloco", "compressor=topk", "strategy.compressor=${compressor}"],
    ],
)
def test_what_has_an_effect_is_not(overrides: list[str]) -> None:
    cfg = composed("trainer=cpu", *overrides)
    refuse_idle(cfg, build(cfg.trainer))


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["compressor=topk", "strategy.warmup_steps=20"], "strategy.warmup_steps: the first phase has 20 steps"),
        (["compressor=onebit_adam", "strategy.warmup_steps=30"], "strategy.warmup_steps: the first phase has 30 steps"),
        (["strategy=post_local_sgd"], "strategy.averaged_steps: the first phase has 1000 steps"),
        (
            ["strategy=local_sgd", "strategy.sync_every=8", "strategy.averaged_steps=5", "strategy.warmup_steps=2"],
            "strategy.warmup_steps: the first phase has 21 steps",  # of two rounds
        ),
    ],
)
def test_a_first_phase_as_long_as_the_run_is_named(overrides: list[str], name: str) -> None:
    warner = Outlasted.of(composed("trainer=cpu_2proc", *overrides))
    with pytest.warns(UserWarning, match=re.escape(f"{name} and the run 20, so what")):
        warner.on_train_start(SimpleNamespace(estimated_stepping_batches=20, world_size=2), None)
    for steps, ranks in ((1001, 2), (20, 1)):
        warner.on_train_start(SimpleNamespace(estimated_stepping_batches=steps, world_size=ranks), None)


def _in_a_process_of_its_own(logger: CSVLogger, metrics: dict[str, float], step: int) -> None:
    """What a spawned process does with the logger that it is sent."""
    sent = pickle.loads(pickle.dumps(logger))
    sent.log_metrics(metrics, step)
    sent.save()


def test_csv_files_keep_what_spawned_processes_wrote(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_hyperparams({"seed": 0})
    _in_a_process_of_its_own(logger, {"train/loss": 2.0, "epoch": 0}, 3)
    go_on_writing([logger], {})
    _in_a_process_of_its_own(logger, {"test/acc": 0.5, "epoch": 0}, 4)
    header, *rows = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    assert header == "epoch,step,test/acc,train/loss"
    assert rows == ["0,3,,2.0", "0,4,0.5,"]


@pytest.mark.parametrize("compressor", ["moniqua", "none"])
def test_ranks_that_share_batches_count_epochs(tmp_path: Path, compressor: str) -> None:
    overrides = ["debug=fast", "trainer=cpu_2proc", "strategy=async_gossip", "trainer.limit_train_batches=1.0"]
    done = forked_train(*overrides, f"compressor={compressor}", folder=tmp_path, ranks=2)
    assert done.stdout.count("test accuracy") == 1


@pytest.mark.thorough
def test_multirun_of_spawned_processes_writes_its_csv(tmp_path: Path) -> None:
    overrides = ["debug=fast", "logger=csv", "trainer=cpu_2proc", "strategy.start_method=spawn", "compressor=topk"]
    done = train("--multirun", *overrides, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    header, *rows = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    assert {"comm/ratio", "train/loss", "test/acc"} <= set(header.split(","))
    assert len(rows) > 3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("ckpt_path=nowhere.ckpt", "there is no such checkpoint"),
        ("ckpt_path=.", "it is a folder; a checkpoint is a file"),
        ("ckpt_path=text.ckpt", "text.ckpt cannot be read: it is damaged, no checkpoint at all"),
        ("seed=-3", "seed=-3: a whole number from 0 to"),
        ("seed=null", "seed=None: a whole number from 0 to"),
        ("optimizer.lr=-1", "optimizer.lr=-1: a number above 0"),
        ("optimizer.lr=true", "optimizer.lr=True: a number above 0"),
        ("optimizer.momentum=abc", "optimizer.momentum=abc: a number"),
        ("data.batch_size=2.5", "^data.batch_size=2.5: a whole number"),
        ("data.num_workers=abc", "data.num_workers=abc: a whole number"),
        ("data.augment=foo", "data.augment=foo: true or false"),
        ("recipe.depth=abc", "recipe.depth=abc: a whole number or null"),
        ("trainer.max_epochs=1.5", "trainer.max_epochs=1.5: a whole number or null"),
        ("trainer.limit_val_batches=abc", "trainer.limit_val_batches=abc: a number or null"),
        ("trainer.devices=0", "trainer.devices=0: a whole number of at least 1"),
        ("trainer.devices=abc", "trainer.devices=abc: a whole number of at least 1"),
        ("trainer.max_epochs=0", "not one step was left to train: trainer.max_epochs=0"),
        ("trainer.limit_test_batches=0", "judged by its test"),
        ("trainer.limit_train_batches=0", "nothing would be trained"),
    ],
)
def test_what_a_run_cannot_do_is_said_before_it_begins(
    override: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.ckpt").write_text("no checkpoint")
    with pytest.raises(ValueError, match=words):
        run_recipe(composed("trainer=cpu", "debug=fast", override))


SMALL = {
    "resnet": ["recipe.depth=8", "data.batch_size=8"],
    "alexnet": ["recipe.hidden=16", "data.batch_size=8"],
    "lstm_speech": [
        *("recipe.layers=1", "recipe.hidden=8", "recipe.warmup_epochs=0"),
        *("data.train_size=16", "data.val_size=2", "data.test_size=2"),
    ],
    "nmt": [
        *("recipe.warmup_steps=2", "data.vocab_size=150"),
        *("data.train_size=200", "data.val_size=10", "data.test_size=10"),
    ],
}
"""Overrides of a short run of each recipe."""


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
@pytest.mark.parametrize("recipe", SMALL)
def test_parameters_of_another_precision(
    recipe: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = [f"recipe={recipe}", *SMALL[recipe], "trainer=cpu", "debug=fast", "trainer.max_epochs=1"]
    _, value = run_recipe(composed(*run, f"trainer.precision={precision}"))
    assert math.isfinite(value)


@pytest.mark.parametrize("recipe", ["lstm_speech", "nmt"])
def test_batches_by_length_are_not_undone(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = [f"recipe={recipe}", *SMALL[recipe], "trainer=cpu", "debug=fast", "trainer.limit_train_batches=1.0"]
    with pytest.raises(ValueError, match=r"overfit_batches=2: batches are made by length.*trainer.limit_train_batches"):
        run_recipe(composed(*run, "trainer.overfit_batches=2"))
