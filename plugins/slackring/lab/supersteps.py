"""A superstep planned from a file: what ``slackring plan`` reads and shows."""

from __future__ import annotations

import csv
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slackring import zipline
from slackring.errors import DataError

__all__ = ["Recorded", "Superstep", "Times", "plan_superstep", "print_superstep", "read_recorded"]

Times = Literal["ends", "iterations"]


@dataclass(frozen=True)
class Recorded:
    """What a file says of each worker.

    Attributes
    ----------
    workers
        Their names.
    rows
        By worker: times, of any unit.
    """

    workers: list[str]
    rows: list[list[float]]


@dataclass(frozen=True)
class Superstep:
    """A plan, and what it was made of.

    Attributes
    ----------
    workers
        Their names.
    times
        How the file was read.
    ends
        By worker: the end times that were planned with.
    start
        Where the drawn timeline begins.
    plan
        What ZipLine chose.
    """

    workers: list[str]
    times: Times
    ends: list[list[float]]
    start: float
    plan: zipline.Plan

    @property
    def shown_until(self) -> float:
        """Where the drawn timeline ends: a little after the barrier."""
        return self.plan.barrier + ((self.plan.barrier - self.start) / 5 or 1)

    def to_json(self) -> dict[str, Any]:
        """Barrier, gap, and a row a worker; a target is an index into its end times."""
        plan = self.plan
        rows = zip(self.workers, plan.targets.tolist(), self.ends, plan.waits.tolist(), strict=True)
        return {
            "times": self.times,
            "barrier": plan.barrier,
            "gap": plan.gap,
            "workers": [
                {"worker": name, "target": target, "iterations": target + 1, "end": ends[target], "wait": wait}
                for name, target, ends, wait in rows
            ],
        }


def read_recorded(file: str | Path) -> Recorded:
    """Read a row of times for every worker.

    A name ending in ``.json`` stands for a list of lists of numbers, or an object of such lists by worker. Any other file is a
    CSV with a line a worker: times, after the worker's name if there is one. A header and lines that begin with ``#`` are
    passed over; lines may differ in length.

    Raises
    ------
    DataError
        If the file is missing or malformed; the message names the file, and the line or worker.
    """
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(f"{str(file)!r} cannot be read: {exc}.") from None
    recorded = _json(str(file), text) if path.suffix.lower() == ".json" else _csv(str(file), text)
    if not recorded.rows:
        raise DataError(f"{str(file)!r} has no workers; give a row of times for each.")
    for worker, row in zip(recorded.workers, recorded.rows, strict=True):
        if not row:
            raise DataError(f"{str(file)!r}: worker {worker} has no times.")
        if not np.isfinite(row).all():
            raise DataError(f"{str(file)!r}: a time of worker {worker} is not finite.")
    return recorded


def _csv(file: str, text: str) -> Recorded:
    recorded = Recorded([], [])
    lines = csv.reader(text.splitlines())
    for line in lines:
        cells = [cell.strip() for cell in line]
        while cells and not cells[-1]:
            cells.pop()
        if not cells or cells[0].startswith("#"):
            continue
        named = _number(cells[0]) is None
        numbers = [_number(cell) for cell in cells[named:]]
        if not recorded.rows and named and all(number is None for number in numbers):
            continue  # a header
        if None in numbers:
            wrong = cells[named:][numbers.index(None)]
            raise DataError(f"{file!r}, line {lines.line_num}: {wrong!r} is not a number.")
        recorded.workers.append(cells[0] if named else str(len(recorded.rows)))
        recorded.rows.append([number for number in numbers if number is not None])
    return recorded


def _number(text: str) -> float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return None


