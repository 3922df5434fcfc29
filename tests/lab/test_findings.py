"""Sentences on what was found say what the figures say: also that BSP was faster, or that a target was missed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from slackring.lab.comparison import CompareConfig, Comparison, Row
from slackring.lab.config import TrainConfig
from slackring.lab.findings import batch_finding, finding, idle_finding, sweep_finding, window_finding
from slackring.lab.train import train_virtual


def rows(rule, *seconds, share=0.5, accuracy=0.9):
    return [
        Row(rule, seed, 0.1, False, seconds_to_target=value, limit_share=share, accuracy_at_equal_samples=accuracy)
        for seed, value in enumerate(seconds)
    ]


def comparison(**seconds):
    found = [row for rule, some in seconds.items() for row in rows(rule, *some)]
    config = CompareConfig(TrainConfig(seconds=20.0, target=0.8), tuple(seconds), seeds=(0, 1, 2))
    return Comparison(config, (), tuple(found), 1234.0, False, Path())


def test_a_rule_that_is_faster_is_told_as_a_share_of_bsps_time():
    text = finding(comparison(bsp=[20, 18, 22], osp=[12, 11, 19], losp=[10, 9, 11]), "losp")
    assert text.startswith(
        "**`losp` reached 0.8 after 10.0 s (9.0 to 11.0), plain BSP after 20.0 s (18.0 to 22.0): 0.50 of its time.**"
    )
    assert "The others: `osp` after 12.0 s (11.0 to 19.0)." in text
    assert "First of all" not in text
    assert text.endswith(
        "Share of the no-wait limit: 0.500; BSP: 0.500. Accuracy after 1,234 samples: 0.900; BSP: 0.900."
    )


@pytest.mark.parametrize(
    ("bsp", "losp", "told"),
    [
        ([8, 9, 10], [20, 18, 22], ": plain BSP was faster.**"),
        ([8, 9, 19], [20, 18, 22], ": plain BSP was faster, though the ranges overlap.**"),
        ([12, 9, 19], [11, 10, 22], ": 0.92 of its time, though the ranges overlap.**"),
        (
            [8, 9, 10],
            [20, None, 22],
            "in only 2 of 3 runs, plain BSP after 9.0 s (8.0 to 10.0): plain BSP was faster.**",
        ),
        ([8, None, None], [9, 9, 9], "reached 0.8 after 9.0 s, plain BSP in only 1 of 3 runs.**"),
        ([None] * 3, [None] * 3, "reached 0.8 in none of 3 runs, plain BSP in none of 3 runs.**"),
        ([None], [None], "reached 0.8 not at all, plain BSP not at all.**"),
    ],
)
def test_what_is_not_faster_is_told_as_plainly(bsp, losp, told):
    assert told in finding(comparison(bsp=bsp, losp=losp), "losp")


def test_another_rule_that_came_first_is_named():
    assert "First of all was `osp`." in finding(comparison(bsp=[20], osp=[5], losp=[10]), "losp")


def test_one_rate_for_all_rules_is_told():
    found = comparison(bsp=[20], losp=[10])
    fixed = dataclasses.replace(found, config=dataclasses.replace(found.config, lr_grid=(0.1,)))
    assert "All rules ran at one learning rate" in finding(fixed, "losp")
    assert "one learning rate" not in finding(found, "losp")


def test_without_bsp_nothing_is_said_of_it():
    assert "BSP" not in finding(comparison(osp=[5], losp=[10]), "losp")
    assert "plain BSP" not in finding(comparison(bsp=[5], losp=[10]), "bsp")


def test_a_sweep_names_the_first_the_last_and_what_chance_may_decide():
    swept = {
        "0": rows("osp", 20, 21, 22, share=0.9),
        "0.5": rows("losp", 10, 11, 12, share=0.95),
        "1": rows("losp", 9, 10.5, 13, accuracy=0.7),
        "1.5": rows("losp", None, 9, 9),
    }
    text = sweep_finding(swept, "compensation", 0.8)
    assert (
        "**0.8 was reached first with compensation=1, after 10.5 s (9.0 to 13.0), and last with compensation=0" in text
    )
    assert "overlaps that of compensation=0.5, so that chance may decide" in text
    assert "It was reached in only 2 of 3 runs with compensation=1.5." in text
    assert "share of the no-wait limit went from 0.500 (compensation=1) to 0.950 (compensation=0.5)." in text
    assert "accuracy at equal samples went from 0.700 (compensation=1) to 0.900 (compensation=0)." in text


def test_a_sweep_without_a_value_that_gets_there_says_so():
    text = sweep_finding({"1": rows("losp", None), "2": rows("losp", None)}, "k_max", 0.8)
    assert text.startswith("**No value of k_max reached 0.8 in all of its runs.**")
    assert "no-wait limit was 0.500 with every value" in text


@pytest.fixture(scope="module")
def runs():
    common = {"task": "digits", "straggler": "persistent:ranks=1,factor=3", "lr": 0.2, "seconds": 4.0}
    return {rule: train_virtual(TrainConfig(rule=rule, **common), 2) for rule in ("bsp", "losp")}


def test_windows_are_told_by_rank(runs):
    assert window_finding(runs["losp"]) == (
        "With `losp`, ranks 0 to 1 took 3 and 1 local steps in a window (medians; at most 3), at a staleness of 1 (at most "
        "1), and were blocked for 0% and 0% of the time."
    )
    assert "took 1 and 1 local steps" in window_finding(runs["bsp"])
    assert "a staleness of 0 (at most 0)" in window_finding(runs["bsp"])
    assert "for 67% and 0%" in window_finding(runs["bsp"])


def test_batches_are_told_with_their_spread(runs):
    text = batch_finding(runs)
    assert "`bsp` 64 (always), 14 updates" in text
    assert "`losp` 1" in text
    assert "64 to 128)" in text


def test_idle_time_is_told_by_value(runs):
    text = idle_finding({"0": runs["bsp"], "1": runs["losp"]}, "staleness")
    assert text == (
        "Ranks were blocked for 33% with staleness=0 (gradients 0 averages old) and 0% with staleness=1 (gradients 1 averages "
        "old) of the time."
    )
