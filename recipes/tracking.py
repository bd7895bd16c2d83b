"""A W&B logger that trains on without an account or a network, and whose curves can be drawn against bytes."""

from __future__ import annotations

import csv
import logging
import netrc
import os
import ssl
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import lightning.pytorch.loggers as loggers
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_only

__all__ = ["WandbLogger", "close", "flat", "go_on_writing", "log_settings", "why_offline"]

log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds in which the server must answer, before a run."""
FINISH = 120.0
"""Seconds that the end of a run waits for what was not uploaded yet."""
LINE = 200
"""Most characters that are shown of what a server says."""
WITHOUT_SERVER = ("offline", "dryrun", "disabled")
"""What ``WANDB_MODE`` may be where no server is needed."""


class WandbLogger(loggers.WandbLogger):
    """Lightning's W&B logger, for runs that must not stop for it.

    Without a key, or where the server does not answer or refuses the key, it says so in a line and goes on offline;
    ``wandb sync`` uploads such a run later. It never asks a question. Where the connection is lost later, W&B goes on
    writing and trying; a table, which needs the server, is left out, the end of the run waits two minutes at most
    (``WANDB_FINISH_TIMEOUT``), and a line says what to sync.

    Settings are logged flat, ``compressor.density``, under the names that sweeps use. Every row has the ``so_far``
    figures beside its own, so that any curve can be drawn against seconds of training or bytes sent.

    Args:
        offline: True: never ask for the server; False: insist on it; None: as it turns out, but insist on it in
            a cell of a sweep, which would be lost to that.
        **kwargs: see ``lightning.pytorch.loggers.WandbLogger``.

    Raises:
        ValueError: wandb is not installed, or the server that was insisted on takes no run.
    """

    so_far: Mapping[str, float]

    def __init__(self, *, offline: bool | None = None, **kwargs: Any) -> None:
        super().__init__(settings=_settings(), **kwargs)
        self.so_far = {}
        self._tries, self._lost = offline is None and not os.environ.get("WANDB_SWEEP_ID"), False
        if offline:
            self._wandb_init["mode"] = "offline"  # the base class would set it for the whole process

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The W&B run, begun when it is first asked for; on rank 0 only."""
        if self._experiment is not None:
            return super().experiment
        if getattr(self, "_attach_id", None) is not None:  # a spawned process
            os.environ["WANDB_DIR"] = str(self.save_dir)  # else it would put pictures into the working folder
            return super().experiment
        if self._tries and (reason := why_offline()):
            self._go_offline(reason)
        try:
            run = super().experiment
        except Exception as error:  # wandb raises many kinds, of its own and of others
            if not self._tries:
                fix = "" if os.environ.get("WANDB_SWEEP_ID") else ", or go on without it: logger.wandb.offline=true"
                raise ValueError(f"W&B: no run can begin: {_first_line(error)}; run `wandb login`{fix}") from error
            self._go_offline(f"the server refused: {_first_line(error)}")
            run = super().experiment
        for name in ("time/seconds", "comm/total_bytes_sent"):
            run.define_metric(name)
        return run

    def _go_offline(self, reason: str) -> None:
        self._tries = False
        self._wandb_init["mode"] = "offline"
        log.warning(
            "W&B: %s; the run is logged offline, and `wandb sync %s/wandb/offline-*` uploads it later",
            reason,
            self.save_dir,
        )

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Log settings under dotted names."""
        super().log_hyperparams(flat(vars(params) if isinstance(params, Namespace) else params))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log figures, and how far the run is."""
        try:
            # a monitor counts from where the run goes on, and waits for what is under way
            reached = {name: max(value, metrics.get(name, value)) for name, value in self.so_far.items()}
            super().log_metrics({**metrics, **reached}, step)
        except Exception as error:  # a table asks the server for its name; numbers never do
            if self.experiment.offline:
                raise
            self._say_lost(f"the server answers no more ({_first_line(error)}), and {', '.join(metrics)} is left out")

    @rank_zero_only
    def close(self) -> None:
        """End the run, so that the next one of this process is a run of its own."""
        if self._experiment is not None or getattr(self, "_attach_id", None) is not None:
            try:
                self.experiment.finish()
            except TimeoutError:
                self._say_lost("the server did not take all of the run in time")

    def _say_lost(self, reason: str) -> None:
        """Once: what follows has the same reason."""
        if not self._lost:
            log.warning("W&B: %s; `wandb sync %s` uploads the rest later", reason, self.experiment.settings.sync_dir)
        self._lost = True


