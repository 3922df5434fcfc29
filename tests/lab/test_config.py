"""The value that shapes a run."""

from __future__ import annotations

import json

import pytest

from slackring.errors import RuleError, SpecError, StragglerError, UnsupportedError
from slackring.lab.config import SINGLE_RANK_LR, TrainConfig


def test_json_holds_everything():
    config = TrainConfig(
        rule="losp:k_max=4", straggler="shifted_exponential:mean=1", compression="fp16", seconds=3.0, lr=0.5
    )
    assert TrainConfig.from_json(json.dumps(config.to_json())) == config


@pytest.mark.parametrize(
    ("values", "error", "told"),
    [
        ({"rule": "lsop"}, RuleError, "did you mean 'losp'"),
        ({"straggler": "persistant"}, StragglerError, "did you mean 'persistent'"),
        ({"network": "latency=x"}, SpecError, "latency"),
        ({"compression": "fp61"}, UnsupportedError, "did you mean 'fp16'"),
        ({"compression": "fp16", "rule": "server/asp"}, SpecError, "leave --compression out"),
        ({"lr": 0.0}, SpecError, "--lr must be"),
        ({"lr": float("nan")}, SpecError, "--lr must be"),
        ({"step_time": -1.0}, SpecError, "--step-time must be"),
        ({"batch_size": 0}, SpecError, "--batch-size must be"),
        ({"seconds": float("inf")}, SpecError, "--seconds must be"),
        ({"momentum": 1.0}, SpecError, "--momentum"),
        ({"target": 88.0}, SpecError, "--target is an accuracy"),
        ({"seed": -1}, SpecError, "seed"),
        ({"seed": 2**63}, SpecError, r"below 2\*\*63"),  # more than torch takes
        ({"seconds": None}, SpecError, "a run needs an end"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(values, error, told):
    with pytest.raises(error, match=told) as caught:
        TrainConfig(**{"seconds": 1.0, **values})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["losp", "losp:", " losp:k_max=64 ", "losp:k_max=64,k_min=1"])
def test_one_rule_has_one_text(text):
    config = TrainConfig(rule=text, seconds=1.0)
    assert config == TrainConfig(rule="losp", seconds=1.0)
    assert config.to_json()["rule"] == "losp"


def test_gradient_rules_take_the_lr_times_the_ranks():
    assert TrainConfig(rule="bsp", seconds=1.0).with_lr(4).lr == pytest.approx(4 * SINGLE_RANK_LR)
    assert TrainConfig(rule="losp", seconds=1.0).with_lr(4).lr == SINGLE_RANK_LR
    given = TrainConfig(rule="bsp", lr=0.3, seconds=1.0)
    assert given.with_lr(4) == given


def test_a_straggler_is_seeded_by_the_run_unless_it_has_a_seed():
    text = "shifted_exponential:mean=1"
    assert TrainConfig(straggler=text, seed=7, seconds=1.0).parsed_straggler().seed == 7
    assert TrainConfig(straggler=f"{text},seed=3", seed=7, seconds=1.0).parsed_straggler().seed == 3
