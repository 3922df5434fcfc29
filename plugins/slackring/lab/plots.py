"""Plots of a comparison: accuracy over seconds, where every rank's time went, windows, batches, a swept option."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from slackring.lab.comparison import Row
from slackring.lab.runs import Run
from slackring.lab.supersteps import Superstep
from slackring.lab.timeline import HIDDEN, lanes
from slackring.lab.windows import batches, windows

__all__ = [
    "accuracy_plot",
    "batch_plot",
    "colours",
    "superstep_plot",
    "sweep_plot",
    "timeline_plot",
    "window_plot",
]

_NEUTRAL = "#555555"
# Okabe and Ito's palette, which people with any colour vision tell apart; yellow is left out, too pale for a line.
_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")

_LANES = {
    "computing": "#0072B2",
    "waiting": "#E69F00",
    "communicating": "#CC79A7",
    "bookkeeping": "#999999",
    HIDDEN: "#CC79A7",
}


def colours(rules: Sequence[str]) -> dict[str, str]:
    """Give each rule a colour: grey for plain BSP, the others by their order.

    Examples
    --------
    >>> colours(["losp", "bsp"])
    {'losp': '#0072B2', 'bsp': '#555555'}
    """
    others = [rule for rule in rules if rule != "bsp"]
    return {rule: _NEUTRAL if rule == "bsp" else _PALETTE[others.index(rule) % len(_PALETTE)] for rule in rules}


def accuracy_plot(runs: Mapping[str, Sequence[Run]]) -> Figure:
    """Draw accuracy over seconds, one line a rule: the median over its runs, and a band over their range.

    Parameters
    ----------
    runs
        Runs by rule.

    Returns
    -------
    Figure
        For ``savefig`` or a notebook.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    colour = colours(list(runs))
    every = [run for group in runs.values() for run in group]
    for rule, group in runs.items():
        if not group:
            continue
        until = min(float(run.curve["seconds"].max()) for run in group)
        grid = np.linspace(0.0, until, 400)
        curves = np.array([_steps(run.curve, grid) for run in group])
        style = "--" if rule == "bsp" else "-." if rule.startswith("server/") else "-"
        axes.step(grid, np.median(curves, axis=0), style, where="post", color=colour[rule], label=rule, linewidth=2)
        if len(group) > 1:
            axes.fill_between(
                grid, curves.min(axis=0), curves.max(axis=0), step="post", color=colour[rule], alpha=0.18, linewidth=0
            )
    if every:
        target = every[0].config.target
        axes.axhline(target, color="black", linewidth=0.8, linestyle=":")
        place = axes.get_yaxis_transform()
        axes.text(0.005, target + 0.004, f"target {target:g}", transform=place, fontsize=9)
        best = max(float(run.curve["accuracy"].max()) for run in every)
        axes.set_ylim(max(0.0, min(0.5, target - 0.2, best - 0.2)), min(1.0, max(best, target) + 0.03))
        axes.set_xlim(0, max(float(run.curve["seconds"].max()) for run in every))
        axes.set_title(f"{every[0].config.task}: consensus model on test samples", loc="left", fontsize=11)
    axes.set_xlabel("training time (s)")
    axes.set_ylabel("accuracy (share of test samples)")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return _bare(figure, [axes])


def _steps(curve: pd.DataFrame, grid: np.ndarray) -> np.ndarray:
    """Accuracy of the newest model at each time; NaN before the first."""
    place = np.searchsorted(curve["seconds"].to_numpy(), grid, side="right") - 1
    known = curve["accuracy"].to_numpy()[np.maximum(place, 0)]
    return np.where(place >= 0, known, np.nan)


def timeline_plot(runs: Mapping[str, Run], start: float | None = None, seconds: float = 3.0) -> Figure:
    """Draw what every rank did in a few seconds of a run, one panel a rule.

    Parameters
    ----------
    runs
        One run a rule.
    start, seconds
        Where the window begins, and how long it is, in seconds of training; None begins after a quarter of the shortest run.

    Returns
    -------
    Figure
        For ``savefig`` or a notebook.
    """
    sizes = [int(run.facts["ranks"]) for run in runs.values()]
    if start is None:
        start = min(run.summary.seconds for run in runs.values()) / 4
    figure = Figure(figsize=(10, 0.8 + sum(0.34 * size + 0.45 for size in sizes)), layout="constrained")
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=sizes)[:, 0]
    for axes, (rule, run) in zip(panels, runs.items(), strict=True):
        _draw_lanes(axes, run, start, start + seconds)
        share = run.summary.limit_share
        axes.set_title(f"{rule}: {share:.0%} of the no-wait limit", loc="left", fontsize=10)
    panels[-1].set_xlabel("training time (s)")
    panels[-1].set_xlim(start, start + seconds)
    handles = [Patch(color=_LANES[name], label=name, alpha=_alpha(name)) for name in _LANES]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    return _bare(figure, list(panels))


