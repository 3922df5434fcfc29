"""A fair comparison of rules: each at its own tuned learning rate, on seeds that it was not tuned on."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from slackring.errors import DataError, DivergedError, OutputError, SpecError
from slackring.lab.choices import parse_choice, refuse_off_virtual
from slackring.lab.config import TrainConfig
from slackring.lab.interrupt import Interrupt
from slackring.lab.launch import Launch, require_horovod, run_name, run_on_horovod, run_virtual
from slackring.lab.runs import Run, load_run, new_folder, whole, write_json, writing
from slackring.lab.summary import accuracy_at
from slackring.lab.train import train_virtual
from slackring.naming import new_name

__all__ = ["CompareConfig", "Comparison", "Row", "Tuned", "compare", "load_comparison", "tune"]

log = logging.getLogger("slackring")

_FIRST_TUNING_SEED = 1000

Say = Callable[[str], None]


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


def tune(config: CompareConfig, rule: str, *, interrupt: Interrupt | None = None) -> Tuned:
    """Choose a rule's learning rate on virtual ranks.

    Parameters
    ----------
    config
        The grid, the seeds to tune on and everything that is injected.
    rule
        Text of the rule.
    interrupt
        Ends it early; what is returned then is of no use.

    Examples
    --------
    >>> base = TrainConfig(task="digits", step_time=0.1, seconds=10.0, target=0.85)
    >>> tuned = tune(CompareConfig(base, rules=("losp",), lr_grid=(0.001, 0.4), tuning_runs=1), "losp")
    >>> tuned.lr, tuned.at_edge, tuned.tried[0.001][0]
    (0.4, True, None)
    """
    tried: dict[float, tuple[float | None, float | None]] = {}
    if len(config.lr_grid) > 1:
        for lr in sorted(config.lr_grid):
            tried[lr] = _judge(config, rule, lr, interrupt)
        lr = min(tried, key=lambda lr: _badness(*tried[lr]))
    else:
        lr = config.lr_grid[0]
    return Tuned(rule, lr, bool(tried) and lr in (min(tried), max(tried)), tried)


def _judge(
    config: CompareConfig, rule: str, lr: float, interrupt: Interrupt | None
) -> tuple[float | None, float | None]:
    seconds: list[float] = []
    accuracies: list[float] = []
    for seed in config.tuning_seeds:
        run = dataclasses.replace(config.base, rule=rule, lr=lr, seed=seed, stop_at_target=True)
        try:
            summary = train_virtual(run, config.workers, interrupt=interrupt).summary
        except DivergedError:
            seconds.append(math.inf)
            accuracies.append(-math.inf)
            continue
        seconds.append(math.inf if summary.seconds_to_target is None else summary.seconds_to_target)
        accuracies.append(summary.final_accuracy)
    return _finite(statistics.median(seconds)), _finite(statistics.median(accuracies))


def _listed(values: Sequence[object]) -> str:
    return ",".join(map(str, values)) or "none"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _badness(seconds: float | None, accuracy: float | None) -> tuple[float, float]:
    return math.inf if seconds is None else seconds, math.inf if accuracy is None else -accuracy


def compare(
    config: CompareConfig,
    out: Path,
    *,
    name: str | None = None,
    launch: Launch = run_on_horovod,
    interrupt: Interrupt | None = None,
    say: Say = print,
) -> Comparison:
    """Tune every rule, run every rule with every seed, and write it all into one new folder.

    Parameters
    ----------
    config
        What to compare.
    out
        Parent of the folder.
    name
        Name of the folder; made up if None.
    launch
        Trains the runs that count, unless they are virtual; see :func:`slackring.lab.launch.launcher`.
    interrupt
        Ends it early: what was run until then is kept.
    say
        Takes a line on what is going on.

    Returns
    -------
    Comparison
        Also in ``comparison.json`` in the folder, beside ``accuracy.png`` and ``timeline.png`` (where matplotlib is
        installed); every run has a folder of its own in it, in the layout of :func:`slackring.lab.runs.save_run`.

    Raises
    ------
    OutputError
        If the folder cannot be written, or not all of it; the runs that could be written are kept.
    SlackringError
        If Horovod is not installed, or the ranks fail.
    KeyboardInterrupt
        If it was ended before anything was run.
    """
    interrupt = interrupt or Interrupt()
    name = name or new_name("compare")
    launch = run_virtual if config.virtual else launch
    if launch is run_on_horovod:
        require_horovod()
    with new_folder(out, name) as folder:
        tuned = []
        for rule in config.rules:
            tuned.append(tune(config, rule, interrupt=interrupt))
            if interrupt.signal is not None:
                raise KeyboardInterrupt
            say(_tuning_line(tuned[-1]))
        jobs = [
            dataclasses.replace(config.base, rule=one.rule, lr=one.lr, lr_source=_lr_source(config, one), seed=seed)
            for seed in config.seeds
            for one in tuned
        ]
        outcomes: list[Path | None] = []
        failure: OutputError | None = None
        try:
            for job, outcome in zip(jobs, launch(jobs, config.workers, folder, interrupt), strict=False):
                outcomes.append(outcome)
                say(_run_line(job, outcome))
        except OutputError as exc:
            failure = exc
        if not outcomes:
            raise failure or KeyboardInterrupt
        runs = [None if outcome is None else load_run(outcome) for outcome in outcomes]
        comparison = _collect(config, tuned, jobs, runs, out / name)
        try:
            with writing(folder):
                write_json(folder / "comparison.json", comparison.to_json())
                _draw(jobs, runs, folder)
        except OutputError as exc:
            failure = failure or exc
    if failure is not None:
        raise OutputError(
            f"{failure} {len(outcomes)} of {len(jobs)} runs are kept in {str(out / name)!r}."
        ) from failure
    return comparison


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


def _collect(
    config: CompareConfig,
    tuned: Sequence[Tuned],
    jobs: Sequence[TrainConfig],
    runs: Sequence[Run | None],
    final: Path,
) -> Comparison:
    equal = min((run.summary.samples for run in runs if run is not None), default=0.0)
    baseline = {
        job.seed: run.summary.seconds_to_target
        for job, run in zip(jobs, runs, strict=False)
        if run is not None and job.rule == "bsp"
    }
    edges = {one.rule: one.at_edge for one in tuned}
    rows = [
        _row(job, run, edges[job.rule], baseline.get(job.seed), equal, final)
        for job, run in zip(jobs, runs, strict=False)
    ]
    interrupted = len(runs) < len(jobs) or any(row.interrupted for row in rows)
    return Comparison(config, tuple(tuned), tuple(rows), equal, interrupted, final)


def _draw(jobs: Sequence[TrainConfig], runs: Sequence[Run | None], folder: Path) -> None:
    """Draw the two plots, where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from slackring.lab.plots import accuracy_plot, timeline_plot

    groups: dict[str, list[Run]] = {}
    for job, run in zip(jobs, runs, strict=False):
        if run is not None:
            groups.setdefault(job.rule, []).append(run)
    if groups:
        timeline = timeline_plot({rule: group[0] for rule, group in groups.items()})
        for name, plot in (("accuracy.png", accuracy_plot(groups)), ("timeline.png", timeline)):
            with whole(folder / name) as file:
                plot.savefig(file, dpi=150)


