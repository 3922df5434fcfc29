"""The notebooks run by papermill, from typed parameters to a page with its tables, plots and findings."""

from __future__ import annotations

import json
import os
import pty
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from slackring.errors import DataError, SlackringError, SpecError
from slackring.lab.notebooks import run_notebook

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
QUICKSTART = FOLDER / "quickstart.ipynb"
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
    "backend": "virtual",
}


def cells(notebook: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(notebook.read_text())["cells"]
    return found


def plots(executed: Path) -> int:
    return sum("image/png" in out.get("data", ()) for cell in cells(executed) for out in cell.get("outputs", ()))


@pytest.mark.notebook
@pytest.mark.parametrize("backend", ["virtual", pytest.param("dask", marks=pytest.mark.multirank)])
def test_a_tiny_run_makes_a_page_with_table_and_plots(tmp_path: Path, backend: str) -> None:
    if backend == "dask":
        pytest.importorskip("horovod", reason="Horovod is not installed: python cluster_configs/horovod/build.py")
    page = run_notebook(QUICKSTART, tmp_path, {**TINY, "backend": backend, "out": str(tmp_path)})
    text = page.read_text()
    assert plots(tmp_path / QUICKSTART.name) == 2
    assert "First at 0.6" in text
    assert "persistent:ranks=1,factor=3" in text
    (comparison,) = tmp_path.glob("*/comparison.json")
    assert {run["rule"] for run in json.loads(comparison.read_text())["runs"]} == {"bsp", "losp"}


@pytest.mark.notebook
@pytest.mark.parametrize(
    ("name", "pictures", "comparisons", "found"),
    [
        ("losp", 4, 2, ["<code>losp</code> reached 0.7 ", "compensation=auto", "at a staleness of 1"]),
        ("anytime_minibatch", 5, 4, ["reached 0.7 ", "Samples in an update", "staleness=1", "compute_time=0.8"]),
        ("elastic_bsp", 5, 3, ["reached 0.7 ", "lookahead=1", "server/elastic_bsp"]),
    ],
)
def test_the_notebook_of_a_paper_ends_with_what_it_found(
    tmp_path: Path, name: str, pictures: int, comparisons: int, found: list[str]
) -> None:
    page = run_notebook(
        FOLDER / f"{name}.ipynb", tmp_path, {"size": "smoke", "backend": "virtual", "out": str(tmp_path)}
    )
    assert plots(tmp_path / f"{name}.ipynb") == pictures
    assert len(list(tmp_path.glob("*/comparison.json"))) == comparisons
    for text in found:
        assert re.search(text, page.read_text()), text


@pytest.mark.notebook
@pytest.mark.multirank
def test_a_model_defined_in_cells_is_trained_stopped_and_fails_on_ranks(tmp_path: Path) -> None:
    pytest.importorskip("horovod", reason="Horovod is not installed: python cluster_configs/horovod/build.py")
    page = run_notebook(FOLDER / "own_model.ipynb", tmp_path, {"seconds": 2.0, "out": str(tmp_path)}).read_text()
    assert plots(tmp_path / "own_model.ipynb") == 1
    assert "train: ended after" in page  # the last drawing of the live table
    assert "rank 0 of 2 has 1347 samples to draw from" in page
    assert re.search(r"rank 1 on worker .* raised FileNotFoundError: there are no digits on this machine\.", page)
    assert re.search(r"in fail\s+raise FileNotFoundError", page)  # the line of the cell, in the rank's traceback
    assert "Conv2d" in page  # the code is what this page is about
    folders = {folder.name.split("-")[2]: folder for folder in sorted(tmp_path.glob("*-*-*-*"))}
    assert set(folders) == {"train", "fail"}
    assert "took" in (folders["train"] / "rank-1.log").read_text()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_every_parameter_has_a_type_and_an_explanation(notebook: Path) -> None:
    (cell,) = [cell for cell in cells(notebook) if "parameters" in cell["metadata"].get("tags", ())]
    for line in "".join(cell["source"]).splitlines():
        assert re.fullmatch(r"\w+: (str|int|float|bool) = .+  # .+", line), line


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_no_output_is_committed(notebook: Path) -> None:
    assert all(not cell.get("outputs") for cell in cells(notebook))


def test_what_cannot_run_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no parameter 'speed'; did you mean 'seeds'"):
        run_notebook(QUICKSTART, tmp_path, {"speed": 3})
    with pytest.raises(DataError, match=r"no notebook 'nowhere\.ipynb'"):
        run_notebook(Path("nowhere.ipynb"), tmp_path, {})


@pytest.mark.notebook
def test_a_cell_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(SlackringError, match=r"cell \d+ of .*quickstart\.ipynb' failed: RuleError: .*'losp'"):
        run_notebook(QUICKSTART, tmp_path, {**TINY, "rules": "bsp,lsop", "out": str(tmp_path)})


@pytest.mark.notebook
def test_ctrl_c_at_a_terminal_is_one_line(tmp_path: Path) -> None:
    waiting = "print('ready', flush=True)\nimport time\nfor _ in range(600): time.sleep(0.1)"
    sources = [("out = ''", ["parameters"]), (waiting, [])]
    notebook = {
        "cells": [
            {"cell_type": "code", "source": code, "metadata": {"tags": tags}, "outputs": [], "execution_count": None}
            for code, tags in sources
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
