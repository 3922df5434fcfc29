"""Injecting stragglers into local steps."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackring.errors import SpecError
from slackring.stragglers import NoStraggler, Pacer, parse

seconds = st.integers(0, 1000).map(lambda value: value / 64)  # sums are exact


class FakeClock:
    """A clock that only sleep moves."""

    def __init__(self, now: float = 0.0) -> None:
        self.time = now

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@given(start=seconds, computing=seconds, step_time=seconds.filter(bool), delay=seconds)
def test_a_step_is_filled_up_to_its_target(start: float, computing: float, step_time: float, delay: float) -> None:
    clock = FakeClock(start + computing)
    injected = Pacer(parse(f"constant:seconds={delay}"), step_time)(clock, 0, 0, start)
    assert clock.time - start == max(step_time + delay, computing)
    assert injected == clock.time - (start + computing)


@given(start=seconds, computing=seconds)
def test_without_a_step_time_the_computing_is_the_step_time(start: float, computing: float) -> None:
    clock = FakeClock(start + computing)
    assert Pacer(parse("persistent:ranks=1,factor=4"))(clock, 0, 0, start) == 0
    assert Pacer(parse("persistent:ranks=1,factor=4"))(clock, 1, 0, start) == 3 * computing
    assert clock.time - start == 4 * computing


def test_an_unknown_start_counts_as_now() -> None:
    clock = FakeClock(5.0)
    assert Pacer(NoStraggler(), 0.5)(clock, 0, 0, None) == 0.5
    assert clock.time == 5.5
    assert Pacer(parse("constant:seconds=2"))(clock, 0, 0, None) == 2.0


def test_each_step_of_each_rank_gets_its_own_delay() -> None:
    straggler = parse("shifted_exponential:mean=1,ranks=1", seed=3)
    pace = Pacer(straggler, 0.5)
    for rank in range(2):
        for step in range(4):
            assert pace(FakeClock(), rank, step, 0.0) == straggler.step_seconds(rank, step, 0.5)


@pytest.mark.parametrize("step_time", [0.0, -1.0, math.nan, math.inf])
def test_refuses_an_impossible_step_time(step_time: float) -> None:
    with pytest.raises(SpecError, match="the step time is"):
        Pacer(NoStraggler(), step_time)


def test_needs_neither_torch_nor_pyarrow() -> None:
    program = (
        "import sys, types, importlib.util\n"
        "import slackring.stragglers as s\n"
        "s.parse('persistent:ranks=3,factor=4')\n"
        "print(sorted({'torch', 'pyarrow', 'pandas', 'horovod'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
