"""A comparison as a value: what is compared, what came out, and where it lies."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from slackring.errors import DataError, SpecError
from slackring.lab.choices import parse_choice, refuse_off_virtual
from slackring.lab.config import TrainConfig
from slackring.lab.runs import Run, load_run

__all__ = ["CompareConfig", "Comparison", "Row", "Tuned", "load_comparison"]

log = logging.getLogger("slackring")

_FIRST_TUNING_SEED = 1000


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """What is compared, and how.

    Parameters
    ----------
    base
        What all runs have in common; its rule, seed and learning rate are replaced.
    rules
        Texts of the rules; with `virtual` also policies of the parameter server.
    workers
        Number of ranks.
    lr_grid
        Learning rates to choose from, for each rule by itself. One value fixes the rate, and nothing is tuned.
    seeds
        Of the runs that count.
    tuning_runs
        Runs a rate is judged by, on virtual ranks, with seeds that are not among `seeds`.
    virtual
        Also do the runs that count on virtual ranks.

    Raises
    ------
    SpecError
        For values that cannot be.
    """

    base: TrainConfig
    rules: tuple[str, ...]
    workers: int = 4
    lr_grid: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.8)
    seeds: tuple[int, ...] = (0,)
    tuning_runs: int = 2
    virtual: bool = False

    def __post_init__(self) -> None:
        choices = [parse_choice(rule) for rule in self.rules]
        if not self.virtual:
            for choice in choices:
                refuse_off_virtual(choice)
        texts = tuple(map(str, choices))
        object.__setattr__(self, "rules", texts)
        if not texts or len(set(texts)) < len(texts):
            raise SpecError(f"--rules needs at least one rule, each once, not {_listed(texts)}.")
        if self.workers < 1:
            raise SpecError(f"--workers must be at least 1, not {self.workers}.")
        if not self.lr_grid or not all(math.isfinite(lr) and lr > 0 for lr in self.lr_grid):
            raise SpecError(f"--lr-grid needs learning rates above 0, not {_listed(self.lr_grid)}.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise SpecError(f"--seeds needs whole numbers of at least 0, each once, not {_listed(self.seeds)}.")
        if self.base.seconds is None:
            raise SpecError("a comparison is timed: give --seconds.")
        self.base.parsed_straggler().check(self.workers)

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        """Seeds to tune on: none that counts."""
        candidates = (seed for seed in range(_FIRST_TUNING_SEED, 2**31) if seed not in self.seeds)
        return tuple(seed for seed, _ in zip(candidates, range(self.tuning_runs), strict=False))


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The learning rate that suits a rule best.

    Attributes
    ----------
    rule
        Its text.
    lr
        The rate with the least median seconds to the target; where none reached it, with the best accuracy.
    at_edge
        Whether that is an end of the grid, so that a rate beyond it may be better still.
    tried
        By rate: median seconds to the target (None if at least half of the runs did not reach it) and median final accuracy
        (None if at least half of the runs diverged).
    """

    rule: str
    lr: float
    at_edge: bool
    tried: dict[float, tuple[float | None, float | None]]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        tried = [[lr, *found] for lr, found in self.tried.items()]
        return {"rule": self.rule, "lr": self.lr, "at_edge": self.at_edge, "tried": tried}


@dataclasses.dataclass(frozen=True)
class Row:
    """One run of a comparison: what :class:`slackring.lab.summary.Summary` says of it, and more.

    Attributes
    ----------
    rule, seed, lr
        What was run.
    lr_at_edge
        See :class:`Tuned`.
    speedup
        Seconds to the target of plain BSP with the same seed, over this run's; None without both.
    accuracy_at_equal_samples
        Accuracy at the largest number of samples that every run of the comparison reached.
    run
        The run's folder; None if it diverged.
    """

    rule: str
    seed: int
    lr: float
    lr_at_edge: bool
    seconds_to_target: float | None = None
    speedup: float | None = None
    final_accuracy: float | None = None
    accuracy_at_equal_samples: float | None = None
    steps_per_second: float | None = None
    limit_share: float | None = None
    wait_share: list[float] | None = None
    idle_share: list[float] | None = None
    rounds: int | None = None
    samples: float | None = None
    bytes_to_target: int | None = None
    longest_window_steps: int | None = None
    longest_window: float | None = None
    interrupted: bool = False
    diverged: bool = False
    run: str | None = None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What came out of a comparison.

    Attributes
    ----------
    config
        What was compared.
    tuned
        By rule.
    rows
        One a run.
    equal_samples
        Samples at which `accuracy_at_equal_samples` was taken.
    interrupted
        Whether runs are missing because Ctrl-C or SIGTERM came.
    folder
        Where everything lies.
    """

    config: CompareConfig
    tuned: tuple[Tuned, ...]
    rows: tuple[Row, ...]
    equal_samples: float
    interrupted: bool
    folder: Path

    def of(self, rule: str) -> list[Row]:
        """Rows of one rule."""
        return [row for row in self.rows if row.rule == rule]

    def runs(self) -> dict[str, list[Run]]:
        """All runs that did not diverge, by rule; read from their folders, without those that are damaged or gone."""
        runs: dict[str, list[Run]] = {rule: [] for rule in self.config.rules}
        for row in self.rows:
            if row.run is not None:
                try:
                    runs[row.rule].append(load_run(Path(row.run)))
                except DataError as exc:
                    log.warning("a run is left out: %s", exc)
        return runs

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, ``runs`` first."""
        return {
            "runs": [dataclasses.asdict(row) for row in self.rows],
            "equal_samples": self.equal_samples,
            "interrupted": self.interrupted,
            "folder": str(self.folder),
            "tuned": [tuned.to_json() for tuned in self.tuned],
            "config": dataclasses.asdict(self.config),
            "tuning_seeds": list(self.config.tuning_seeds),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` gave."""
        config = dict(values["config"])
        lists = {key: tuple(config[key]) for key in ("rules", "lr_grid", "seeds")}
        return cls(
            config=CompareConfig(**{**config, **lists, "base": TrainConfig(**config["base"])}),
            tuned=tuple(
                Tuned(**{**tuned, "tried": {lr: (seconds, accuracy) for lr, seconds, accuracy in tuned["tried"]}})
                for tuned in values["tuned"]
            ),
            rows=tuple(Row(**row) for row in values["runs"]),
            equal_samples=values["equal_samples"],
            interrupted=values["interrupted"],
            folder=Path(values["folder"]),
        )


def load_comparison(folder: Path) -> Comparison:
    """Read a comparison's folder.

    Raises
    ------
    DataError
        If it is missing or malformed.
    """
    try:
        values = json.loads((folder / "comparison.json").read_text())
        comparison = Comparison.from_json(values)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise DataError(f"{str(folder)!r} is not the folder of a comparison: {exc}.") from exc
    # The folder may have been moved since.
    rows = tuple(
        row if row.run is None else dataclasses.replace(row, run=str(folder / Path(row.run).name))
        for row in comparison.rows
    )
    return dataclasses.replace(comparison, folder=folder, rows=rows)


def _listed(values: Sequence[object]) -> str:
    return ",".join(map(str, values)) or "none"