def _row(job: TrainConfig, run: Run | None, at_edge: bool, baseline: float | None, equal: float, final: Path) -> Row:
    if job.lr is None:
        raise SpecError("every run of a comparison has a learning rate.")
    if run is None:
        return Row(job.rule, job.seed, job.lr, at_edge, diverged=True)
    summary = run.summary
    seconds = summary.seconds_to_target
    return Row(
        rule=job.rule,
        seed=job.seed,
        lr=job.lr,
        lr_at_edge=at_edge,
        seconds_to_target=seconds,
        speedup=baseline / seconds if baseline is not None and seconds else None,
        final_accuracy=summary.final_accuracy,
        accuracy_at_equal_samples=accuracy_at(run.curve, equal),
        steps_per_second=summary.steps_per_second,
        limit_share=summary.limit_share,
        wait_share=summary.wait_share,
        idle_share=summary.idle_share,
        rounds=summary.rounds,
        samples=summary.samples,
        bytes_to_target=summary.bytes_to_target,
        longest_window_steps=summary.longest_window_steps,
        longest_window=summary.longest_window,
        interrupted=summary.interrupted,
        run=str(final / run_name(job)),
    )


def _lr_source(config: CompareConfig, tuned: Tuned) -> str:
    if not tuned.tried:
        return "given"
    seeds = ", ".join(map(str, config.tuning_seeds))
    grid = ", ".join(f"{lr:g}" for lr in tuned.tried)
    return f"tuned on virtual ranks, seeds {seeds}, grid {grid}{'; at the edge of the grid' if tuned.at_edge else ''}"


def _tuning_line(tuned: Tuned) -> str:
    if not tuned.tried:
        return f"{tuned.rule}: lr {tuned.lr:g}, given"
    tried = ", ".join(f"{lr:g}: {_found(*found)}" for lr, found in tuned.tried.items())
    return f"{tuned.rule}: lr {tuned.lr:g} of {{{tried}}}{', at the edge of the grid' if tuned.at_edge else ''}"


def _found(seconds: float | None, accuracy: float | None) -> str:
    if accuracy is None:
        return "diverges"
    return f"{accuracy:.3f} at the end" if seconds is None else f"{seconds:.1f} s"


def _run_line(job: TrainConfig, outcome: Path | None) -> str:
    if outcome is None:
        return f"{job.rule}, seed {job.seed}: diverged"
    summary = load_run(outcome).summary
    reached = (
        "target not reached" if summary.seconds_to_target is None else f"target after {summary.seconds_to_target:.1f} s"
    )
    return f"{job.rule}, seed {job.seed}: {reached}, final accuracy {summary.final_accuracy:.3f}"
