"""Where each rank's time went, as lanes: for plots, and as a Chrome trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from slackring.lab.records import split_blocked

__all__ = ["ACTIVITIES", "HIDDEN", "chrome_trace", "lanes"]

HIDDEN = "hidden communication"
ACTIVITIES = ("computing", "waiting", "communicating", "bookkeeping", HIDDEN)
"""What a rank can be doing; the last is on the ring while it computes."""

_COLUMNS = ["rank", "activity", "start", "end", "round", "step"]
_MAIN, _RING = 0, 1  # thread numbers in the trace


def lanes(steps: pd.DataFrame, rounds: pd.DataFrame) -> pd.DataFrame:
    """Lay out what each rank did, when.

    Parameters
    ----------
    steps, rounds
        Rows of all ranks, as in :class:`slackring.lab.runs.Run`.

    Returns
    -------
    DataFrame
        Columns ``rank, activity, start, end, round, step`` (`step` is -1 on the ring); seconds from the start of training.
        A local step is laid out as computing, waiting, communicating and bookkeeping, in this order, and fills its time.
        Only ``hidden communication`` overlaps the others.
    """
    split = split_blocked(rounds)
    # A round blocked the step in which it landed.
    ends = steps[["rank", "step", "end"]].sort_values("end")
    blocking = pd.merge_asof(
        split.sort_values("landed"), ends, by="rank", left_on="landed", right_on="end", direction="forward"
    )
    communicating = blocking.groupby(["rank", "step"], as_index=False)["communicating"].sum()
    table = steps.merge(communicating, on=["rank", "step"], how="left")
    computed = table["start"] + table["compute"]
    landed = computed + table["blocked"]
    waited = landed - np.minimum(table["communicating"].fillna(0.0), table["blocked"])
    parts = [
        table.assign(activity=activity, start=start, end=end)
        for activity, start, end in (
            ("computing", table["start"], computed),
            ("waiting", computed, waited),
            ("communicating", waited, landed),
            ("bookkeeping", landed, table["end"]),
        )
    ]
    hidden_end = split["ended"] - split["communicating"]
    parts.append(split.assign(activity=HIDDEN, start=split["began"], end=hidden_end, step=-1))
    laid_out = pd.concat([part[_COLUMNS] for part in parts], ignore_index=True)
    laid_out = laid_out[laid_out["end"] > laid_out["start"]]
    return laid_out.sort_values(["rank", "start"], kind="stable", ignore_index=True)


def chrome_trace(steps: pd.DataFrame, rounds: pd.DataFrame) -> dict[str, Any]:
    """Lay a run out as a trace that Perfetto and chrome://tracing open.

    Parameters
    ----------
    steps, rounds
        Rows of all ranks, as in :class:`slackring.lab.runs.Run`.

    Returns
    -------
    dict
        JSON values in the Trace Event Format, times in microseconds: a process for each rank, with a thread for what the
        rank does and one for what the ring does meanwhile.
    """
    events: list[dict[str, Any]] = []
    for rank in sorted({int(rank) for rank in steps["rank"]}):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for thread, name in ((_MAIN, "this rank"), (_RING, "ring, hidden behind computing")):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}})
    for lane in lanes(steps, rounds).to_dict("records"):
        hidden = lane["activity"] == HIDDEN
        events.append(
            {
                "ph": "X",
                "name": "communicating" if hidden else lane["activity"],
                "pid": int(lane["rank"]),
                "tid": _RING if hidden else _MAIN,
                "ts": round(lane["start"] * 1e6, 1),
                "dur": round((lane["end"] - lane["start"]) * 1e6, 1),
                "args": {"round": int(lane["round"])} | ({} if hidden else {"step": int(lane["step"])}),
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
