"""Runs a notebook from its first cell to its last, and makes a page of it."""

from __future__ import annotations

import ast
import json
import logging
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

from slackring.errors import DataError, SlackringError, SpecError
from slackring.lab.runs import check_writable, whole, writing

__all__ = ["run_notebook"]


def run_notebook(notebook: Path, out: Path, parameters: Mapping[str, object]) -> Path:
    """Execute a notebook with papermill, and convert it to HTML without its code.

    What it prints goes to stderr meanwhile.

    Parameters
    ----------
    notebook
        With a cell that is tagged `parameters`.
    out
        Folder for the executed notebook and the page, which replace older ones of the same name.
    parameters
        By name.

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
    unknown = set(parameters) - _parameters(notebook)
    if unknown:
        raise SpecError(f"notebook {str(notebook)!r} has no parameter {', '.join(sorted(unknown))}.")
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
                stdout_file=sys.stderr,
                stderr_file=sys.stderr,
                extra_arguments=["--IPKernelApp.log_level=CRITICAL"],
            )
        except papermill.exceptions.PapermillExecutionError as exc:
            where = f"cell {exc.cell_index + 1} of {str(executed)!r}"
            raise SlackringError(f"{where} failed: {exc.ename}: {exc.evalue}") from exc
        body, _ = nbconvert.HTMLExporter(exclude_input=True, exclude_output_prompt=True).from_filename(str(executed))  # type: ignore[no-untyped-call]
    page = executed.with_suffix(".html")
    with writing(out), whole(page):
        page.write_text(body, encoding="utf-8")
    return page


def _parameters(notebook: Path) -> set[str]:
    """Names that the cell tagged `parameters` sets; papermill itself cannot read those whose text has an equals sign."""
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        tagged = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", ())]
        statements = [statement for cell in tagged for statement in ast.parse("".join(cell["source"])).body]
    except (OSError, ValueError, KeyError, TypeError, SyntaxError) as exc:
        raise DataError(f"{str(notebook)!r} is not a notebook that can be read: {exc!r}.") from exc
    return {
        target.id
        for statement in statements
        for target in (statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)])
        if isinstance(target, ast.Name)
    }