def _json(file: str, text: str) -> Recorded:
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise DataError(f"{file!r} is not JSON: {exc}.") from None
    if isinstance(found, list):
        found = {str(place): row for place, row in enumerate(found)}
    if not isinstance(found, dict):
        raise DataError(f"{file!r} is neither a list of lists of numbers nor an object of such lists by worker.")
    for worker, row in found.items():
        if not isinstance(row, list) or not all(type(item) in (int, float) for item in row):
            raise DataError(f"{file!r}: worker {worker} has no list of numbers.")
    return Recorded(list(found), list(found.values()))


def plan_superstep(recorded: Recorded, lookahead: int, times: Times | None = None) -> Superstep:
    """Plan where the workers meet next.

    Parameters
    ----------
    recorded
        Their times.
    lookahead
        End times of each worker that are considered.
    times
        ``"ends"``: the times say when the next iterations end. ``"iterations"``: they are how long past iterations took; all
        start at 0, and each goes on as long as its last one. None tells them apart: end times ascend.

    Raises
    ------
    DataError
        If the kind of times cannot be told.
    PlanError
        If end times descend.
    """
    rows = recorded.rows
    if times is None:
        if all(len(row) == 1 for row in rows):
            raise DataError(
                "one time a worker may be its next end or its last duration; say --times ends or --times iterations."
            )
        ascend = all(earlier < later for row in rows for earlier, later in itertools.pairwise(row))
        times = "ends" if ascend else "iterations"
    if times == "iterations":
        shortest = min(row[-1] for row in rows)
        if shortest <= 0:
            raise DataError(f"an iteration took {shortest:g}; the last time of every worker must be above 0.")
        ends = [[row[-1] * (place + 1) for place in range(lookahead)] for row in rows]
        start: float = 0
    else:
        ends = [row[:lookahead] for row in rows]
        firsts = [row[0] for row in ends]
        start = min(firsts) - max((row[1] - row[0] for row in ends if len(row) > 1), default=0)
    return Superstep(recorded.workers, times, ends, start, zipline.plan(ends))


def print_superstep(superstep: Superstep, console: Console) -> None:
    """Print the plan as a table, and the timeline up to a little after the barrier."""
    plan = superstep.plan
    how = "end times" if superstep.times == "ends" else "past iteration times, each worker going on as in its last one"
    console.print(f"barrier {_text(plan.barrier)}, gap {_text(plan.gap)} (from {how})", highlight=False)
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("worker", no_wrap=True)
    for header in ("iterations", "end", "wait"):
        table.add_column(header, justify="right")
    for row in superstep.to_json()["workers"]:
        table.add_row(row["worker"], str(row["iterations"]), _text(row["end"]), _text(row["wait"]))
    console.print(table)
    names = max(map(len, superstep.workers))
    for name, line in zip(superstep.workers, _lanes(superstep, max(console.width - names - 2, 20)), strict=True):
        console.print(Text(f"{name:>{names}} ") + line, no_wrap=True, highlight=False)
    console.print(
        f"{'':{names}} | an iteration ends   ● the target   ░ waiting   ┃ the barrier", style="dim", highlight=False
    )


def _lanes(superstep: Superstep, width: int) -> list[Text]:
    """One line a worker, `width` characters wide."""
    plan, start = superstep.plan, superstep.start
    until = superstep.shown_until

    def column(time: float) -> int:
        return round((time - start) / (until - start) * (width - 1))

    barrier = column(plan.barrier)
    lanes = []
    for ends, target in zip(superstep.ends, plan.targets.tolist(), strict=True):
        lane = ["─"] * (column(ends[target]) + 1)
        lane += ["░"] * (barrier - len(lane) + 1) + [" "] * (width - barrier - 1)
        for end in ends:
            if end <= until:
                lane[column(end)] = "|"
        lane[barrier] = "┃"
        lane[column(ends[target])] = "●"
        lanes.append(Text("".join(lane[: barrier + 1])) + Text("".join(lane[barrier + 1 :]), style="dim"))
    return lanes


def _text(time: float) -> str:
    return str(time) if isinstance(time, int) else f"{time:.6g}"
