"""Ranks on a Dask cluster: what they are asked to do, and what comes back."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, LocalCluster
from tests.dask.conftest import until

import slackring.dask.executor
from slackring.dask.executor import DaskExecutor
from slackring.dask.run import RunFolder
from slackring.dask.saving import save
from slackring.errors import PoolError, RankError

pytestmark = pytest.mark.multirank


def where(word: str, times: int = 1) -> tuple[str, int, str]:
    print(f"rank {os.environ['HOROVOD_RANK']} says {word * times}")
    return word * times, int(os.environ["HOROVOD_RANK"]), os.environ["HOROVOD_LOCAL_RANK"]


def rank() -> int:
    return int(os.environ["HOROVOD_RANK"])


@pytest.fixture
def executor(client: Client, nothing_left: None, tmp_path: Path) -> Iterator[DaskExecutor]:
    with DaskExecutor(client, 2, out=tmp_path / "runs") as made:
        yield made


def folder_of(executor: DaskExecutor, tmp_path: Path) -> Path:
    return max((tmp_path / "runs").iterdir(), key=lambda path: path.stat().st_mtime)


def test_results_come_by_rank_and_logs_lie_in_the_run_folder(executor: DaskExecutor, tmp_path: Path) -> None:
    assert executor.run(where, ["ho"], {"times": 2}) == [("hoho", 0, "0"), ("hoho", 1, "1")]
    (folder,) = (tmp_path / "runs").iterdir()
    assert "where" in folder.name
    for number in (0, 1):
        assert (folder / f"rank-{number}.log").read_text() == f"rank {number} says hoho\n"
    assert [told["rank"] for told in json.loads((folder / "run.json").read_text())["ranks"]] == [0, 1]
    assert folder.stat().st_mode & 0o077 == 0


def test_ranks_stay_between_calls_and_have_their_own_processes(executor: DaskExecutor, client: Client) -> None:
    first, second = executor.run(os.getpid), executor.run(os.getpid)
    assert first == second
    assert len({*first, os.getpid(), *client.run(os.getpid).values()}) == 2 + 1 + 4


def test_files_that_ranks_save_are_there_while_they_go_on(executor: DaskExecutor, tmp_path: Path) -> None:
    def train(file: str) -> None:
        import os
        import time

        import slackring as sr

        rank = os.environ["HOROVOD_RANK"]
        print("before")
        for size in (10, 5_000_000):
            sr.dask.save(f"model-{rank}.pt", rank.encode() * size)
        while not os.path.exists(file):
            time.sleep(0.02)

    run = executor.run_remote(train, [str(tmp_path / "seen")])
    files = [run.folder / "saved" / f"model-{rank}.pt" for rank in (0, 1)]
    until(lambda: all(file.exists() and file.stat().st_size == 5_000_000 for file in files), "the files have come")
    assert (run.folder / "rank-0.log").read_text() == "before\n"
    (tmp_path / "seen").touch()
    assert run.result() == [None] * 2
    assert [file.read_bytes()[-1:] for file in files] == [b"0", b"1"]
    assert sorted((run.folder / "saved").iterdir()) == files


def test_a_file_on_its_way_when_its_rank_dies_does_not_harm_the_one_before(
    executor: DaskExecutor, tmp_path: Path
) -> None:
    def train() -> None:
        import os
        import signal

        import slackring as sr

        if os.environ["HOROVOD_RANK"] == "0":
            sr.dask.save("model.pt", b"old" * 1000)
            sr.dask.save("model.pt", b"new" * 20_000_000)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    for _ in range(3):
        with pytest.raises(RankError, match=r"rank 0 on .* died: SIGKILL"):
            executor.run(train)
        file = folder_of(executor, tmp_path) / "saved" / "model.pt"
        assert not file.exists() or file.read_bytes() in (b"old" * 1000, b"new" * 20_000_000)


def test_a_run_goes_on_where_files_cannot_be_saved(executor: DaskExecutor, caplog: pytest.LogCaptureFixture) -> None:
    def train(file: str) -> None:
        import os
        import time

        import slackring as sr

        while not os.path.exists(file):
            time.sleep(0.02)
        sr.dask.save("model.pt", b"model")

    run = executor.run_remote(train, [str(executor._out / "go")])
    (run.folder / "saved").touch()  # a file where a folder should be
    (executor._out / "go").touch()
    with caplog.at_level(logging.WARNING, "slackring"):
        assert run.result() == [None, None]
    assert "saved/model.pt cannot be written" in caplog.text


def test_what_cannot_be_saved_is_told(executor: DaskExecutor) -> None:
    def escape() -> None:
        import slackring as sr

        sr.dask.save("../model.pt", b"")

    with pytest.raises(RankError, match=r"'\.\./model.pt' is no name for a saved file"):
        executor.run(escape)
    with pytest.raises(PoolError, match=r"'model\.pt' cannot be saved"):
        save("model.pt", b"")


def test_a_large_result_and_a_long_log_arrive_whole(executor: DaskExecutor, tmp_path: Path) -> None:
    def much() -> bytes:
        for number in range(100_000):
            print(f"line {number}")
        return b"x" * 10_000_000

    assert [len(result) for result in executor.run(much)] == [10_000_000] * 2
    text = (folder_of(executor, tmp_path) / "rank-1.log").read_text()
    assert text.splitlines() == [f"line {number}" for number in range(100_000)]


def test_a_copy_that_a_function_forks_does_not_answer_for_its_rank(executor: DaskExecutor) -> None:
    def fork(how: str) -> str:
        if os.fork():
            time.sleep(0.2)
            return "rank"
        if how == "raises":
            raise ValueError
        if how == "exits":
            sys.exit(1)
        return "copy"

    for how in ("returns", "raises", "exits"):
        assert executor.run(fork, [how]) == ["rank", "rank"]
        assert executor.run(rank) == [0, 1]


def test_a_function_may_close_its_output(executor: DaskExecutor) -> None:
    def close() -> int:
        sys.stdout.close()
        return 4

    assert executor.run(close) == [4, 4]


def test_what_cannot_be_decoded_is_reported_all_the_same(executor: DaskExecutor) -> None:
    def report() -> None:
        import slackring as sr

        sr.report(file=os.fsdecode(b"a\xff"))

    got: list[Any] = []
    executor.run(report, callbacks=[got.append])
    assert [told["file"] for told in got] == ["a?", "a?"]


def test_what_cannot_be_sent_is_told_before_anything_runs(executor: DaskExecutor) -> None:
    lock = threading.Lock()
    with pytest.raises(PoolError, match="'lock'"):
        executor.run(lambda: lock)
    with pytest.raises(RankError, match=r"rank \d on worker .* raised PoolError: what <lambda> returns .*lock"):
        executor.run(lambda: threading.Lock())
    assert executor.run(rank) == [0, 1]


def test_an_endless_text_of_an_error_is_cut(executor: DaskExecutor) -> None:
    def fail() -> None:
        raise ValueError("x" * 30_000_000)

    with pytest.raises(RankError, match="raised ValueError: xxx") as caught:
        executor.run(fail)
    assert len(str(caught.value)) < 100_000


def test_a_class_that_is_not_here_is_told(executor: DaskExecutor) -> None:
    def strange() -> Any:
        import types

        module = types.ModuleType("nowhere_to_be_found")
        sys.modules[module.__name__] = module
        exec("class Thing: pass", module.__dict__)
        return module.Thing()

    with pytest.raises(PoolError, match=r"what rank 0 returned cannot be read here .*nowhere_to_be_found"):
        executor.run(strange)


class Counter:
    def __init__(self, start: int, step: int = 1) -> None:
        self.count, self.step = start, step

    def more(self) -> tuple[int, int]:
        self.count += self.step
        return rank(), self.count


def test_an_executable_lives_on_every_rank(client: Client, nothing_left: None, tmp_path: Path) -> None:
    executor = DaskExecutor(client, 2, out=tmp_path)
    executor.start(Counter, [10], {"step": 5}, extra_env_vars={"WORD": "hello"})
    try:
        assert executor.execute(lambda counter: counter.more()) == [(0, 15), (1, 15)]
        assert executor.execute_single(lambda counter: counter.more()) == (0, 20)
        assert executor.execute(lambda counter: counter.more()) == [(0, 25), (1, 20)]
        assert executor.run(lambda: os.environ["WORD"]) == ["hello", "hello"]
        executor.start()
        with pytest.raises(PoolError, match="executable_cls="):
            executor.execute(lambda counter: counter.more())
    finally:
        executor.shutdown()


def test_what_needs_ranks_or_an_executable_says_so(executor: DaskExecutor, client: Client) -> None:
    with pytest.raises(PoolError, match="use it in a with block, or call start"):
        DaskExecutor(client).run(rank)
    with pytest.raises(PoolError, match="executable_cls="):
        executor.execute(lambda thing: thing)
    with pytest.raises(PoolError, match="at least 1, not 0"):
        DaskExecutor(client, 0)


def test_too_few_workers_are_told_in_time(client: Client, nothing_left: None) -> None:
    settings = DaskExecutor.create_settings(placement_timeout_s=0.5)
    with pytest.raises(PoolError, match=r"5 workers are needed, and the cluster has 4 after 0\.5 s"):
        DaskExecutor(client, 5, settings=settings).start()


def test_all_workers_are_those_that_the_cluster_was_asked_for(
    client: Client, nothing_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = DaskExecutor.create_settings(placement_timeout_s=5.0)
    executor = DaskExecutor(client, settings=settings, out=tmp_path)
    with monkeypatch.context() as more:
        more.setattr(slackring.dask.executor, "asked_for", lambda cluster: 5)
        more.setattr(executor, "_settings", DaskExecutor.create_settings(placement_timeout_s=0.5))
        for _ in range(2):  # also where it has failed before
            with pytest.raises(PoolError, match="5 workers are needed, and the cluster has 4"):
                executor.start()
    with executor:
        assert executor.size == 4


def test_the_newest_of_files_that_are_saved_fast_is_there_in_the_end(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for number in range(100):
        folder.take(0, {"kind": "saved", "name": "model.pt", "content": bytes([number]) * 1000})
    folder.close()
    folder.settle()
    assert (tmp_path / "run" / "saved" / "model.pt").read_bytes() == bytes([99]) * 1000
    assert len(list((tmp_path / "run" / "saved").iterdir())) == 1


def test_ranks_have_no_variables_of_another_launcher(executor: DaskExecutor, client: Client) -> None:
    assert executor.run(lambda: sorted(name for name in os.environ if name.startswith("SLACKRING"))) == [[], []]
    assert executor.run(lambda: os.environ["OMP_NUM_THREADS"]) == ["1", "1"]
    assert executor.run(lambda: sys.stdin.read()) == ["", ""]


def test_a_changed_module_reaches_the_ranks(executor: DaskExecutor, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "my_model_of_this_test.py"
    module.write_text("def size():\n    return 1\n")

    def use() -> int:
        import my_model_of_this_test

        return int(my_model_of_this_test.size())

    assert executor.run(use) == [1, 1]
    before = executor.run(os.getpid)
    assert executor.run(use) == [1, 1] and executor.run(os.getpid) == before
    module.write_text("def size():\n    return 22\n")
    assert executor.run(use) == [22, 22]
    assert not set(before) & set(executor.run(os.getpid))


def test_a_run_in_the_background_can_be_cancelled(executor: DaskExecutor) -> None:
    run = executor.run_remote(time.sleep, [600])
    assert not run.done()
    with pytest.raises(TimeoutError):
        run.result(timeout=0.2)
    run.cancel()
    assert run.done()
    with pytest.raises(PoolError, match=r"sleep\(\) was cancelled"):
        run.result()
    assert executor.run(rank) == [0, 1]


def test_a_wish_to_stop_is_one_for_its_run_alone(executor: DaskExecutor) -> None:
    def until_asked() -> bool:
        from slackring.optim.ambient import stop_wish

        return rank() > 0 or stop_wish.wait(30.0)  # it is rank 0 that is asked, and tells the others in a round

    def asked() -> bool:
        from slackring.optim.ambient import stop_wish

        return stop_wish.wait(0.2)

    for _ in range(5):
        run = executor.run_remote(until_asked, [])
        run.stop()  # wherever it is: not begun, on its way, or there
        assert run.result()[0]
    run = executor.run_remote(asked)
    run.result()
    run.stop()  # when it is over
    assert executor.run(asked) == [False, False]


def test_runs_take_turns(executor: DaskExecutor) -> None:
    runs = [executor.run_remote(where, [word]) for word in "abc"]
    assert [run.result()[1][0] for run in runs] == ["a", "b", "c"]
    assert len({run.folder for run in runs}) == 3


def test_callbacks_get_what_ranks_report(executor: DaskExecutor, tmp_path: Path) -> None:
    def report() -> None:
        import slackring as sr

        sr.report(loss=0.5 + int(os.environ["HOROVOD_RANK"]), phase="warm-up")

    got: list[dict[str, Any]] = []

    def broken(told: Any) -> None:
        raise ValueError("this callback is broken")

    executor.run(report, callbacks=[broken, got.append])
    assert sorted((told["rank"], told["loss"], told["phase"]) for told in got) == [
        (0, 0.5, "warm-up"),
        (1, 1.5, "warm-up"),
    ]
    lines = (folder_of(executor, tmp_path) / "events.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["values"]["loss"] for line in lines) == [0.5, 1.5]


def test_a_callback_may_end_the_run(executor: DaskExecutor) -> None:
    def report() -> None:
        import slackring as sr

        sr.report(loss=0.5)
        time.sleep(600)

    run = executor.run_remote(report, callbacks=[lambda told: run.cancel()])
    with pytest.raises(PoolError, match="was cancelled"):
        run.result(timeout=20.0)


def test_what_is_printed_after_a_run_is_not_of_it(
    executor: DaskExecutor, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def chatter() -> None:
        def go_on() -> None:
            while True:
                print("still here")
                time.sleep(0.02)

        threading.Thread(target=go_on, daemon=True).start()

    executor.run(chatter)
    folder_of(executor, tmp_path).rename(tmp_path / "moved")

    executor.run(time.sleep, [1.0])
    assert "cannot be written" not in caplog.text
    assert "still here" in (folder_of(executor, tmp_path) / "rank-0.log").read_text()


def test_a_module_that_rank_0_alone_has_needed_reaches_the_others(
    client: Client, nothing_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needed_once.py").write_text("NUMBER = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def use(executable: dict[str, int]) -> int:
        import needed_once  # type: ignore[import-not-found]

        return int(needed_once.NUMBER)

    executor = DaskExecutor(client, 2, out=tmp_path / "runs")
    executor.start(dict)
    try:
        assert executor.execute_single(use) == 3
        assert executor.execute(use) == [3, 3]
    finally:
        executor.shutdown()


def test_a_worker_that_is_paused_keeps_its_rank(executor: DaskExecutor, client: Client) -> None:
    def set_status(name: str, dask_worker: Any) -> None:
        dask_worker.status = type(dask_worker.status)[name]

    first = executor.run(os.getpid)
    run = executor.run_remote(time.sleep, [2.5])
    until(lambda: run.board is not None, "ranks are there")
    client.run(set_status, "paused")
    try:
        assert run.result(timeout=20.0) == [None, None]
    finally:
        client.run(set_status, "running")
    assert executor.run(os.getpid) == first


def test_a_worker_that_stays_busy_is_not_waited_for_twice(client: Client, nothing_left: None, tmp_path: Path) -> None:
    busy = client.map(time.sleep, [60.0 + number for number in range(4)])
    settings = DaskExecutor.create_settings(timeout_s=30.0, placement_timeout_s=1.0)
    began = time.monotonic()
    try:
        with pytest.raises(PoolError, match=r"was not free within 1 s"):
            DaskExecutor(client, 2, settings=settings, out=tmp_path).start()
        assert time.monotonic() - began < 10.0
    finally:
        client.cancel(busy, force=True)
        client.restart()


def test_a_worker_that_does_not_answer_is_named_and_not_waited_for(
    client: Client, nothing_left: None, tmp_path: Path
) -> None:
    settings = DaskExecutor.create_settings(timeout_s=3.0, placement_timeout_s=3.0)
    executor = DaskExecutor(client, 4, settings=settings, out=tmp_path)
    executor.start()
    pids = client.run(os.getpid)
    address, pid = next(iter(pids.items()))
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        executor.shutdown()
        with pytest.raises(PoolError, match=f"{address} does not answer within 3 s"):
            DaskExecutor(client, 4, settings=settings, out=tmp_path).start()
        assert time.monotonic() - began < 20.0
    finally:
        os.kill(pid, signal.SIGCONT)


def test_an_order_that_does_not_arrive_is_no_reason_to_wait(executor: DaskExecutor, client: Client) -> None:
    def break_(dask_worker: Any) -> None:
        async def refuse(**order: Any) -> None:
            raise RuntimeError("no orders today")

        dask_worker.handlers["slackring_order"] = refuse

    def mend(dask_worker: Any) -> None:
        dask_worker.handlers["slackring_order"] = dask_worker.extensions["slackring"]._order

    run = executor.run_remote(rank)
    run.result()
    broken = run.places[1].worker.address
    client.run(break_, workers=[broken])
    try:
        with pytest.raises(RankError, match=r"rank 1 on .* has lost its worker"):
            executor.run_remote(rank).result(timeout=20.0)
    finally:
        client.run(mend, workers=[broken])


def test_a_closed_client_is_named(cluster: LocalCluster, nothing_left: None, tmp_path: Path) -> None:
    with Client(cluster) as client:
        executor = DaskExecutor(client, 2, out=tmp_path)
        executor.start()
    with pytest.raises(PoolError, match="the client of this executor is closed"):
        executor.run(rank)
    with pytest.raises(PoolError, match="the client of this executor is closed"):
        executor.start()
    executor.shutdown()


def test_an_asynchronous_client_awaits(cluster: LocalCluster, nothing_left: None, tmp_path: Path) -> None:
    async def use() -> Any:
        async with (
            Client(cluster.scheduler_address, asynchronous=True) as client,
            DaskExecutor(client, 2, out=tmp_path) as executor,
        ):
            run = executor.run_remote(where, ["b"])
            return await executor.run(where, ["a"]), await run.result(), repr(run)

    first, second, shown = asyncio.run(use())
    assert [told[0] for told in first + second] == ["a", "a", "b", "b"]
    assert "where on 2 ranks, done" in shown


def test_two_executors_on_one_cluster_both_finish(client: Client, nothing_left: None, tmp_path: Path) -> None:
    found: dict[str, list[Any]] = {}

    def train(name: str) -> None:
        with DaskExecutor(client, 4, out=tmp_path) as executor:
            found[name] = executor.run(where, [name])

    threads = [threading.Thread(target=train, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    assert {name: [told[:2] for told in results] for name, results in found.items()} == {
        name: [(name, number) for number in range(4)] for name in "abc"
    }


def test_executors_that_fit_beside_each_other_do_not_wait(client: Client, nothing_left: None, tmp_path: Path) -> None:
    with DaskExecutor(client, 2, out=tmp_path) as one, DaskExecutor(client, 2, out=tmp_path) as other:
        assert one.run(rank) == other.run(rank) == [0, 1]
        settings = DaskExecutor.create_settings(placement_timeout_s=0.5)
        with pytest.raises(PoolError, match=r"rank \d on worker .* was not free within 0\.5 s"):
            DaskExecutor(client, 4, settings=settings, out=tmp_path).start()
        assert one.run(rank) == other.run(rank) == [0, 1]


def test_executors_after_each_other_leave_nothing(client: Client, nothing_left: None, tmp_path: Path) -> None:
    def open_files() -> dict[str, int]:
        return {**client.run(_open_files), "here": _open_files()}

    def use() -> None:
        with DaskExecutor(client, 2, out=tmp_path) as executor:
            assert executor.run(rank) == [0, 1]

    for _ in range(3):  # until pools of connections are full
        use()
    before = open_files()
    for _ in range(20):
        use()
    until(
        lambda: all(number <= before[at] + 2 for at, number in open_files().items()), f"no more than {before} are open"
    )
    tasks = client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))
    assert tasks == 0


def _open_files() -> int:
    process = psutil.Process()
    return process.num_fds() + process.num_threads()
