"""The board: what a running pool shows of its ranks, from the newest of their snapshots."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slackring.dask.snapshots import Snapshot, gained, reported, wait_share

__all__ = ["Board", "Row"]

_INTERVAL = 3.0  # seconds that rates and shares are taken over
_CLEARLY = 0.1  # the share that all others wait more than the one they wait for
_MOST_VALUES, _MOST_WARNINGS, _WIDEST = 4, 3, 24
_NOTHING = "-"


@dataclass(frozen=True)
class Row:
    """A rank, or all of them.

    Attributes
    ----------
    name, worker
        The rank's number, and the Dask worker that it runs on; "all" and nothing for all ranks.
    rounds, steps
        That have landed; local steps. Of all ranks, the fewest rounds and the sum of the steps.
    samples_per_second, waiting
        Samples, and the share of its time in which it waited; None if they are not known yet. Of all ranks, sum and mean.
    waits_for
        The rank that it waits for, if that is clear.
    values
        What it reported; of all ranks, the mean of what are numbers.
    """

    name: str
    worker: str
    rounds: int
    steps: int
    samples_per_second: float | None
    waiting: float | None
    waits_for: int | None
    values: dict[str, float | int | str | None]


class Board:
    """How far a run is, rank by rank.

    Rates and shares are those of the last seconds; once the run has ended, those of all of it.

    Parameters
    ----------
    workers
        The Dask worker of each rank.
    title
        Of the run.

    Examples
    --------
    >>> board = Board(["node1", "node2"], title="demo")
    >>> work = {"rounds": 8, "steps": 8, "samples": 256.0, "bookkeeping": 0.0, "reported.loss": 0.5}
    >>> board.take(0, {**work, "seconds": 4.0, "compute": 1.0, "blocked": 3.0})
    >>> board.take(1, {**work, "seconds": 4.0, "compute": 4.0, "blocked": 0.0})
    >>> print(board.line())
    demo: 8 rounds, 16 steps, 128 samples/s, waiting 75% 0% (for rank 1), loss 0.5
    """

    def __init__(self, workers: Sequence[str], title: str = "") -> None:
        self.title, self.over = title, False
        self.warnings: list[str] = []
        """All that came, oldest first."""
        self._workers = list(workers)
        self._first: list[Snapshot] = [{} for _ in workers]
        self._recent: list[deque[Snapshot]] = [deque([{}]) for _ in workers]

    def take(self, rank: int, snapshot: Snapshot) -> None:
        """Take the newest snapshot of a rank."""
        recent = self._recent[rank]
        if snapshot.get("steps") and not self._first[rank]:
            self._first[rank] = snapshot
        recent.append(snapshot)
        while len(recent) > 2 and gained(recent[1], snapshot, "seconds") >= _INTERVAL:
            recent.popleft()

    def warn(self, text: str) -> None:
        """Take a warning."""
        self.warnings.append(text)

    def end(self) -> None:
        """Show, from now on, the run as a whole."""
        self.over = True

    def rows(self) -> tuple[list[Row], Row]:
        """A row for each rank, and the one of all ranks."""
        spans = [self._span(rank) for rank in range(len(self._workers))]
        shares = [wait_share(before, now) for before, now in spans]
        slowest = _slowest(shares)
        rows = [
            Row(
                name=str(rank),
                worker=worker,
                rounds=int(gained({}, now, "rounds")),
                steps=int(gained({}, now, "steps")),
                samples_per_second=_rate(before, now),
                waiting=share,
                waits_for=None if slowest is None or rank == slowest or share is None else slowest,
                values=reported(now),
            )
            for rank, (worker, (before, now), share) in enumerate(zip(self._workers, spans, shares, strict=True))
        ]
        return rows, _all(rows)

    def _span(self, rank: int) -> tuple[Snapshot, Snapshot]:
        recent = self._recent[rank]
        first = self._first[rank] if self.over else recent[0]
        return (first if gained(first, recent[-1], "seconds") > 0 else {}), recent[-1]

    def table(self) -> RenderableType:
        """All of it, for a terminal or a page."""
        rows, total = self.rows()
        names = list(dict.fromkeys(chain.from_iterable(row.values for row in rows)))[:_MOST_VALUES]
        title = f"{self.title}: {'ended after' if self.over else 'running for'} {self._seconds():,.0f} s".removeprefix(
            ": "
        )
        result = Table(
            title=Text(title), title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        result.show_footer = True
        result.add_column("rank", no_wrap=True)
        result.add_column("worker", overflow="ellipsis", min_width=9)  # the one that gives way where all do not fit
        for header in ("rounds", "steps", "samples/s", "waiting", "waits for", *names):
            result.add_column(Text(header), justify="right", no_wrap=True)
        for column, cell in zip(result.columns, _cells(total, names), strict=True):
            column.footer = cell
        for row in rows:
            result.add_row(*_cells(row, names))
        said = [Text(f"warning: {text}", style="yellow") for text in self.warnings[-_MOST_WARNINGS:]]
        return Group(result, *said)

    def line(self) -> str:
        """All ranks in one line."""
        rows, total = self.rows()
        shares = " ".join(_percent(row.waiting) for row in rows)
        slowest = next((f" (for rank {row.waits_for})" for row in rows if row.waits_for is not None), "")
        values = [f"{name} {_value(value)}" for name, value in list(total.values.items())[:_MOST_VALUES]]
        parts = [f"{total.rounds:,} rounds", f"{total.steps:,} steps", f"{_number(total.samples_per_second)} samples/s"]
        return f"{self.title}: {', '.join([*parts, f'waiting {shares}{slowest}', *values])}".removeprefix(": ")

    def _seconds(self) -> float:
        return max((gained({}, recent[-1], "seconds") for recent in self._recent), default=0.0)


def _rate(before: Snapshot, now: Snapshot) -> float | None:
    seconds = gained(before, now, "seconds")
    return gained(before, now, "samples") / seconds if seconds > 0 else None


def _slowest(shares: Sequence[float | None]) -> int | None:
    """The rank that all others wait for: it waits least, by a clear margin."""
    known = sorted((share, rank) for rank, share in enumerate(shares) if share is not None)
    if len(known) < 2 or known[1][0] - known[0][0] < _CLEARLY:
        return None
    return known[0][1]


def _all(rows: Sequence[Row]) -> Row:
    rates = [row.samples_per_second for row in rows if row.samples_per_second is not None]
    shares = [row.waiting for row in rows if row.waiting is not None]
    numbers: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.values.items():
            if isinstance(value, int | float):
                numbers.setdefault(name, []).append(value)
    return Row(
        name="all",
        worker="",
        rounds=min((row.rounds for row in rows), default=0),
        steps=sum(row.steps for row in rows),
        samples_per_second=sum(rates) if rates else None,
        waiting=sum(shares) / len(shares) if shares else None,
        waits_for=None,
        values={name: sum(values) / len(values) for name, values in numbers.items()},
    )


def _cells(row: Row, names: Sequence[str]) -> list[Text]:
    cells = [
        row.name,
        row.worker.removeprefix("tcp://"),
        f"{row.rounds:,}",
        f"{row.steps:,}",
        _number(row.samples_per_second),
        _percent(row.waiting),
        "" if row.name == "all" else _NOTHING if row.waits_for is None else f"rank {row.waits_for}",
        *(_value(row.values.get(name)) for name in names),
    ]
    return [Text(cell) for cell in cells]  # texts of the user's are no markup


def _number(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.0%}"


def _value(value: float | int | str | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value[:_WIDEST]
