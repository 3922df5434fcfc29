"""A run's folder: written whole or not at all, never overwritten, and read back."""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from slackring import __version__
from slackring.errors import DataError
from slackring.lab.config import TrainConfig
from slackring.lab.summary import Summary
from slackring.lab.timeline import chrome_trace

__all__ = ["SCHEMA", "Run", "check_writable", "facts", "load_run", "new_folder", "new_name", "save_run"]

SCHEMA = 1
"""Version of the folder's layout."""


@dataclass(frozen=True)
class Run:
    """One training run and all that was measured.

    Attributes
    ----------
    config
        What was asked for.
    facts
        What it ran on; see :func:`facts`.
    steps, rounds
        Rows of all ranks (column `rank`; the other columns are those of :class:`slackring.optim.records.StepRecord`, with the
        step's loss, and :class:`slackring.optim.records.RoundRecord`). Seconds count from the start of training.
    curve
        Rows of :class:`slackring.lab.records.CurvePoint`.
    summary
        The run in numbers.
    checkpoint
        By rank, the content of the file that it goes on from; see :mod:`slackring.lab.checkpoint`. Empty if none was taken.
    """

    config: TrainConfig
    facts: dict[str, Any]
    steps: pd.DataFrame
    rounds: pd.DataFrame
    curve: pd.DataFrame
    summary: Summary
    checkpoint: tuple[bytes, ...] = ()


def facts(config: TrainConfig, ranks: int, ring: str) -> dict[str, Any]:
    """Say what a run ran on and what was injected into it.

    Parameters
    ----------
    config
        The run.
    ranks
        How many.
    ring
        The kind of their ring.

    Returns
    -------
    dict
        JSON values: ranks and ring, everything injected, git revision of the current folder, versions, processor.
    """
    hvd = sys.modules.get("horovod")
    return {
        "schema": SCHEMA,
        "ranks": ranks,
        "ring": ring,
        "injected": {
            "step_time": config.step_time,
            "straggler": str(config.parsed_straggler()),
            "network": str(config.parsed_network() or "none"),
        },
        "git": _git_revision(),
        "versions": {
            "slackring": __version__,
            "torch": torch.__version__,
            "horovod": getattr(hvd, "__version__", None),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _git_revision() -> str | None:
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip()


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def new_name(*words: str) -> str:
    """Make a name that no other run has: the time, what it is about, and a few random digits."""
    return "-".join((time.strftime("%Y%m%d-%H%M%S", time.gmtime()), *words, secrets.token_hex(2)))


def check_writable(out: Path) -> None:
    """Find out before a run whether its results can be written.

    Raises
    ------
    DataError
        If `out` cannot be made, or nothing can be written into it.
    """
    with _as_data_error(out):
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".probe-{secrets.token_hex(4)}"
        probe.mkdir()
        probe.rmdir()


@contextmanager
def new_folder(out: Path, name: str) -> Iterator[Path]:
    """Fill a new folder ``out/name``: it appears only when the block ends well, and is removed when it does not.

    Parameters
    ----------
    out
        Parent folder; made if it is missing.
    name
        Name of the new folder.

    Yields
    ------
    Path
        A hidden folder beside it, to write into.

    Raises
    ------
    DataError
        If the folder exists, or cannot be written (the path is not writable, the disk is full).
    """
    final = out / name
    if final.exists():
        raise DataError(f"{str(final)!r} exists already; results are never overwritten: give another --out.")
    partial = out / f".{name}.{secrets.token_hex(4)}"
    try:
        with _as_data_error(out):
            partial.mkdir(parents=True)
            yield partial
            partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _as_data_error(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise DataError(
            f"results cannot be written to {str(out)!r}: {exc.strerror or exc}; give another --out."
        ) from exc


def save_run(run: Run, out: Path, name: str) -> Path:
    """Write a run's folder.

    Parameters
    ----------
    run
        What to write.
    out, name
        The folder is ``out/name``.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    DataError
        If it exists or cannot be written; nothing is left behind then.
    """
    with new_folder(out, name) as folder:
        write_json(folder / "config.json", {**run.facts, **run.config.to_json()})
        for table in ("steps", "rounds", "curve"):
            getattr(run, table).to_parquet(folder / f"{table}.parquet", index=False)
        write_json(folder / "timeline.json", chrome_trace(run.steps, run.rounds), indent=None)
        write_json(folder / "summary.json", run.summary.to_json())
        if run.checkpoint:
            (folder / "checkpoint").mkdir()
            for rank, content in enumerate(run.checkpoint):
                (folder / "checkpoint" / f"rank-{rank}.pt").write_bytes(content)
    return out / name


def load_run(folder: Path) -> Run:
    """Read a run's folder, without its checkpoint.

    Raises
    ------
    DataError
        If it is missing, incomplete or of another schema.
    """
    try:
        values = json.loads((folder / "config.json").read_text())
        if values.get("schema") != SCHEMA:
            raise DataError(f"run {str(folder)!r} has schema {values.get('schema')}, but this version reads {SCHEMA}.")
        names = set(TrainConfig.__dataclass_fields__)
        return Run(
            config=TrainConfig(**{key: value for key, value in values.items() if key in names}),
            facts={key: value for key, value in values.items() if key not in names},
            steps=pd.read_parquet(folder / "steps.parquet"),
            rounds=pd.read_parquet(folder / "rounds.parquet"),
            curve=pd.read_parquet(folder / "curve.parquet"),
            summary=Summary(**json.loads((folder / "summary.json").read_text())),
        )
    except (OSError, ValueError, TypeError) as exc:
        if isinstance(exc, DataError):
            raise
        raise DataError(f"{str(folder)!r} is not the folder of a finished run: {exc}.") from exc


def write_json(file: Path, value: object, indent: int | None = 1) -> None:
    """Write JSON that other languages read too: no NaN."""
    file.write_text(json.dumps(value, indent=indent, allow_nan=False) + "\n")
