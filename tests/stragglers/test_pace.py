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


@given(computing=seconds, step_time=seconds.filter(bool), delay=seconds)
def test_a_step_is_filled_up_to_its_target(computing: float, step_time: float, delay: float) -> None:
    injected = Pacer(parse(f"constant:seconds={delay}"), step_time)(0, 0, computing)
    assert computing + injected == max(step_time + delay, computing)


@given(computing=seconds)
def test_without_a_step_time_the_computing_is_the_step_time(computing: float) -> None:
    pace = Pacer(parse("persistent:ranks=1,factor=4"))
    assert pace(0, 0, computing) == 0
    assert pace(1, 0, computing) == 3 * computing


def test_each_step_of_each_rank_gets_its_own_delay() -> None:
    straggler = parse("shifted_exponential:mean=1,ranks=1", seed=3)
    pace = Pacer(straggler, 0.5)
    for rank in range(2):
        for step in range(4):
            assert pace(rank, step, 0.0) == straggler.step_seconds(rank, step, 0.5)


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