def why_offline() -> str | None:
    """What keeps a run from W&B's server, in a few words; None: nothing, or that none is wanted."""
    import wandb

    if os.environ.get("WANDB_MODE") in WITHOUT_SERVER:
        return None
    settings = wandb.setup().settings
    if settings.mode in WITHOUT_SERVER:
        return None
    url = str(settings.base_url)
    if not (getattr(settings, "api_key", None) or _has_key(url)):
        return f"no login for {url} (run `wandb login`, or set WANDB_API_KEY)"
    try:
        urllib.request.urlopen(url, timeout=PATIENCE).close()
    except urllib.error.HTTPError:
        return None  # it answered
    except OSError as error:
        reason = getattr(error, "reason", error)
        return None if isinstance(reason, ssl.SSLError) else f"{url} does not answer ({reason})"
    return None


def _has_key(url: str) -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    given = os.environ.get("NETRC")
    for path in [Path(given).expanduser()] if given else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            known, asked = netrc.netrc(path), urlsplit(url)
            if any(map(known.authenticators, (asked.netloc, asked.hostname or ""))):  # older wandb: without the port
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _settings() -> dict[str, Any]:
    """Bounds on the time that W&B may take, as far as this version knows them."""
    try:
        import wandb
    except ModuleNotFoundError:
        raise ValueError("logger=wandb: wandb is not installed; pip install '.[wandb]', or take logger=csv") from None
    bounds = {"init_timeout": 60.0, "finish_timeout": FINISH, "finish_timeout_raises": True, "login_timeout": 30.0}
    known = wandb.Settings()
    named = [name for name in bounds if f"WANDB_{name.upper()}" in os.environ]  # by the user, who knows better
    return {name: value for name, value in bounds.items() if hasattr(known, name) and name not in named}


def _first_line(error: BaseException) -> str:
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line if len(line) <= LINE else f"{line[:LINE]}..."  # a page of HTML, for one


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names, as a sweep's parameters are; lists stay lists.

    Args:
        settings: nested mappings.
        prefix: of all names.
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def log_settings(loggers: Sequence[Logger], settings: dict[str, Any], choices: dict[str, Any]) -> None:
    """Tell every logger the settings of a run, and W&B what was chosen of each config group: ``compressor: topk``."""
    for logger in loggers:
        logger.log_hyperparams(settings)
        if isinstance(logger, WandbLogger):
            logger.log_hyperparams(choices)  # one word each, as in a sweep


def go_on_writing(loggers: Sequence[Logger], fitted: Mapping[str, Any]) -> None:
    """Let loggers go on after spawned processes, whose columns and bytes this process has not seen.

    Args:
        loggers: the trainer's.
        fitted: what training left in ``trainer.callback_metrics``.
    """
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.so_far = {
                "time/seconds": float(fitted["run/seconds"]),
                "comm/total_bytes_sent": float(fitted["run/total_bytes_sent"]),
            }
        if not isinstance(logger, CSVLogger) or getattr(rank_zero_only, "rank", 0) != 0:  # other ranks write nothing
            continue
        if os.path.isfile(path := logger.experiment.metrics_file_path):
            with open(path, newline="") as file:
                logger.experiment.metrics_keys = next(csv.reader(file), [])


def close(loggers: Sequence[Logger]) -> None:
    """End the runs of W&B."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.close()
