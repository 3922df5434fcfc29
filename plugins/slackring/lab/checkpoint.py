"""Checkpoints of a run: what a rank keeps to go on, after which rounds all ranks take one, and where it goes."""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from slackring.errors import DataError, OutputError, SpecError
from slackring.lab.config import TrainConfig
from slackring.lab.runs import Run, load_run, save_run
from slackring.ring.base import Ring

__all__ = [
    "Checkpoints",
    "Earlier",
    "RunFolder",
    "Saved",
    "StatefulBatches",
    "Timetable",
    "load_earlier",
    "pack",
    "random_state",
    "set_random_state",
    "share",
]

log = logging.getLogger("slackring")


@runtime_checkable
class StatefulBatches(Protocol):
    """Batches that can say where they are; others are drawn again and skipped when a run is resumed."""

    def state_dict(self) -> dict[str, Any]:
        """Where they are, in tensors and plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        ...


@dataclass(frozen=True)
class Checkpoints:
    """Has a run take checkpoints: one at its end, and others on the way if asked to.

    Parameters
    ----------
    every
        Seconds of the ring's clock between two of them; None takes none before the end.
    keep
        Called on rank 0 with the run as far as it has come, checkpoint included, for each but the last.

    Raises
    ------
    SpecError
        If `every` is not a finite number above 0.
    """

    every: float | None = None
    keep: Callable[[Run], object] = lambda run: None

    def __post_init__(self) -> None:
        if self.every is not None and not (math.isfinite(self.every) and self.every > 0):
            raise SpecError(f"--checkpoint-every must be a finite number above 0, not {self.every}.")


class Timetable:
    """Rounds after which all ranks meet about a checkpoint.

    Clocks differ between ranks and rounds do not. So ranks meet after an agreed round, learn the seconds on rank 0's clock, and
    conclude from them alone whether one is due and after which round to meet again.

    Parameters
    ----------
    every
        Seconds between two checkpoints.

    Examples
    --------
    >>> timetable = Timetable(every=10.0)
    >>> timetable.meet(rounds=1, seconds=0.5), timetable.meeting  # never more than twice as many rounds
    (False, 2)
    >>> timetable.meet(rounds=16, seconds=8.0), timetable.meeting
    (False, 20)
    >>> timetable.meet(rounds=20, seconds=10.25), timetable.meeting
    (True, 40)
    """

    def __init__(self, every: float) -> None:
        self._every, self._taken = every, 0.0
        self.meeting = 1
        """After how many rounds the next meeting is."""

    def resume(self, rounds: int, seconds: float) -> None:
        """Go on after so many rounds and seconds."""
        self.meeting, self._taken = rounds + 1, seconds

    def meet(self, rounds: int, seconds: float) -> bool:
        """Tell whether to take a checkpoint now, `seconds` into the run on rank 0's clock, and plan the next meeting."""
        due = seconds - self._taken >= self._every
        if due:
            self._taken = seconds
        ahead = math.ceil(rounds * (self._taken + self._every - seconds) / max(seconds, 1e-9))
        self.meeting = rounds + max(1, min(ahead, rounds))
        return due


def random_state() -> dict[str, Any]:
    """Random streams of this rank (torch, NumPy, Python), in tensors and plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys, np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(words), gauss_next],
    }


def set_random_state(saved: dict[str, Any]) -> None:
    """Go on with the random streams that :func:`random_state` gave.

    Examples
    --------
    >>> saved = random_state()
    >>> drawn = torch.rand(1).item(), np.random.normal(), random.random()
    >>> set_random_state(saved)
    >>> (torch.rand(1).item(), np.random.normal(), random.random()) == drawn
    True
    """
    torch.set_rng_state(saved["torch"])
    kind, keys, *rest = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, words, gauss_next = saved["python"]
    random.setstate((version, tuple(words), gauss_next))


def pack(state: dict[str, Any]) -> bytes:
    """A rank's state as the content of a file that ``torch.load(..., weights_only=True)`` reads."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _unpack(content: bytes, name: str) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    except Exception as exc:  # torch raises many kinds for a damaged file
        raise DataError(f"the checkpoint's file {name!r} cannot be read: {exc}.") from exc
    return state


