"""A rank of a pool: waits for jobs, and ends as soon as the pool is gone."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Client
from typing import Any

import torch


def main(kind: str, rank: int, address: str, log: str, variables: dict[str, str]) -> None:
    """Serve, as a rank of some kind, the pool that listens at `address`; write to a log what is printed."""
    os.setsid()  # by which this process and all that it starts are found
    os.environ.clear()
    os.environ.update(variables)
    with open(log, "wb") as out:
        os.dup2(out.fileno(), sys.stdout.fileno())
        os.dup2(out.fileno(), sys.stderr.fileno())
    multiprocessing.set_start_method("fork", force=True)  # as in a process that was not forked itself
    torch.set_num_threads(1)  # as OMP_NUM_THREADS would have it if torch were imported here
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    link = Client(address, "AF_UNIX")
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        # Also while a job hangs: once the pool is gone, so is this rank.
        try:
            while True:
                jobs.put(link.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)

    def answer(worked: bool, value: Any) -> None:
        message = pickle.dumps((worked, value))
        try:
            link.send_bytes(message)
        except OSError:
            os._exit(0)

    link.send_bytes(pickle.dumps(rank))
    try:
        if kind == "torch":
            import torch.distributed as dist

            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        else:
            import horovod.torch as hvd

            hvd.init()
    except BaseException:
        answer(False, traceback.format_exc())
        raise
    threading.Thread(target=listen, daemon=True).start()
    answer(True, None)
    while True:
        module, name, args, kwargs = pickle.loads(jobs.get())
        try:
            result = getattr(importlib.import_module(module), name)(*args, **kwargs)
            # What a job leaves behind is gone on every rank before the next one; what stays is not looked at again.
            gc.collect()
            gc.freeze()
            answer(True, result)
        except BaseException:
            answer(False, traceback.format_exc())
