"""Predict what each method does for a training run, and say what to write."""

from __future__ import annotations

import os
from typing import Literal

from lightning_compress.commands.words import above_zero

STARTED = ("WORLD_SIZE", "NODE_RANK")
"""Set where one process of several was started: by torchrun, or by hand on each host for Lightning's own launcher."""


def advise(
    script: str | None = None,
    args: list[str] | None = None,
    params: str | None = None,
    model: str | None = None,
    profile: str | None = None,
    compute_ms: float | None = None,
    ranks: int | None = None,
    replicas: int | None = None,
    gbit: float | None = None,
    latency_us: float = 100.0,
    optimizer: Literal["sgd", "adam", "adamw", "muon"] | None = None,
    cores_per_rank: float | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    json: bool = False,
) -> None:
    """Predict the step time of nine ways to average on your link, and say what to write into your script.

    Say what trains by ``script``, which runs for about 35 steps; or by ``profile``; or by ``params`` or ``model`` with
    ``compute_ms``. Say where by ``ranks`` and ``gbit``; or start it with torchrun on your hosts, where it measures the
    link.

    Args:
        script: Lightning script, or a module as for python -m. It runs without averaging and saves no checkpoint.
        args: words of the script; or write them after --.
        params: number of parameters, such as 25M, 1.5B or 25e6.
        model: class or function that makes the model, such as train:Net.
        profile: file that the callback StepProfile wrote.
        compute_ms: milliseconds of a step without communication, all processes of a host at work.
        ranks: processes that train together, 2 or more.
        replicas: of a sharded model (HSDP), over which the ranks are divided. One replica's ranks share a host's link.
        gbit: speed of each process's link, or with replicas of each host's, in Gbit/s, such as 1 or 0.1.
        latency_us: microseconds until a small message has arrived; ping says twice this.
        optimizer: that you use, on which the cost in quality depends. The default is adamw, or what was measured.
        cores_per_rank: CPU cores of each process. The default is 1, or what the script has.
        device: that encodes, cpu or cuda. The default is cpu, or what the script trains on. Without a script, cuda
            takes the published figures of one H100.
        json: print JSON instead of a table.
    """
    _check_what({"script": script, "params": params, "model": model, "profile": profile}, compute_ms, replicas)
    _check_where(ranks, gbit, "--compute-ms" if compute_ms is None and (params or model or replicas) else "", replicas)
    if args and script is None:
        raise ValueError(f"{' '.join(args)}: words after -- are those of --script; leave them out")
    for name, value in (("gbit", gbit), ("latency_us", latency_us), ("cores_per_rank", cores_per_rank)):
        above_zero(name, 1.0 if value is None else value)
    above_zero("compute_ms", 1.0 if compute_ms is None else compute_ms)

    from lightning_compress.commands import jobs, told
    from lightning_compress.commands.busy import load

    busy = load()  # before the script runs, which keeps cores busy itself
    job = jobs.of(script, args or [], params, model, profile, compute_ms, optimizer)
    if job is not None:
        told.tell(job, jobs.where(job, ranks, gbit, latency_us, replicas), cores_per_rank, device, busy, json)


def _check_what(given: dict[str, str | None], compute_ms: float | None, replicas: int | None) -> None:
    """Raise ValueError unless exactly one option says what trains."""
    names = [f"--{name}" for name, value in given.items() if value is not None]
    if not names:
        raise ValueError(
            "say what trains: --script train.py, or --params 25M --compute-ms 77, or --model train:Net --compute-ms "
            "77, or --profile profile.json; and where: --ranks 4 --gbit 1"
        )
    if len(names) > 1:
        raise ValueError(f"give one of {' and '.join(names)}: each says what trains")
    if given["script"] is not None and replicas is not None:
        raise ValueError(
            f"--replicas {replicas}: --script runs in one process, which cannot shard a model; give --params or "
            "--model, and --compute-ms"
        )
    if given["script"] is not None and compute_ms is not None:
        raise ValueError(f"--compute-ms {compute_ms:g}: --script measures it; leave it out")


def _check_where(ranks: int | None, gbit: float | None, missing: str, replicas: int | None) -> None:
    """Raise ValueError if options are missing, or there cannot be so many ranks or replicas."""
    names = [missing] if missing else []
    measures = (ranks, gbit, replicas) == (None, None, None) and any(name in os.environ for name in STARTED)
    if not measures:
        names += [name for name, value in (("--ranks", ranks), ("--gbit", gbit)) if value is None]
    if names:
        measured = replicas is None and names != ["--compute-ms"]
        more = "; with torchrun on your hosts, it measures ranks and link itself" * measured
        raise ValueError(f"missing: {', '.join(names)} (such as --compute-ms 77 --ranks 4 --gbit 1){more}")
    if ranks is not None and ranks < 2:
        raise ValueError(f"--ranks {ranks}: one process sends nothing; use 2 or more")
    if ranks is not None and replicas is not None and (ranks % max(1, replicas) or not 2 <= replicas <= ranks):
        raise ValueError(f"--replicas {replicas}: use a divisor of --ranks {ranks}, 2 or more")
