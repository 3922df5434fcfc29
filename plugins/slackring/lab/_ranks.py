"""What every rank of a comparison runs: ``python -m slackring.lab._ranks ORDERS.json``; see :mod:`slackring.lab.launch`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from slackring.errors import DivergedError, SlackringError
from slackring.lab.config import TrainConfig
from slackring.lab.interrupt import Interrupt
from slackring.lab.launch import EVENT, run_name
from slackring.lab.runs import save_run
from slackring.lab.train import inject, train
from slackring.ring.horovod import HorovodRing, import_horovod


def main(orders_file: str) -> int:
    """Train the ordered runs, one after another; return the exit code."""
    orders = json.loads(Path(orders_file).read_text())
    folder = Path(orders["folder"])
    hvd = import_horovod()
    hvd.init()
    with Interrupt() as interrupt:
        for values in orders["jobs"]:
            config = TrainConfig.from_json(values)
            try:
                run = train(config, ring=inject(HorovodRing(), config), interrupt=interrupt)
                outcome = None if run is None else save_run(run, folder, run_name(config))
            except DivergedError:
                outcome = None
            except SlackringError as exc:
                if hvd.rank() == 0:
                    _tell({"error": str(exc), "kind": type(exc).__name__})
                return 2
            if hvd.rank() == 0:
                _tell({"run": None if outcome is None else str(outcome)})
            if interrupt.signal is not None:
                return 128 + interrupt.signal
    return 0


def _tell(event: dict[str, str | None]) -> None:
    print(EVENT + json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
