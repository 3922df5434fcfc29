"""The command line on real Horovod ranks, as a user starts them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pandas as pd
import psutil
import pytest
from tests import bad_task
from tests.multirank.scripts import check_collectives

import slackring as sr
from slackring import cli
from slackring.lab.comparison import load_comparison
from slackring.lab.runs import load_run

pytest.importorskip("horovod", reason="Horovod is not installed: python cluster_configs/horovod/build.py")

LAUNCH = [
    sys.executable,
    "-m",
    "horovod.runner.launch",
    "--gloo",
    "-np",
    "2",
    "-H",
    "localhost:2",
    "--network-interfaces",
    "lo",
]
TRAIN = ["-m", "slackring", "train", "--task", "digits"]


@pytest.fixture(autouse=True)
def no_rank_is_left(tmp_path):
    """Every process that a test starts has the test's folder as its own, and is gone in the end."""
    yield
    deadline = time.monotonic() + 10
    while (left := _processes_in(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def _processes_in(folder):
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder):
                found.append(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def launch(folder, *arguments):
    command = [*LAUNCH, *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process):
    out, _ = process.communicate(timeout=100)
    return process.returncode, out


def test_ctrl_c_leaves_a_readable_run(tmp_path):
    options = ["--rule", "losp", "--straggler", "persistent:ranks=1,factor=4", "--step-time", "0.1", "--seconds", "100"]
    process = launch(tmp_path, sys.executable, *TRAIN, *options)
    for line in iter(lambda: process.stdout.read(200), ""):
        if "rounds=" in line:
            break
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    finish(process)
    (folder,) = (tmp_path / "runs").iterdir()
    run = load_run(folder)
    assert run.summary.interrupted
    assert run.summary.rounds > 1
    assert sorted(set(run.steps["rank"])) == [0, 1]


def test_a_schedulers_signal_to_one_rank_ends_all_well_and_the_run_goes_on(tmp_path):
    straggler = ["--straggler", "persistent:ranks=1,factor=4"]
    options = ["--rule", "losp", *straggler, "--step-time", "0.02", "--seconds", "100"]
    process = launch(tmp_path, sys.executable, *TRAIN, *options)
    for line in iter(lambda: process.stdout.read(200), ""):
        if "rounds=" in line:
            break
    os.kill(_pid_of_rank(tmp_path, 1), signal.SIGUSR1)
    code, out = finish(process)
    assert code == 0, out
    (folder,) = (tmp_path / "runs").iterdir()
    before = load_run(folder)
    assert before.summary.interrupted
    assert sorted(file.name for file in (folder / "checkpoint").iterdir()) == ["rank-0.pt", "rank-1.pt"]

    goal = before.summary.rounds + 60
    again = [*TRAIN[:3], "--resume", folder, "--rounds", goal, "--out", "again"]
    code, out = finish(launch(tmp_path, sys.executable, *again))
    assert code == 0, out
    (folder,) = (tmp_path / "again").iterdir()
    after = load_run(folder)
    assert after.facts["resumed"]["exact"]
    assert not after.summary.interrupted
    assert after.summary.rounds == goal
    for rank in (0, 1):
        mine = after.steps[after.steps["rank"] == rank]
        assert mine["step"].tolist() == list(range(len(mine)))
    assert len(after.steps) > len(before.steps)
    assert after.curve["samples"].iloc[-1] == after.steps["samples"].sum()
    pd.testing.assert_frame_equal(
        after.steps.groupby("rank").head(3).reset_index(drop=True),
        before.steps.groupby("rank").head(3).reset_index(drop=True),
    )

    # What a run that comes to its end leaves, one run of both ranks.
    assert (after.facts["ring"], after.facts["ranks"]) == ("horovod", 2)
    assert after.facts["versions"]["horovod"]
    assert after.summary.final_accuracy > 0.7
    assert f"/{goal}.0 rounds" in out  # the bar of rank 0
    assert out.count("final accuracy") == 1
    # Time is accounted for on every rank.
    walls = after.steps["end"] - after.steps["start"]
    parts = after.steps[["compute", "blocked", "bookkeeping"]].sum(axis=1)
    assert (walls - parts).abs().max() < 1e-6


def _pid_of_rank(folder, rank):
    for process in psutil.process_iter():
        try:
            ours = process.cwd() == str(folder) and process.cmdline()[:3] == [sys.executable, *TRAIN[:2]]
            if ours and process.environ().get("HOROVOD_RANK") == str(rank):
                return process.pid
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    raise AssertionError(f"there is no rank {rank}")


def test_a_mistake_is_told_once(tmp_path):
    code, out = finish(launch(tmp_path, sys.executable, *TRAIN, "--rule", "lsop"))
    assert code != 0
    assert out.count("slackring: error:") == 1
    assert "did you mean 'losp'" in out
    assert "exit with status code 2" in out


def command_of_a_rank(folder, arguments, rule):
    """Run the command on this rank of a pool, under the rank's own rule; its exit code, and what it says."""
    before, said = os.getcwd(), io.StringIO()
    os.chdir(folder)
    sys.argv = ["slackring", "train", "--rule", rule[sr.ring().rank], *arguments]
    code = 0
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            cli.main()
    except SystemExit as exc:
        code = exc.code
    finally:
        os.chdir(before)
    return code, said.getvalue()


@pytest.fixture
def fail(ranks, tmp_path):
    """Have the command fail on both ranks of a pool, and give what they say; all is over when a collective still works."""
    shutil.copy(bad_task.__file__, tmp_path)
    pool = ranks(2)

    def run(*arguments, rule=("losp", "losp")):
        codes, said = zip(*pool.run(command_of_a_rank, tmp_path, arguments, rule), strict=True)
        assert codes == (2, 2), said
        check_collectives(pool)
        out = "".join(said)
        assert out.count("slackring: error:") == 1
        assert not list((tmp_path / "runs").iterdir())
        return out

    yield run
    pool.close()  # its ranks have loaded a task of this test's


def test_ranks_with_different_rules_are_told_once(fail):
    assert 'ranks differ in rule: rank 1 has "losp"' in fail("--task", "digits", rule=("bsp", "losp"))


def test_a_loss_that_turns_to_nan_on_one_rank_ends_all(fail):
    out = fail("--task", "bad_task:nan", "--seconds", "60")
    assert "the loss of rank 1 was not a finite number at its local step 20" in out


def test_a_task_that_fails_on_one_rank_ends_all_with_its_sentence(fail):
    out = fail("--task", "bad_task:no_model")
    assert "slackring: error: rank 1: ValueError: no weights on this host" in out
    assert "in model" in out  # the traceback


COMPARE = ["compare", "--task", "digits", "--workers", "2", "--lr-grid", "0.1"]


def compare(folder, monkeypatch, capsys, *options):
    """Compare from this process; its exit code, stdout and stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["slackring", *COMPARE, *options])
    code = 0
    try:
        cli.main()
    except SystemExit as exc:
        code = exc.code
    return code, *capsys.readouterr()


def test_compare_runs_all_rules_on_the_same_ranks(tmp_path, monkeypatch, capsys):
    straggler = ["--straggler", "persistent:ranks=1,factor=4", "--step-time", "0.02"]
    options = ["--rules", "bsp,losp", *straggler, "--seconds", "3", "--json"]
    code, out, err = compare(tmp_path, monkeypatch, capsys, *options)
    assert code == 0, err
    rows = json.loads(out)["runs"]
    assert [row["rule"] for row in rows] == ["bsp", "losp"]
    bsp, losp = rows
    assert losp["limit_share"] > 1.5 * bsp["limit_share"]
    assert load_run(tmp_path / losp["run"]).facts["ring"] == "horovod"


def test_ranks_that_fail_in_a_comparison_are_quoted(tmp_path, monkeypatch, capsys):
    shutil.copy(bad_task.__file__, tmp_path)
    options = ["--rules", "bsp", "--seconds", "3", "--task", "bad_task:broken"]
    code, _, err = compare(tmp_path, monkeypatch, capsys, *options)
    assert code == 2
    assert "the Horovod ranks ended before their work was done" in err
    assert "ValueError: this loss is broken" in err
    assert not list((tmp_path / "runs").iterdir())


def test_ctrl_c_in_a_comparison_keeps_the_runs_made(tmp_path):
    options = ["--rules", "bsp,losp", "--step-time", "0.05", "--seconds", "6"]
    command = [sys.executable, "-m", "slackring", *COMPARE, *options]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "bsp, seed 0" in line:
                break
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    (folder,) = (tmp_path / "runs").iterdir()
    found = load_comparison(folder)
    assert found.interrupted
    assert [row.interrupted for row in found.rows] == [False, True]
    assert "Interrupted" in out
