"""``slackring run`` and ``compare`` on the ranks of a Dask cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from distributed import Client
from tests import bad_task
from tests.dask.conftest import rank_processes, until

from slackring import cli
from slackring.lab.launch import BACKENDS, launcher, run_on_horovod, run_virtual
from slackring.lab.runs import load_run

pytest.importorskip("horovod", reason="Horovod is not installed: python cluster_configs/horovod/build.py")
pytestmark = [pytest.mark.multirank, pytest.mark.usefixtures("nothing_left")]

Slackring = Callable[..., tuple[int, str, str]]


@pytest.fixture
def slackring(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Slackring:
    """Run a command on two ranks of the shared cluster, in a folder of its own; give exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(bad_task.__file__, tmp_path)

    def call(command: str, *arguments: object) -> tuple[int, str, str]:
        where = ["--cluster", client.scheduler.address, "--workers", 2]
        monkeypatch.setattr(sys, "argv", ["slackring", *map(str, [command, *where, *arguments])])
        with pytest.raises(SystemExit) as caught:
            cli.main()
            raise SystemExit(0)
        return int(caught.value.code or 0), *capsys.readouterr()

    return call


def test_a_run_is_written_as_by_train_and_says_where_it_was(slackring: Slackring, tmp_path: Path) -> None:
    slow = ["--straggler", "persistent:ranks=1,factor=4", "--step-time", "0.02"]
    code, out, err = slackring("run", "--rule", "losp", "--task", "digits", *slow, "--seconds", "3")
    assert code == 0, err
    (folder,) = (tmp_path / "runs").iterdir()
    trained = load_run(folder)
    assert (trained.facts["ring"], trained.facts["ranks"], trained.facts["launcher"]) == ("horovod", 2, "dask")
    assert not trained.summary.interrupted
    assert sorted(set(trained.steps["rank"])) == [0, 1]
    assert f"2 (horovod), on Dask workers of {os.uname().nodename}" in out
    assert "losp: 0 rounds" in err  # lines, since this is no terminal
    assert "warning" not in err  # of the straggler, which is injected
    assert sorted(file.name for file in (folder / "checkpoint").iterdir()) == ["rank-0.pt", "rank-1.pt"]
    assert len(json.loads((folder / "ranks" / "run.json").read_text())["ranks"]) == 2


def test_compare_runs_all_rules_on_the_same_ranks(slackring: Slackring) -> None:
    slow = ["--straggler", "persistent:ranks=1,factor=4", "--step-time", "0.02"]
    options = ["--rules", "bsp,losp", "--lr-grid", "0.1", "--seconds", "3", "--json"]
    code, out, err = slackring("compare", "--task", "digits", *slow, *options)
    assert code == 0, err
    bsp, losp = json.loads(out)["runs"]
    assert losp["limit_share"] > 1.5 * bsp["limit_share"]
    runs = [load_run(Path(row["run"])) for row in (bsp, losp)]
    assert [run.facts["launcher"] for run in runs] == ["dask"] * 2
    places = [json.loads((Path(row["run"]) / "ranks" / "run.json").read_text())["ranks"] for row in (bsp, losp)]
    assert places[0] == places[1]
    assert len(list(Path("runs").iterdir())) == 1


