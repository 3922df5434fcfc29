"""The eight promises of every rule, on real ranks; tests/testing runs the same checks on the virtual ring."""

from __future__ import annotations

import pytest

from slackring.rules import parse_rule
from slackring.testing import PROMISES

# One of each family, with the options that are hardest on a ring: on two ranks and on four.
RULES = (
    "bsp:accumulate=3",
    "local_sgd:steps=3",
    "losp:k_max=8,compensation=auto",
    "cocod:steps=2,weighting=samples",
    "anytime:compute_time=0.003,staleness=auto,communication_time=0.005",
    "elastic_bsp:objective=rate,payload=gradient",
    "relaxed:payload=gradient,staleness=2,k_max=4",
    "relaxed:steps=2,staleness=3,compensation=0.5,weighting=ranks",
)
# What differs from those in the payload or the trigger, which are the same code on any number of ranks: on two.
OTHERS = ("bsp", "osp:k_max=8", "losp:k_max=8,compensation=0.75", "anytime:compute_time=0.005", "elastic_bsp")
# The first promise is about a rank that trains alone: tests/ring has it for Horovod.
SHARED = [promise for promise in PROMISES if promise != "size_one_is_the_plain_optimizer"]


def keep(rule, promise):
    PROMISES[promise](parse_rule(rule))


@pytest.mark.parametrize("promise", SHARED)
@pytest.mark.parametrize("rule", RULES)
def test_promise(ranks, size, rule, promise):
    ranks(size).run(keep, rule, promise)


@pytest.mark.parametrize("size", [2], indirect=True)
@pytest.mark.parametrize("promise", SHARED)
@pytest.mark.parametrize("rule", OTHERS)
def test_promise_of_the_others(ranks, size, rule, promise):
    ranks(size).run(keep, rule, promise)
