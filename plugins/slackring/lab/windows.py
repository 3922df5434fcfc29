"""The windows of a run: how long they were, how many samples they had, how stale the model was on which they were computed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from slackring.lab.runs import Run

__all__ = ["batches", "by_rank", "by_rule", "idle_share", "windows"]


def windows(run: Run) -> pd.DataFrame:
    """List the windows of all ranks.

    Parameters
    ----------
    run
        On a ring.

    Returns
    -------
    DataFrame
        One row for each window with a local step, columns ``rank, round, start, local_steps, samples, staleness``: the round
        that carried it, when its first step began (s), and how many rounds
        were in flight then.

    Examples
    --------
    >>> from slackring.lab.config import TrainConfig
    >>> from slackring.lab.train import train_virtual
    >>> config = TrainConfig(task="digits", rule="losp", straggler="persistent:ranks=1,factor=3", lr=0.2, rounds=5)
    >>> found = windows(train_virtual(config, size=2))
    >>> found[found["round"] == 3][["rank", "local_steps", "samples", "staleness"]].to_numpy().tolist()
    [[0.0, 3.0, 96.0, 1.0], [1.0, 1.0, 32.0, 1.0]]
    """
    grouped = run.steps.groupby(["rank", "round"], as_index=False)
    found = grouped.agg(start=("start", "min"), local_steps=("step", "size"), samples=("samples", "sum"))
    landed = {rank: np.sort(times.to_numpy()) for rank, times in run.rounds.groupby("rank")["landed"]}
    # All rounds before a window's own have been launched when it begins.
    in_flight = [
        np.maximum(window["round"] - np.searchsorted(landed.get(rank, np.empty(0)), window["start"], side="right"), 0)
        for rank, window in found.groupby("rank")
    ]
    return found.assign(staleness=np.concatenate(in_flight) if in_flight else np.empty(0))


def idle_share(run: Run) -> list[float]:
    """Tell which share of the run each rank was blocked: waiting, or communicating without computing meanwhile."""
    blocked = run.steps.groupby("rank")["blocked"].sum()
    seconds = run.summary.seconds
    return [float(blocked.get(rank, 0.0)) / seconds if seconds else 0.0 for rank in range(int(run.facts["ranks"]))]


def batches(run: Run) -> pd.Series:
    """Samples of all ranks in each round that had any, by round."""
    return windows(run).groupby("round")["samples"].sum()


def by_rank(run: Run) -> pd.DataFrame:
    """Bring the windows of each rank down to a few numbers, medians if nothing else is said, to be shown as a table."""
    grouped = windows(run).groupby("rank")
    table = pd.DataFrame(
        {
            "seconds a local step": run.steps.groupby("rank")["compute"].median().round(3),
            "windows": grouped.size(),
            "local steps a window": grouped["local_steps"].median(),
            "least": grouped["local_steps"].min(),
            "most": grouped["local_steps"].max(),
            "samples a window": grouped["samples"].median(),
            "staleness": grouped["staleness"].median(),
        }
    )
    shares = idle_share(run)
    return table.assign(idle=[f"{shares[rank]:.0%}" for rank in table.index])


def by_rule(runs: Mapping[str, Run]) -> pd.DataFrame:
    """Set the tables of :func:`by_rank` of one run a rule among each other."""
    return pd.concat({rule: by_rank(run) for rule, run in runs.items()}, names=["rule"])
