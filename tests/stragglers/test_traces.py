"""Reading recorded steps."""

from __future__ import annotations

import math
import os
from pathlib import Path
from random import Random

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackring.errors import DataError
from slackring.stragglers import Trace
from slackring.stragglers.traces import read_trace

TRACES = Path(os.environ.get("SLACKRING_TRACES") or Path(__file__).parents[3] / "shared" / "traces")


@given(
    st.dictionaries(st.tuples(st.integers(0, 9), st.integers(0, 99)), st.floats(1e-9, 1e9), min_size=1), st.randoms()
)
def test_csv_keeps_every_value_in_the_order_of_ranks_and_steps(
    tmp_path_factory: pytest.TempPathFactory, times: dict[tuple[int, int], float], random: Random
) -> None:
    file = tmp_path_factory.mktemp("trace") / "steps.csv"
    lines = [f"{seconds!r}, {step},x,{rank}\n" for (rank, step), seconds in times.items()]
    random.shuffle(lines)
    file.write_text("\ufeffseconds,step,note,rank\n" + "\n".join(lines), encoding="utf-8")
    ranks = sorted({rank for rank, _ in times})
    assert read_trace(file) == tuple(tuple(times[key] for key in sorted(times) if key[0] == rank) for rank in ranks)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"line 1: no column rank, step, seconds; rank,step,seconds are needed"),
        ("rank,step,duration\n0,0,1\n", "line 1: no column seconds"),
        ("rank,step,seconds\n", "has no steps"),
        ("rank,step,seconds\n0,0,1\n0,1\n", "line 3: rank and step must be whole numbers, seconds a number"),
        ("rank,step,seconds\n0,0,1\n\n0,x,1\n", "line 4: rank and step must be whole numbers"),
        ("rank,step,seconds\n0,0,1s\n", "line 2: rank and step must be whole numbers, seconds a number"),
        ("rank,step,seconds\n0,-1,1\n", "line 2: rank 0, step -1 is negative"),
        ("rank,step,seconds\n0,0,0\n", "line 2: seconds is 0.0, but must be a finite number above 0"),
        ("rank,step,seconds\n0,0,nan\n", "line 2: seconds is nan"),
        ("rank,step,seconds\n0,0,inf\n", "line 2: seconds is inf"),
        ("rank,step,seconds\n0,0,1\n0,0,1\n", "line 3: rank 0, step 0 is there twice"),
        (b"rank,step,seconds\n0,0,\xff\n", "cannot be read as CSV"),
        ('rank,step,seconds\n0,0,"' + "1" * 200_000 + '"\n', "cannot be read as CSV"),
    ],
)
def test_csv_refusals_name_file_and_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    file = tmp_path / "steps.csv"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=rf"^trace '{file}'.* ?{message}"):
        read_trace(file)


def test_missing_files_are_named(tmp_path: Path) -> None:
    for file in (tmp_path / "gone.csv", tmp_path / "gone.parquet", tmp_path):
        with pytest.raises(DataError, match=f"there is no trace file '{file}'"):
            read_trace(file)


def test_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "steps.csv").write_text("rank,step,seconds\n0,0,2\n")
    assert read_trace("~/steps.csv") == ((2.0,),)


def operations() -> pd.DataFrame:
    """Two data-parallel ranks with two pipeline stages; rank 1 recorded one step only."""
    rows = [
        # dp_rank, rank, step, optype, duration
        (1, 3, 7, "backward-compute", 0.25),
        (1, 2, 7, "forward-compute", 0.125),
        (0, 0, 9, "forward-compute", 1.0),
        (0, 0, 9, "backward-compute", 2.0),
        (0, 0, 9, "forward-compute", 0.5),
        (0, 1, 9, "forward-compute", 3.0),
        (0, 0, 7, "forward-compute", 1.0),
        (0, 1, 7, "backward-compute", 4.0),
        (0, 1, 7, "backward-recv", 100.0),
        (1, 3, 7, "optimizer", 100.0),
    ]
    frame = pd.DataFrame(rows, columns=["dp_rank", "rank", "step", "optype", "duration"])
    return frame.astype({"dp_rank": "int8", "optype": "category", "duration": "float32"})


def test_operations_add_up_per_worker_and_the_slowest_worker_counts(tmp_path: Path) -> None:
    file = tmp_path / "job.parquet"
    operations().to_parquet(file)
    assert read_trace(file) == ((4.0, 3.5), (0.25,))


def test_operations_refusals_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.parquet"
    operations().drop(columns=["step", "duration"]).to_parquet(file)
    with pytest.raises(DataError, match=rf"^trace '{file}' has no column duration, step"):
        read_trace(file)
    operations().iloc[-2:].to_parquet(file)
    with pytest.raises(DataError, match=rf"^trace '{file}' has no steps"):
        read_trace(file)
    for bad in (0.0, -1.0, math.inf, math.nan):
        operations().iloc[:1].assign(duration=bad).to_parquet(file)
        with pytest.raises(DataError, match=rf"^trace '{file}': rank 1, step 7 computes for"):
            read_trace(file)
    file.write_bytes(b"no parquet")
    with pytest.raises(DataError, match=rf"^trace '{file}' cannot be read as parquet"):
        read_trace(file)


@pytest.mark.parametrize(
    ("name", "size", "steps", "slowest_over_mean"), [("AR", 4, 44, 1.72), ("SE", 32, 43, 1.26), ("ST", 2, 32, 1.00)]
)
def test_production_traces(name: str, size: int, steps: int, slowest_over_mean: float) -> None:
    file = TRACES / f"trace-{name}.parquet"
    if not file.is_file():
        pytest.skip(f"no production trace {file}; SLACKRING_TRACES may name their folder")
    straggler = Trace(str(file))
    seconds = np.array([[straggler.step_seconds(rank, step, 0.1) for step in range(steps)] for rank in range(size)])
    assert np.median(seconds) == pytest.approx(0.1)
    assert straggler.step_seconds(size, steps, 0.1) == seconds[0, 0]
    assert np.all(seconds > 0)
    assert np.mean(seconds.max(axis=0) / seconds.mean(axis=0)) == pytest.approx(slowest_over_mean, abs=5e-3)
    if name == "AR":
        recorded = np.array(read_trace(file))
        assert recorded.shape == (4, 44)
        assert recorded.mean(axis=1) == pytest.approx([45.3, 20.1, 20.1, 20.1], abs=0.15)
