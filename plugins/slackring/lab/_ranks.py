"""What ranks run: :mod:`slackring.lab.launch` starts this as a program, :mod:`slackring.lab.on_dask` a function of it."""

from __future__ import annotations

import json
import logging
import signal
import sys
from pathlib import Path

import cloudpickle

from slackring.dask.saving import save
from slackring.errors import DivergedError, SlackringError
from slackring.lab.checkpoint import Checkpoints, Earlier
from slackring.lab.config import TrainConfig
from slackring.lab.interrupt import Interrupt
from slackring.lab.runs import Run, run_name, save_run
from slackring.lab.train import inject, train
from slackring.optim.ambient import slowed, stop_wish
from slackring.ring.horovod import HorovodRing, import_horovod
from slackring.stragglers import NoStraggler

log = logging.getLogger("slackring")

EVENT = "@slackring "
"""What a line begins with by which rank 0 tells the launcher something; JSON follows."""

CHECKPOINT = "slackring.checkpoint"
"""Name by which rank 0 of a pool saves the run so far."""


def main(orders_file: str) -> int:
    """Train the runs that a file orders, one after another; return the exit code."""
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


class _Wish(Interrupt):
    """Takes the wish to stop of whoever runs this rank for Ctrl-C."""

    @property
    def signal(self) -> int | None:
        return signal.SIGINT if stop_wish.is_set() else self._others

    @signal.setter
    def signal(self, number: int | None) -> None:
        self._others = number


def train_on_rank(
    config: TrainConfig, checkpoint: bool, every: float | None = None, earlier: Earlier | None = None
) -> Run | None:
    """Train on this rank of a pool.

    Parameters
    ----------
    config
        The run.
    checkpoint
        Whether it ends with a checkpoint.
    every
        Seconds between checkpoints on the way, which rank 0 saves as :data:`CHECKPOINT`, pickled.
    earlier
        The run to continue.

    Returns
    -------
    Run or None
        As of :func:`slackring.lab.train.train`.
    """
    import_horovod().init()
    ring = inject(HorovodRing(), config)
    if not isinstance(config.parsed_straggler(), NoStraggler):
        slowed.set()
    try:
        return train(
            config,
            ring=ring,
            interrupt=_Wish(),
            checkpoints=Checkpoints(every, _keep) if checkpoint else None,
            earlier=earlier,
        )
    finally:
        slowed.clear()


def _keep(run: Run) -> None:
    try:
        save(CHECKPOINT, cloudpickle.dumps(run))
    except OSError as exc:
        log.warning("no checkpoint after round %d: %s", run.summary.rounds, exc)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
