"""What fails on a cluster, 20 times in a row: the others stop in time, the rank is named, and nothing is left."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, LocalCluster
from tests.dask.conftest import rank_processes, until

from slackring.dask.executor import DaskExecutor
from slackring.errors import RankError

pytestmark = pytest.mark.multirank

TIMES = 20
TIMEOUT = 10.0  # seconds; what create_settings(timeout_s=) promises


@pytest.fixture
def executor(client: Client, nothing_left: None, tmp_path: Path) -> Iterator[DaskExecutor]:
    settings = DaskExecutor.create_settings(timeout_s=TIMEOUT)
    with DaskExecutor(client, 2, settings=settings, out=tmp_path / "runs") as made:
        yield made


def on_rank_1(fail: Callable[[], Any]) -> Callable[[], None]:
    """What fails on rank 1, while rank 0 would go on for ever."""

    def train() -> None:
        import os
        import time

        print("rank", os.environ["HOROVOD_RANK"], "is here")
        if os.environ["HOROVOD_RANK"] == "1":
            fail()
        time.sleep(3600)

    return train


def interrupt() -> None:
    raise KeyboardInterrupt


def mute() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    raise Mute


def half_a_character() -> None:
    raise FileNotFoundError("there is no file 'a" + os.fsdecode(b"\xff") + "'")


def close_all_output() -> None:
    for number in (0, 1, 2):
        os.close(number)
    raise ValueError("nobody hears this.")


def fails_in_time(executor: DaskExecutor, train: Callable[[], None]) -> RankError:
    """Run something that fails; give its error."""
    executor.run(int)  # so that what is timed does not have to start ranks
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        executor.run(train)
    assert time.monotonic() - began < TIMEOUT
    return caught.value


@pytest.mark.parametrize(
    ("fail", "told", "times"),
    [
        (lambda: 1 // 0, "raised ZeroDivisionError: integer division or modulo by zero", TIMES),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "died: SIGKILL", TIMES),
        (lambda: os.abort(), "died: SIGABRT", 2),
        (lambda: os._exit(3), "died: exit code 3", 2),
        (lambda: sys.exit(5), "raised SystemExit: 5", 2),
        (lambda: interrupt(), "raised KeyboardInterrupt.\n", 1),
        (lambda: mute(), "raised Mute, which has no text.\nIts own traceback:", 1),
        (lambda: half_a_character(), "raised FileNotFoundError: there is no file 'a?'.\nIts own traceback:", 1),
        (lambda: close_all_output(), "raised ValueError: nobody hears this.\nIts own traceback:", 1),
    ],
    ids=["raises", "killed", "aborts", "leaves", "exits", "interrupts", "mute", "undecodable", "closes"],
)
def test_a_rank_that_fails_is_named(executor: DaskExecutor, fail: Callable[[], Any], told: str, times: int) -> None:
    for _ in range(times):
        error = fails_in_time(executor, on_rank_1(fail))
        assert error.rank == 1
        assert "rank 1 on worker 1 (tcp://127.0.0.1:" in str(error)
        assert told in str(error)
        if "ZeroDivisionError" in told:
            assert ", in train\n" in str(error) and "_rank.py" not in str(error)
            assert isinstance(error.__cause__, ZeroDivisionError)
        elif "died" in told:
            assert "rank 1 is here" in str(error)


def test_a_rank_that_hangs_when_asked_to_end_is_killed(executor: DaskExecutor) -> None:
    def deaf() -> None:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)

    def train() -> None:
        import os

        if os.environ["HOROVOD_RANK"] == "1":
            raise ValueError
        deaf()

    assert fails_in_time(executor, train).rank == 1


def test_what_a_rank_has_started_ends_with_it(executor: DaskExecutor, tmp_path: Path) -> None:
    def start(file: str) -> None:
        import os
        import subprocess
        import sys
        import time

        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        with open(f"{file}.{os.environ['HOROVOD_RANK']}", "w") as told:
            told.write(str(child.pid))
        if os.environ["HOROVOD_RANK"] == "1":
            os._exit(1)
        time.sleep(3600)

    with pytest.raises(RankError, match="rank 1 on"):
        executor.run(start, [str(tmp_path / "pid")])
    # Rank 0 may have been ended before it had started anything.
    pids = [int(path.read_text()) for path in tmp_path.glob("pid.*") if path.read_text()]
    assert pids
    until(lambda: not any(map(psutil.pid_exists, pids)), "no child of a rank is left")


@pytest.mark.parametrize("times", [TIMES // 4] * 4, ids=range(4))  # Dask gives a worker up after some 15 times
def test_a_worker_that_dies(tmp_path: Path, times: int) -> None:
    settings = DaskExecutor.create_settings(timeout_s=TIMEOUT)
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", memory_limit=0, silence_logs=50
        ) as cluster,
        Client(cluster) as client,
        DaskExecutor(client, 2, settings=settings, out=tmp_path / "runs") as executor,
    ):
        for _ in range(times):
            client.wait_for_workers(2, timeout=60)
            until(lambda: all(map(settled, cluster.workers.values())), "nannies have seen their workers run")
            executor.run(int)
            run = executor.run_remote(time.sleep, [3600])
            until(lambda run=run: len(run.places) == 2, "the run has ranks")
            address = run.places[1].worker.address
            pid = client.run(os.getpid, workers=[address])[address]
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(RankError, match=r"rank 1 on worker .* has lost its worker") as caught:
                run.result()
            assert caught.value.rank == 1
            assert time.monotonic() - began < TIMEOUT
            until(lambda address=address: address not in client.scheduler_info(n_workers=-1)["workers"], "it is gone")
            until(lambda: not rank_processes(), "no rank is left", TIMEOUT)
        # Between two runs, it is the next run's to get another.
        client.wait_for_workers(2, timeout=60)
        until(lambda: all(map(settled, cluster.workers.values())), "nannies have seen their workers run")
        run = executor.run_remote(int)
        run.result()
        address = run.places[1].worker.address
        os.kill(client.run(os.getpid, workers=[address])[address], signal.SIGKILL)
        assert executor.run(int) == [0, 0]
    until(lambda: not rank_processes(), "no rank is left", TIMEOUT)


def settled(nanny: Any) -> bool:
    """Whether Dask would restart the worker if it died now."""
    return nanny.process is not None and nanny.process.status.name == "running"


def test_a_rank_that_dies_between_two_runs_is_replaced(
    executor: DaskExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "slackring"):
        for _ in range(TIMES):
            pids = executor.run(os.getpid)
            os.kill(pids[1], signal.SIGKILL)
            again = executor.run(os.getpid)
            assert pids[1] not in again
    told = [message for message in caplog.messages if "Starting all ranks anew" in message]
    assert len(told) == TIMES
    assert "rank 1 on worker 1" in told[0] and "died: SIGKILL" in told[0]


def test_a_rank_that_is_stopped_between_two_runs_is_replaced(
    client: Client, nothing_left: None, tmp_path: Path
) -> None:
    settings = DaskExecutor.create_settings(timeout_s=1)
    with DaskExecutor(client, 2, settings=settings, out=tmp_path / "runs") as executor:
        pids = executor.run(os.getpid)
        os.kill(pids[0], signal.SIGSTOP)
        assert not {*pids} & {*executor.run(os.getpid)}


SCRIPT = """
import sys, time
from distributed import Client
from slackring.dask.executor import DaskExecutor

