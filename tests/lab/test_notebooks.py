"""Notebooks are found, their parameters read, and several of them run."""

from __future__ import annotations

import json
import multiprocessing
import sys

import pytest

from slackring import cli
from slackring.errors import DataError, SlackringError, SpecError
from slackring.lab import notebooks as module
from slackring.lab.notebooks import (
    Parameter,
    find_notebooks,
    parameters_of,
    read_values,
    run_notebooks,
    title_of,
)

PARAMETERS = """
size: str = "a=1 # b"  # how large = how long
runs: int = 3  # how many
share: float = 0.5  # of all
fast: bool = False  # or slow
plain = 7
"""


def write(folder, name, *sources, title="# A title\n\ntext"):
    cells = [{"cell_type": "markdown", "id": "title", "metadata": {}, "source": title}]
    for index, source in enumerate(sources):
        tags = [] if index else ["parameters"]
        cell = {
            "cell_type": "code",
            "id": str(index),
            "metadata": {"tags": tags},
            "source": source.splitlines(keepends=True),
        }
        cells.append({**cell, "execution_count": None, "outputs": []})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    file = folder / f"{name}.ipynb"
    file.write_text(
        json.dumps({"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5})
    )
    return file


@pytest.fixture
def notebook(tmp_path):
    return write(tmp_path, "one", PARAMETERS)


def test_parameters_have_types_defaults_and_explanations(notebook):
    assert parameters_of(notebook) == {
        "size": Parameter("str", "a=1 # b", "how large = how long"),
        "runs": Parameter("int", 3, "how many"),
        "share": Parameter("float", 0.5, "of all"),
        "fast": Parameter("bool", False, "or slow"),
        "plain": Parameter("int", 7, ""),
    }
    assert title_of(notebook) == "A title"


def test_values_are_read_as_the_parameters_types_ask_for(notebook):
    texts = {"size": "1", "runs": "2", "share": "3", "fast": "True", "plain": "4"}
    values = read_values(notebook, texts)
    assert values == {"size": "1", "runs": 2, "share": 3.0, "fast": True, "plain": 4}
    assert [type(value) for value in values.values()] == [str, int, float, bool, int]


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        ({"runs": "2.5"}, "runs of notebook 'one' is a whole number, not '2.5'"),
        ({"share": "half"}, "share of notebook 'one' is a number, not 'half'"),
        ({"fast": "very"}, "fast of notebook 'one' is true or false, not 'very'"),
        ({"sise": "large"}, "'one' has no parameter 'sise'; did you mean 'size'"),
    ],
)
def test_values_that_cannot_be_are_refused(notebook, texts, told):
    with pytest.raises(SpecError, match=told):
        read_values(notebook, texts)


def test_notebooks_are_found_by_name(tmp_path, notebook):
    other = write(tmp_path, "other", PARAMETERS)
    assert find_notebooks(tmp_path) == [notebook, other]
    assert find_notebooks(tmp_path, ["other.ipynb", "one", "other"]) == [other, notebook]
    with pytest.raises(SpecError, match=r"no notebook 'ohter' in .*; did you mean 'other'"):
        find_notebooks(tmp_path, ["ohter"])
    with pytest.raises(DataError, match="no notebooks in"):
        find_notebooks(tmp_path / "elsewhere")


@pytest.mark.parametrize("source", ["x = [", "x: int = open(3)"])
def test_parameters_that_are_no_literals_are_one_clear_error(tmp_path, source):
    with pytest.raises(DataError, match=r"the parameters of .*odd\.ipynb' cannot be read"):
        parameters_of(write(tmp_path, "odd", source))


@pytest.mark.notebook
def test_a_notebook_that_fails_leaves_the_others_alone(tmp_path):
    bad = write(tmp_path, "bad", "runs: int = 1  # how many", "1 / (runs - 1)")
    good = write(tmp_path, "good", "runs: int = 1  # how many", "print('runs:', runs)")
    out = tmp_path / "out"
    found = dict(run_notebooks({bad: {}, good: {"runs": 7}}, out, jobs=2))
    assert isinstance(found[bad], SlackringError)
    assert "cell 3 of" in str(found[bad])
    assert "ZeroDivisionError" in str(found[bad])
    assert found[good] == out / "good.html"
    assert "runs: 7" in found[good].read_text()


@pytest.mark.notebook
def test_what_still_runs_ends_with_its_caller(tmp_path):
    quick = write(tmp_path, "quick", "runs: int = 1  # how many")
    endless = write(tmp_path, "endless", "runs: int = 1  # how many", "import time\nwhile True: time.sleep(0.1)")
    out = tmp_path / "out"
    before = set(multiprocessing.active_children())
    results = run_notebooks({endless: {}, quick: {}}, out, 2)
    assert next(results) == (quick, out / "quick.html")
    assert len(set(multiprocessing.active_children()) - before) == 1
    results.close()
    assert not set(multiprocessing.active_children()) - before


def invoke(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["slackring", "notebooks", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
        sys.exit(0)
    return caught.value.code, *capsys.readouterr()


def test_the_command_lists_notebooks_with_their_parameters(notebook, monkeypatch, capsys):
    code, out, _ = invoke(monkeypatch, capsys, "list", "--folder", notebook.parent)
    assert code == 0
    assert out.splitlines()[:2] == ["one: A title", "    size=a=1 # b  how large = how long"]
    _, out, _ = invoke(monkeypatch, capsys, "list", "--folder", notebook.parent, "--json")
    (listed,) = json.loads(out)["notebooks"]
    assert (listed["name"], listed["title"]) == ("one", "A title")
    assert listed["parameters"]["runs"] == {"type": "int", "default": 3, "explanation": "how many"}


def test_the_command_runs_what_is_named_and_tells_what_failed(tmp_path, monkeypatch, capsys):
    for name in ("one", "two", "three"):
        write(tmp_path, name, "runs: int = 3  # how many\nout: str = 'runs'  # where")
    given = {}

    def run(notebook, out, parameters, **settings):
        given[notebook.stem] = dict(parameters)
        if notebook.stem == "two":
            raise SlackringError("cell 2 failed.")
        return out / f"{notebook.stem}.html"

    monkeypatch.setattr(module, "run_notebook", run)
    monkeypatch.chdir(tmp_path)
    code, out, err = invoke(
        monkeypatch, capsys, "run", "two", "one", "-p", "runs=2", "--folder", ".", "--out", "pages", "--json"
    )
    assert code == 2
    assert given == {name: {"runs": 2, "out": str(tmp_path / "pages")} for name in ("two", "one")}
    assert json.loads(out) == {"pages": {"one": "pages/one.html"}, "failed": {"two": "cell 2 failed."}}
    assert "slackring: error: cell 2 failed." in err


def test_the_command_refuses_a_wrong_value_before_anything_runs(notebook, monkeypatch, capsys):
    code, out, err = invoke(monkeypatch, capsys, "run", "one", "-p", "runs=many", "--folder", notebook.parent)
    assert (code, out) == (2, "")
    assert "runs of notebook 'one' is a whole number, not 'many'" in err
