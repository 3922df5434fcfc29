"""Names of runs."""

from __future__ import annotations

import secrets
import time

__all__ = ["new_name"]


def new_name(*words: str) -> str:
    """Make a name that no other run has: the time, what it is about, and a few random digits."""
    return "-".join((time.strftime("%Y%m%d-%H%M%S", time.gmtime()), *words, secrets.token_hex(2)))