def _draw_lanes(axes: Axes, run: Run, start: float, end: float) -> None:
    table = lanes(run.steps, run.rounds)
    table = table[(table["end"] > start) & (table["start"] < end)]
    ranks = int(run.facts["ranks"])
    for activity, colour in _LANES.items():
        hidden = activity == HIDDEN
        bottom, height = (0.32, 0.12) if hidden else (-0.38, 0.66)
        edge = "white" if activity == "computing" else "none"  # a hair line between local steps
        for rank in range(ranks):
            part = table[(table["rank"] == rank) & (table["activity"] == activity)]
            spans = list(zip(part["start"], part["end"] - part["start"], strict=True))
            axes.broken_barh(
                spans, (rank + bottom, height), facecolors=colour, edgecolor=edge, linewidth=0.6, alpha=_alpha(activity)
            )
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)
    axes.set_ylim(ranks - 0.5, -0.5)


def window_plot(runs: Mapping[str, Run], rounds: int = 40) -> Figure:
    """Draw how many local steps each rank takes in a window, one panel a rule.

    Parameters
    ----------
    runs
        One run a rule.
    rounds
        How many rounds from the first are shown.

    Returns
    -------
    Figure
        For ``savefig`` or a notebook.
    """
    figure = Figure(figsize=(10, 0.9 + 1.9 * len(runs)), layout="constrained")
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (rule, run) in zip(panels, runs.items(), strict=True):
        table = windows(run)
        ranks = int(run.facts["ranks"])
        for rank in range(ranks):
            window = table[(table["rank"] == rank) & (table["round"] < rounds)]
            # Lines of ranks that take as many steps lie over each other: the lower ones are wider.
            width = 1.5 + 4.0 * (ranks - 1 - rank) / max(ranks - 1, 1)
            colour = _PALETTE[rank % len(_PALETTE)]
            axes.step(
                window["round"], window["local_steps"], where="mid", color=colour, linewidth=width, label=f"rank {rank}"
            )
        axes.set_title(rule, loc="left", fontsize=10)
        axes.set_ylabel("local steps")
        axes.set_ylim(0, max(axes.get_ylim()[1], 2))
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25)
    panels[-1].set_xlabel("round")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 8), frameon=False, fontsize=9)
    return _bare(figure, list(panels))


def batch_plot(runs: Mapping[str, Run]) -> Figure:
    """Draw the samples of every update, of all ranks together and by rank, a row of panels a rule.

    Parameters
    ----------
    runs
        One run a rule.

    Returns
    -------
    Figure
        Left, round by round, with the mean and a band of a standard deviation; right, the quartiles and extremes of each rank.
    """
    figure = Figure(figsize=(10, 0.5 + 2.4 * len(runs)), layout="constrained")
    panels = figure.subplots(len(runs), 2, squeeze=False, width_ratios=(3, 2))
    for (left, right), (rule, run) in zip(panels, runs.items(), strict=True):
        sizes, table = batches(run), windows(run)
        mean, deviation = float(sizes.mean()), float(sizes.std(ddof=0))
        left.plot(sizes.index, sizes, ".-", color=_PALETTE[0], linewidth=0.8, markersize=4)
        left.axhline(mean, color="black", linewidth=1)
        left.axhspan(mean - deviation, mean + deviation, color=_PALETTE[0], alpha=0.15, linewidth=0)
        left.set_title(rule, loc="left", fontsize=10)
        text = f"mean {mean:.0f}, standard deviation {deviation:.0f}"
        left.text(0.01, 0.04, text, transform=left.transAxes, fontsize=9)
        left.set_ylabel("samples of all ranks")
        ranks = range(int(run.facts["ranks"]))
        right.boxplot(
            [table.loc[table["rank"] == rank, "samples"].to_numpy() for rank in ranks],
            whis=(0, 100),
            tick_labels=[str(rank) for rank in ranks],
            medianprops={"color": _PALETTE[1], "linewidth": 2},
        )
        right.set_title("by rank: quartiles, extremes", loc="left", fontsize=10)
        right.set_ylabel("samples in a window")
        for axes in (left, right):
            axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
            axes.grid(alpha=0.25)
        left.xaxis.get_major_locator().set_params(integer=True)
    panels[-1, 0].set_xlabel("round")
    panels[-1, 1].set_xlabel("rank")
    return _bare(figure, list(panels.flat))


