"""The quickstart notebook runs by papermill, from typed parameters to a page with its table and plots."""

from __future__ import annotations

import json
import os
import pty
import re
import sys
from pathlib import Path

import pytest

from slackring.errors import DataError, SlackringError, SpecError
from slackring.lab.notebooks import run_notebook

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"
TINY = {
    "task": "digits",
    "rules": "bsp,losp",
    "workers": 2,
    "straggler": "persistent:ranks=1,factor=3",
    "lr_grid": "0.2,0.4",
    "tuning_runs": 1,
    "seeds": "0",
    "seconds": 3.0,
    "target": 0.6,
    "virtual": True,
}


@pytest.mark.notebook
def test_a_tiny_run_makes_a_page_with_table_and_plots(tmp_path: Path) -> None:
    page = run_notebook(NOTEBOOK, tmp_path, {**TINY, "out": str(tmp_path)})
    text = page.read_text()
    cells = json.loads((tmp_path / NOTEBOOK.name).read_text())["cells"]
    plots = [out for cell in cells for out in cell.get("outputs", ()) if "image/png" in out.get("data", ())]
    assert len(plots) == 2
    assert "First at 0.6" in text
    assert "persistent:ranks=1,factor=3" in text
    (comparison,) = tmp_path.glob("*/comparison.json")
    assert {run["rule"] for run in json.loads(comparison.read_text())["runs"]} == {"bsp", "losp"}


def test_every_parameter_has_a_type_and_an_explanation() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    (cell,) = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", ())]
    for line in "".join(cell["source"]).splitlines():
        assert re.fullmatch(r"\w+: (str|int|float|bool) = .+  # .+", line), line


def test_no_output_is_committed() -> None:
    assert all(not cell.get("outputs") for cell in json.loads(NOTEBOOK.read_text())["cells"])


def test_what_cannot_run_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no parameter speed"):
        run_notebook(NOTEBOOK, tmp_path, {"speed": 3})
    with pytest.raises(DataError, match=r"no notebook 'nowhere\.ipynb'"):
        run_notebook(Path("nowhere.ipynb"), tmp_path, {})


@pytest.mark.notebook
def test_a_cell_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(SlackringError, match=r"cell \d+ of .*quickstart\.ipynb' failed: RuleError: .*'losp'"):
        run_notebook(NOTEBOOK, tmp_path, {**TINY, "rules": "bsp,lsop", "out": str(tmp_path)})


@pytest.mark.notebook
def test_ctrl_c_at_a_terminal_is_one_line(tmp_path: Path) -> None:
    waiting = "print('ready', flush=True)\nimport time\nfor _ in range(600): time.sleep(0.1)"
    cells = [("out = ''", ["parameters"]), (waiting, [])]
    notebook = {
        "cells": [
            {"cell_type": "code", "source": code, "metadata": {"tags": tags}, "outputs": [], "execution_count": None}
            for code, tags in cells
        ],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 4,
    }
    (tmp_path / "waiting.ipynb").write_text(json.dumps(notebook))
    command = [sys.executable, "-m", "slackring", "demo", "--notebook", "waiting.ipynb", "--out", "out"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(command[0], command)
    shown = b""
    try:
        while part := os.read(terminal, 4096):
            if b"ready" not in shown and b"ready" in shown + part:
                os.write(terminal, b"\x03")
            shown += part
    except OSError:  # the other side is closed
        pass
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert shown.decode().split() == [
        "ready",
        "^C",
        "slackring:",
        "interrupted",
        "before",
        "there",
        "was",
        "a",
        "result.",
    ]
