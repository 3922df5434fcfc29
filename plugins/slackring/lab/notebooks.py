"""Runs notebooks from their first cell to their last, and makes pages of them."""

from __future__ import annotations

import ast
import json
import logging
import multiprocessing
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

from slackring.errors import DataError, SlackringError, SpecError
from slackring.lab.runs import check_writable, whole, writing
from slackring.spec import nearest

__all__ = ["Parameter", "find_notebooks", "parameters_of", "read_values", "run_notebook", "run_notebooks", "title_of"]

_BOOLEANS = {"true": True, "false": False}


class Parameter(NamedTuple):
    """A parameter of a notebook.

    Attributes
    ----------
    type
        Of ``str``, ``int``, ``float`` and ``bool``; a value without an annotation has the type of its default.
    default
        Its value, if none is given.
    explanation
        The comment behind it.
    """

    type: str
    default: object
    explanation: str


def run_notebooks(
    parameters: Mapping[Path, Mapping[str, object]], out: Path, jobs: int = 1
) -> Iterator[tuple[Path, Path | SlackringError]]:
    """Execute notebooks, at most `jobs` at a time, then each in a process of its own.

    Parameters
    ----------
    parameters
        By notebook.
    out
        As in :func:`run_notebook`.
    jobs
        How many may run at the same time. With more than one, nothing is told of what they print.

    Yields
    ------
    tuple
        A notebook and its page, or what went wrong; in the order in which they end.
    """
    if jobs == 1 or len(parameters) == 1:
        for notebook in parameters:
            yield notebook, _result(notebook, out, parameters[notebook], echo=True)
        return
    context = multiprocessing.get_context("spawn")
    waiting, running = list(parameters), dict[Connection, tuple[Path, SpawnProcess]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                notebook = waiting.pop(0)
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_serve, args=(sender, notebook, out, parameters[notebook]), daemon=True
                )
                process.start()
                sender.close()  # so that its death is noticed here
                running[receiver] = notebook, process
            ended = connection.wait(list(running))
            for receiver in [receiver for receiver in running if receiver in ended]:
                notebook, process = running.pop(receiver)
                try:
                    result = receiver.recv()
                except EOFError:
                    result = SlackringError(f"the process that ran {str(notebook)!r} died.")
                process.join()
                yield notebook, result
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()