def sweep_plot(rows: Mapping[str, Sequence[Row]], option: str, baseline: Sequence[Row] = ()) -> Figure:
    """Draw what a swept option does to the seconds to the target and to the share of the no-wait limit.

    Parameters
    ----------
    rows
        Rows by the option's value.
    option
        Its name.
    baseline
        Rows of plain BSP, drawn as a dashed line.

    Returns
    -------
    Figure
        Medians and ranges over the runs; a value with runs that missed the target has a cross at the top and their number.
    """
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_sweep(left, rows, baseline, lambda row: row.seconds_to_target)
    _draw_sweep(right, rows, baseline, lambda row: row.limit_share)
    for place, some in enumerate(rows.values()):
        missed = sum(row.seconds_to_target is None for row in some)
        if missed:
            top = left.get_xaxis_transform()
            left.plot(place, 0.95, "x", color=_PALETTE[1], transform=top, clip_on=False)
            left.text(place, 0.89, f"{missed} of {len(some)}\nmissed", transform=top, fontsize=8, ha="center", va="top")
    left.set_ylabel("seconds to the target")
    right.set_ylabel("share of the no-wait limit")
    everyone = [row for some in (*rows.values(), baseline) for row in some]
    if all(row.seconds_to_target is None for row in everyone):
        left.set_yticks([])
    left.set_ylim(0, (1.4 if any(row.seconds_to_target is None for row in everyone) else 1.1) * left.get_ylim()[1])
    right.set_ylim(0, 1.05)
    for axes in (left, right):
        axes.set_xlabel(option)
        axes.set_xlim(-0.5, len(rows) - 0.5)
        axes.set_xticks(range(len(rows)), list(rows))
        axes.grid(alpha=0.25)
    return _bare(figure, [left, right])


def _draw_sweep(
    axes: Axes, rows: Mapping[str, Sequence[Row]], baseline: Sequence[Row], measure: Callable[[Row], float | None]
) -> None:
    for place, some in enumerate(rows.values()):
        known = [value for row in some if (value := measure(row)) is not None]
        if known and len(known) == len(some):  # a median of those that got there flatters
            middle = statistics.median(known)
            reach = [[middle - min(known)], [max(known) - middle]]
            axes.errorbar(place, middle, reach, fmt="o", color=_PALETTE[0], capsize=4)
    known = [value for row in baseline if (value := measure(row)) is not None]
    if known and len(known) == len(baseline):
        middle = statistics.median(known)
        axes.axhline(middle, color=_NEUTRAL, linestyle="--")
        axes.text(1.0, middle, "bsp", transform=axes.get_yaxis_transform(), color=_NEUTRAL, fontsize=9, va="center")


def superstep_plot(superstep: Superstep) -> Figure:
    """Draw a planned superstep: iterations, targets and waits of each worker, up to a little after the barrier.

    Parameters
    ----------
    superstep
        The plan, and the end times it was made of.

    Returns
    -------
    Figure
        For ``savefig`` or a notebook.
    """
    plan, start, until = superstep.plan, superstep.start, superstep.shown_until
    figure = Figure(figsize=(10, 1.1 + 0.34 * len(superstep.workers)), layout="constrained")
    axes = figure.add_subplot()
    for place, (ends, target) in enumerate(zip(superstep.ends, plan.targets.tolist(), strict=True)):
        spans = [(left, right - left) for left, right in itertools.pairwise([start, *ends])]
        for some, alpha in ((spans[: target + 1], 1.0), (spans[target + 1 :], 0.25)):
            colour = _LANES["computing"]
            axes.broken_barh(
                some, (place - 0.33, 0.66), facecolors=colour, edgecolor="white", linewidth=0.6, alpha=alpha
            )
        wait = (ends[target], plan.barrier - ends[target])
        axes.broken_barh([wait], (place - 0.33, 0.66), facecolors=_LANES["waiting"])
    axes.axvline(plan.barrier, color="black", linewidth=1.2)
    axes.set_yticks(range(len(superstep.workers)), superstep.workers, fontsize=8)
    axes.set_ylim(len(superstep.workers) - 0.5, -0.5)
    axes.set_xlim(start, until)
    axes.set_xlabel("time, in the unit of the file")
    axes.set_title(f"barrier {plan.barrier:g}, gap {plan.gap:g}", loc="left", fontsize=10)
    handles = [Patch(color=_LANES[name], label=name) for name in ("computing", "waiting")]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    return _bare(figure, [axes])


def _alpha(activity: str) -> float:
    return 0.45 if activity == HIDDEN else 1.0


def _bare(figure: Figure, panels: Sequence[Axes]) -> Figure:
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure
