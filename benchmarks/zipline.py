"""How long a plan takes: ours beside the published table, and beside one sort of the same points.

    python benchmarks/zipline.py

The published figures are those of the ICDM paper's table II (means of 10 trials on Xeon E5-2620 v3, 2.4 GHz); the data are made
as theirs: starts a few milliseconds apart, intervals from 1000 to 1500 ms, constant by worker. Our plan and the sort take turns,
and the fastest of all repeats counts, since whatever else the machine does only adds. ``--variants`` also times the published
methods as rewritten in plain Python (published_zipline.py), which takes minutes at the largest size.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from published_zipline import VARIANTS

import slackring as sr

# microseconds, by (n, R)
PUBLISHED = {
    (10, 15): {"ZipLine": 1.49e2, "FullGridScan": 1.54e3, "GridScan": 1.68e2},
    (10, 150): {"ZipLine": 1.32e3, "FullGridScan": 4.67e4, "GridScan": 5.50e3},
    (100, 15): {"ZipLine": 6.37e3, "FullGridScan": 8.13e4, "GridScan": 1.11e3},
    (100, 150): {"ZipLine": 4.99e4, "FullGridScan": 2.15e6, "GridScan": 4.38e4},
    (1000, 15): {"ZipLine": 2.53e5, "FullGridScan": 4.04e6, "GridScan": 7.45e3},
    (1000, 150): {"ZipLine": 2.38e6, "FullGridScan": 2.07e8, "GridScan": 2.57e5},
}


def end_times(workers: int, iterations: int, seed: int) -> NDArray[np.int64]:
    """End times in ms as the papers' generator predicts them, shape (workers, iterations)."""
    generator = np.random.default_rng(seed)
    interval = generator.integers(1000, 1501, workers)
    pushed = 1_600_000_000_000 + generator.integers(0, workers, workers) + 2 * interval
    pushed += interval * -((pushed - pushed.max()) // interval)  # no history ends before the last worker's
    return pushed[:, None] + np.arange(iterations) * interval[:, None]


def seconds(call: Callable[[], object]) -> float:
    """Duration of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(workers: int, iterations: int, repeats: int, variants: bool) -> dict[str, Any]:
    """One row of the table, in microseconds."""
    planned, sorted_ = [], []
    for repeat in range(repeats):
        ends = end_times(workers, iterations, seed=repeat)
        points = ends.ravel()
        planned.append(seconds(lambda ends=ends: sr.zipline.plan(ends)))
        sorted_.append(seconds(lambda points=points: np.argsort(points, kind="stable")))
    plan, sort = min(planned) * 1e6, min(sorted_) * 1e6
    published = PUBLISHED[workers, iterations]
    row = {"n": workers, "R": iterations, "plan": plan, "argsort": sort, "ratio": plan / sort, "published": published}
    row["times_faster"] = published["ZipLine"] / plan
    if variants:
        rows = end_times(workers, iterations, seed=0).tolist()
        row["in_python"] = {name: seconds(lambda find=find: find(rows)) * 1e6 for name, find in VARIANTS.items()}
    return row


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=51)
    parser.add_argument("--largest", type=int, default=1000, help="workers")
    parser.add_argument("--variants", action="store_true", help="time the published methods in plain Python, too")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = [size for size in PUBLISHED if size[0] <= arguments.largest]
    found = [measure(*size, arguments.repeats, arguments.variants) for size in sizes]
    if arguments.json:
        print(json.dumps({"unit": "microseconds", "sizes": found}, indent=1))
        return
    print("microseconds;             published                         sr.zipline.plan")
    print(f"{'n':>5}{'R':>5}{'ZipLine':>12}{'FullGridScan':>14}{'GridScan':>12}", end="")
    print(f"{'ours':>10}{'faster than ZipLine':>21}{'one stable argsort':>20}{'ours in argsorts':>18}")
    for row in found:
        published = row["published"]
        print(f"{row['n']:5}{row['R']:5}{published['ZipLine']:12,.0f}{published['FullGridScan']:14,.0f}", end="")
        print(f"{published['GridScan']:12,.0f}{row['plan']:10,.0f}{row['times_faster']:20,.0f}x", end="")
        print(f"{row['argsort']:20,.0f}{row['ratio']:18.2f}")
        for name, value in row.get("in_python", {}).items():
            print(f"{'':10}{name + ' in Python':>26}{value:12,.0f}")


if __name__ == "__main__":
    main()
