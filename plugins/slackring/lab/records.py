"""What a run measured, as tables: one row a local step, one row a round, one row an evaluation."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from slackring.optim.records import RoundRecord, StepRecord

__all__ = ["CurvePoint", "RunRecorder", "from_bytes", "split_blocked", "to_bytes", "to_table"]


class CurvePoint(NamedTuple):
    """One evaluation of the consensus model.

    Attributes
    ----------
    seconds
        Since the start of training.
    rounds, steps, samples
        Of all ranks, in the model that was evaluated.
    loss
        Mean loss over the evaluation batches.
    accuracy
        The task's metric, from 0 to 1.
    """

    seconds: float
    rounds: int
    steps: int
    samples: float
    loss: float
    accuracy: float


class RunRecorder:
    """Keeps a rank's rows; a :class:`slackring.optim.records.Recorder`."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.rounds: list[RoundRecord] = []

    def step(self, record: StepRecord) -> None:
        """Keep a local step's row."""
        self.steps.append(record)

    def round(self, record: RoundRecord) -> None:
        """Keep a round's row."""
        self.rounds.append(record)


def to_table(rows: Sequence[tuple[object, ...]], fields: Iterable[str]) -> pd.DataFrame:
    """Make a table of rows that may be none."""
    return pd.DataFrame(rows, columns=list(fields))


def to_bytes(table: pd.DataFrame) -> bytes:
    """A table as the content of a parquet file."""
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    return buffer.getvalue()


def from_bytes(payloads: Sequence[bytes]) -> pd.DataFrame:
    """The tables of all ranks as one, with their rank as the first column."""
    tables = [pd.read_parquet(io.BytesIO(payload)) for payload in payloads]
    for rank, table in enumerate(tables):
        table.insert(0, "rank", rank)
    return pd.concat(tables, ignore_index=True)


def split_blocked(rounds: pd.DataFrame) -> pd.DataFrame:
    """Split the seconds blocked on each round into communication and wait.

    A round needed communication from the launch of the last rank to the first landing, which is at most its shortest flight
    over ranks. Communication is what a rank was blocked, up to that; the rest is wait.

    Parameters
    ----------
    rounds
        Columns ``rank, round, launched, landed, blocked`` in seconds, of all ranks.

    Returns
    -------
    DataFrame
        The same rows with the columns `communicating` and `waiting` (their sum is `blocked`), and `began` and `ended`, between
        which all ranks were on the ring.

    Examples
    --------
    >>> rounds = pd.DataFrame(
    ...     {"rank": [0, 1], "round": [0, 0], "launched": [1.0, 3.0], "landed": [3.5, 3.5], "blocked": [2.5, 0.5]}
    ... )
    >>> split_blocked(rounds)[["communicating", "waiting", "began", "ended"]].to_numpy().tolist()
    [[0.5, 2.0, 3.0, 3.5], [0.5, 0.0, 3.0, 3.5]]
    """
    grouped = rounds.groupby("round")
    began = grouped["launched"].transform("max")
    ended = np.maximum(grouped["landed"].transform("min"), began)
    communicating = np.minimum(rounds["blocked"], ended - began)
    return rounds.assign(
        communicating=communicating, waiting=rounds["blocked"] - communicating, began=began, ended=ended
    )
