"""A fair comparison of rules: each at its own tuned learning rate, on seeds that it was not tuned on."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from slackring.errors import DivergedError, OutputError, SpecError
from slackring.lab.comparison import CompareConfig, Comparison, Row, Tuned
from slackring.lab.config import TrainConfig
from slackring.lab.interrupt import Interrupt
from slackring.lab.launch import Launch, require_horovod, run_on_horovod, run_virtual
from slackring.lab.runs import Run, load_run, new_folder, run_name, whole, write_json, writing
from slackring.lab.summary import accuracy_at
from slackring.lab.train import train_virtual
from slackring.naming import new_name

__all__ = ["compare", "tune"]

log = logging.getLogger("slackring")

Say = Callable[[str], None]


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
