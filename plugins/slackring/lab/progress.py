"""A progress bar on rank 0."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from tqdm import tqdm

from slackring.lab.config import TrainConfig
from slackring.optim.progress import Progress
from slackring.ring.ambient import launcher

__all__ = ["ProgressBar"]


class ProgressBar:
    """Shows on stderr how far a run is; a context manager.

    Parameters
    ----------
    config
        The run.
    shown
        Whether to show anything. None decides by itself: on a terminal, and under a Horovod launcher, which passes what ranks
        print through a pipe, yes.

    Examples
    --------
    >>> with ProgressBar(TrainConfig(seconds=10.0), shown=False) as bar:
    ...     bar.show(Progress(rounds=2, samples=64.0), seconds=1.5, accuracy=0.5)
    """

    def __init__(self, config: TrainConfig, shown: bool | None = None) -> None:
        if shown is None:
            shown = sys.stderr.isatty() or launcher() == "horovodrun"
        self._by = next(limit for limit in ("seconds", "samples", "rounds") if getattr(config, limit) is not None)
        self._total = float(getattr(config, self._by))
        self._bar = tqdm(
            desc=config.rule.partition(":")[0],
            total=round(self._total, 1),
            unit=self._by,
            mininterval=1.0,
            disable=not shown,
            dynamic_ncols=sys.stderr.isatty(),
            bar_format="{desc} {percentage:3.0f}%|{bar}| {n:.1f}/{total:.1f} {unit}{postfix}",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def show(self, progress: Progress, seconds: float, accuracy: float | None) -> None:
        """Move the bar.

        Parameters
        ----------
        progress
            What the ranks agree on.
        seconds
            Since the start of training.
        accuracy
            Of the last evaluated model; None if there is none yet.
        """
        if self._bar.disable:
            return
        done = seconds if self._by == "seconds" else float(getattr(progress, self._by))
        self._bar.set_postfix(
            {"rounds": progress.rounds, "accuracy": "-" if accuracy is None else f"{accuracy:.3f}"}, refresh=False
        )
        self._bar.update(min(done, self._total) - self._bar.n)
