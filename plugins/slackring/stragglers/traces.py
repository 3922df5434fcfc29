"""Recorded step times: what a straggler was like in reality."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Mapping
from pathlib import Path

from slackring.errors import DataError

__all__ = ["read_trace"]

_CSV_COLUMNS = ("rank", "step", "seconds")
_OPERATION_COLUMNS = ("dp_rank", "rank", "step", "optype", "duration")
_COMPUTE = ("forward-compute", "backward-compute")


def read_trace(file: str | Path) -> tuple[tuple[float, ...], ...]:
    """Read how long each step of each data-parallel rank took.

    A name ending in ``.parquet`` stands for one row an operation of a pipeline-parallel job, with the columns
    ``dp_rank`` (data-parallel rank), ``rank`` (worker), ``step``, ``optype`` and ``duration`` (seconds). The operations
    ``forward-compute`` and ``backward-compute`` of a worker and step are added up, and the slowest worker (that of the
    slowest pipeline stage) gives the data-parallel rank its time. Any other file is a CSV with a header and the columns
    ``rank``, ``step`` and ``seconds``; its rows may be in any order.

    Numbers of ranks and steps only give the order, so a recording may start anywhere and leave steps out.

    Parameters
    ----------
    file
        Path of the recording; ``~`` is the home folder.

    Returns
    -------
    tuple of tuple of float
        Seconds by rank and step, above 0. Ranks may have different numbers of steps.

    Raises
    ------
    DataError
        If the file is missing or malformed; the message names the file, and the line of a CSV.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise DataError(f"there is no trace file {str(file)!r}; give the path of a CSV or parquet file.")
    times = _operations(path) if path.suffix.lower() == ".parquet" else _csv(path)
    if not times:
        raise DataError(f"trace {str(path)!r} has no steps.")
    return _by_rank(times)


def _by_rank(times: Mapping[tuple[int, int], float]) -> tuple[tuple[float, ...], ...]:
    groups = itertools.groupby(sorted(times.items()), key=lambda item: item[0][0])
    return tuple(tuple(seconds for _, seconds in steps) for _, steps in groups)


def _csv(path: Path) -> dict[tuple[int, int], float]:
    times: dict[tuple[int, int], float] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            rows = csv.DictReader(lines)
            missing = [column for column in _CSV_COLUMNS if column not in (rows.fieldnames or ())]
            if missing:
                raise DataError(
                    f"trace {str(path)!r}, line 1: no column {', '.join(missing)}; rank,step,seconds are needed."
                )
            for row in rows:
                where = f"trace {str(path)!r}, line {rows.line_num}"
                try:
                    key, seconds = (int(row["rank"]), int(row["step"])), float(row["seconds"])
                except (TypeError, ValueError):  # TypeError: the line is too short, and the value None
                    raise DataError(f"{where}: rank and step must be whole numbers, seconds a number.") from None
                if min(key) < 0:
                    raise DataError(f"{where}: rank {key[0]}, step {key[1]} is negative; both count from 0.")
                if not (math.isfinite(seconds) and seconds > 0):
                    raise DataError(f"{where}: seconds is {seconds}, but must be a finite number above 0.")
                if key in times:
                    raise DataError(f"{where}: rank {key[0]}, step {key[1]} is there twice; keep one.")
                times[key] = seconds
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        raise DataError(f"trace {str(path)!r} cannot be read as CSV: {exc}.") from exc
    return times


def _operations(path: Path) -> dict[tuple[int, int], float]:
    # Imported here: nobody else should wait for pyarrow, or need it.
    import pyarrow.compute
    import pyarrow.parquet

    try:
        missing = set(_OPERATION_COLUMNS) - set(pyarrow.parquet.read_schema(path).names)
        if missing:
            raise DataError(f"trace {str(path)!r} has no column {', '.join(sorted(missing))}.")
        table = pyarrow.parquet.read_table(
            path, columns=list(_OPERATION_COLUMNS), filters=pyarrow.compute.field("optype").isin(_COMPUTE)
        )
        workers = table.group_by(["dp_rank", "rank", "step"]).aggregate([("duration", "sum")])
        slowest = workers.group_by(["dp_rank", "step"]).aggregate([("duration_sum", "max")]).to_pydict()
    except (OSError, pyarrow.ArrowException) as exc:
        raise DataError(f"trace {str(path)!r} cannot be read as parquet: {exc}.") from exc
    columns = zip(slowest["dp_rank"], slowest["step"], slowest["duration_sum_max"], strict=True)
    times = {(rank, step): seconds for rank, step, seconds in columns}
    for (rank, step), seconds in times.items():
        if seconds is None or not (math.isfinite(seconds) and seconds > 0):
            raise DataError(
                f"trace {str(path)!r}: rank {rank}, step {step} computes for {seconds} s; it must be above 0."
            )
    return times
