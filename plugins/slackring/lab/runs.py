"""A run's folder: written whole or not at all, never overwritten, and read back."""

from __future__ import annotations

import json
import os
import platform
import re
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
from slackring.errors import DataError, OutputError
from slackring.lab.config import TrainConfig
from slackring.lab.records import to_bytes
from slackring.lab.summary import Summary
from slackring.lab.timeline import chrome_trace

__all__ = [
    "SCHEMA",
    "Run",
    "check_writable",
    "facts",
    "git_revision",
    "load_run",
    "new_folder",
    "run_name",
    "save_run",
    "whole",
    "write_json",
    "writing",
]

SCHEMA = 1
"""Version of the folder's layout."""

_PARTIAL = re.compile(r"^\.(.+)\.[0-9a-f]{8}$")  # a folder that is being filled, and its name in the end


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
        "git": git_revision(),
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


def git_revision() -> str | None:
    """The commit of the current folder, ``-dirty`` if it has changed since; None outside of a repository."""
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


def check_writable(out: Path) -> None:
    """Find out before a run whether its results can be written.

    Raises
    ------
    OutputError
        If `out` cannot be made, or nothing can be written into it.
    """
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".probe-{secrets.token_hex(4)}"
        probe.mkdir()
        probe.rmdir()


def run_name(job: TrainConfig) -> str:
    """Name of a run's folder inside a comparison's.

    Examples
    --------
    >>> run_name(TrainConfig(rule="losp:k_max=16,compensation=auto", seed=3, seconds=1.0))
    'losp-k_max_16-compensation_auto-seed3'
    """
    words = "".join(letter if letter.isalnum() or letter in "._" else " " for letter in job.rule.replace("=", "_"))
    return "-".join((*words.split(), f"seed{job.seed}"))


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
        If the folder exists.
    OutputError
        If it cannot be written.
    """
    final = out / name
    if final.exists():
        raise DataError(f"{str(final)!r} exists already; results are never overwritten: give another --out.")
    partial = out / f".{name}.{secrets.token_hex(4)}"
    try:
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            partial.mkdir(mode=0o700)
            yield partial
            partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Say in one sentence what the system has against writing into `out`, which is named as it will be in the end.

    Raises
    ------
    OutputError
        For an error of the system.
    """
    try:
        yield
    except OSError as exc:
        final = Path(*(_PARTIAL.sub(r"\1", part) for part in out.parts))
        raise OutputError(
            f"results cannot be written to {str(final)!r}: {exc.strerror or exc}; give another --out."
        ) from exc


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Write a file or folder whole, or leave nothing of it.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         with whole(Path(folder) / "half") as file:
    ...             _ = file.write_text("once upon")
    ...             raise OSError
    ...     except OSError:
    ...         file.exists()
    False
    """
    try:
        yield path
    except BaseException:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        raise


def save_run(run: Run, out: Path, name: str) -> Path:
    """Write a run's folder; on a disk that fills up, first what cannot be done without.

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
        If it exists.
    OutputError
        If it cannot be written, and nothing is left behind; or if it is there, but not the checkpoint or the timeline.
    """
    lost: OutputError | None = None
    with new_folder(out, name) as folder:
        write_json(folder / "config.json", {**run.facts, **run.config.to_json()})
        for table in ("steps", "rounds", "curve"):
            (folder / f"{table}.parquet").write_bytes(to_bytes(getattr(run, table)))
        write_json(folder / "summary.json", run.summary.to_json())
        for what, write in (("checkpoint", _write_checkpoint), ("timeline.json", _write_timeline)):
            try:
                with writing(out / name / what), whole(folder / what) as path:
                    write(run, path)
            except OutputError as exc:
                lost = exc
    if lost is not None:
        raise OutputError(f"{lost} The rest of the run is there.") from lost
    return out / name


def _write_checkpoint(run: Run, folder: Path) -> None:
    if run.checkpoint:
        folder.mkdir()
    for rank, content in enumerate(run.checkpoint):
        (folder / f"rank-{rank}.pt").write_bytes(content)


def _write_timeline(run: Run, file: Path) -> None:
    write_json(file, chrome_trace(run.steps, run.rounds), indent=None)


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
        parts = sorted(part.parent.name for part in folder.glob("[!.]*/summary.json"))
        if parts:
            raise DataError(
                f"{str(folder)!r} is an incomplete comparison; show its runs one by one: {', '.join(parts)}."
            ) from exc
        raise DataError(f"{str(folder)!r} is not the folder of a finished run: {exc}.") from exc


def write_json(file: Path, value: object, indent: int | None = 1) -> None:
    """Write JSON that other languages read too: no NaN."""
    with whole(file):
        file.write_text(json.dumps(value, indent=indent, allow_nan=False) + "\n")
