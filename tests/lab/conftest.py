"""A disk that fills up."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def fill_disk_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the disk fill up in the midst of every file of a name, and of all files of a run of a name."""
    write_bytes = Path.write_bytes

    def fill(*names: str) -> None:
        def fails(method):
            def write(self, *args, **kwargs):
                if any(self.name == name or f".{name}." in str(self) for name in names):
                    write_bytes(self, b"half")
                    raise OSError(errno.ENOSPC, "No space left on device")
                return method(self, *args, **kwargs)

            return write

        for name in ("write_text", "write_bytes"):
            monkeypatch.setattr(Path, name, fails(getattr(Path, name)))

    return fill
