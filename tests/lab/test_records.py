"""From rows to a summary and to lanes."""

from __future__ import annotations

import pandas as pd
import pytest

from slackring.lab.records import CurvePoint, from_bytes, split_blocked, to_bytes, to_table
from slackring.lab.summary import accuracy_at, summarise
from slackring.lab.timeline import HIDDEN, chrome_trace, lanes
from slackring.optim.records import RoundRecord, StepRecord


def steps_of(*rows):
    """Rows of (rank, step, round, start, compute, blocked, bookkeeping)."""
    return pd.DataFrame(
        [
            (
                rank,
                *StepRecord(
                    step, number, start, start + compute + blocked + book, compute, compute, blocked, book, 32.0
                ),
            )
            for rank, step, number, start, compute, blocked, book in rows
        ],
        columns=["rank", *StepRecord._fields],
    )


def rounds_of(*rows):
    """Rows of (rank, round, launched, landed, blocked)."""
    return pd.DataFrame(
        [
            (rank, *RoundRecord(number, launched, landed, blocked, 1, 32.0, 2, 64.0, 2, 2, 0.0, 1000))
            for rank, number, launched, landed, blocked in rows
        ],
        columns=["rank", *RoundRecord._fields],
    )


# Two blocking rounds; rank 1 computes for 3 s, rank 0 for 1 s, a round travels 0.5 s.
STEPS = steps_of(
    (0, 0, 0, 0.0, 1.0, 2.5, 0.0),
    (0, 1, 1, 3.5, 1.0, 2.5, 0.25),
    (1, 0, 0, 0.0, 3.0, 0.5, 0.0),
    (1, 1, 1, 3.5, 3.0, 0.5, 0.25),
)
ROUNDS = rounds_of((0, 0, 1.0, 3.5, 2.5), (0, 1, 4.5, 7.0, 2.5), (1, 0, 3.0, 3.5, 0.5), (1, 1, 6.5, 7.0, 0.5))
CURVE = pd.DataFrame(
    [CurvePoint(3.5, 1, 2, 64.0, loss=1.0, accuracy=0.5), CurvePoint(7.25, 2, 4, 128.0, loss=0.5, accuracy=0.9)],
    columns=list(CurvePoint._fields),
)


def test_tables_survive_the_way_to_rank_0():
    tables = [
        to_table([StepRecord(0, 0, 0.0, 1.0, 1.0, 0.5, 0.0, 0.0, 32.0)], StepRecord._fields),
        to_table([], StepRecord._fields),
    ]
    together = from_bytes([to_bytes(table) for table in reversed(tables)])
    assert together["rank"].tolist() == [1]
    assert list(together.columns) == ["rank", *StepRecord._fields]


def test_waiting_ends_where_the_last_rank_launches():
    split = split_blocked(ROUNDS)
    assert split["communicating"].tolist() == [0.5] * 4
    assert split["waiting"].tolist() == [2.0, 2.0, 0.0, 0.0]


def test_communication_is_at_most_the_shortest_flight():
    # With a round in flight, the last rank notices its landing late.
    rounds = rounds_of((0, 0, 1.0, 3.25, 1.5), (1, 0, 3.0, 6.0, 0.0))
    split = split_blocked(rounds)
    assert split["communicating"].tolist() == [0.25, 0.0]
    assert split["waiting"].tolist() == [1.25, 0.0]


def test_a_summary_of_a_run_known_by_heart():
    summary = summarise(STEPS, ROUNDS, CURVE, target=0.9)
    assert summary.seconds == 7.25
    assert summary.seconds_to_target == 7.25
    assert summary.steps_per_second == pytest.approx(4 / 7.25)
    assert summary.limit_share == pytest.approx(4 / 7.25 / (1 / 1 + 1 / 3))
    assert summary.wait_share == pytest.approx([4 / 7.25, 0.0])
    assert summary.idle_share == pytest.approx([5 / 7.25, 1 / 7.25])
    assert (summary.rounds, summary.steps, summary.samples) == (2, 4, 128.0)
    assert (summary.bytes_to_target, summary.nbytes) == (4000, 4000)
    assert (summary.longest_window_steps, summary.longest_window) == (1, 1.0)
    assert summary.final_accuracy == 0.9


def test_a_target_that_was_not_reached_has_no_figure():
    summary = summarise(STEPS, ROUNDS, CURVE, target=0.95)
    assert summary.seconds_to_target is None
    assert summary.bytes_to_target is None


def test_bytes_to_the_target_count_the_rounds_in_that_model():
    assert summarise(STEPS, ROUNDS, CURVE, target=0.5).bytes_to_target == 2000


def test_a_long_window_is_measured_in_the_slowest_ranks_steps():
    steps = steps_of(
        *((0, step, step // 6, step * 1.0, 1.0, 0.0, 0.0) for step in range(6)), (1, 0, 0, 0.0, 3.0, 0.0, 0.0)
    )
    summary = summarise(steps, ROUNDS, CURVE, target=0.9)
    assert (summary.longest_window_steps, summary.longest_window) == (6, 2.0)


def test_accuracy_at_a_number_of_samples_looks_back_only():
    assert accuracy_at(CURVE, 100) == 0.5
    assert accuracy_at(CURVE, 128) == 0.9
    assert accuracy_at(CURVE, 10) is None


def test_lanes_fill_each_ranks_time_without_overlap():
    table = lanes(STEPS, ROUNDS)
    for rank in (0, 1):
        own = table[(table["rank"] == rank) & (table["activity"] != HIDDEN)].sort_values("start")
        assert own["start"].iloc[0] == 0.0
        assert own["end"].iloc[-1] == 7.25
        assert own["start"].tolist()[1:] == own["end"].tolist()[:-1]
    spent = table.assign(seconds=table["end"] - table["start"]).groupby(["rank", "activity"])["seconds"].sum()
    assert spent[0].to_dict() == {"computing": 2.0, "waiting": 4.0, "communicating": 1.0, "bookkeeping": 0.25}
    assert spent[1].to_dict() == {"computing": 6.0, "communicating": 1.0, "bookkeeping": 0.25}


def test_communication_behind_computing_is_a_lane_of_its_own():
    steps = steps_of((0, 0, 0, 0.0, 4.0, 0.0, 0.0), (1, 0, 0, 0.0, 4.0, 0.0, 0.0))
    rounds = rounds_of((0, 0, 1.0, 4.0, 0.0), (1, 0, 2.0, 3.5, 0.0))
    hidden = lanes(steps, rounds).query("activity == @HIDDEN")
    assert hidden[["rank", "start", "end"]].to_numpy().tolist() == [[0, 2.0, 3.5], [1, 2.0, 3.5]]


def test_the_trace_has_a_process_a_rank_and_microseconds():
    events = chrome_trace(STEPS, ROUNDS)["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["rank 0", "rank 1"]
    waits = [event for event in events if event["name"] == "waiting"]
    assert [(event["pid"], event["ts"], event["dur"]) for event in waits] == [(0, 1e6, 2e6), (0, 4.5e6, 2e6)]
