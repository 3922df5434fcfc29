"""Files that a rank sends to the folder of its run, while it runs."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

from slackring.errors import PoolError

__all__ = ["save", "send_by", "write_whole"]

_NAME = re.compile(r"\w[\w.-]*")

_send: Callable[[str, bytes], object] | None = None


def save(name: str, content: bytes) -> None:
    """From a rank of a pool, write a file into the folder of its run: ``runs/<id>/saved/<name>``, where the client is.

    It goes there while the rank goes on, and takes the place of an earlier file of this name once all of it has come. So a
    checkpoint outlives the rank and its worker.

    Parameters
    ----------
    name
        Letters, digits, and ``_.-``, of which the latter two do not come first.
    content
        What is in it.

    Raises
    ------
    PoolError
        Outside of what a :class:`~slackring.dask.DaskExecutor` runs, and for a name that cannot be one.
    OSError
        If the worker's disk has no room for it on its way.

    Examples
    --------
    In the training function, on rank 0::

        if optimizer.progress.rounds % 1000 == 0:
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            sr.dask.save("model.pt", file.getvalue())
    """
    if not _NAME.fullmatch(name):
        raise PoolError(f"{name!r} is no name for a saved file: letters, digits, and _ . - (not first) make one.")
    if _send is None:
        raise PoolError(
            f"{name!r} cannot be saved: only what DaskExecutor.run() and its like run on a rank has a folder for it."
        )
    _send(name, content)


def send_by(send: Callable[[str, bytes], object] | None) -> None:
    """Say how files leave this process, if there is a run that they belong to; whoever runs a rank does."""
    global _send
    _send = send


def write_whole(file: Path, content: bytes) -> None:
    """Write a file in the place of an earlier one, whole or not at all.

    Raises
    ------
    OSError
        If it cannot be written; nothing of it is left then.
    """
    part = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}")  # a rank may have forked
    try:
        part.write_bytes(content)
        os.replace(part, file)
    except OSError:
        part.unlink(missing_ok=True)
        raise
