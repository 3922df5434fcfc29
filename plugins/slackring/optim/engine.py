"""The round: when this rank launches, waits for and lands contributions, and how all ranks agree on the last one."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from slackring.errors import StoppedError, UnsupportedError
from slackring.optim.agreement import agree
from slackring.optim.control import ControlBlock, ControlLayout, Landed, Slot
from slackring.optim.ending import Ending
from slackring.optim.flat import digest
from slackring.optim.gradient import GradientPayload
from slackring.optim.hyper import HyperParameters
from slackring.optim.payload import Contribution, DeltaPayload
from slackring.optim.progress import Budget, LandedRound
from slackring.optim.records import Recorder, RoundRecord, StepRecord
from slackring.optim.statistics import AveragedBuffers
from slackring.ring.base import ArrivedFlight, Flight, Ring
from slackring.rules import Rule

__all__ = ["Engine"]

log = logging.getLogger("slackring")


@dataclass
class _Window:
    """The local steps since the last contribution."""

    steps: int = 0
    samples: float = 0.0
    seconds: float = 0.0
    blocked: float = 0.0


@dataclass
class _InFlight:
    """A round that this rank has launched and not yet landed."""

    index: int
    flight: Flight
    contribution: Contribution
    control: ControlBlock
    window: _Window
    launched: float
    compensation: float
    nbytes: int


class Engine:
    """Carries out a rule for one optimizer on one rank.

    Every rank launches the same rounds in the same order; what its clock or its polls say decides when, never whether.

    Parameters
    ----------
    optimizer
        The user's optimizer.
    rule, ring
        What to do, and where.
    names, parameters
        Of everything the optimizer trains.
    buffers
        Floating model buffers to average.
    max_grad_norm, budget, recorder
        As in :func:`slackring.DistributedOptimizer`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rule: Rule,
        ring: Ring,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        max_grad_norm: float | None,
        budget: Budget | None,
        recorder: Recorder | None,
    ) -> None:
        self.rule, self.ring = rule, ring
        # Weakly, since the optimizer holds the engine: dropping it frees both at once, on all ranks alike.
        self._weak_optimizer = weakref.ref(optimizer)
        self._names, self._parameters = list(names), list(parameters)
        self._max_grad_norm, self._budget, self._recorder = max_grad_norm, budget or Budget(), recorder
        self._name = f"slackring.{ring.claim(self)}"
        self._staleness = rule.staleness
        self._trigger = rule.trigger
        self._buffers = list(buffers)
        self.started = False

        self._in_flight: deque[_InFlight] = deque()
        self._launched = 0
        self._ending = Ending(rule.staleness, self._budget)
        self.progress = self._ending.progress
        self._stop_requested = False

        self._window = _Window()
        self._samples = 1.0  # assumed for the next step
        self._local_step = 0
        self._flight_seconds = 0.0
        self._mark: float | None = None  # when the step before ended
        self._stepping_inside = False
        self._hidden: list[tuple[dict[str, object], object]] = []
        self._probe: tuple[int, int] | None = None
        self._blocked = 0.0
        self.settled = True  # nothing in flight and no open window, on all ranks
        self._overriding: AbstractContextManager[None] = nullcontext()
        self._saved: dict[str, Any] | None = None  # a checkpoint to go on from
        self._listeners: list[Callable[[LandedRound], object]] = []

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self._weak_optimizer()
        if optimizer is None:
            raise RuntimeError("the optimizer is gone")
        return optimizer

    # -- before the first round ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take the anchor and check that all ranks agree; collective, once."""
        delta = self.rule.payload == "delta"
        self._hyper = HyperParameters(self._optimizer)
        agree(self.ring, self._facts(), f"{self._name}.agree")
        self._payload: DeltaPayload | GradientPayload
        if delta:
            self._payload = DeltaPayload(self.rule, [parameter.detach() for parameter in self._parameters])
        else:
            blocking_steps = self._staleness == 0 and self._trigger.closes(1, lambda: False) and self.ring.size > 1
            self._payload = GradientPayload(self._parameters, self.ring.size, self._open if blocking_steps else None)
        self._statistics = AveragedBuffers(self._buffers) if self._buffers else None
        self._layout = ControlLayout(
            self.ring.size, 0 if delta else len(self._hyper), 0 if delta else len(self._parameters)
        )
        self._began = self.ring.clock.now()
        self.started = True
        if self._saved is not None:
            self._restore(self._saved)
            self._saved = None

    def _facts(self) -> dict[str, object]:
        from slackring import __version__

        return {
            "version of slackring": __version__,
            "version of torch": torch.__version__.split("+")[0],
            "rule": str(self.rule),
            "parameters": [
                f"{name} {list(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}"
                for name, parameter in zip(self._names, self._parameters, strict=True)
            ],
            "averaged buffers": [[list(buffer.shape), str(buffer.dtype)] for buffer in self._buffers],
            "optimizer": type(self._optimizer).__name__,
            "hyper-parameters in number": len(self._hyper),
            "budget": str(self._budget),
            **self._initial_facts(),
        }

    def _initial_facts(self) -> dict[str, object]:
        saved = self._saved
        if saved is None or self.rule.payload == "gradient":
            facts: dict[str, object] = {"initial parameters (broadcast them first)": digest(self._parameters)}
        else:
            facts = {"the checkpoint's anchor": digest(saved["payload"]["anchor"])}
        return {"the checkpoint's round": None if saved is None else saved["launched"], **facts}

    # -- checkpoints -----------------------------------------------------------------------------------------------------

    def save(self) -> dict[str, Any] | None:
        """State of this rank in tensors and plain values, local; waits for rounds that this rank has launched.

        A round in flight is saved as the sum it becomes, so that it can be landed after a restart without the other ranks.
        """
        if not self.started:
            return self._saved
        for round in self._in_flight:
            round.flight.wait()
        return {
            "rule": str(self.rule),
            "rank": self.ring.rank,
            "size": self.ring.size,
            "launched": self._launched,
            "local step": self._local_step,
            "samples": self._samples,
            "seconds": self.ring.clock.now() - self._began,
            "window": dataclasses.asdict(self._window),
            "ending": self._ending.save(),
            "payload": self._payload.save(),
            "statistics": None if self._statistics is None else self._statistics.save(),
            "in flight": [
                {
                    "index": round.index,
                    "sum": round.contribution.buffers.save(),
                    "control": round.control.tensor.clone(),
                    "unscaled": round.contribution.unscaled,
                    "window": dataclasses.asdict(round.window),
                    "compensation": round.compensation,
                    "nbytes": round.nbytes,
                }
                for round in self._in_flight
            ],
        }

    def load(self, saved: dict[str, Any] | None) -> None:
        """Go on from a checkpoint at the next start, which checks that all ranks do; None goes on from the model alone."""
        if not self.settled:
            raise UnsupportedError("a state dict can be loaded before the first step or after drain(), not in between.")
        if saved is not None and ("anchor" in saved["payload"]) != (self.rule.payload == "delta"):
            raise UnsupportedError(
                f"a checkpoint of rule {saved['rule']!r} has no state that {str(self.rule)!r} can go on from; load it without "
                "its 'slackring' entry to go on from the model alone."
            )
        self._saved, self.started, self._probe, self._mark = saved, False, None, None
        self._local_step = 0 if saved is None else saved["local step"]

    def _restore(self, saved: dict[str, Any]) -> None:
        """Go on exactly where every rank was, if all have their own checkpoint; else from the anchor."""
        mine = (saved["rule"], saved["rank"], saved["size"]) == (str(self.rule), self.ring.rank, self.ring.size)
        exact = b"0" not in self.ring.gather(b"1" if mine else b"0", f"{self._name}.exact")
        self._payload.restore(saved["payload"], exact=exact)
        self._ending.restore(saved["ending"], exact=exact)
        if self._statistics is not None and saved["statistics"] is not None:
            self._statistics.restore(saved["statistics"], exact=exact)
        self._launched, self._samples = saved["launched"], saved["samples"]
        self._began = self.ring.clock.now() - saved["seconds"]
        if not exact:
            return
        self._window = _Window(**saved["window"])
        self.settled = False
        for place, round in enumerate(saved["in flight"]):
            control = self._layout.new(self.ring.rank)
            control.tensor.copy_(round["control"])
            contribution = self._payload.restore_contribution(round["sum"], place)
            contribution.unscaled = round["unscaled"]
            self._in_flight.append(
                _InFlight(
                    round["index"],
                    ArrivedFlight(),
                    contribution,
                    control,
                    _Window(**round["window"]),
                    self.ring.clock.now(),
                    round["compensation"],
                    round["nbytes"],
                )
            )

    # -- one local step --------------------------------------------------------------------------------------------------

    def set_samples(self, samples: float) -> None:
        """Announce the samples of the next micro-batch, before its backward pass."""
        self._samples = _positive(samples)
        if self.started and isinstance(self._payload, GradientPayload):
            self._payload.overlap(self._samples)

    def before_step(self, samples: float | None) -> None:
        """Run as the optimizer's step pre-hook: take the gradients, and let the optimizer step on what the rule says."""
        if self._stepping_inside:
            return
        if not self.started:
            self.start()
        if self.progress.stop:
            raise StoppedError(
                f"the ranks agreed to stop after round {self._ending.last}; leave the loop once optimizer.progress.stop is true."
            )
        self._refuse_outside_changes()
        self.settled = False
        clock, ring = self.ring.clock, self.ring
        entered = clock.now()
        self._step_start = entered if self._mark is None else self._mark
        self._injected = ring.pace(clock, ring.rank, self._local_step, self._mark) if ring.pace else 0.0
        self._paced = clock.now()
        self._blocked = 0.0
        # Weighted by steps, if the samples are not known.
        self._samples = self._samples if samples is None else _positive(samples)
        self._overflow = self._take_gradient_scale()
        self._step_samples = 0.0 if self._overflow else self._samples
        self._round = self._launched
        payload = self._payload
        if isinstance(payload, GradientPayload):
            payload.accumulate(self._step_samples)
            self._add_to_window(self._paced - self._step_start)
            self._advance_if_closed()
            if not self._apply_average():
                self._hide_parameters()
        elif self._overflow:
            self._hide_parameters()
        elif self._max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        self._hooked = clock.now()

    def after_step(self) -> None:
        """Run as the optimizer's step post-hook: close the window if the rule says so, and record the step."""
        if self._stepping_inside:
            return
        clock = self.ring.clock
        stepped = clock.now()
        for group, parameters in self._hidden:
            group["params"] = parameters
        self._hidden.clear()
        self._stop_overriding()
        compute = self._paced - self._step_start + stepped - self._hooked
        if isinstance(self._payload, GradientPayload):
            if not self.over:
                self._payload.overlap(self._samples)
        else:
            self._add_to_window(compute)
            self._advance_if_closed()
        place = self._local_step % len(self._parameters)
        self._probe = (place, self._parameters[place]._version)
        end = clock.now()
        if self._recorder is not None:
            total = end - self._step_start
            bookkeeping = max(total - compute - self._blocked, 0.0)
            self._recorder.step(
                StepRecord(
                    self._local_step,
                    self._round,
                    self._step_start,
                    end,
                    total - self._blocked - bookkeeping,
                    self._injected,
                    self._blocked,
                    bookkeeping,
                    self._step_samples,
                )
            )
        self._local_step += 1
        self._mark = end

    def _add_to_window(self, seconds: float) -> None:
        window = self._window
        # A step that overflowed counts for the trigger, so that ranks stay in line, but not as work.
        window.steps += 1
        window.samples += self._step_samples
        window.seconds += seconds

    def _advance_if_closed(self) -> None:
        if self._trigger.closes(self._window.steps, self._ring_free):
            self._advance(stepping=True)

    def _ring_free(self) -> bool:
        return len(self._in_flight) < self._staleness or self._in_flight[0].flight.done()

    def _take_gradient_scale(self) -> bool:
        """Unscale gradients that torch's GradScaler handed over; return whether this micro-batch overflowed."""
        optimizer = self._optimizer
        found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        if found is None:
            return False
        if isinstance(self._payload, GradientPayload):
            self._payload.no_overlap()  # scales differ between ranks, and are not known in the backward pass
        # What is unscaled here must not be unscaled again by a fused optimizer.
        optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]
        if float(found) > 0:
            return True
        if scale is not None:
            grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            torch._foreach_mul_(grads, 1.0 / float(scale))
        return False

    def _apply_average(self) -> bool:
        """Put a landed average into the gradients and use the agreed hyper-parameters; return whether there was one."""
        payload = self._payload
        if not isinstance(payload, GradientPayload) or not payload.ready:
            return False
        payload.apply()
        if self._max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        self._overriding = self._hyper.using(self._agreed_hyper_parameters)
        self._overriding.__enter__()
        return True

    def _hide_parameters(self) -> None:
        """Turn the optimizer's coming step into a no-op, at a cost that does not grow with the model."""
        for group in self._optimizer.param_groups:
            self._hidden.append((group, group["params"]))
            group["params"] = []

    def _refuse_outside_changes(self) -> None:
        if self._probe is not None:
            place, version = self._probe
            if self._parameters[place]._version != version:
                raise UnsupportedError(
                    f"parameter {self._names[place]!r} was changed outside the optimizer since its last step; after changing "
                    "parameters on every rank, call optimizer.reset_anchor()."
                )

    # -- rounds ----------------------------------------------------------------------------------------------------------

    def _open(self) -> Flight:
        return self.ring.open(f"{self._name}.{self._launched % (self._staleness + 1)}")

    def _advance(self, *, joined_at: float | None = None, draining: bool = False, stepping: bool = False) -> None:
        """Launch the next round, landing an older one first if there would be too many in flight.

        With `stepping` the user's own call of ``step()`` is under way and will use a landed average.
        """
        if self.over:
            return
        if self._staleness and len(self._in_flight) == self._staleness:
            self._land()
        self._launch(joined_at, draining)
        if not self._staleness:
            self._land()
            if self._statistics is not None:
                self._statistics.settle()
        if not stepping:
            # After the launch, as in step(), so that every rank launches a round with the same anchor.
            self._step_on_average()
        if self._ending.pause(self._launched):
            self._land_all()  # on all ranks, also those that only help others to drain
        self.progress.stop = self.over

    @property
    def over(self) -> bool:
        """Whether the last round of all has been launched."""
        return self._ending.over(self._launched)

    def _launch(self, joined_at: float | None, draining: bool) -> None:
        window, self._window = self._window, _Window()
        contribution = self._payload.pack(window.steps, window.samples)
        flight = contribution.flight
        if flight is None:
            flight = self._open()
            for tensor in contribution.tensors:
                flight.send(tensor)
        if contribution.culprit is not None:
            self._tell_non_finite(contribution.culprit)
        overflowed = contribution.present is not None and window.steps > 0 and window.samples == 0
        non_finite = overflowed or contribution.culprit is not None
        contributes = window.steps > 0 and not non_finite
        control = self._layout.new(self.ring.rank)
        slots = control.slots
        slots[Slot.STEPS] = window.steps
        slots[Slot.SAMPLES] = window.samples if contributes else 0.0
        slots[Slot.STEP_SECONDS] = window.seconds / max(window.steps, 1)
        slots[Slot.BLOCKED_SECONDS] = window.blocked
        slots[Slot.FLIGHT_SECONDS] = self._flight_seconds
        if joined_at is not None:
            slots[Slot.JOINED] = 1.0 + max(self.ring.clock.now() - joined_at, 0.0)
        slots[Slot.DRAINING] = draining
        slots[Slot.STOP] = self._stop_requested or self._out_of_time()
        slots[Slot.NON_FINITE] = non_finite
        slots[Slot.AGAIN] = contribution.again
        slots[Slot.DIGEST] = self._payload.digest(self._launched)
        if contribution.present is not None:
            control.hyper_parameters[:] = self._hyper.read()
            control.has_gradient[:] = contribution.present
        nbytes = self._payload.nbytes + control.tensor.nbytes
        if self._statistics is not None:
            for tensor in self._statistics.pack(contributes):
                flight.send(tensor)
            nbytes += self._statistics.nbytes
        flight.send(control.tensor)
        flight.seal()
        self._in_flight.append(
            _InFlight(
                self._launched,
                flight,
                contribution,
                control,
                window,
                self.ring.clock.now(),
                self._payload.compensation,
                nbytes,
            )
        )
        self._launched += 1

    def _land(self) -> None:
        """Wait for the oldest round in flight and take it in."""
        clock = self.ring.clock
        before = clock.now()
        oldest = self._in_flight.popleft()
        oldest.flight.wait()
        landed = oldest.flight.once(lambda: self._layout.read(oldest.control))
        sent = landed.totals  # what came with the buffers, also if the gradients are reduced again
        if landed.again:
            landed = self._reduce_again(oldest, landed)
        now = clock.now()
        blocked = now - before
        self._blocked += blocked
        self._window.blocked += blocked
        self._flight_seconds = now - oldest.launched

        landed.check_anchor(oldest.index)
        self._payload.land(oldest.contribution, landed)
        if isinstance(self._payload, GradientPayload) and landed.totals.samples > 0 and not self._payload.ready:
            culprit = self._payload.own_culprit()
            if culprit is not None:
                self._tell_non_finite(culprit)
        if self._statistics is not None:
            self._statistics.land(sent)
        if self._layout.hyper_parameters:
            self._agreed_hyper_parameters = landed.hyper_parameters[landed.lowest_training_rank]
        self._ending.take(oldest.index, landed)
        if self._listeners:
            told = landed.told(oldest.index)
            for listener in self._listeners:
                listener(told)
        if self._recorder is not None:
            self._recorder.round(
                RoundRecord(
                    oldest.index,
                    oldest.launched,
                    now,
                    blocked,
                    oldest.window.steps,
                    oldest.window.samples,
                    landed.steps,
                    landed.samples,
                    landed.totals.contributors,
                    landed.totals.training,
                    oldest.compensation,
                    oldest.nbytes,
                )
            )

    def _reduce_again(self, oldest: _InFlight, landed: Landed) -> Landed:
        """Reduce a blocking gradient round once more, from what the gradients really are."""
        payload = self._payload
        if not isinstance(payload, GradientPayload):
            raise RuntimeError("only gradient rounds are reduced again")
        payload.discard(oldest.contribution)
        if oldest.window.steps:
            payload.accumulate(oldest.window.samples)
        contribution = payload.pack(oldest.window.steps, oldest.window.samples)
        control = self._layout.new(self.ring.rank)
        control.slots[:] = landed.slots[self.ring.rank]
        control.slots[Slot.AGAIN] = False
        control.slots[Slot.NON_FINITE] = contribution.culprit is not None
        control.hyper_parameters[:] = landed.hyper_parameters[self.ring.rank]
        control.has_gradient[:] = contribution.present or 0
        flight = self.ring.open(f"{self._name}.again")
        for tensor in (*contribution.tensors, control.tensor):
            flight.send(tensor)
        flight.seal()
        flight.wait()
        oldest.contribution = contribution
        oldest.nbytes *= 2
        return flight.once(lambda: self._layout.read(control))

    def _land_all(self) -> None:
        while self._in_flight:
            self._land()
            self._step_on_average()

    def _step_on_average(self) -> None:
        """Take the optimizer's step on a landed average outside the user's own call of ``step()``."""
        if self._apply_average():
            self._stepping_inside = True
            try:
                self._optimizer.step()
            finally:
                self._stepping_inside = False
                self._stop_overriding()

    def _stop_overriding(self) -> None:
        self._overriding.__exit__(None, None, None)
        self._overriding = nullcontext()

    def _out_of_time(self) -> bool:
        limit = self._budget.seconds
        return limit is not None and self.ring.clock.now() - self._began >= limit

    def _tell_non_finite(self, place: int) -> None:
        log.warning(
            "rank %d, round %d: %r is not finite (NaN or infinite) in this rank's contribution.",
            self.ring.rank,
            self._launched,
            self._names[place],
        )

    # -- for whoever gives ranks their data ----------------------------------------------------------------------------------

    @property
    def local_steps(self) -> int:
        """Local steps of this rank, landed or not."""
        return self._local_step

    @property
    def resuming(self) -> bool:
        """Whether a checkpoint waits for the start."""
        return self._saved is not None

    def on_landed(self, callback: Callable[[LandedRound], object]) -> None:
        """Call `callback` with every round that lands from now on."""
        self._listeners.append(callback)

    def sit_out(self) -> None:
        """Give the next round what the window holds, perhaps nothing, since this rank has no batch to go on with."""
        if not self.started:
            self.start()
        self._refuse_outside_changes()
        self.settled = False
        self._advance()
        self._probe = None
        if self._mark is not None:
            self._mark = self.ring.clock.now()  # waiting is no part of the next step

    # -- what the user can ask for -----------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Ask all ranks, in this rank's next contribution, to stop after the same round."""
        self._stop_requested = True

    def drain(self) -> None:
        """Land everything on all ranks; collective."""
        if not self.started:
            self.start()
        goal = self._ending.completed("drain") + 1
        while self._ending.completed("drain") < goal and not self.over:
            self._advance(draining=True)
        self._settle()

    def join(self) -> int:
        """Help the other ranks with empty contributions until all have joined; collective."""
        if not self.started:
            self.start()
        goal, now = self._ending.completed("join") + 1, self.ring.clock.now()
        if self._window.steps:
            self._advance()  # this rank's last work still counts as a training rank's
        while self._ending.completed("join") < goal and not self.over:
            self._advance(joined_at=now)
        self._settle()
        return self._ending.last_joiner

    def _settle(self) -> None:
        self._land_all()
        self._payload.settle()
        if self._statistics is not None:
            self._statistics.settle()
        self._probe = None
        self._mark = self.ring.clock.now()
        self.settled = True

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Put the last landed anchor and the averaged buffers into the model for a while; local."""
        entered = self.ring.clock.now()
        targets: list[Tensor] = []
        values: list[Tensor] = []
        if self.started:
            anchor = self._payload.anchor()
            if anchor is not None:
                targets += [parameter.detach() for parameter in self._parameters]
                values += anchor
            if self._statistics is not None:
                targets += self._buffers
                values += self._statistics.average
        saved = [target.clone() for target in targets]
        try:
            if targets:
                torch._foreach_copy_(targets, values)
            yield
        finally:
            if targets:
                torch._foreach_copy_(targets, saved)
            if self._probe is not None:
                place = self._probe[0]
                self._probe = (place, self._parameters[place]._version)
            if self._mark is not None:
                self._mark += self.ring.clock.now() - entered

    def reset_anchor(self) -> None:
        """Make the model as it is now the anchor; on every rank, with the same parameters."""
        if self._in_flight or self._window.steps:
            raise UnsupportedError(
                "reset_anchor() needs all rounds landed; call optimizer.drain() before changing parameters."
            )
        if self.started:
            self._payload.reset()
        self._probe = None


def _positive(samples: float) -> float:
    samples = float(samples)
    if not 0 < samples < float("inf"):
        raise UnsupportedError(
            f"samples= is the number of samples (or tokens) in the micro-batch, above 0, not {samples:g}."
        )
    return samples