def _serve(sender: Connection, notebook: Path, out: Path, parameters: Mapping[str, object]) -> None:
    """Run a notebook in a process of its own, which its parent ends if it is interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sender.send(_result(notebook, out, parameters, echo=False))


def _result(notebook: Path, out: Path, parameters: Mapping[str, object], *, echo: bool) -> Path | SlackringError:
    try:
        return run_notebook(notebook, out, parameters, echo=echo)
    except SlackringError as exc:
        return exc


def run_notebook(notebook: Path, out: Path, parameters: Mapping[str, object], *, echo: bool = True) -> Path:
    """Execute a notebook with papermill, and make a page of it: without code, unless its metadata have ``"show_code": true``.

    Parameters
    ----------
    notebook
        With a cell that is tagged `parameters`.
    out
        Folder for the executed notebook and the page, which replace older ones of the same name.
    parameters
        By name.
    echo
        Whether what it prints goes to stderr meanwhile.

    Returns
    -------
    Path
        The page.

    Raises
    ------
    DataError
        If the notebook is missing or none, or `out` cannot be written.
    SlackringError
        If a cell fails; the executed notebook shows where.
    """
    try:
        import nbconvert
        import papermill
    except ImportError as exc:
        raise DataError(f"notebooks need the package {exc.name}: pip install 'slackring[lab]'.") from exc
    if not notebook.is_file():
        raise DataError(f"there is no notebook {str(notebook)!r}; run this from a clone of the repository.")
    known = parameters_of(notebook)
    for name in parameters:
        _require(notebook, name, known)
    check_writable(out)
    executed = out / notebook.name
    # Papermill complains of the help texts behind parameters, and the kernel of its local connection and, after Ctrl-C, of a
    # connection that is gone. What fails in a cell is told by papermill.
    logging.getLogger("papermill").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            papermill.execute_notebook(
                str(notebook),
                str(executed),
                dict(parameters),
                progress_bar=False,
                stdout_file=sys.stderr if echo else None,
                stderr_file=sys.stderr if echo else None,
                extra_arguments=["--IPKernelApp.log_level=CRITICAL"],
            )
        except papermill.exceptions.PapermillExecutionError as exc:
            where = f"cell {exc.cell_index + 1} of {str(executed)!r}"
            raise SlackringError(f"{where} failed: {exc.ename}: {exc.evalue}") from exc
        body, _ = nbconvert.HTMLExporter(
            exclude_input=not _content(notebook).get("metadata", {}).get("show_code", False),
            exclude_input_prompt=True,
            exclude_output_prompt=True,
        ).from_filename(str(executed))  # type: ignore[no-untyped-call]
    page = executed.with_suffix(".html")
    with writing(out), whole(page):
        page.write_text(body, encoding="utf-8")
    return page


def find_notebooks(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """Find notebooks in a folder.

    Parameters
    ----------
    folder
        Where they are.
    names
        Which, with or without ``.ipynb``; all if empty.

    Raises
    ------
    DataError
        If the folder has none.
    SpecError
        If one that is named is not there.
    """
    known = {file.stem: file for file in sorted(folder.glob("*.ipynb"))}
    if not known:
        raise DataError(
            f"there are no notebooks in {str(folder)!r}; run this from a clone of the repository, or give --folder."
        )
    stems = [name.removesuffix(".ipynb") for name in names] or list(known)
    for stem in stems:
        if stem not in known:
            raise SpecError(f"there is no notebook {stem!r} in {str(folder)!r}; {nearest(stem, known)}.")
    return [known[stem] for stem in dict.fromkeys(stems)]


def title_of(notebook: Path) -> str:
    """The first heading of a notebook; empty if it has none."""
    sources = ("".join(cell["source"]) for cell in _cells(notebook) if cell["cell_type"] == "markdown")
    headings = (line.removeprefix("# ") for source in sources for line in source.splitlines() if line.startswith("# "))
    return next(headings, "")


def parameters_of(notebook: Path) -> dict[str, Parameter]:
    """The parameters of a notebook by name; papermill itself cannot read those whose text has an equals sign.

    Raises
    ------
    DataError
        If the file is no notebook, or the cell that is tagged `parameters` is not made of literals.
    """
    tagged = [cell for cell in _cells(notebook) if "parameters" in cell["metadata"].get("tags", ())]
    found: dict[str, Parameter] = {}
    for source in ("".join(cell["source"]) for cell in tagged):
        try:
            for statement in ast.parse(source).body:
                match statement:
                    case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr() as value):
                        kind = ast.unparse(annotation)
                    case ast.Assign(targets=[ast.Name(id=name)], value=value):
                        kind = type(ast.literal_eval(value)).__name__
                    case _:
                        continue
                rest = source.splitlines()[(value.end_lineno or 1) - 1][value.end_col_offset or 0 :]
                found[name] = Parameter(kind, ast.literal_eval(value), rest.partition("#")[2].strip())
        except (ValueError, SyntaxError) as exc:
            raise DataError(f"the parameters of {str(notebook)!r} cannot be read: {exc}.") from exc
    return found


def read_values(notebook: Path, texts: Mapping[str, str]) -> dict[str, object]:
    """Read values of a notebook's parameters from text, as their types ask for.

    Raises
    ------
    SpecError
        For an unknown parameter (with the nearest valid one) or a malformed value.
    """
    known = parameters_of(notebook)
    values: dict[str, object] = {}
    for name, text in texts.items():
        kind = _require(notebook, name, known).type
        try:
            values[name] = (
                _BOOLEANS[text.lower()] if kind == "bool" else {"int": int, "float": float}.get(kind, str)(text)
            )
        except (ValueError, KeyError):
            what = {"bool": "true or false", "int": "a whole number"}.get(kind, "a number")
            raise SpecError(f"parameter {name} of notebook {notebook.stem!r} is {what}, not {text!r}.") from None
    return values


def _require(notebook: Path, name: str, known: Mapping[str, Parameter]) -> Parameter:
    if name not in known:
        raise SpecError(f"notebook {notebook.stem!r} has no parameter {name!r}; {nearest(name, known)}.")
    return known[name]


def _cells(notebook: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = _content(notebook)["cells"]
    return cells


def _content(notebook: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(notebook.read_text(encoding="utf-8"))
        for cell in content["cells"]:
            _ = cell["cell_type"], cell["metadata"], cell["source"]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise DataError(f"{str(notebook)!r} is not a notebook that can be read: {exc!r}.") from exc
    return content
