"""Tells dead ranks from slow ones, as far as they are processes of this machine."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import psutil

__all__ = ["Peers"]


class Peers:
    """The processes of all ranks.

    Parameters
    ----------
    cards
        What :meth:`card` gave on each rank, by rank.

    Examples
    --------
    >>> Peers([Peers.card()]).dead()
    {}
    """

    def __init__(self, cards: Sequence[bytes]) -> None:
        here, _ = json.loads(self.card())
        self._processes: dict[int, psutil.Process] = {}
        self._gone: dict[int, int] = {}
        for rank, (where, pid) in enumerate(map(json.loads, cards)):
            if where == here:
                try:
                    self._processes[rank] = psutil.Process(pid)
                except psutil.NoSuchProcess:
                    self._gone[rank] = pid

    @staticmethod
    def card() -> bytes:
        """Where this process runs, and its number there."""
        where = []
        with contextlib.suppress(OSError):
            # Containers may share the kernel, but each numbers its processes by itself.
            where = [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
        return json.dumps([where or None, os.getpid()]).encode()

    def dead(self) -> dict[int, int]:
        """Process numbers, by rank, of the ranks of this machine that have ended."""
        return self._gone | {rank: process.pid for rank, process in self._processes.items() if not _runs(process)}


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False
