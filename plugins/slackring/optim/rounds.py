"""Rounds: when this rank launches, waits for and lands contributions."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slackring.optim.ambient import recorders, stop_wish, watchers
from slackring.optim.control import ControlBlock, ControlLayout, Landed, Slot
from slackring.optim.ending import Ending
from slackring.optim.gradient import GradientPayload
from slackring.optim.hyper import HyperParameters
from slackring.optim.payload import Contribution, DeltaPayload
from slackring.optim.progress import LandedRound
from slackring.optim.records import Recorder, RoundRecord
from slackring.optim.statistics import AveragedBuffers
from slackring.optim.wire import Wire, WireFlight
from slackring.ring.base import ArrivedFlight, Flight, Ring
from slackring.rules import Every, Moment, Plan, Rule
from slackring.rules.timing import next_deadline

__all__ = ["Rounds", "Window"]

log = logging.getLogger("slackring")


@dataclass
class Window:
    """The local steps since the last contribution.

    Attributes
    ----------
    steps, samples
        Local steps, and the samples in them.
    seconds, last_seconds
        Computing time of its local steps, and of the last one.
    blocked
        Seconds of waiting for rounds.
    """

    steps: int = 0
    samples: float = 0.0
    seconds: float = 0.0
    last_seconds: float = 0.0
    blocked: float = 0.0


@dataclass
class _InFlight:
    """A round that this rank has launched and not yet landed."""

    index: int
    flight: Flight
    contribution: Contribution
    control: ControlBlock
    window: Window
    launched: float
    compensation: float
    nbytes: int


class Rounds:
    """The rounds of one optimizer on one rank.

    Every rank launches the same rounds in the same order; what its clock or its polls say decides when, never whether.

    Parameters
    ----------
    rule, ring
        What to do, and where.
    name
        What the rounds are called on the ring.
    names, parameters
        Of everything the optimizer trains.
    buffers
        Floating model buffers to average.
    compression
        "fp16" or None: how payloads travel.
    device
        Where flat buffers lie; None is beside what they hold.
    hyper
        The optimizer's hyper-parameters.
    ending
        Agrees on the last round.
    seconds
        After how many of them this rank asks all to stop; None is never.
    recorder, listeners
        Hear of every round that lands.
    use_average
        Called where an average that has landed is to be used outside the user's own ``step()``.
    """

    def __init__(
        self,
        rule: Rule,
        ring: Ring,
        name: str,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        *,
        compression: str | None,
        device: torch.device | None,
        hyper: HyperParameters,
        ending: Ending,
        seconds: float | None,
        recorder: Recorder | None,
        listeners: Sequence[Callable[[LandedRound], object]],
        use_average: Callable[[], object],
    ) -> None:
        self._rule, self._ring, self._name, self._names = rule, ring, name, names
        self._hyper, self._ending, self._seconds = hyper, ending, seconds
        self._recorder, self._listeners, self._use_average = recorder, listeners, use_average
        self.plan = rule.first_plan
        self._wire = Wire(ring.size) if compression and ring.size > 1 else None
        delta = rule.payload == "delta"
        self.payload: DeltaPayload | GradientPayload
        if delta:
            self.payload = DeltaPayload(rule, [parameter.detach() for parameter in parameters], device)
        else:
            blocking_steps = rule.most_in_flight == 0 and rule.trigger == Every(1) and ring.size > 1
            self.payload = GradientPayload(parameters, ring.size, self._open if blocking_steps else None, device)
        self.statistics = AveragedBuffers(list(buffers), device) if buffers else None
        self._layout = ControlLayout(ring.size, 0 if delta else len(hyper), 0 if delta else len(parameters))
        self._in_flight: deque[_InFlight] = deque()
        self._flight_seconds = 0.0
        self._began = ring.clock.now()
        self._deadline: float | None = None  # of the open window, on the ring's clock
        self.launched = 0
        self.window = Window()
        self.blocked = 0.0
        """Seconds blocked in all."""
        self.begin_window()

    @property
    def over(self) -> bool:
        """Whether the last round of all has been launched."""
        return self._ending.over(self.launched)

    @property
    def _staleness(self) -> int:
        planned = self.plan.in_flight
        return self._rule.most_in_flight if planned is None else planned

    def _free(self) -> bool:
        """Whether a launch would not block; polls the ring."""
        if len(self._in_flight) < self._staleness:
            return True
        oldest = self._in_flight[0]
        return oldest.flight.done() and self._ring.clock.now() >= oldest.launched + self._rule.least_flight

    def moment(self) -> Moment:
        """What the trigger may look at now."""
        window, steps = self.window, self.plan.steps
        return Moment(
            window.steps,
            self._free,
            steps[self._ring.rank] if steps else 1,
            window.last_seconds,
            self.seconds_left(),
        )

    def seconds_left(self) -> float | None:
        """Seconds until the open window's deadline; None if it has none."""
        return None if self._deadline is None else self._deadline - self._ring.clock.now()

    def begin_window(self) -> None:
        """Count the open window's time from now on."""
        self._deadline = None if self.plan.seconds is None else self._ring.clock.now() + self.plan.seconds

    def postpone(self, seconds: float) -> None:
        """Move the open window's deadline, since time has passed that is not training's."""
        if self._deadline is not None:
            self._deadline += seconds

    @property
    def open(self) -> bool:
        """Whether anything is in flight or in the window."""
        return bool(self._in_flight) or self.window.steps > 0

    def _open(self) -> Flight:
        flight = self._ring.open(f"{self._name}.{self.launched % (self._rule.most_in_flight + 1)}")
        return flight if self._wire is None else self._wire.open(flight)

    def advance(self, *, joined_at: float | None = None, draining: bool = False, stepping: bool = False) -> None:
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
            if self.statistics is not None:
                self.statistics.settle()
        if not stepping:
            # After the launch, as in step(), so that every rank launches a round with the same anchor.
            self._use_average()
        if self._ending.pause(self.launched):
            self.land_all()  # on all ranks, also those that only help others to drain
        if self._staleness and self._deadline is not None and self.plan.seconds is not None:
            self._deadline = next_deadline(self._deadline, self._ring.clock.now(), self.plan.seconds)
        else:
            self.begin_window()
        self._ending.progress.stop = self.over

    def _launch(self, joined_at: float | None, draining: bool) -> None:
        window, self.window = self.window, Window()
        contribution = self.payload.pack(window.steps, window.samples)
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
        control = self._layout.new(self._ring.rank)
        slots = control.slots
        slots[Slot.STEPS] = window.steps
        slots[Slot.SAMPLES] = window.samples if contributes else 0.0
        slots[Slot.STEP_SECONDS] = window.seconds / max(window.steps, 1)
        slots[Slot.LAST_SECONDS] = window.last_seconds
        slots[Slot.BLOCKED_SECONDS] = window.blocked
        slots[Slot.FLIGHT_SECONDS] = self._flight_seconds
        if joined_at is not None:
            slots[Slot.JOINED] = 1.0 + max(self._ring.clock.now() - joined_at, 0.0)
        slots[Slot.DRAINING] = draining
        slots[Slot.STOP] = self._ending.stop_requested or stop_wish.is_set() or self._out_of_time()
        slots[Slot.NON_FINITE] = non_finite
        slots[Slot.AGAIN] = contribution.again
        slots[Slot.DIGEST] = self.payload.digest(self.launched)
        if contribution.present is not None:
            control.hyper_parameters[:] = self._hyper.read()
            control.has_gradient[:] = contribution.present
        nbytes, uncompressed = self.payload.nbytes, flight
        if isinstance(flight, WireFlight):
            nbytes, uncompressed = flight.nbytes, flight.inner
            slots[Slot.PEAK] = peak = flight.peak()
            slots[Slot.WIDE] = flight.too_wide(peak)
        if self.statistics is not None:
            for tensor in self.statistics.pack(contributes):
                uncompressed.send(tensor)
            nbytes += self.statistics.nbytes
        uncompressed.send(control.tensor)
        nbytes += control.tensor.nbytes
        flight.seal()
        self._in_flight.append(
            _InFlight(
                self.launched,
                flight,
                contribution,
                control,
                window,
                self._ring.clock.now(),
                self.payload.compensation,
                nbytes,
            )
        )
        self.launched += 1

    def _land(self) -> None:
        """Wait for the oldest round in flight and take it in."""
        clock = self._ring.clock
        before = clock.now()
        oldest = self._in_flight.popleft()
        oldest.flight.wait()
        clock.sleep(oldest.launched + self._rule.least_flight - clock.now())
        landed = oldest.flight.once("landed", lambda: self._layout.read(oldest.control))
        sent = landed.totals  # what came with the buffers, also if the gradients are reduced again
        if landed.again:
            landed = self._reduce_again(oldest, landed)
        elif landed.wide:
            self._reduce_uncompressed(oldest)
        elif isinstance(oldest.flight, WireFlight):
            oldest.flight.unpack()
        if self._wire is not None:
            self._wire.learn(landed.slots[:, Slot.PEAK])
        now = clock.now()
        blocked = now - before
        self.blocked += blocked
        self.window.blocked += blocked
        self._flight_seconds = now - oldest.launched

        landed.check_anchor(oldest.index)
        self.payload.land(oldest.contribution, landed)
        if isinstance(self.payload, GradientPayload) and landed.totals.samples > 0 and not self.payload.ready:
            culprit = self.payload.own_culprit()
            if culprit is not None:
                self._tell_non_finite(culprit)
        if self.statistics is not None:
            self.statistics.land(sent)
        self.agreed_hyper_parameters = landed.hyper_parameters[landed.lowest_training_rank]
        plan = self.plan
        self.plan = oldest.flight.once("plan", lambda: self._rule.plan(landed.seen, plan))
        self._ending.take(oldest.index, landed)
        listeners = (*self._listeners, *(watcher.landed for watcher in watchers))
        if listeners:
            told = landed.told(oldest.index)
            for listener in listeners:
                listener(told)
        heard = recorders(self._recorder)
        if heard:
            record = RoundRecord(
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
            for recorder in heard:
                recorder.round(record)

    def _reduce_again(self, oldest: _InFlight, landed: Landed) -> Landed:
        """Reduce a blocking gradient round once more, from what the gradients really are."""
        payload = self.payload
        if not isinstance(payload, GradientPayload):
            raise RuntimeError("only gradient rounds are reduced again")
        payload.discard(oldest.contribution)
        if oldest.window.steps:
            payload.accumulate(oldest.window.samples)
        contribution = payload.pack(oldest.window.steps, oldest.window.samples)
        control = self._layout.new(self._ring.rank)
        control.slots[:] = landed.slots[self._ring.rank]
        control.slots[Slot.AGAIN] = False
        control.slots[Slot.NON_FINITE] = contribution.culprit is not None
        control.hyper_parameters[:] = landed.hyper_parameters[self._ring.rank]
        control.has_gradient[:] = contribution.present or 0
        flight = self._ring.open(f"{self._name}.again")
        for tensor in (*contribution.tensors, control.tensor):
            flight.send(tensor)
        flight.seal()
        flight.wait()
        oldest.contribution = contribution
        oldest.nbytes += self.payload.nbytes + control.tensor.nbytes
        return flight.once("landed", lambda: self._layout.read(control))

    def _reduce_uncompressed(self, oldest: _InFlight) -> None:
        """Reduce the payload of a round once more, as it is."""
        flight = self._ring.open(f"{self._name}.again")
        for tensor in oldest.contribution.tensors:
            flight.send(tensor)
        flight.seal()
        flight.wait()
        oldest.nbytes += self.payload.nbytes

    def land_all(self) -> None:
        """Land everything that is in flight."""
        while self._in_flight:
            self._land()
            self._use_average()

    def _out_of_time(self) -> bool:
        return self._seconds is not None and self._ring.clock.now() - self._began >= self._seconds

    def _tell_non_finite(self, place: int) -> None:
        log.warning(
            "rank %d, round %d: %r is not finite (NaN or infinite) in this rank's contribution.",
            self._ring.rank,
            self.launched,
            self._names[place],
        )

    def save(self) -> dict[str, Any]:
        """State of this rank in tensors and plain values, local; waits for rounds that this rank has launched.

        A round in flight is saved as the sum it becomes, so that it can be landed after a restart without the other ranks; or
        as this rank's contribution, if all ranks have to reduce it again then.
        """
        for round in self._in_flight:
            round.flight.wait()
            if isinstance(round.flight, WireFlight) and not self._layout.read(round.control).wide:
                round.flight.unpack()
        return {
            "rule": str(self._rule),
            "rank": self._ring.rank,
            "size": self._ring.size,
            "launched": self.launched,
            "seconds": self._ring.clock.now() - self._began,
            "window": dataclasses.asdict(self.window),
            "plan": dataclasses.asdict(self.plan),
            "seconds left": self.seconds_left(),
            "exponent": None if self._wire is None else self._wire.exponent,
            "ending": self._ending.save(),
            "payload": self.payload.save(),
            "statistics": None if self.statistics is None else self.statistics.save(),
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

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on exactly where every rank was, if all have their own checkpoint; else from the anchor."""
        mine = (saved["rule"], saved["rank"], saved["size"]) == (str(self._rule), self._ring.rank, self._ring.size)
        exact = b"0" not in self._ring.gather(b"1" if mine else b"0", f"{self._name}.exact")
        self.payload.restore(saved["payload"], exact=exact)
        last = saved["ending"]["last"]
        over = last is not None and saved["launched"] > last  # that stop ended the training before, not this one
        self._ending.restore(saved["ending"], exact=exact and not over)
        if self.statistics is not None and saved["statistics"] is not None:
            self.statistics.restore(saved["statistics"], exact=exact)
        self.launched = saved["launched"]
        self._began = self._ring.clock.now() - saved["seconds"]
        if not exact:
            return
        self.window, self.plan = Window(**saved["window"]), Plan(**saved["plan"])
        left = saved["seconds left"]
        self._deadline = None if left is None else self._ring.clock.now() + left
        if self._wire is not None:
            self._wire.exponent = saved["exponent"]
        for place, round in enumerate(saved["in flight"]):
            control = self._layout.new(self._ring.rank)
            control.tensor.copy_(round["control"])
            contribution = self.payload.restore_contribution(round["sum"], place)
            contribution.unscaled = round["unscaled"]
            self._in_flight.append(
                _InFlight(
                    round["index"],
                    ArrivedFlight(),
                    contribution,
                    control,
                    Window(**round["window"]),
                    self._ring.clock.now(),
                    round["compensation"],
                    round["nbytes"],
                )
            )
