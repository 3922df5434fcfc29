"""Starts scripts as users do: with horovodrun, with torchrun, or alone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
from tests.multirank.pool import ROOT

_MARK = "SLACKRING_TEST_LAUNCH"  # environment variable by which every process of a launch is found again
_HOROVODRUN = [str(Path(sys.executable).with_name("horovodrun")), "--gloo", "--network-interfaces", "lo"]
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def horovodrun(ranks, *command, timeout=120):
    return _run(*_HOROVODRUN, "-np", str(ranks), "-H", f"localhost:{ranks}", sys.executable, *command, timeout=timeout)


def torchrun(ranks, *command, timeout=120):
    return _run(*_TORCHRUN, "--nproc-per-node", str(ranks), *command, timeout=timeout)


def alone(ranks, *command, timeout=120):
    assert ranks == 1
    return _run(sys.executable, *command, timeout=timeout)


def _run(*command, timeout):
    mark = uuid.uuid4().hex
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", _MARK: mark},
        cwd=ROOT,
        check=False,
    )
    assert not _running(mark), f"{Path(command[0]).name} left processes running"
    return done


def _running(mark):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
