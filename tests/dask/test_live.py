"""The board is drawn in a terminal, in a notebook, and in a pipe, and its last state stays."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from slackring.dask import live
from slackring.dask.board import Board
from slackring.dask.live import Live, show


def updates(board, number=5):
    """A run of a rank that has taken as many steps as there were updates."""
    for steps in range(1, number + 1):
        work = {"samples": 8.0 * steps, "seconds": 1.0 * steps, "compute": 1.0 * steps}
        board.take(0, {"rounds": steps, "steps": steps, **work, "reported.loss": 1 / steps})
        if steps == 2:
            board.warn("rank 0 is slow.")
        yield
    board.end()


def test_a_pipe_gets_a_line_now_and_then_and_each_warning_once(monkeypatch):
    times = iter(range(0, 1000, 2))
    monkeypatch.setattr(live.time, "monotonic", lambda: float(next(times)))
    board, console = Board(["node1"]), Console(file=io.StringIO(), width=20)
    show(board, updates(board), console)
    assert console.file.getvalue().splitlines() == [
        "1 rounds, 1 steps, 8 samples/s, waiting 0%, loss 1",
        "warning: rank 0 is slow.",
        "4 rounds, 4 steps, 8 samples/s, waiting 0%, loss 0.25",
        "5 rounds, 5 steps, 8 samples/s, waiting 0%, loss 0.2",
    ]


def test_the_same_line_is_not_repeated():
    board, console = Board(["node1"]), Console(file=io.StringIO())
    with Live(board, console) as drawing:
        drawing._medium.interval = 0.0
        for _ in range(5):
            drawing.draw()
    assert len(console.file.getvalue().splitlines()) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_terminal_keeps_the_last_state_and_its_cursor(fails):
    board, console = Board(["node1"], title="run7"), Console(file=io.StringIO(), width=100, force_terminal=True)
    outcome = None
    try:
        with Live(board, console) as drawing:
            for _ in updates(board):
                drawing.draw()
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        outcome = "interrupted"
    written = console.file.getvalue()
    assert outcome == ("interrupted" if fails else None)
    assert "running for 1 s" in written
    assert "run7: ended after 5 s" in written[written.rindex("run7") :] and "warning: rank 0 is slow." in written
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1  # hidden, and shown again


@pytest.mark.notebook
def test_a_notebook_keeps_the_last_state_in_one_output(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    papermill = pytest.importorskip("papermill")
    source = Path(__file__).read_text()
    helper = source[source.index("def updates") : source.index("def test_a_pipe")]
    notebook = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        cells=[
            nbformat.v4.new_code_cell("from slackring.dask.board import Board\nfrom slackring.dask.live import show"),
            nbformat.v4.new_code_cell(helper),
            nbformat.v4.new_code_cell("board = Board(['node1'], title='run7')\nshow(board, updates(board))"),
        ],
    )
    nbformat.write(notebook, tmp_path / "in.ipynb")
    papermill.execute_notebook(tmp_path / "in.ipynb", tmp_path / "out.ipynb", progress_bar=False)
    (output,) = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells[-1].outputs
    for kind in ("text/html", "text/plain"):
        content = output.data[kind]
        assert "run7: ended after 5 s" in content and "warning: rank 0 is slow." in content and "node1" in content
    assert "<pre" in output.data["text/html"] and "running" not in output.data["text/html"]
