"""What a pool on Dask costs beside horovodrun, and how soon a failure is told.

    python benchmarks/dask_pool.py

Both start four ranks on this machine, which do the same: import PyTorch and Horovod, meet, and sum a few times. Pool and launcher
take turns, and medians count. The Dask cluster runs already, as it does for its users.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed import Client, LocalCluster

import slackring as sr
from slackring.errors import RankError

RANKS = 4
SUMS = 300


def meet() -> float:
    """Meet, and sum; give the seconds that a sum takes."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    x = torch.ones(1000)
    hvd.allreduce(x, name="first")
    began = time.perf_counter()
    for _ in range(SUMS):
        hvd.allreduce(x, name="x")
    return (time.perf_counter() - began) / SUMS


def die_at(file: str) -> None:
    """Sum until rank 1 dies, which writes down when."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    for step in range(10**6):
        if hvd.rank() == 1 and step == 50:
            Path(file).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(10), name="x")


def seconds(call: Callable[[], object]) -> float:
    """Duration of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def launch() -> float:
    """The same by horovodrun, from its start to its end; give the seconds of a sum."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seconds"
        command = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "--network-interfaces", "lo"]
        command += ["-np", str(RANKS), "-H", f"localhost:{RANKS}", sys.executable, __file__, "--rank", str(file)]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return float(file.read_text())


def measure(client: Client, repeats: int, out: str) -> dict[str, Any]:
    """All figures, in seconds."""
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for _ in range(repeats):
        note("horovodrun: from start to end", seconds(lambda: note("horovodrun: a sum", launch())))
        began = time.perf_counter()
        executor = sr.DaskExecutor(client, RANKS, out=out)
        note("pool: start of 4 ranks", seconds(executor.start))
        note(
            "pool: first run, with imports",
            seconds(lambda executor=executor: note("pool: a sum", executor.run(meet)[0])),
        )
        note("pool: run of a function that does nothing", seconds(lambda executor=executor: executor.run(int)))
        note("pool: shutdown", seconds(executor.shutdown))
        note("pool: from start to end", time.perf_counter() - began)
    with sr.DaskExecutor(client, RANKS, out=out) as executor, tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            executor.run(meet)
            file = Path(folder) / str(number)
            try:
                executor.run(die_at, [str(file)])
            except RankError as exc:
                if exc.rank != 1:
                    raise
                note("from a rank's death to the error", time.time() - float(file.read_text()))
    durations = []
    for _ in range(20):

        def use() -> None:
            with sr.DaskExecutor(client, RANKS, out=out) as executor:
                executor.run(int)

        durations.append(seconds(use))
    note("20 executors in a row: the first five", statistics.median(durations[:5]))
    note("20 executors in a row: the last five", statistics.median(durations[-5:]))
    return {name: [statistics.median(values), min(values), max(values)] for name, values in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        took = meet()
        if os.environ["HOROVOD_RANK"] == "0":
            Path(arguments.rank).write_text(str(took))
        return
    with (
        tempfile.TemporaryDirectory() as out,
        LocalCluster(
            n_workers=RANKS, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0", memory_limit=0
        ) as cluster,
        Client(cluster) as client,
    ):
        found = measure(client, arguments.repeats, out)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    print(f"seconds, median of {arguments.repeats} (least to most)")
    for name, (median, least, most) in found.items():
        print(f"{name:45} {median:9.4f} ({least:.4f} to {most:.4f})")


if __name__ == "__main__":
    main()
