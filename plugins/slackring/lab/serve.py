"""One training run on the parameter server, in the same form as a run on a ring."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from slackring.lab.config import TrainConfig
from slackring.lab.dealt import Dealt
from slackring.lab.evaluation import evaluate
from slackring.lab.interrupt import Interrupt
from slackring.lab.progress import ProgressBar
from slackring.lab.records import CurvePoint, to_table
from slackring.lab.runs import Run, facts
from slackring.lab.summary import summarise
from slackring.lab.tasks import load_task
from slackring.optim.progress import Budget, Progress
from slackring.server.server import ParameterServer, ServerRun
from slackring.server.simulation import Push

__all__ = ["train_on_server"]


def train_on_server(
    config: TrainConfig, size: int, *, interrupt: Interrupt | None = None, bar: ProgressBar | None = None
) -> Run:
    """Run on a parameter server and its workers, under a virtual clock.

    Model, batches and delays are those of the same run on a virtual ring.

    Parameters
    ----------
    config
        The run; its rule is a policy of the server.
    size
        Number of workers.
    interrupt, bar
        As in :func:`slackring.lab.train.train`.

    Returns
    -------
    Run
        Its `steps` also tell the `staleness` and `lead` of each push, as in :class:`slackring.server.simulation.Push`. A round
        is a moment at which the server gave its OK. What a rank contributes is its push; it waits while the server holds it,
        and communicates otherwise.

    Examples
    --------
    >>> run = train_on_server(TrainConfig(task="digits", rule="server/asp", lr=0.1, step_time=0.1, seconds=5.0), 4)
    >>> run.facts["ring"], run.summary.steps, run.summary.final_accuracy > 0.8, run.summary.wait_share
    ('virtual server', 200, True, [0.0, 0.0, 0.0, 0.0])
    """
    config, interrupt = config.with_lr(size), interrupt or Interrupt()
    server = ParameterServer(
        size,
        step_time=0.1 if config.step_time is None else config.step_time,
        straggler=config.parsed_straggler(),
        network=config.parsed_network(),
        seed=config.seed,
    )
    task = load_task(config.task)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = task.model()
    loaders = [task.loaders(config.batch_size, rank, size, config.seed) for rank in range(size)]
    first, test = loaders[0]
    shared = _dealt(first) if isinstance(first, Dealt) else iter(())
    curve: list[CurvePoint] = []
    due = 0.0

    def watch(seconds: float, progress: Progress) -> bool:
        nonlocal due
        reached = False
        if seconds >= due:
            due += config.eval_every
            curve.append(evaluate(task, model, test, seconds, progress))
            reached = config.stop_at_target and curve[-1].accuracy >= config.target
        if bar is not None:
            bar.show(progress, seconds, curve[-1].accuracy)
        return reached or interrupt.signal is not None

    run = server.run(
        config.rule,
        model,
        torch.optim.SGD(model.parameters(), lr=config.lr or 0.0, momentum=config.momentum),
        task.loss,
        [shared if isinstance(batches, Dealt) else batches for batches, _ in loaders],
        budget=Budget(rounds=config.rounds, samples=config.samples, seconds=config.seconds),
        on_update=watch,
    )
    curve.append(evaluate(task, model, test, run.seconds, run.progress))
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    steps, rounds = _tables(run, nbytes)
    table = to_table(curve, CurvePoint._fields)
    summary = summarise(steps, rounds, table, target=config.target, interrupted=interrupt.signal is not None)
    return Run(config, facts(config, size, "virtual server") | {"updates": run.updates}, steps, rounds, table, summary)


def _dealt(dealt: Dealt) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of a data set that all workers share, for whoever comes next."""
    loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(
        dealt.dataset,
        dealt.batch_size,
        shuffle=True,
        num_workers=dealt.num_workers,
        generator=torch.Generator().manual_seed(dealt.seed),
    )
    while True:
        yield from loader


def _tables(run: ServerRun, nbytes: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    pushes = to_table(run.pushes, Push._fields).sort_values(["worker", "step"], ignore_index=True)
    answered = pushes.groupby("round")
    compute, blocked = pushes["sent"] - pushes["started"], pushes["received"] - pushes["sent"]
    steps = pd.DataFrame(
        {
            "rank": pushes["worker"],
            "step": pushes["step"],
            "round": pushes["round"],
            "start": pushes["started"],
            "end": pushes["received"],
            "compute": compute,
            "injected": compute,
            "blocked": blocked,
            "bookkeeping": 0.0,
            "samples": pushes["samples"].astype(float),
            "loss": pushes["loss"],
            "staleness": pushes["staleness"],
            "lead": pushes["lead"],
        }
    )
    rounds = pd.DataFrame(
        {
            "rank": pushes["worker"],
            "round": pushes["round"],
            "launched": pushes["sent"],
            "landed": pushes["received"],
            "blocked": blocked,
            "local_steps": 1,
            "local_samples": steps["samples"],
            "steps": answered["step"].transform("size"),
            "samples": answered["samples"].transform("sum").astype(float),
            "contributors": answered["step"].transform("size"),
            "training": pushes["training"],
            "compensation": 0.0,
            "nbytes": nbytes,
        }
    )
    return steps, rounds