if __name__ == "__main__":
    with Client(sys.argv[1]) as client, DaskExecutor(client, 2, out=sys.argv[2]) as executor:
        run = executor.run_remote(lambda: (print("training", flush=True), time.sleep(3600)))
        while not all((run.folder / f"rank-{rank}.log").exists() for rank in (0, 1)):
            time.sleep(0.02)
        print("ready", flush=True)
        run.result()
"""


@pytest.fixture
def script(cluster: LocalCluster, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Start a client in a process of its own, and wait until its ranks train."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, str(file), cluster.scheduler_address, str(tmp_path / "out")]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # as from a terminal
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if len(rank_processes()) != 2:
            process.kill()
            pytest.fail(f"{rank_processes()} are the ranks of a script that says:\n{process.communicate()[1]}")
        return process

    yield start
    for process in started:
        process.kill()


def test_a_client_that_dies_or_is_restarted(nothing_left: None, script: Callable[[], subprocess.Popen[str]]) -> None:
    for _ in range(TIMES):
        with script() as process:
            process.kill()
            until(lambda: not rank_processes(), "no rank is left", TIMEOUT)


def test_ctrl_c_ends_the_ranks_and_then_the_script(
    nothing_left: None, script: Callable[[], subprocess.Popen[str]]
) -> None:
    with script() as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60.0)
    assert "KeyboardInterrupt" in errors.splitlines()[-1]
    assert not rank_processes()


def test_a_cluster_that_is_closed(nothing_left: None, tmp_path: Path) -> None:
    with LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", memory_limit=0, silence_logs=50
    ) as other:
        client = Client(other)
        executor = DaskExecutor(client, 2, out=tmp_path)
        executor.start()
        run = executor.run_remote(time.sleep, [3600])
        until(lambda: len(run.places) == 2, "the run has ranks")
    with pytest.raises(RankError, match="has lost its worker"):
        run.result(timeout=TIMEOUT)
    client.close()
    until(lambda: not rank_processes(), "no rank is left", TIMEOUT)
