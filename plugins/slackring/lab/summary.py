"""What a run comes to, in a few numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd

from slackring.lab.records import split_blocked

__all__ = ["Summary", "accuracy_at", "summarise"]


@dataclasses.dataclass(frozen=True)
class Summary:
    """A run in numbers.

    Attributes
    ----------
    seconds_to_target
        Until the consensus model first had the target accuracy; None if it never had.
    final_accuracy
        Of the model that all ranks end with.
    steps_per_second
        Local steps of all ranks over the run's seconds.
    limit_share
        `steps_per_second` over the no-wait limit: the sum over ranks of 1 / (median computing time of its local steps,
        injected time included).
    wait_share
        By rank: the share of the run in which the rank had nothing to compute because others were not ready.
    idle_share
        By rank: the share of the run in which the rank computed nothing, be it for others or for communication.
    rounds, steps, samples
        Of all ranks together.
    seconds
        From the start to the last local step.
    bytes_to_target
        Bytes that all ranks had contributed to the rounds in the model that first had the target accuracy; None if none had.
    nbytes
        Bytes that all ranks contributed.
    longest_window_steps
        Most local steps in one window.
    longest_window
        Most computing time in one window, in median local steps of the slowest rank.
    interrupted
        Whether a signal (Ctrl-C, SIGTERM, SIGUSR1) cut the run short, or this is a checkpoint on its way.
    """

    seconds_to_target: float | None
    final_accuracy: float
    steps_per_second: float
    limit_share: float
    wait_share: list[float]
    idle_share: list[float]
    rounds: int
    steps: int
    samples: float
    seconds: float
    bytes_to_target: int | None
    nbytes: int
    longest_window_steps: int
    longest_window: float
    interrupted: bool = False

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dataclasses.asdict(self)


def summarise(
    steps: pd.DataFrame, rounds: pd.DataFrame, curve: pd.DataFrame, *, target: float, interrupted: bool = False
) -> Summary:
    """Bring a run down to a :class:`Summary`.

    Parameters
    ----------
    steps, rounds
        Rows of all ranks, with their rank; see :mod:`slackring.optim.records`.
    curve
        Rows of :class:`slackring.lab.records.CurvePoint`, at least one; the last is the model that all ranks end with.
    target
        Accuracy whose first reaching counts.
    interrupted
        Whether the run was cut short.
    """
    seconds = float(steps["end"].max()) if len(steps) else 0.0
    medians = steps.groupby("rank")["compute"].median()
    rate = len(steps) / seconds if seconds else 0.0
    limit = float((1 / medians[medians > 0]).sum())
    split = split_blocked(rounds)
    ranks = sorted(set(rounds["rank"]) | set(steps["rank"]))
    # Draining after the last step is no longer training.
    shares = split[split["launched"] <= seconds].groupby("rank")[["waiting", "blocked"]].sum() / (seconds or 1.0)
    shares = shares.reindex(ranks, fill_value=0.0)
    windows = steps.groupby(["rank", "round"])["compute"].agg(["sum", "size"])
    reached = curve[curve["accuracy"] >= target]
    first = reached.iloc[0] if len(reached) else None
    last = curve.iloc[-1]
    return Summary(
        seconds_to_target=None if first is None else float(first["seconds"]),
        final_accuracy=float(last["accuracy"]),
        steps_per_second=rate,
        limit_share=rate / limit if limit else 0.0,
        wait_share=shares["waiting"].tolist(),
        idle_share=shares["blocked"].tolist(),
        rounds=int(rounds["round"].nunique()),
        steps=len(steps),
        samples=float(steps["samples"].sum()),
        seconds=seconds,
        bytes_to_target=None if first is None else int(rounds.loc[rounds["round"] < first["rounds"], "nbytes"].sum()),
        nbytes=int(rounds["nbytes"].sum()),
        longest_window_steps=int(windows["size"].max()) if len(windows) else 0,
        longest_window=float(windows["sum"].max() / medians.max()) if len(windows) and medians.max() > 0 else 0.0,
        interrupted=interrupted,
    )


def accuracy_at(curve: pd.DataFrame, samples: float) -> float | None:
    """Accuracy of the last evaluated model that held at most `samples` samples of all ranks; None if there is none.

    Examples
    --------
    >>> curve = pd.DataFrame({"samples": [100.0, 200.0, 300.0], "accuracy": [0.5, 0.7, 0.8]})
    >>> accuracy_at(curve, samples=250)
    0.7
    """
    earlier = curve[curve["samples"] <= samples]
    return float(earlier["accuracy"].iloc[-1]) if len(earlier) else None
