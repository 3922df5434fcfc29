"""The command line, in processes of its own where that matters."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from slackring import cli

COMMANDS = ["doctor", "train", "run", "compare", "fuzz", "show", "plan", "demo", "notebooks list", "notebooks run"]
VIRTUAL = [
    "--virtual",
    "--task",
    "digits",
    "--straggler",
    "persistent:ranks=3,factor=4",
    "--step-time",
    "0.1",
    "--seconds",
    "4",
]


def invoke(monkeypatch, capsys, *arguments):
    """Run the command in this process; return its exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["slackring", *map(str, arguments)])
    code = 0
    try:
        cli.main()
    except SystemExit as exc:
        code = exc.code or 0
    out, err = capsys.readouterr()
    return code, out, err


def test_help_answers_at_once():
    program = (
        "import sys, time\nsys.argv = ['slackring', '--help']\nfrom slackring.cli import main\n"
        "try:\n    main()\nfinally:\n"
        "    heavy = {'torch', 'numpy', 'pandas', 'horovod', 'rich', 'matplotlib', 'distributed'}\n"
        "    print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
        "    print(time.process_time(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    heavy, seconds = done.stderr.split()
    assert heavy == "[]"
    assert float(seconds) < 0.5  # of the processor: what else the machine does must not matter
    assert "Example:" in done.stdout


def test_without_a_command_the_help_is_shown(monkeypatch, capsys):
    code, out, err = invoke(monkeypatch, capsys)
    assert (code, err) == (0, "")
    assert out.startswith("Usage: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(command):
    done = CliRunner().invoke(cli.cli, [*command.split(), "--help"])
    assert done.exit_code == 0
    assert "slackring " + command in done.output
    assert "Example" in done.output
    assert "--json" in done.output


def test_train_writes_a_run_and_says_what_came_out(monkeypatch, capsys, tmp_path):
    code, out, err = invoke(monkeypatch, capsys, "train", "--rule", "losp", *VIRTUAL, "--out", tmp_path)
    (folder,) = tmp_path.iterdir()
    assert code == 0
    assert str(folder) in out
    assert "final accuracy" in out
    assert err == ""  # no bar where there is no terminal
    assert json.loads((folder / "summary.json").read_text())["steps"] > 100
    code, shown, _ = invoke(monkeypatch, capsys, "show", folder)
    assert (code, shown) == (0, out)


def test_train_serves_virtual_workers_of_a_parameter_server(monkeypatch, capsys, tmp_path):
    arguments = ["train", "--rule", "server/ssp:staleness=1", *VIRTUAL, "--out", tmp_path, "--json"]
    code, out, _ = invoke(monkeypatch, capsys, *arguments)
    values = json.loads(out)
    assert code == 0
    assert (values["rule"], values["ranks"], values["ring"]) == ("server/ssp:staleness=1", 4, "virtual server")
    code, shown, _ = invoke(monkeypatch, capsys, "show", values["run"])
    assert (code, "staleness" in shown) == (0, True)
    code, out, err = invoke(monkeypatch, capsys, "train", "--resume", values["run"], "--virtual", "--seconds", "9")
    assert (code, out) == (2, "")
    assert "has no checkpoint to go on from" in err


def test_train_and_compare_compress(monkeypatch, capsys, tmp_path):
    arguments = [*VIRTUAL, "--compression", "fp16", "--out", tmp_path]
    code, out, _ = invoke(monkeypatch, capsys, "train", "--rule", "bsp", *arguments)
    assert (code, "(compressed: fp16)" in out) == (0, True)
    code, out, _ = invoke(monkeypatch, capsys, "compare", "--rules", "bsp,losp", "--lr-grid", "0.4", *arguments)
    assert (code, "digits, 4 virtual ranks (compressed: fp16)" in out) == (0, True)


def test_json_is_all_that_goes_to_stdout(monkeypatch, capsys, tmp_path):
    code, out, _ = invoke(monkeypatch, capsys, "train", "--rule", "bsp", *VIRTUAL, "--out", tmp_path, "--json")
    values = json.loads(out)
    assert code == 0
    assert (values["rule"], values["ranks"], values["ring"]) == ("bsp", 4, "virtual")
    assert values["lr"] == pytest.approx(0.8)  # Horovod's habit: times the ranks
    code, shown, _ = invoke(monkeypatch, capsys, "show", values["run"], "--json")
    assert (code, json.loads(shown)) == (0, values)


def test_compare_prints_the_schema_and_its_progress_elsewhere(monkeypatch, capsys, tmp_path):
    arguments = [
        "compare",
        "--rules",
        "bsp,losp:k_max=8,compensation=auto",
        "--lr-grid",
        "0.1",
        *VIRTUAL,
        "--out",
        tmp_path,
    ]
    code, out, err = invoke(monkeypatch, capsys, *arguments, "--json")
    values = json.loads(out)
    assert code == 0
    assert [row["rule"] for row in values["runs"]] == ["bsp", "losp:k_max=8,compensation=auto"]
    assert "final accuracy" in err
    code, shown, _ = invoke(monkeypatch, capsys, "show", values["folder"])
    assert code == 0
    assert "digits, 4 virtual ranks" in shown


def test_a_run_on_one_real_rank_needs_no_launcher(monkeypatch, capsys, tmp_path):
    arguments = ["train", "--rule", "bsp", "--task", "digits", "--rounds", "5", "--out", tmp_path, "--json"]
    code, out, _ = invoke(monkeypatch, capsys, *arguments)
    values = json.loads(out)
    assert (code, values["ring"], values["ranks"], values["rounds"]) == (0, "single", 1, 5)


BSP = ["--rule", "bsp"]
BAD = {
    "rule": (["train", "--rule", "lsop"], "did you mean 'losp'"),
    "rule option": (["train", "--rule", "losp:k_mx=3"], "k_max"),
    "straggler": (["train", *BSP, "--straggler", "persistant:ranks=1,factor=2"], "did you mean 'persistent'"),
    "value": (["train", *BSP, "--straggler", "persistent:ranks=1,factor=fast"], "factor='fast' is not a number"),
    "rank": (["train", *BSP, "--virtual", "--straggler", "persistent:ranks=7,factor=2"], "names rank 7"),
    "trace": (
        ["train", *BSP, "--straggler", "trace:file=no-such-file.csv"],
        "there is no trace file 'no-such-file.csv'",
    ),
    "network": (["train", *BSP, "--network", "latency=fast"], "latency='fast' is not a number"),
    "task": (["train", *BSP, "--task", "digitz"], "did you mean 'digits'"),
    "number": (["train", *BSP, "--seconds", "long"], "'long' is not a valid float"),
    "compression": (["train", *BSP, "--compression", "fp61"], "did you mean 'fp16'"),
    "workers": (["train", *BSP, "--virtual", "--workers", "0"], "at least one rank"),
    "grid": (["compare", "--lr-grid", "0.1,x"], "'0.1,x' is not numbers joined by commas"),
    "seeds": (["compare", "--seeds", "one"], "'one' is not whole numbers joined by commas"),
    "rules": (["compare", "--rules", "bsp,losq"], "did you mean 'losp'"),
    "server": (["train", "--rule", "server/asp"], "rule 'server/asp' needs a parameter server"),
    "servers": (["compare", "--rules", "bsp,server/ssp"], "in virtual time only; add --virtual"),
    "policy": (["train", "--virtual", "--rule", "server/aps"], "did you mean 'server/asp'"),
    "no rule": (["train"], "Missing option '--rule'"),
    "too few ranks": (["train", *BSP, "--workers", "4"], "horovodrun --gloo -np 4 slackring train"),
    "cluster file": (["run", *BSP, "--cluster", "nowhere.yaml"], "there is no cluster file nowhere.yaml"),
    "cluster's class": (["run", *BSP, "--cluster", __file__], "this is no YAML"),
    "cluster's address": (
        ["run", *BSP, "--cluster", "tcp://127.0.0.1:1"],
        "no Dask scheduler answers at tcp://127.0.0.1:1",
    ),
    "cluster to compare on": (["compare", "--cluster", "nowhere.yaml"], "there is no cluster file nowhere.yaml"),
    "virtual cluster": (["compare", "--cluster", "a.yaml", "--virtual"], "virtual ranks need no cluster"),
    "task on a cluster": (["run", *BSP, "--task", "digitz"], "did you mean 'digits'"),
    "command": (["trian"], "train"),
    "option": (["train", "--ruel", "bsp"], "--rule"),
    "folder": (["show", "no-such-folder"], "'no-such-folder' is not the folder of a finished run"),
    "times": (["plan", "no-such.csv"], "'no-such.csv' cannot be read"),
    "notebook": (["demo", "--notebook", "no-such.ipynb"], "there is no notebook 'no-such.ipynb'"),
    "no notebook": (["demo", "--notebook", __file__], "is not a notebook"),
    "no notebooks": (["notebooks", "list"], "there are no notebooks in 'notebooks'"),
    "parameter": (["notebooks", "run", "quickstart", "-p", "size"], "'size': it is of the form KEY=VALUE"),
    "parameters": (
        ["notebooks", "run", "quickstart", "-p", "a=1", "-p", "a=2"],
        "'a=2': this parameter is given twice",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_line_and_exit_code_2(case, monkeypatch, capsys, tmp_path):
    arguments, told = BAD[case]
    monkeypatch.chdir(tmp_path)
    code, out, err = invoke(monkeypatch, capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("slackring: error: ")
    assert told in err
    assert err.count("\n") == 1
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_a_folder_that_cannot_be_written_is_found_before_training(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("in the way")
    code, _, err = invoke(monkeypatch, capsys, "train", "--rule", "bsp", *VIRTUAL, "--out", tmp_path / "file")
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot be written" in err


@pytest.fixture
def small_disk(tmp_path):
    """A disk of its own, of 200 KB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_disk_that_is_full_after_training_costs_the_files_but_not_the_figures(
    monkeypatch, capsys, tmp_path, small_disk
):
    (small_disk / "other").write_bytes(bytes(190_000))
    code, out, err = invoke(monkeypatch, capsys, "train", "--rule", "losp", *VIRTUAL, "--out", small_disk / "runs")
    assert code == 2
    assert "final accuracy" in out
    told = f"slackring: error: results cannot be written to '{small_disk}/runs': No space left on device; give another --out."
    assert err == told + "\n"
    assert not list((small_disk / "runs").iterdir())
    (small_disk / "other").write_bytes(bytes(100_000))
    code, out, err = invoke(monkeypatch, capsys, "train", "--rule", "losp", *VIRTUAL, "--out", small_disk / "runs")
    assert code == 2
    assert err.endswith("No space left on device; give another --out. The rest of the run is there.\n")
    (folder,) = (small_disk / "runs").iterdir()
    assert invoke(monkeypatch, capsys, "show", folder) == (0, out, "")


def test_a_rank_other_than_0_leaves_the_telling_to_it(monkeypatch, capsys):
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setattr(cli, "_HEAD_START", 0.0)
    code, out, err = invoke(monkeypatch, capsys, "train", "--rule", "lsop")
    assert (code, out, err) == (2, "", "")


@pytest.mark.parametrize("command", [["train", *BSP, "--virtual"], ["run", *BSP], ["compare"]])
def test_what_starts_its_own_ranks_is_not_launched_by_horovodrun(command, monkeypatch, capsys):
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.setenv("HOROVOD_RANK", "0")
    code, _, err = invoke(monkeypatch, capsys, *command)
    assert code == 2
    assert "without horovodrun" in err


def test_a_comparison_without_horovod_says_so_before_it_tunes(monkeypatch, capsys, tmp_path):
    from slackring.lab import launch

    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    code, out, err = invoke(monkeypatch, capsys, "compare", "--out", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "cluster_configs/horovod/build.py" in err
    assert "--virtual" in err


def test_a_cluster_without_its_packages_says_how_to_get_them(tmp_path):
    program = (
        "import sys\nsys.modules['cloudpickle'] = None\nsys.argv = ['slackring', 'run', '--rule', 'bsp']\n"
        "from slackring.cli import main\nmain()"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "'cloudpickle': pip install 'slackring[dask]'." in done.stderr


TASK = """
import dataclasses, torch
from slackring.lab.tasks import load_task

def nan():
    task = load_task("digits")
    calls = []
    def loss(output, labels):
        calls.append(1)
        return task.loss(output, labels) * (float("nan") if len(calls) > 50 else 1)
    return dataclasses.replace(task, loss=loss)
"""


def test_a_loss_that_turns_to_nan_leaves_nothing(monkeypatch, capsys, tmp_path):
    (tmp_path / "diverging_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["--rule", "osp", "--virtual", "--task", "diverging_task:nan", "--out", tmp_path / "runs"]
    code, _, err = invoke(monkeypatch, capsys, "train", *arguments)
    assert code == 2
    assert "was not a finite number at its local step" in err
    assert err.count("\n") == 1
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["INT", "TERM"])
def test_a_signal_leaves_a_readable_run(number, code, tmp_path):
    options = ["--rule", "bsp", "--task", "digits", "--step-time", "0.05", "--seconds", "100", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "slackring", "train", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        _wait_for_training(process)
        time.sleep(1.0)
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == code
    (folder,) = tmp_path.iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["interrupted"]
    assert summary["steps"] >= 1
    assert "Interrupted" in out
    assert f"slackring train --resume {folder}" in out
    assert [file.name for file in (folder / "checkpoint").iterdir()] == ["rank-0.pt"]


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path, monkeypatch, capsys):
    options = ["--rule", "bsp", "--task", "digits", "--step-time", "0.02", "--seconds", "100", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "slackring", "train", "--checkpoint-every", "0.3", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not (kept := list(tmp_path.glob("2*-round*"))) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
    kept = sorted(tmp_path.glob("2*-round*"))
    done = json.loads((kept[-1] / "summary.json").read_text())
    goal = done["rounds"] + 5
    code, out, err = invoke(
        monkeypatch, capsys,
        "train", "--resume", kept[-1], "--rounds", goal, "--out", tmp_path / "again", "--json",
    )  # fmt: skip
    assert (code, err) == (0, "")
    resumed = json.loads(out)
    assert (resumed["rounds"], resumed["steps"], resumed["interrupted"]) == (goal, done["steps"] + 5, False)
    assert resumed["resumed"]["run"] == str(kept[-1])
    assert resumed["resumed"]["rounds"] == done["rounds"]
    assert resumed["seconds"] > done["seconds"]


def test_what_cannot_be_resumed_says_why(tmp_path, monkeypatch, capsys):
    def train(*arguments):
        return invoke(monkeypatch, capsys, "train", *arguments, "--out", tmp_path / "runs", "--json")

    code, out, _ = train("--rule", "losp", *VIRTUAL)
    folder = json.loads(out)["run"]
    assert code == 0
    for arguments, told in (
        (["--virtual"], "came to its end"),
        (["--virtual", "--rounds", "1"], "--rounds 1 counts from the run's start"),
        (["--rounds", "1000"], "go on with 'slackring train --virtual'"),
        (["--virtual", "--lr", "0.1"], "--lr comes from the run"),
        (["--virtual", "--seconds", "9", "--checkpoint-every", "0"], "--checkpoint-every must be"),
    ):
        code, out, err = train("--resume", folder, *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert told in err
    code, _, err = train("--resume", tmp_path)
    assert (code, "is not the folder of a finished run" in err) == (2, True)
    code, out, err = train("--resume", folder, "--virtual", "--seconds", "6")
    assert (code, err) == (0, "")
    assert 5.5 < json.loads(out)["seconds"] < 7
    assert json.loads(out)["ranks"] == 4
    code, out, err = train("--resume", folder, "--virtual", "--seconds", "6", "--workers", "5")
    assert (code, json.loads(out)["resumed"]["exact"]) == (0, False)
    assert "had 4 ranks and goes on with 5" in err


def test_a_signal_before_there_is_a_result_leaves_nothing(tmp_path):
    options = ["--virtual", "--task", "digits", "--seconds", "100", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "slackring", "compare", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        _wait_for_training(process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err.strip()) == (130, "", "slackring: interrupted before there was a result.")
    assert not list(tmp_path.iterdir())


def _wait_for_training(process: subprocess.Popen[str]) -> None:
    """Wait until the process takes SIGTERM as a wish."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
        if caught >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.1)
    process.kill()
    pytest.fail(f"no training began: {process.communicate()}")
