"""Plots of a comparison: accuracy over seconds, and where every rank's time went."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from slackring.lab.runs import Run
from slackring.lab.supersteps import Superstep
from slackring.lab.timeline import HIDDEN, lanes

__all__ = ["accuracy_plot", "colours", "superstep_plot", "timeline_plot"]

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