def test_a_run_that_diverges_is_one_sentence_and_leaves_nothing(slackring: Slackring) -> None:
    code, out, err = slackring("run", "--rule", "bsp", "--task", "bad_task:nan", "--json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "slackring: error: the loss of rank 1 was not a finite number at its local step 20" in err
    assert not list(Path("runs").iterdir())


def test_a_comparison_goes_on_after_a_run_that_diverges(slackring: Slackring) -> None:
    options = ["--rules", "bsp,local_sgd", "--lr-grid", "0.1", "--seconds", "3", "--json"]
    code, out, err = slackring("compare", "--task", "bad_task:nan", *options)
    assert code == 0, err
    assert [row["diverged"] for row in json.loads(out)["runs"]] == [True, True]


def test_a_task_that_fails_on_one_rank_is_one_sentence_and_its_log_is_kept(slackring: Slackring) -> None:
    code, out, err = slackring("run", "--rule", "bsp", "--task", "bad_task:no_model", "--json")
    assert (code, out) == (2, "")
    assert "slackring: error: rank 1: ValueError: no weights on this host" in err
    (folder,) = Path("runs").iterdir()
    assert f"The logs are in {str(folder)!r}." in err
    assert "in model" in (folder / "rank-1.log").read_text()


def test_code_that_fails_while_it_trains_is_told_with_its_traceback(slackring: Slackring) -> None:
    code, out, err = slackring("run", "--rule", "bsp", "--task", "bad_task:broken", "--json")
    assert (code, out) == (2, "")
    assert "raised ValueError: this loss is broken" in err
    assert "in loss" in err


def test_what_ranks_find_wrong_is_the_sentence_that_train_has(slackring: Slackring) -> None:
    code, _, err = slackring("run", "--rule", "bsp", "--task", "bad_task:nowhere", "--json")
    assert code == 2
    assert err == "slackring: error: task 'bad_task:nowhere': the module 'bad_task' has no function 'nowhere'.\n"
    code, _, err = slackring("run", "--rule", "bsp", "--straggler", "persistent:ranks=5,factor=2", "--json")
    assert (code, err.count("\n"), "rank 5" in err) == (2, 1, True)


def test_a_run_goes_on_from_the_checkpoint_that_a_dead_rank_leaves_behind(
    slackring: Slackring,
) -> None:
    def kill_one() -> None:
        until(lambda: list(Path("runs").glob("*-round*/summary.json")), "there is a checkpoint", patience=60)
        psutil.Process(min(rank_processes())).kill()

    options = ["--task", "digits", "--step-time", "0.02", "--checkpoint-every", "0.3", "--seconds", "100", "--json"]
    with ThreadPoolExecutor(1) as aside:
        killing = aside.submit(kill_one)
        code, out, err = slackring("run", "--rule", "cocod", *options)
        killing.result()
    assert (code, out) == (2, "")
    (kept,) = Path("runs").glob("*-round*")
    assert f"the run can go on from its last checkpoint: --resume {kept}" in err
    before = load_run(kept)
    assert before.facts["launcher"] == "dask"

    goal = before.summary.rounds + 5
    code, out, err = slackring("run", "--resume", kept, "--rounds", goal, "--json")
    assert code == 0, err
    resumed = json.loads(out)
    assert (resumed["rounds"], resumed["rule"], resumed["resumed"]["exact"]) == (goal, "cocod", True)
    assert len(load_run(Path(resumed["run"])).steps) > len(before.steps)
    code, _, err = slackring("run", "--resume", kept, "--rule", "bsp")
    assert (code, "--rule comes from the run that --resume continues" in err) == (2, True)


def _training(folder: Path, step_time: float) -> subprocess.Popen[str]:
    options = [
        "--rule",
        "losp",
        "--task",
        "digits",
        "--workers",
        "2",
        "--step-time",
        str(step_time),
        "--seconds",
        "200",
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "slackring", "run", *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_ctrl_c_at_a_terminal_ends_the_run_with_its_results(tmp_path: Path) -> None:
    with _training(tmp_path, step_time=0.05) as process:
        for line in process.stderr or ():
            if line.startswith("losp: ") and "losp: 0 rounds" not in line:
                break
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the cluster's workers, too
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    (folder,) = (tmp_path / "runs").iterdir()
    assert load_run(folder).summary.interrupted
    assert "Interrupted: this run was cut short." in out
    assert f"slackring run --resume {folder.relative_to(tmp_path)}" in out


def test_a_second_ctrl_c_does_not_wait_for_a_round(tmp_path: Path) -> None:
    with _training(tmp_path, step_time=100.0) as process:
        for line in process.stderr or ():
            if line.startswith("losp: "):
                break
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(1.0)  # signals that come at once are one
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err
    assert err.endswith("slackring: interrupted before there was a result.\n")
    assert not list((tmp_path / "runs").glob("*/summary.json"))


def test_a_backend_is_one_of_three() -> None:
    assert (launcher("horovod"), launcher("virtual")) == (run_on_horovod, run_virtual)
    for backend in BACKENDS:
        assert callable(launcher(backend))
