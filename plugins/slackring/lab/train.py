"""One training run: the same function on every rank of any ring."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Literal

import pandas as pd
import torch
from torch import Tensor

from slackring.cluster import VirtualCluster
from slackring.errors import DivergedError, SpecError
from slackring.lab.agree import on_every_rank
from slackring.lab.checkpoint import (
    Checkpoints,
    Earlier,
    Saved,
    StatefulBatches,
    Timetable,
    pack,
    random_state,
    set_random_state,
    share,
)
from slackring.lab.choices import parse_choice, refuse_off_virtual
from slackring.lab.config import TrainConfig
from slackring.lab.dealt import Dealt, DealtBatches
from slackring.lab.evaluation import evaluate
from slackring.lab.interrupt import Interrupt
from slackring.lab.progress import ProgressBar
from slackring.lab.records import CurvePoint, RunRecorder, from_bytes, to_bytes, to_table
from slackring.lab.runs import Run, facts
from slackring.lab.serve import train_on_server
from slackring.lab.summary import summarise
from slackring.lab.tasks import Task, load_task
from slackring.optim.agreement import agree
from slackring.optim.ambient import report
from slackring.optim.optimizer import DistributedOptimizer
from slackring.optim.progress import Budget, LandedRound
from slackring.optim.records import RoundRecord, StepRecord
from slackring.ring.ambient import ring as ambient_ring
from slackring.ring.base import Ring
from slackring.ring.injected import InjectedNetwork
from slackring.server import Policy
from slackring.stragglers import NoStraggler, Pacer, StragglerWatch

__all__ = ["inject", "train", "train_virtual"]


def inject(ring: Ring, config: TrainConfig) -> Ring:
    """Slow a real ring down as a run asks for.

    Parameters
    ----------
    ring
        Of Horovod or torch.distributed, or a ring of one.
    config
        Names the straggler, the step time and the network.

    Returns
    -------
    Ring
        The ring to train on.
    """
    network, straggler = config.parsed_network(), config.parsed_straggler()
    injected = ring if network is None else InjectedNetwork(ring, network)
    paced = config.step_time is not None or not isinstance(straggler, NoStraggler)
    injected.pace = Pacer(straggler, config.step_time) if paced else None
    return injected


def train_virtual(
    config: TrainConfig,
    size: int,
    *,
    interrupt: Interrupt | None = None,
    bar: ProgressBar | None = None,
    checkpoints: Checkpoints | None = None,
    earlier: Earlier | None = None,
) -> Run:
    """Run on virtual ranks, under a virtual clock; on a parameter server if the rule is a policy of one.

    Parameters
    ----------
    config
        The run; it needs a step time, since computing takes no virtual time.
    size
        Number of virtual ranks.
    interrupt, bar, checkpoints, earlier
        As in :func:`train`. Of a parameter server there are no checkpoints.

    Examples
    --------
    >>> run = train_virtual(TrainConfig(task="digits", rule="losp", lr=0.4, step_time=0.1, seconds=5.0), size=4)
    >>> run.facts["ring"], run.summary.steps > 4 * 40, run.summary.final_accuracy > 0.8
    ('virtual', True, True)
    """
    if isinstance(parse_choice(config.rule), Policy):
        if checkpoints is not None and checkpoints.every is not None:
            raise SpecError(
                f"rule {config.rule!r}: a parameter server takes no checkpoints; leave --checkpoint-every out."
            )
        return train_on_server(config, size, interrupt=interrupt, bar=bar)
    cluster = VirtualCluster(
        size,
        step_time=0.1 if config.step_time is None else config.step_time,
        straggler=config.parsed_straggler(),
        network=config.parsed_network(),
        seed=config.seed,
    )
    runs = cluster.run(train, config, interrupt=interrupt, bar=bar, checkpoints=checkpoints, earlier=earlier)
    return next(run for run in runs if run is not None)


def train(
    config: TrainConfig,
    *,
    ring: Ring | None = None,
    interrupt: Interrupt | None = None,
    bar: ProgressBar | None = None,
    checkpoints: Checkpoints | None = None,
    earlier: Earlier | None = None,
) -> Run | None:
    """Train on this rank as one of all ranks; collective.

    Parameters
    ----------
    config
        The run, the same on all ranks.
    ring
        Where to train; the ambient ring if None. On a real one, :func:`inject` what the run asks for.
    interrupt
        Ends the run early, on all ranks after the same round, once a signal has come on any of them.
    bar
        Shows the progress on rank 0.
    checkpoints
        When to take checkpoints, the same on all ranks; None takes none. They are taken between two local steps of every
        rank, after the same round, until one of them has run out of batches.
    earlier
        The run to continue, on rank 0; what the other ranks give does not count. With as many ranks as before, each goes on
        exactly where it was; with another number, all go on from the anchor, and their batches where they were: what is
        :class:`~slackring.lab.dealt.Dealt` and had not landed is dealt anew.

    Returns
    -------
    Run or None
        What all ranks measured, on rank 0; None on the others.

    Raises
    ------
    DivergedError
        On every rank, if a loss was no longer a finite number on one of them.
    DataError
        On every rank, if the checkpoint cannot be read.
    SlackringError
        On every rank, if the ranks disagree, the task is not there or fails on one of them, or the ring breaks.
    """
    ring = ambient_ring() if ring is None else ring
    every = None if checkpoints is None else checkpoints.every
    agree(ring, {**config.to_json(), "checkpoint_every": every}, "slackring.lab.config")
    config = config.with_lr(ring.size)
    task = on_every_rank(ring, lambda: _task(config, ring))
    session = on_every_rank(ring, lambda: _Session(config, ring, interrupt, bar, task, checkpoints))
    session.broadcast_model()
    files = earlier.run.checkpoint if earlier is not None and ring.rank == 0 else ()
    saved = on_every_rank(ring, lambda: share(ring, files))
    if saved is not None:
        session.resume(saved, earlier if ring.rank == 0 else None)
    return session.run()


def _task(config: TrainConfig, ring: Ring) -> Task:
    refuse_off_virtual(parse_choice(config.rule))
    config.parsed_straggler().check(ring.size)
    return load_task(config.task)


class _Session:
    """The state of one run on one rank; made without the other ranks, since the user's code may fail on one of them."""

    def __init__(
        self,
        config: TrainConfig,
        ring: Ring,
        interrupt: Interrupt | None,
        bar: ProgressBar | None,
        task: Task,
        checkpoints: Checkpoints | None,
    ) -> None:
        self.config, self.ring, self.task = config, ring, task
        self.facts = facts(config, ring.size, ring.kind) if ring.rank == 0 else {}
        self.interrupt, self.bar = interrupt or Interrupt(), bar if ring.rank == 0 else None
        torch.manual_seed(config.seed)
        self.model = task.model()
        batches, self.test = task.loaders(config.batch_size, ring.rank, ring.size, config.seed)
        self.recorder = RunRecorder()
        self.optimizer = DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=_lr(config), momentum=config.momentum),
            rule=config.rule,
            compression=config.compression,
            named_parameters=self.model.named_parameters(),
            named_buffers=self.model.named_buffers(),
            budget=Budget(rounds=config.rounds, samples=config.samples, seconds=config.seconds),
            recorder=self.recorder,
            ring=ring,
        )
        self.batches = DealtBatches(batches, self.optimizer) if isinstance(batches, Dealt) else batches
        self.place: Literal["loader", "step", "end"] = "loader"
        """Where this rank is: it waits for a batch, has one, or has had its last."""
        self.curve: list[CurvePoint] = []
        self.losses: list[float] = []
        self.diverged_at: int | None = None
        self.evaluation_due = 0.0
        self.checkpoints = checkpoints
        every = None if checkpoints is None else checkpoints.every
        self.timetable = None if every is None else Timetable(every)
        self.saved: Saved | None = None
        self.earlier: Run | None = None

    def broadcast_model(self) -> None:
        """Start from rank 0's model; collective."""
        state = self.model.state_dict()
        shapes = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in state.items()]
        agree(self.ring, {"model": shapes}, "slackring.lab.model")
        for tensor in state.values():
            tensor.copy_(self.ring.broadcast(tensor))

    def resume(self, saved: Saved, earlier: Earlier | None) -> None:
        """Go on from a checkpoint; `earlier` on rank 0, which holds the rows of all ranks."""
        self.saved = saved
        self.model.load_state_dict(saved.state["model"])
        self.optimizer.load_state_dict(saved.state["optimizer"])
        self.evaluation_due = saved.state["evaluation due"]
        if self.timetable is not None:
            rounds = saved.state["optimizer"]["slackring"]["ending"]["progress"]["rounds"]
            self.timetable.resume(rounds, saved.state["seconds"])
        # What is dealt is every rank's; other batches are their own rank's.
        batches = saved.state["batches"] if isinstance(self.batches, DealtBatches) else saved.batches
        if isinstance(self.batches, StatefulBatches) and batches is not None:
            self.batches.load_state_dict(batches)
        if earlier is not None:
            self.earlier = earlier.run
            self.curve += [CurvePoint(*row) for row in earlier.run.curve.itertuples(index=False)]
            summary = earlier.run.summary
            self.facts["resumed"] = {
                "run": str(earlier.folder),
                "ranks": earlier.ranks,
                "exact": saved.exact,
                "seconds": summary.seconds,
                "rounds": summary.rounds,
            }

    def run(self) -> Run | None:
        self.ring.barrier()
        self.began = self.ring.clock.now() - (0.0 if self.saved is None else self.saved.state["seconds"])
        self.optimizer.on_landed(self._landed)
        # What is injected needs no warning.
        if (
            self.ring.rank == 0
            and self.ring.kind != "virtual"
            and isinstance(self.config.parsed_straggler(), NoStraggler)
        ):
            self.optimizer.on_landed(StragglerWatch())
        self._loop(self._stream())
        self.place = "end"
        self.optimizer.join()
        interrupted, diverged = self._verdicts()
        if diverged is not None:
            raise DivergedError(diverged)
        return self._result(interrupted, over=True)

    def _stream(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches that are left, with this rank's random streams where they were."""
        stream = iter(self.batches)
        if self.saved is not None and self.saved.exact:
            if not isinstance(self.batches, StatefulBatches):
                for _ in range(self.saved.state["optimizer"]["slackring"]["local step"]):
                    next(stream, None)
            set_random_state(self.saved.state["random"])
        return stream

    def _loop(self, stream: Iterator[tuple[Tensor, Tensor]]) -> None:
        optimizer, model, loss_of = self.optimizer, self.model, self.task.loss
        for x, y in stream:
            self.place = "step"
            optimizer.set_samples(len(y))
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            value = float(loss.detach())
            if not math.isfinite(value):
                self.diverged_at = len(self.losses)
                optimizer.request_stop()
                return
            self.losses.append(value)
            report(loss=value)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step(samples=len(y))
            if self.ring.rank == 0 and self._seconds() >= self.evaluation_due:
                self.evaluation_due += self.config.eval_every
                if not self.curve or optimizer.progress.rounds > self.curve[-1].rounds:
                    with optimizer.consensus():
                        self._evaluate()
            self._meet()
            if self.bar is not None:
                self.bar.show(optimizer.progress, self._seconds(), self.curve[-1].accuracy if self.curve else None)
            if self.interrupt.signal is not None:
                optimizer.request_stop()
            if optimizer.progress.stop:
                return
            self.place = "loader"

    def _seconds(self) -> float:
        return self.ring.clock.now() - self.began

    def _evaluate(self) -> None:
        """Evaluate what is in the model: the consensus of all ranks."""
        progress = self.optimizer.progress
        self.curve.append(evaluate(self.task, self.model, self.test, self._seconds(), progress))
        report(accuracy=self.curve[-1].accuracy)
        if self.config.stop_at_target and self.curve[-1].accuracy >= self.config.target and not progress.stop:
            self.optimizer.request_stop()

    def _landed(self, landed: LandedRound) -> None:
        """Meet the others also in rounds without a local step of this rank: to say that it cannot go on from here."""
        if self.place != "step":
            self._meet()

    def _meet(self) -> None:
        """Meet the other ranks if it is the round for it; take a checkpoint if it is time, and all can go on from here."""
        checkpoints, timetable, rounds = self.checkpoints, self.timetable, self.optimizer.progress.rounds
        engine = self.optimizer._engine
        # The end that is agreed is this run's, and the resumed one may have other limits.
        if checkpoints is None or timetable is None or rounds < timetable.meeting or engine.ending:
            return
        with engine.paused():
            mine = json.dumps([self.place, self._seconds()]).encode()
            told = [json.loads(text) for text in self.ring.gather(mine, "slackring.lab.meeting")]
            places = {place for place, _ in told}
            if "end" in places:
                self.timetable = None
            elif "loader" in places:
                timetable.meeting = rounds + 1
            elif timetable.meet(rounds, told[0][1]):
                run = self._result(interrupted=True, over=False)
                if run is not None:
                    checkpoints.keep(run)

    def _state(self) -> bytes:
        """All that this rank goes on from."""
        return pack(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "batches": self.batches.state_dict() if isinstance(self.batches, StatefulBatches) else None,
                "random": random_state(),
                "seconds": self._seconds(),
                "evaluation due": self.evaluation_due,
            }
        )

    def _result(self, interrupted: bool, *, over: bool) -> Run | None:
        """The run as far as it has come, on rank 0; collective."""
        files = () if self.checkpoints is None else tuple(self.ring.gather(self._state(), "slackring.lab.checkpoint"))
        tables = self._tables()
        if tables is None:
            return None
        steps, rounds = tables
        if over:
            self._evaluate()
        curve = to_table(self.curve, CurvePoint._fields)
        summary = summarise(steps, rounds, curve, target=self.config.target, interrupted=interrupted)
        return Run(self.config, self.facts, steps, rounds, curve, summary, files)

    def _verdicts(self) -> tuple[bool, str | None]:
        """Learn from all ranks whether the run was cut short, and where it diverged."""
        mine = {"interrupted": self.interrupt.signal, "diverged": self.diverged_at}
        verdicts = [json.loads(text) for text in self.ring.gather(json.dumps(mine).encode(), "slackring.lab.verdict")]
        signals = [verdict["interrupted"] for verdict in verdicts if verdict["interrupted"] is not None]
        if signals and self.interrupt.signal is None:
            self.interrupt.signal = signals[0]
        diverged = next(
            (
                f"the loss of rank {rank} was not a finite number at its local step {verdict['diverged']} (lr {self.config.lr}, "
                f"rule {self.config.rule}); use a lower --lr."
                for rank, verdict in enumerate(verdicts)
                if verdict["diverged"] is not None
            ),
            None,
        )
        return bool(signals), diverged

    def _tables(self) -> tuple[pd.DataFrame, pd.DataFrame] | None:
        """The steps and rounds of all ranks, on rank 0; collective."""
        steps = to_table(self.recorder.steps, StepRecord._fields)
        steps["loss"] = self.losses[: len(steps)]
        rounds = to_table(self.recorder.rounds, RoundRecord._fields)
        # Each rank counts from its own start, right after a barrier, so that clocks of several hosts need not agree.
        steps[["start", "end"]] -= self.began
        rounds[["launched", "landed"]] -= self.began
        all_steps = self.ring.gather(to_bytes(steps), "slackring.lab.steps")
        all_rounds = self.ring.gather(to_bytes(rounds), "slackring.lab.rounds")
        if self.ring.rank != 0:
            return None
        steps, rounds = from_bytes(all_steps), from_bytes(all_rounds)
        if self.earlier is None:
            return steps, rounds
        return _after(self.earlier.steps, steps, "step"), _after(self.earlier.rounds, rounds, "round")


def _after(earlier: pd.DataFrame, rows: pd.DataFrame, index: str) -> pd.DataFrame:
    """The rows of a run and of the one that continues it, rank by rank."""
    return pd.concat([earlier, rows], ignore_index=True).sort_values(["rank", index], kind="stable", ignore_index=True)


def _lr(config: TrainConfig) -> float:
    return config.lr if config.lr is not None else 0.0
