"""The settings of the papers' notebooks, and what is swept in them."""

from __future__ import annotations

import pytest

from slackring.errors import RuleError, SpecError
from slackring.lab.studies import STUDIES, study, with_options

EVERY = [(name, size) for name, sizes in STUDIES.items() for size in sizes]


@pytest.mark.parametrize(("name", "size"), EVERY)
def test_every_size_can_be_compared_and_swept(name, size):
    given = study(name, size)
    for virtual in (True, False):
        config = given.comparison(virtual=virtual)
        assert config.virtual == virtual
        assert config.rules[0] == "bsp"
        assert config.rules[-1].split(":")[0] == name
    for option, values in given.values.items():
        sweep = given.sweep(option)
        assert list(sweep.rules) == values.split(",")
        assert sweep.config.rules == ("bsp", *sweep.rules.values())
        assert sweep.config.virtual
    if given.on_server:
        assert given.comparison(f"{given.on_server},{given.rule}").rules[-1] == config.rules[-1]


@pytest.mark.parametrize("name", STUDIES)
def test_sizes_grow(name):
    smoke, laptop, paper = (study(name, size).comparison() for size in ("smoke", "laptop", "paper"))
    assert len(smoke.seeds) < len(laptop.seeds) < len(paper.seeds)
    assert smoke.base.seconds < laptop.base.seconds < paper.base.seconds
    assert smoke.workers <= laptop.workers <= paper.workers


def test_what_is_given_replaces_what_the_size_says_and_what_is_empty_does_not():
    given = study("losp", "laptop", rule="losp:k_max=8", seeds="7", straggler="", workers=0, target=0.5)
    config = given.comparison()
    assert config.rules[-1] == "losp:k_max=8"
    assert (config.seeds, config.workers, config.base.target) == ((7,), 4, 0.5)
    assert config.base.straggler == study("losp", "laptop").straggler


def test_a_sweep_keeps_the_rules_other_options_and_takes_more():
    given = study("anytime", "smoke", rule="anytime:compute_time=0.4")
    sweep = given.sweep("staleness", "0, 2,auto", beside="", communication_time=0.3)
    common = "anytime:compute_time=0.4"
    assert sweep.rules == {
        "0": f"{common},communication_time=0.3",
        "2": f"{common},staleness=2,communication_time=0.3",
        "auto": f"{common},staleness=auto,communication_time=0.3",
    }
    assert sweep.config.rules == tuple(sweep.rules.values())


def test_options_replace_those_that_a_rule_has():
    assert with_options("bsp", accumulate=2) == "bsp:accumulate=2"
    assert with_options("losp:compensation = 0.5,k_max=16", compensation="auto") == "losp:k_max=16,compensation=auto"
    with pytest.raises(RuleError, match="has no option 'lookahead'"):
        with_options("losp", lookahead=3)


def test_an_unknown_size_is_refused():
    with pytest.raises(SpecError, match="no size 'labtop'; did you mean 'laptop'"):
        study("losp", "labtop")
