"""Windows, batches, idle time and staleness, as runs recorded them; and their plots."""

from __future__ import annotations

import pytest

from slackring.lab.comparison import Row
from slackring.lab.config import TrainConfig
from slackring.lab.plots import batch_plot, sweep_plot, window_plot
from slackring.lab.train import train_virtual
from slackring.lab.windows import batches, by_rank, by_rule, idle_share, windows

COMMON = {"task": "digits", "straggler": "persistent:ranks=1,factor=4", "step_time": 0.1, "lr": 0.1, "seconds": 4.0}


def run(rule, **changes):
    return train_virtual(TrainConfig(**{**COMMON, "rule": rule, **changes}), 2)


@pytest.fixture(scope="module")
def runs():
    return {rule: run(rule) for rule in ("bsp:accumulate=2", "losp", "anytime:compute_time=0.8")}


def test_windows_count_every_local_step_and_sample_once(runs):
    for one in runs.values():
        table = windows(one)
        assert table["local_steps"].sum() == one.summary.steps
        assert table["samples"].sum() == one.summary.samples
        assert batches(one).sum() == one.summary.samples


@pytest.mark.parametrize(
    ("rule", "rank_0", "rank_1", "stale"),
    [
        ("bsp:accumulate=2", 2, 2, 0),
        ("losp", 4, 1, 1),
        ("anytime:compute_time=0.8", 8, 2, 0),
    ],
)
def test_windows_are_as_long_as_the_rule_says(runs, rule, rank_0, rank_1, stale):
    table = windows(runs[rule]).query("2 <= round <= 3")
    assert table[table["rank"] == 0]["local_steps"].tolist() == [rank_0] * 2
    assert table[table["rank"] == 1]["local_steps"].tolist() == [rank_1] * 2
    assert table["staleness"].tolist() == [stale] * 4


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_staleness_is_what_the_rule_says_once_rounds_take_that_long(staleness):
    rule = f"anytime:compute_time=0.4,staleness={staleness},communication_time={0.4 * max(staleness, 1)}"
    table = windows(run(rule, seconds=6.0))
    assert table[table["round"] < staleness]["staleness"].tolist() == [r for _ in range(2) for r in range(staleness)]
    assert set(table[table["round"] >= staleness]["staleness"]) == {staleness}


def test_idle_is_what_blocked_a_rank():
    half = "anytime:compute_time=0.4,communication_time=0.4"
    assert idle_share(run(half, seconds=8.0)) == pytest.approx([0.5, 0.5], abs=0.06)
    assert idle_share(run("bsp", seconds=8.0)) == pytest.approx([0.75, 0.0], abs=0.01)


def test_the_table_by_rank(runs):
    table = by_rank(runs["losp"])
    assert table["seconds a local step"].tolist() == [0.1, 0.4]
    assert table["local steps a window"].tolist() == [4, 1]
    assert table["idle"].tolist() == ["0%", "0%"]
    both = by_rule(runs)
    assert both.index.names == ["rule", "rank"]
    assert both.loc["losp"].equals(table)


def test_the_window_plot_has_a_line_a_rank_in_a_panel_a_rule(runs, tmp_path):
    figure = window_plot(runs, rounds=4)
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(runs)
    for axes, one in zip(figure.axes, runs.values(), strict=True):
        for rank, line in enumerate(axes.lines):
            expected = windows(one).query(f"rank == {rank} and round < 4")["local_steps"]
            assert line.get_ydata().tolist() == expected.tolist()
    figure.savefig(tmp_path / "windows.png")


def test_the_batch_plot_shows_every_update(runs, tmp_path):
    figure = batch_plot(runs)
    for left, one in zip(figure.axes[::2], runs.values(), strict=True):
        assert left.lines[0].get_ydata().tolist() == batches(one).tolist()
    figure.savefig(tmp_path / "batches.png")


def test_the_sweep_plot_shows_medians_ranges_and_what_was_missed(tmp_path):
    def some(*seconds, share=0.8):
        return [Row("losp", seed, 0.1, False, value, limit_share=share) for seed, value in enumerate(seconds)]

    figure = sweep_plot({"1": some(4, 5, 9), "2": some(6, None, 7)}, "k_max", baseline=some(20, 21, 22, share=0.3))
    left, right = figure.axes
    assert left.lines[0].get_xydata().tolist() == [[0, 5]]
    (bars,) = left.collections
    assert bars.get_segments()[0].tolist() == [[0, 4], [0, 9]]
    assert "1 of 3\nmissed" in [text.get_text() for text in left.texts]
    assert [label.get_text() for label in left.get_xticklabels()] == ["1", "2"]
    assert [line.get_ydata()[0] for line in right.lines if line.get_linestyle() == "--"] == [0.3]
    assert left.get_ylim()[1] > 21
    figure.savefig(tmp_path / "sweep.png")


def test_the_sweep_plot_has_no_seconds_where_nothing_reached_the_target(tmp_path):
    missed = [Row("losp", 0, 0.1, False, None, limit_share=0.8)]
    figure = sweep_plot({"1": missed, "2": missed}, "k_max")
    assert list(figure.axes[0].get_yticks()) == []
    assert len(figure.axes[0].texts) == 2
    figure.savefig(tmp_path / "sweep.png")
