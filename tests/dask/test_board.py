"""What the board says of a run, from snapshots alone."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from slackring.dask.board import Board


def snapshot(seconds, *, step=0.1, waiting=0.0, **values):
    """Of a rank that has worked for some seconds, and waited for a share of them."""
    steps = int(seconds * (1 - waiting) / step)
    reported = {f"reported.{name}": value for name, value in values.items()}
    work = {"compute": seconds * (1 - waiting), "blocked": seconds * waiting, "bookkeeping": 0.0}
    return {
        "rounds": 3,
        "steps": steps,
        "samples": 8.0 * steps,
        "seconds": seconds,
        "step_seconds": step,
        **work,
    } | reported


def drawn(board, width=120):
    console = Console(file=io.StringIO(), width=width)
    console.print(board.table())
    return console.file.getvalue()


def test_nothing_is_known_at_first():
    board = Board(["tcp://node1:1", "tcp://node2:1"])
    rows, total = board.rows()
    assert [(row.name, row.steps, row.samples_per_second, row.waiting) for row in rows] == [
        ("0", 0, None, None),
        ("1", 0, None, None),
    ]
    assert (total.name, total.rounds, total.samples_per_second) == ("all", 0, None)
    assert board.line() == "0 rounds, 0 steps, - samples/s, waiting - -"
    assert "node1:1" in drawn(board) and "tcp" not in drawn(board)
    assert Board([]).line() == "0 rounds, 0 steps, - samples/s, waiting "


def test_rates_and_shares_are_of_the_last_seconds_and_in_the_end_of_all():
    board = Board(["node1"])
    for tenths in range(1, 101):
        board.take(0, snapshot(tenths / 10))
    for tenths in range(1, 101):
        busy = snapshot(10)
        board.take(0, busy | {"seconds": 10 + tenths / 10, "blocked": tenths / 10})
    (row,), _ = board.rows()
    assert row.samples_per_second == 0 and row.waiting == 1
    board.end()
    (row,), total = board.rows()
    assert row.samples_per_second == pytest.approx(40, rel=0.05) and row.waiting == pytest.approx(0.5, rel=0.05)
    assert total.samples_per_second == row.samples_per_second


def test_a_rank_that_tells_seldom_is_measured_over_longer():
    board = Board(["node1"])
    for seconds in (10, 20, 30):
        board.take(0, snapshot(seconds))
    assert board.rows()[0][0].samples_per_second == pytest.approx(80)


@pytest.mark.parametrize(
    ("shares", "slowest"),
    [
        ((0.4, 0.5, 0.0), 2),
        ((0.0, 0.09), None),  # the difference is not clear
        ((0.3, 0.3, 0.3), None),
        ((0.0, 0.0, 0.6), None),  # two are as slow
        ((0.5,), None),
        ((0.5, None, 0.1), 2),
        ((None, None), None),
    ],
)
def test_all_wait_for_the_rank_that_waits_clearly_least(shares, slowest):
    board = Board(["node"] * len(shares))
    for rank, share in enumerate(shares):
        if share is not None:
            board.take(rank, snapshot(10, waiting=share))
    told = [row.waits_for for row in board.rows()[0]]
    assert told == [
        None if slowest is None or share is None or rank == slowest else slowest for rank, share in enumerate(shares)
    ]
    assert (f"(for rank {slowest})" in board.line()) == (slowest is not None)


def test_the_last_row_is_of_all_ranks():
    board = Board(["node1", "node2"], title="run7")
    board.take(0, snapshot(10, step=0.1, loss=1.0, phase="warm-up") | {"rounds": 4})
    board.take(1, snapshot(10, step=0.2, loss=2.0))
    rows, total = board.rows()
    assert (total.rounds, total.steps, total.values) == (3, rows[0].steps + rows[1].steps, {"loss": 1.5})
    assert total.samples_per_second == rows[0].samples_per_second + rows[1].samples_per_second
    text = drawn(board)
    assert text.startswith("run7: running for 10 s")
    assert "warm-up" in text and "1.5" in text
    board.end()
    assert drawn(board).startswith("run7: ended after 10 s")


@pytest.mark.parametrize("width", [80, 120])
def test_numbers_are_whole_at_any_width(width):
    board = Board([f"tcp://192.168.100.{rank}:45678" for rank in range(4)])
    for rank in range(4):
        board.take(rank, snapshot(10_000, step=0.01, waiting=0.5 * (rank < 3), loss=0.12345, accuracy=0.98))
    text = drawn(board, width)
    assert text.count(" 500,000") == 3 and "2,500,000" in text and text.count("0.1235") == 4 + 1
    assert text.count("rank 3") == 3 and text.count("50%") == 3 and "2,000" in text


def test_the_users_texts_are_no_markup():
    board = Board(["[red]node1"])
    board.take(0, snapshot(10, phase="[bold]x[/bold]", **{"[i]": 1.0}))
    board.warn("[dim]rank 3 takes 0.4 s")
    text = drawn(board)
    assert all(part in text for part in ("[red]node1", "[bold]x[/bold]", "[i]", "warning: [dim]rank 3"))


def test_only_the_newest_warnings_are_in_the_table():
    board = Board(["node1"])
    for number in range(10):
        board.warn(f"number {number}")
    text = drawn(board)
    assert "number 9" in text and "number 6" not in text and len(board.warnings) == 10
