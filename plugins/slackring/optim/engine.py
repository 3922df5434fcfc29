"""One optimizer on one rank: what a local step, a drain or a join does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from slackring.errors import StoppedError, UnsupportedError
from slackring.optim.agreement import agree
from slackring.optim.ambient import recorders
from slackring.optim.ending import Ending
from slackring.optim.fence import Fence
from slackring.optim.flat import digest
from slackring.optim.gradient import GradientPayload
from slackring.optim.hyper import HyperParameters
from slackring.optim.progress import Budget, LandedRound
from slackring.optim.records import Recorder, StepRecord
from slackring.optim.rounds import Rounds
from slackring.ring.base import Ring
from slackring.rules import Every, Rule

__all__ = ["Engine"]

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Carries out a rule for one optimizer on one rank.

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
    compression
        "fp16" or None.
    device
        Where flat buffers lie; None is beside what they hold.
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
        compression: str | None,
        device: torch.device | None,
        max_grad_norm: float | None,
        budget: Budget | None,
        recorder: Recorder | None,
    ) -> None:
        self.rule, self.ring = rule, ring
        # Weakly, since the optimizer holds the engine: dropping it frees both at once, on all ranks alike.
        self._weak_optimizer = weakref.ref(optimizer)
        self._names, self._parameters = list(names), list(parameters)
        self._compression, self._device = compression, device
        self._max_grad_norm, self._budget, self._recorder = max_grad_norm, budget or Budget(), recorder
        self._name = f"slackring.{ring.claim(self)}"
        self._trigger = rule.trigger
        self._buffers = list(buffers)
        self.started = False

        self._rounds: Rounds  # from the start on
        self._launched_before = 0  # by rounds that came before the newest start
        self._ending = Ending(rule.most_in_flight, self._budget)
        self.progress = self._ending.progress
        self._samples = 1.0  # assumed for the next step
        self._local_step = 0
        self._mark: float | None = None  # when the step before ended
        self._stepping_inside = False
        self._hidden: list[tuple[dict[str, object], object]] = []
        self._probe: tuple[int, int] | None = None
        self.settled = True  # nothing in flight and no open window, on all ranks
        self._overriding: AbstractContextManager[None] | None = None
        self._saved: dict[str, Any] | None = None  # a checkpoint to go on from
        self._listeners: list[Callable[[LandedRound], object]] = []
        _engines.add(self)

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self._weak_optimizer()
        if optimizer is None:
            raise RuntimeError("the optimizer is gone")
        return optimizer

    # -- before the first round ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take the anchor and check that all ranks agree; collective, once."""
        self._hyper = HyperParameters(self._optimizer)
        agree(self.ring, self._facts(), f"{self._name}.agree")
        self._fence = Fence(self._parameters)
        self._rounds = Rounds(
            self.rule,
            self.ring,
            self._name,
            self._names,
            self._parameters,
            self._buffers,
            compression=self._compression,
            device=self._device,
            hyper=self._hyper,
            ending=self._ending,
            seconds=self._budget.seconds,
            recorder=self._recorder,
            listeners=self._listeners,
            use_average=self._step_on_average,
        )
        self._rounds.launched = self._launched_before
        self.started = True
        if self._saved is not None:
            self._samples = self._saved["samples"]
            self._rounds.restore(self._saved)
            self.settled = not self._rounds.open
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
            "compression": self._compression,
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
        """State of this rank in tensors and plain values, local; None before the first step."""
        if not self.started:
            return self._saved
        return {**self._rounds.save(), "local step": self._local_step, "samples": self._samples}

    def load(self, saved: dict[str, Any] | None) -> None:
        """Go on from a checkpoint at the next start, which checks that all ranks do; None goes on from the model alone."""
        if not self.settled:
            raise UnsupportedError("a state dict can be loaded before the first step or after drain(), not in between.")
        if saved is not None and ("anchor" in saved["payload"]) != (self.rule.payload == "delta"):
            raise UnsupportedError(
                f"a checkpoint of rule {saved['rule']!r} has no state that {str(self.rule)!r} can go on from; load it without "
                "its 'slackring' entry to go on from the model alone."
            )
        self._start_anew()
        self._saved = saved
        self._local_step = 0 if saved is None else saved["local step"]

    def extend(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Train more parameters from the next start on."""
        self._start_anew()
        self._names += names
        self._parameters += parameters

    def _start_anew(self) -> None:
        """Take the anchor and agree again before the next round."""
        if self.started:
            self._launched_before = self._rounds.launched
        self.started, self._probe, self._mark = False, None, None

    # -- one local step --------------------------------------------------------------------------------------------------

    def set_samples(self, samples: float) -> None:
        """Announce the samples of the next micro-batch, before its backward pass."""
        self._samples = _positive(samples)
        if self.started and isinstance(self._rounds.payload, GradientPayload):
            self._rounds.payload.overlap(self._samples)

    @property
    def only_accumulates(self) -> bool:
        """Whether the coming local step adds gradients to an open window, and no more than that."""
        return (
            self.started
            and self.rule.payload == "gradient"
            and isinstance(self._trigger, Every)
            and self._rounds.window.steps + 1 < self._trigger.steps
            and not self._stepping_inside
        )

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
        if self.settled:
            self._refuse_a_second_optimizer()
        self.settled = False
        clock = self.ring.clock
        self._fence.cross()
        entered = clock.now()
        self._step_start = entered if self._mark is None else self._mark
        self._injected, interrupted = self._lengthen(entered)
        self._paced = clock.now()
        self._blocked_before = self._rounds.blocked
        # Weighted by steps, if the samples are not known.
        self._samples = self._samples if samples is None else _positive(samples)
        self._void = self._take_gradient_scale() or interrupted
        self._step_samples = 0.0 if self._void else self._samples
        self._round = self._rounds.launched
        payload = self._rounds.payload
        if isinstance(payload, GradientPayload):
            payload.accumulate(self._step_samples)
            self._add_to_window(self._paced - self._step_start)
            self._advance_if_closed()
            if not self._apply_average():
                self._hide_parameters()
        elif self._void:
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
        self.restore_groups()
        compute = self._paced - self._step_start + stepped - self._hooked
        if isinstance(self._rounds.payload, GradientPayload):
            if not self._rounds.over:
                self._rounds.payload.overlap(self._samples)
        else:
            self._add_to_window(compute)
            self._advance_if_closed()
        place = self._local_step % len(self._parameters)
        self._probe = (place, self._parameters[place]._version)
        end = clock.now()
        told = recorders(self._recorder)
        if told:
            total, blocked = end - self._step_start, self._rounds.blocked - self._blocked_before
            bookkeeping = max(total - compute - blocked, 0.0)
            record = StepRecord(
                self._local_step,
                self._round,
                self._step_start,
                end,
                total - blocked - bookkeeping,
                self._injected,
                blocked,
                bookkeeping,
                self._step_samples,
            )
            for recorder in told:
                recorder.step(record)
        self._local_step += 1
        self._mark = end

    def _add_to_window(self, seconds: float) -> None:
        window = self._rounds.window
        # A step that overflowed counts for the trigger, so that ranks stay in line, but not as work.
        window.steps += 1
        window.samples += self._step_samples
        window.seconds += seconds
        window.last_seconds = seconds

    def _advance_if_closed(self) -> None:
        if self._trigger.closes(self._rounds.moment()):
            self._rounds.advance(stepping=True)

    def _lengthen(self, now: float) -> tuple[float, bool]:
        """Let what is injected into this step pass; return its seconds, and whether the deadline cut it short."""
        ring = self.ring
        if ring.pace is None:
            return 0.0, False
        seconds = ring.pace(ring.rank, self._local_step, now - self._step_start)
        interrupted = False
        if self.rule.interrupts and self._rounds.window.steps:  # every window has at least one whole step
            left = self._rounds.seconds_left()
            if left is not None and left < seconds:
                seconds, interrupted = max(left, 0.0), True
        ring.clock.sleep(seconds)
        return seconds, interrupted

    def _take_gradient_scale(self) -> bool:
        """Unscale gradients that torch's GradScaler handed over; return whether this micro-batch overflowed."""
        optimizer = self._optimizer
        found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        if found is None:
            return False
        if isinstance(self._rounds.payload, GradientPayload):
            self._rounds.payload.no_overlap()  # scales differ between ranks, and are not known in the backward pass
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
        payload = self._rounds.payload
        if not isinstance(payload, GradientPayload) or not payload.ready:
            return False
        payload.apply()
        if self._max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        self._overriding = self._hyper.using(self._rounds.agreed_hyper_parameters)
        self._overriding.__enter__()
        return True

    def _hide_parameters(self) -> None:
        """Turn the optimizer's coming step into a no-op, at a cost that does not grow with the model."""
        for group in self._optimizer.param_groups:
            self._hidden.append((group, group["params"]))
            group["params"] = []

    def restore_groups(self) -> None:
        """Give the optimizer's groups back what the step changed in them; also after a step that raised."""
        if self._hidden:
            for group, parameters in self._hidden:
                group["params"] = parameters
            self._hidden.clear()
        self._stop_overriding()

    def _refuse_outside_changes(self) -> None:
        if self._probe is not None:
            place, version = self._probe
            if self._parameters[place]._version != version:
                raise UnsupportedError(
                    f"parameter {self._names[place]!r} was changed outside the optimizer since its last step; after changing "
                    "parameters on every rank, call optimizer.reset_anchor()."
                )

    def _refuse_a_second_optimizer(self) -> None:
        """Refuse what must hang: some ranks would wait in this optimizer's rounds, and others in the other one's."""
        for other in _engines:
            unsettled = other.ring is self.ring and not (other.settled or other.progress.stop)
            rule = next((engine.rule for engine in (self, other) if engine._trigger.by_rank), None)
            if other is not self and unsettled and rule is not None:
                raise UnsupportedError(
                    f"another optimizer of this process has open rounds, and under rule {str(rule)!r} ranks take different "
                    "numbers of steps between rounds, so that they would wait for each other for ever; train everything with "
                    "one optimizer (parameter groups), drain() the other one first, or use a rule like bsp or local_sgd."
                )

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
        if self._overriding is not None:
            self._overriding.__exit__(None, None, None)
            self._overriding = None

    # -- for whoever gives ranks their data ----------------------------------------------------------------------------------

    @property
    def local_steps(self) -> int:
        """Local steps of this rank, landed or not."""
        return self._local_step

    @property
    def ending(self) -> bool:
        """Whether the ranks have agreed on the last round; alike on all that have landed as many."""
        return self._ending.last is not None

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
        self._rounds.advance()
        self._probe = None
        if self._mark is not None:
            self._mark = self.ring.clock.now()  # waiting is no part of the next step

    # -- what the user can ask for -----------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Ask all ranks, in this rank's next contribution, to stop after the same round."""
        self._ending.stop_requested = True

    def drain(self) -> None:
        """Land everything on all ranks; collective."""
        if not self.started:
            self.start()
        goal = self._ending.completed("drain") + 1
        while self._ending.completed("drain") < goal and not self._rounds.over:
            self._rounds.advance(draining=True)
        self._settle()

    def join(self) -> int:
        """Help the other ranks with empty contributions until all have joined; collective."""
        if not self.started:
            self.start()
        goal, now = self._ending.completed("join") + 1, self.ring.clock.now()
        if self._rounds.window.steps:
            self._rounds.advance()  # this rank's last work still counts as a training rank's
        while self._ending.completed("join") < goal and not self._rounds.over:
            self._rounds.advance(joined_at=now)
        self._settle()
        return self._ending.last_joiner

    def _settle(self) -> None:
        self._rounds.land_all()
        self._rounds.payload.settle()
        if self._rounds.statistics is not None:
            self._rounds.statistics.settle()
        self._rounds.begin_window()
        self._probe = None
        self._mark = self.ring.clock.now()
        self.settled = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what is done between two local steps out of the time of both; local."""
        entered = self.ring.clock.now()
        try:
            yield
        finally:
            elapsed = self.ring.clock.now() - entered
            if self._mark is not None:
                self._mark += elapsed
            if self.started:
                self._rounds.postpone(elapsed)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Put the last landed anchor and the averaged buffers into the model for a while; local."""
        with self.paused(), self._anchor_in_model():
            yield

    @contextmanager
    def _anchor_in_model(self) -> Iterator[None]:
        targets: list[Tensor] = []
        values: list[Tensor] = []
        if self.started:
            anchor = self._rounds.payload.anchor()
            if anchor is not None:
                targets += [parameter.detach() for parameter in self._parameters]
                values += anchor
            if self._rounds.statistics is not None:
                targets += self._buffers
                values += self._rounds.statistics.average
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

    def reset_anchor(self) -> None:
        """Make the model as it is now the anchor; on every rank, with the same parameters."""
        if self.started and self._rounds.open:
            raise UnsupportedError(
                "reset_anchor() needs all rounds landed; call optimizer.drain() before changing parameters."
            )
        if self.started:
            self._rounds.payload.reset()
        self._probe = None


def _positive(samples: float) -> float:
    samples = float(samples)
    if not 0 < samples < float("inf"):
        raise UnsupportedError(
            f"samples= is the number of samples (or tokens) in the micro-batch, above 0, not {samples:g}."
        )
    return samples