@dataclass(frozen=True)
class Earlier:
    """A run that is to be continued, as rank 0 reads it.

    Attributes
    ----------
    folder
        Where it is.
    run
        The run, with its checkpoint.
    """

    folder: Path
    run: Run

    @property
    def ranks(self) -> int:
        """Ranks that the run had."""
        return int(self.run.facts["ranks"])

    def on_others(self, ranks: int) -> str | None:
        """A sentence that says how the run goes on if its ranks are not as many as before; None if they are."""
        if ranks == self.ranks:
            return None
        return f"the run had {self.ranks} ranks and goes on with {ranks}: from the anchor, without what was in flight."

    def going_on(self, limits: dict[str, Any]) -> TrainConfig:
        """What the resumed run is: as before, until the limits in `limits` if there are any.

        Parameters
        ----------
        limits
            By name (seconds, samples, rounds): in all, with what the earlier run has behind it. None is no limit.

        Raises
        ------
        SpecError
            If the run is at its end already.
        """
        given = {name: value for name, value in limits.items() if value is not None}
        summary = self.run.summary
        if not given and not summary.interrupted:
            raise SpecError(
                f"run {str(self.folder)!r} came to its end; to train on, give --seconds, --samples or --rounds, counted from "
                "its start."
            )
        for name, value in given.items():
            done = getattr(summary, name)
            if value <= done:
                raise SpecError(
                    f"--{name} {value:g} counts from the run's start, and it has {done:g} behind it; give more."
                )
        if not given:
            return self.run.config
        changed: dict[str, Any] = {name: given.get(name) for name in ("seconds", "samples", "rounds")}
        return dataclasses.replace(self.run.config, **changed)


def load_earlier(folder: Path) -> Earlier:
    """Read a run to continue.

    Raises
    ------
    DataError
        If it is no run's folder, or has no checkpoint.
    """
    run = load_run(folder)
    files = sorted((folder / "checkpoint").glob("rank-*.pt"), key=lambda file: int(file.stem.partition("-")[2]))
    if not files:
        raise DataError(
            f"run {str(folder)!r} has no checkpoint to go on from; 'slackring train' and 'slackring run' write them."
        )
    if [file.name for file in files] != [f"rank-{rank}.pt" for rank in range(len(files))]:
        raise DataError(f"the checkpoint of run {str(folder)!r} lacks the file of a rank.")
    return Earlier(folder, dataclasses.replace(run, checkpoint=tuple(file.read_bytes() for file in files)))


@dataclass(frozen=True)
class Saved:
    """What one rank goes on from.

    Attributes
    ----------
    state
        Its own state if it is `exact`, else rank 0's.
    batches
        Where its batches were; None if it had none, or they cannot say.
    exact
        Whether all ranks go on from their own state, with as many ranks as before.
    """

    state: dict[str, Any]
    batches: dict[str, Any] | None
    exact: bool


def share(ring: Ring, files: Sequence[bytes]) -> Saved | None:
    """Hand the ranks' files out; collective.

    Parameters
    ----------
    ring
        Whose ranks go on.
    files
        By rank, as they were; only those on rank 0 count, since other hosts may not see its folder.

    Returns
    -------
    Saved or None
        None if there are no files.

    Raises
    ------
    DataError
        If this rank's file cannot be read.
    """
    count = int(ring.gather(str(len(files)).encode(), "slackring.lab.files")[0])
    kept: dict[int, bytes] = {}
    for rank in range(count):
        content = ring.gather(files[rank] if ring.rank == 0 else b"", "slackring.lab.file")[0]
        if rank in (0, ring.rank):
            kept[rank] = content
    if not kept:
        return None
    states = {rank: _unpack(content, f"rank-{rank}.pt") for rank, content in kept.items()}
    exact = count == ring.size
    own = states.get(ring.rank)
    return Saved(own if exact and own is not None else states[0], None if own is None else own["batches"], exact)


class RunFolder:
    """Where a run goes: what it has come to while it lasts, and itself in the end.

    Each checkpoint on the way is a whole run's folder beside the final one, and replaces the one before once it is there.

    Parameters
    ----------
    out, name
        The run's folder in the end is ``out/name``; that of a checkpoint is ``out/name-roundN``.
    """

    def __init__(self, out: Path, name: str) -> None:
        self._out, self._name = out, name
        self.latest: Path | None = None
        """The last checkpoint on the way, until the run is finished."""

    @property
    def path(self) -> Path:
        """The run's folder in the end."""
        return self._out / self._name

    def keep(self, run: Run) -> None:
        """Write a checkpoint; one that cannot be written is a warning, since training goes on without it."""
        name = f"{self._name}-round{run.summary.rounds}"
        try:
            folder = save_run(run, self._out, name)
        except OutputError as exc:
            log.warning("no checkpoint after round %d: %s", run.summary.rounds, exc)
            shutil.rmtree(self._out / name, ignore_errors=True)
            return
        self._drop_latest()
        self.latest = folder

    def finish(self, run: Run) -> Path:
        """Write the run, which makes the checkpoints before it superfluous.

        Raises
        ------
        OutputError
            If it cannot be written, or not whole; the last checkpoint is kept then.
        """
        try:
            folder = save_run(run, self._out, self._name)
        except OutputError as exc:
            if self.latest is None:
                raise
            raise OutputError(f"{exc} The last checkpoint on the way is {str(self.latest)!r}.") from exc
        self._drop_latest()
        return folder

    def _drop_latest(self) -> None:
        if self.latest is not None:
            shutil.rmtree(self.latest, ignore_errors=True)
            self.latest = None
