"""A small training job that is written down in advance, and the diary that every rank keeps of it.

A plan says what each rank does, so all ranks know all plans. Everything a rank notices is noticed through public names: user
hooks on the optimizer, the recorder, ``consensus()``, and the ring that is handed to the optimizer.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from slackring.optim.optimizer import DistributedOptimizer, RelaxedOptimizer
from slackring.optim.progress import Budget
from slackring.optim.records import RoundRecord, StepRecord
from slackring.ring.ambient import ring as ambient_ring
from slackring.ring.base import Flight, Ring
from slackring.rules import Rule

__all__ = ["UNIT", "Act", "Diary", "Plan", "WatchedRing", "draw_plan", "make_model", "micro_batch", "play"]

T = TypeVar("T")

UNIT = 0.001
"""Seconds of an undisturbed local step in a plan."""

_SCALE = 4.0  # of the gradient scaler on rank 0; twice as much on the next rank, and so on


@dataclass(frozen=True)
class Act:
    """One thing that a rank does.

    Attributes
    ----------
    seconds
        What a local step or a look takes.
    samples
        In a local step.
    overflow
        The step's gradient is infinite.
    announced
        The samples are announced before the backward pass.
    kind
        A local step, a ``drain()``, a ``request_stop()``, a look at ``consensus()``, or a collective of the script's own after a
        ``drain()``, which every rank must have equally often, without other drains and stops.
    """

    seconds: float = UNIT
    samples: int = 1
    overflow: bool = False
    announced: bool = True
    kind: Literal["step", "drain", "stop", "look", "meet"] = "step"


@dataclass(frozen=True)
class Plan:
    """What every rank does, until it joins the others.

    Attributes
    ----------
    acts
        By rank.
    optimizer
        "sgd", "momentum" or "adam".
    scaled
        Use a gradient scaler, with another scale on each rank.
    budget
        Given to the optimizer.
    seed
        Of the data.
    """

    acts: tuple[tuple[Act, ...], ...]
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    scaled: bool = False
    budget: Budget | None = None
    seed: int = 0

    @classmethod
    def even(cls, size: int, steps: int, **choices: Any) -> Plan:
        """Every rank takes as many steps, at a speed of its own; the last is the slowest."""
        seconds = [UNIT * (1 + 2 * rank / max(size - 1, 1)) for rank in range(size)]
        return cls(tuple(tuple(Act(seconds=s, samples=1 + i % 3) for i in range(steps)) for s in seconds), **choices)


def draw_plan(seed: int, size: int) -> Plan:
    """Draw speeds, lengths, drains, overflows, looks, stops, collectives and budgets; equal arguments give equal plans."""
    draw = random.Random(f"slackring {seed} {size}")
    scaled = draw.random() < 0.3
    optimizer: Literal["sgd", "momentum", "adam"] = draw.choice(["sgd", "momentum", "adam"])
    # An infinite gradient spoils momentum for good, unless a scaler sees it coming.
    overflows = 0.15 if draw.random() < 0.4 and (scaled or optimizer == "sgd") else 0.0
    drains = 0.1 if draw.random() < 0.4 else 0.0
    stops = 0.05 if draw.random() < 0.3 else 0.0
    budget = draw.choice([None, None, None, Budget(rounds=draw.randint(1, 8)), Budget(samples=draw.randint(1, 60))])
    meets = draw.randint(0, 2) if drains == stops == 0.0 and budget is None else 0
    acts = []
    for _ in range(size):
        speed = draw.choice([0.3, 1.0, 1.0, 1.3, 4.0])
        mine = []
        for _ in range(draw.choice([0, 1, 3, 6, 10])):
            chance = draw.random()
            if chance < drains:
                mine.append(Act(kind="drain"))
            elif chance < drains + stops:
                mine.append(Act(kind="stop"))
            elif chance < drains + stops + 0.1:
                mine.append(Act(UNIT * draw.choice([0.0, 3.0, 20.0]), kind="look"))
            seconds = UNIT * speed * (1.0 if draw.random() < 0.5 else draw.expovariate(1.0))
            mine.append(Act(seconds, draw.randint(1, 5), draw.random() < overflows, draw.random() < 0.7))
        for _ in range(meets):
            mine.insert(draw.randint(0, len(mine)), Act(kind="meet"))
        acts.append(tuple(mine))
    return Plan(tuple(acts), optimizer, scaled, budget, seed)


@dataclass
class Diary:
    """What one rank noticed; all tensors are written down as lists of float64 numbers.

    Attributes
    ----------
    kind
        Of the ring.
    first, last
        The model before the first step, and after the ranks have joined.
    anchors
        Rounds that had landed, and a hash of the consensus model then.
    drained
        Hashes of the model after each ``drain()``, and after the end.
    steps, rounds
        What the recorder was told.
    planned
        Seconds that each step was to take.
    moves
        By step: how the rank's own optimizer moved the model. For delta rules only; a gradient rule moves it by rounds.
    gradients
        By step: the micro-batch's own mean gradient.
    applied
        Every gradient that went through the optimizer.
    sent
        Name, shape and dtype of everything that was sent, in order.
    progress
        Rounds, steps, samples.
    last_joiner
        What ``join()`` returned.
    """

    kind: str = ""
    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    anchors: list[tuple[int, str]] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    planned: list[float] = field(default_factory=list)
    moves: list[list[float]] = field(default_factory=list)
    gradients: list[list[float]] = field(default_factory=list)
    applied: list[list[float]] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    progress: tuple[int, int, float] = (0, 0, 0.0)
    last_joiner: int = -1

    def step(self, record: StepRecord) -> None:
        """Take a local step's row, as a recorder."""
        self.steps.append(record)

    def round(self, record: RoundRecord) -> None:
        """Take a round's row, as a recorder."""
        self.rounds.append(record)

    def exchange(self, ring: Ring) -> list[Diary]:
        """Collect the diaries of all ranks, by rank."""
        payloads = ring.gather(json.dumps(vars(self)).encode(), "slackring.testing.diary")
        return [Diary._read(json.loads(payload)) for payload in payloads]

    @classmethod
    def _read(cls, facts: dict[str, Any]) -> Diary:
        diary = cls(**facts)
        diary.steps = [StepRecord(*record) for record in diary.steps]
        diary.rounds = [RoundRecord(*record) for record in diary.rounds]
        return diary


class _WatchedFlight(Flight):
    def __init__(self, inner: Flight, name: str, sent: list[str]) -> None:
        self._inner, self._name, self._sent = inner, name, sent

    def send(self, tensor: Tensor) -> None:
        self._sent.append(f"{self._name} {list(tensor.shape)} {tensor.dtype}")
        self._inner.send(tensor)

    def seal(self) -> None:
        self._inner.seal()

    def done(self) -> bool:
        return self._inner.done()

    def wait(self) -> None:
        self._inner.wait()

    def once(self, what: str, compute: Callable[[], T]) -> T:
        return self._inner.once(what, compute)


class WatchedRing(Ring):
    """Another ring, of which it is noted what is sent, with steps of a length of one's own.

    Parameters
    ----------
    inner
        The ring that carries everything.
    seconds
        What each local step of this rank takes.
    """

    def __init__(self, inner: Ring, seconds: Sequence[float] = ()) -> None:
        super().__init__()
        self._inner, self._seconds = inner, seconds
        self.rank, self.size, self.kind, self.clock = inner.rank, inner.size, inner.kind, inner.clock
        self.pace = self._take_time
        self.sent: list[str] = []

    def _take_time(self, rank: int, step: int, elapsed: float) -> float:
        return max(self._seconds[step] - elapsed, 0.0) if step < len(self._seconds) else 0.0

    def claim(self, owner: object = None) -> int:
        """Claim a number on the inner ring, whose names are shared by all."""
        return self._inner.claim(owner)

    def open(self, name: str) -> Flight:
        """Open a round, and note what is sent into it."""
        return _WatchedFlight(self._inner.open(name), name, self.sent)

    def reduces(self, device: torch.device) -> bool:
        """Whether the inner ring sums on a device."""
        return self._inner.reduces(device)

    def gather(self, payload: bytes, name: str) -> list[bytes]:
        """Collect bytes on the inner ring."""
        return self._inner.gather(payload, name)

    def _broadcast(self, tensor: Tensor, root: int) -> Tensor:
        return self._inner.broadcast(tensor, root)


def make_model(dtype: torch.dtype = torch.float64) -> torch.nn.Sequential:
    """Make a small model, the same on every rank, without touching the random state."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def micro_batch(seed: int, rank: int, step: int, samples: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw the inputs of a local step, ``(samples, 3)``."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * rank + step)
    return torch.randn(samples, 3, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: torch.nn.Module, inputs: Tensor) -> Tensor:
    """Mean loss over the samples of a micro-batch."""
    target = torch.sin(inputs.sum(1, keepdim=True))
    return torch.nn.functional.mse_loss(model(inputs), target)


def make_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Make a plain optimizer by its name in a plan."""
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9 if name == "momentum" else 0.0)


def written(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[float]:
    """Write tensors down as one list; None counts as zeros of the shape beside it."""
    parts = [torch.zeros_like(other) if tensor is None else tensor for tensor, other in zip(tensors, like, strict=True)]
    numbers: list[float] = torch.cat([part.detach().reshape(-1).double() for part in parts]).tolist()
    return numbers


def _hash(parameters: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


class _Player:
    """One rank of a plan."""

    def __init__(self, rule: Rule, plan: Plan, ring: Ring) -> None:
        acts = plan.acts[ring.rank]
        self.diary = Diary(kind=ring.kind, planned=[act.seconds for act in acts if act.kind == "step"])
        self.ring = WatchedRing(ring, self.diary.planned)
        self.plan, self.acts = plan, acts
        self.model = make_model()
        self.parameters = list(self.model.parameters())
        self.diary.first = written(self.parameters, self.parameters)
        plain = make_optimizer(plan.optimizer, self.model)
        # Hooks made before the optimizer is wrapped see the rank's own step; those made after see what the rule gives it.
        if rule.payload == "delta":
            plain.register_step_pre_hook(lambda *_: self._remember())
            plain.register_step_post_hook(lambda *_: self._note_move())
        self.optimizer: RelaxedOptimizer = DistributedOptimizer(
            plain,
            rule,
            named_parameters=self.model.named_parameters(),
            budget=plan.budget,
            recorder=self.diary,
            ring=self.ring,
        )
        self.optimizer.register_step_pre_hook(lambda *_: self._note_applied())
        self.scaler = None
        if plan.scaled:
            scale = _SCALE * 2.0**ring.rank
            self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)

    def _remember(self) -> None:
        self._before = written(self.parameters, self.parameters)

    def _note_move(self) -> None:
        after = written(self.parameters, self.parameters)
        self.diary.moves.append([new - old for new, old in zip(after, self._before, strict=True)])

    def _note_applied(self) -> None:
        if any(group["params"] for group in self.optimizer.param_groups):
            self.diary.applied.append(written([parameter.grad for parameter in self.parameters], self.parameters))

    def play(self) -> Diary:
        step, diary, optimizer = 0, self.diary, self.optimizer
        for act in self.acts:
            if optimizer.progress.stop:
                break
            if act.kind == "step":
                self._step(step, act)
                step += 1
                self._look()
            elif act.kind in ("drain", "meet"):
                optimizer.drain()
                diary.drained.append(_hash(self.parameters))
                self._look()
                if act.kind == "meet":
                    with optimizer.consensus():  # else its time is the next step's
                        self.ring.gather(b"", "slackring.testing.meet")
            elif act.kind == "stop":
                optimizer.request_stop()
            else:
                self._look(act.seconds)
        diary.last_joiner = optimizer.join()
        self._look()
        diary.drained.append(_hash(self.parameters))
        diary.last = written(self.parameters, self.parameters)
        progress = optimizer.progress
        diary.progress = (progress.rounds, progress.steps, progress.samples)
        diary.sent = self.ring.sent
        return diary

    def _look(self, seconds: float = 0.0) -> None:
        with self.optimizer.consensus():
            self.ring.clock.sleep(seconds)
            self.diary.anchors.append((self.optimizer.progress.rounds, _hash(self.parameters)))

    def _step(self, step: int, act: Act) -> None:
        optimizer, scaler = self.optimizer, self.scaler
        inputs = micro_batch(self.plan.seed, self.ring.rank, step, act.samples)
        if act.announced:
            optimizer.set_samples(act.samples)
        optimizer.zero_grad()
        loss = loss_of(self.model, inputs)
        if act.overflow:
            loss = loss * torch.inf
        torch.autograd.backward(loss if scaler is None else scaler.scale(loss))
        scale = 1.0 if scaler is None else scaler.get_scale()
        grads = written([parameter.grad for parameter in self.parameters], self.parameters)
        self.diary.gradients.append([number / scale for number in grads])
        if scaler is None:
            optimizer.step(samples=act.samples)
        else:
            scaler.step(optimizer, samples=act.samples)
            scaler.update()


def play(rule: Rule, plan: Plan) -> list[Diary]:
    """Carry out a plan on the ambient ring; every rank calls this, and gets the diaries of all ranks."""
    ring = ambient_ring()
    return _Player(rule, plan, ring).play().exchange(ring)
