"""Draws a board again and again: as a table in a terminal or a notebook, as lines in a pipe."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Protocol, Self

from rich import live
from rich.console import Console

from slackring.dask.board import Board

__all__ = ["Live", "show"]

_PAGE_WIDTH = 100  # characters; what a page of JupyterLab shows beside its panels
_FORMAT = '<pre style="white-space:pre; font-family:monospace; line-height:1.3; margin:0">{code}</pre>'


class Live:
    """Draws a board wherever this process writes to; a context manager.

    In a terminal and in a notebook the drawing is renewed in its place, and its last state stays. Elsewhere there is a line every
    few seconds, and one for each warning.

    Parameters
    ----------
    board
        Whoever holds it goes on changing it.
    console
        Where to draw, if not in a notebook; standard output if None.
    """

    def __init__(self, board: Board, console: Console | None = None) -> None:
        self._board, self._console = board, console
        self._due = 0.0

    def __enter__(self) -> Self:
        self._medium = _medium(self._console)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._medium.draw(self._board)
        self._medium.close()

    def draw(self) -> None:
        """Draw the board, unless that was done a moment ago."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._medium.interval
            self._medium.draw(self._board)


def show(board: Board, updates: Iterable[object], console: Console | None = None) -> None:
    """Draw a board after each of some updates, and a last time when there are no more.

    Parameters
    ----------
    board
        What to draw.
    updates
        Changes the board before it yields, at its own pace.
    console
        As in :class:`Live`.

    Examples
    --------
    >>> board = Board(["node1"])
    >>> def updates():
    ...     board.take(0, {"rounds": 1, "steps": 2, "samples": 8.0, "seconds": 1.0, "compute": 1.0})
    ...     yield
    >>> show(board, updates(), Console(width=100))
    1 rounds, 2 steps, 8 samples/s, waiting 0%
    """
    with Live(board, console) as drawing:
        for _ in updates:
            drawing.draw()


class _Medium(Protocol):
    interval: float  # seconds between two drawings

    def draw(self, board: Board) -> None: ...

    def close(self) -> None: ...


class _Terminal:
    interval = 0.25

    def __init__(self, console: Console) -> None:
        self._live = live.Live(console=console, auto_refresh=False)
        self._live.start()

    def draw(self, board: Board) -> None:
        self._live.update(board.table(), refresh=True)

    def close(self) -> None:
        self._live.stop()


class _Notebook:
    """One output that is replaced; the notebook keeps its last state, also where papermill runs it."""

    interval = 0.5

    def __init__(self) -> None:
        from IPython.display import display

        self._handle: Any = display(self._bundle(""), raw=True, display_id=True)  # type: ignore[no-untyped-call]

    @staticmethod
    def _bundle(content: Any) -> dict[str, str]:
        console = Console(record=True, file=io.StringIO(), width=_PAGE_WIDTH, force_jupyter=False)
        console.print(content)
        return {
            "text/html": console.export_html(code_format=_FORMAT, inline_styles=True, clear=False),
            "text/plain": console.export_text(),
        }

    def draw(self, board: Board) -> None:
        self._handle.update(self._bundle(board.table()), raw=True)

    def close(self) -> None:
        pass


class _Lines:
    interval = 5.0

    def __init__(self, console: Console) -> None:
        self._console = console
        self._warned = 0
        self._last = ""

    def draw(self, board: Board) -> None:
        for text in board.warnings[self._warned :]:
            self._write(f"warning: {text}")
        self._warned = len(board.warnings)
        line = board.line()
        if line != self._last:
            self._write(line)
        self._last = line

    def _write(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass


def _medium(console: Console | None) -> _Medium:
    ipython = sys.modules.get("IPython")  # which a notebook's kernel has loaded
    if console is None and ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
        return _Notebook()
    console = console or Console()
    return _Terminal(console) if console.is_terminal else _Lines(console)
