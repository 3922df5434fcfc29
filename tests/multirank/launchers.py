"""Starts scripts as users do: with horovodrun, with torchrun, or alone."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

from tests.multirank.pool import MARK, ROOT, processes_of_pools

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
    mark = f"{os.getpid()}-{uuid.uuid4().hex}"
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", MARK: mark},
        cwd=ROOT,
        check=False,
    )
    assert not processes_of_pools(mark), f"{Path(command[0]).name} left processes running"
    return done
