"""A parameter server and its workers in this process, under a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slackring.errors import SpecError
from slackring.optim.progress import Budget, Progress
from slackring.ring.network import Network, parse_network
from slackring.server.policies import Policy, parse_policy
from slackring.server.simulation import Push, Simulation
from slackring.stragglers import Pacer, Straggler, parse

__all__ = ["ParameterServer", "ServerRun"]


@dataclass(frozen=True)
class ServerRun:
    """What a parameter server did.

    Attributes
    ----------
    pushes
        Every local step, in the order in which the workers got their OK.
    updates
        How often the optimizer stepped.
    progress
        Rounds (moments at which the server gave its OK), local steps and samples of all workers.
    """

    pushes: tuple[Push, ...]
    updates: int
    progress: Progress

    @property
    def seconds(self) -> float:
        """When the server gave its last OK."""
        return self.pushes[-1].answered if self.pushes else 0.0


class ParameterServer:
    """Trains as a parameter server and its workers would, in virtual time with real gradients.

    It exists to compare rules of the ring with what their papers ran. Each worker pulls the weights, computes the gradient of
    one mini-batch and pushes it; the server lets the user's optimizer step on it and sends its OK, the new weights with it,
    when the policy lets it. Gradients that arrive at the same time are summed into one step (for plain SGD the same as one
    step after the other, so that a nanosecond decides nothing); those that a policy pools at a barrier are averaged, weighted
    by samples.

    Computing takes no virtual time: a local step costs what `step_time` and `straggler` say, exactly as on a
    :class:`slackring.VirtualCluster`. A push and a pull are one message each, with all parameters in it, and cost ``latency +
    nbytes / bandwidth``. The server has one link of this bandwidth, which carries pushes and pulls at the same time, and
    messages queue for it. Updates cost nothing. A run is the same every time.

    Parameters
    ----------
    size
        Workers.
    step_time
        Seconds of an undisturbed local step.
    straggler
        A straggler model or its text, such as ``"persistent:ranks=3,factor=4"``.
    network
        What a message costs, or its text, such as ``"latency=0.01,bandwidth=1e9"``; nothing by default.
    seed
        Of the straggler's draws and of every worker's random streams.

    Raises
    ------
    SpecError
        For values that cannot be.

    Examples
    --------
    One of two workers takes twice as long, and pushes half as often:

    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> model = torch.nn.Linear(2, 1)
    >>> x, y = torch.randn(8, 2), torch.randn(8, 1)
    >>> server = ParameterServer(2, step_time=0.1, straggler="persistent:ranks=1,factor=2")
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> run = server.run("asp", model, optimizer, mse_loss, [[(x, y)] * 6, [(x, y)] * 3])
    >>> [push.worker for push in run.pushes], run.updates
    ([0, 0, 1, 0, 0, 1, 0, 0, 1], 6)
    """

    def __init__(
        self,
        size: int,
        step_time: float = 0.1,
        straggler: Straggler | str | None = None,
        network: Network | str | None = None,
        seed: int = 0,
    ) -> None:
        if size < 1:
            raise SpecError(f"a parameter server has at least one worker, not {size}.")
        model = (parse(straggler) if isinstance(straggler, str) else straggler) or parse("none")
        model.check(size)
        self.size, self._seed, self._step_time = size, seed, step_time
        self._network = (parse_network(network) if isinstance(network, str) else network) or Network()
        self._straggler = Pacer(model.seeded(seed), step_time).straggler

    def run(
        self,
        policy: Policy | str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
        batches: Sequence[Iterable[tuple[Tensor, Tensor]]],
        *,
        budget: Budget | None = None,
        on_update: Callable[[float, Progress], bool | None] = lambda seconds, progress: None,
    ) -> ServerRun:
        """Train `model` under a policy, until the budget is used up or every worker is out of batches.

        A worker that has no batch left leaves, as does each one at its next OK once training is over; nobody waits for it any
        more. Every gradient that was computed is applied.

        Parameters
        ----------
        policy
            A policy of :mod:`slackring.server` or its text, such as ``"ssp:staleness=3"``.
        model
            The server's model, trained in place. Buffers (BatchNorm's statistics) follow all mini-batches, in the order in
            which workers got their weights.
        optimizer
            The server's optimizer, over the model's parameters.
        loss
            Mean loss of a mini-batch, from the model's output and the labels.
        batches
            Inputs and labels of each worker's mini-batches, one iterable a worker.
        budget
            When training ends by itself; what is on its way then still arrives.
        on_update
            Called after every update with the virtual seconds and the progress, the new weights in `model`; training ends if it
            returns true.

        Raises
        ------
        RuleError
            For a policy that there is not.
        SpecError
            If there are not as many `batches` as workers.
        DivergedError
            If a loss is not a finite number.
        """
        if len(batches) != self.size:
            raise SpecError(f"a parameter server of {self.size} workers needs as many batches, not {len(batches)}.")
        simulation = Simulation(
            parse_policy(policy).gate(self.size),
            lambda worker, step: self._straggler.step_seconds(worker, step, self._step_time),
            self._network,
            self._seed,
            model,
            optimizer,
            loss,
            batches,
            budget or Budget(),
            on_update,
        )
        simulation.run()
        return ServerRun(tuple(simulation.pushes), simulation.updates, simulation.progress)
