"""Comparisons, tables and plots, on virtual ranks."""

from __future__ import annotations

import dataclasses
import io
import json
import signal

import pytest
from rich.console import Console

from slackring.errors import DataError, DivergedError, OutputError, SpecError
from slackring.lab import compare as compare_module
from slackring.lab import launch
from slackring.lab.compare import compare, tune
from slackring.lab.comparison import CompareConfig, Comparison, load_comparison
from slackring.lab.config import TrainConfig
from slackring.lab.interrupt import Interrupt
from slackring.lab.plots import accuracy_plot, timeline_plot
from slackring.lab.report import print_comparison, verdict
from slackring.lab.runs import load_run, run_name

BASE = TrainConfig(
    task="digits", step_time=0.1, straggler="persistent:ranks=2+3,factor=1.3+4", seconds=10.0, target=0.8, momentum=0.9
)
CONFIG = CompareConfig(BASE, ("bsp", "losp"), lr_grid=(0.05, 0.2), seeds=(0, 1), tuning_runs=1, virtual=True)
SCHEMA = {
    *("rule", "seed", "lr", "seconds_to_target", "speedup", "final_accuracy", "steps_per_second", "limit_share"),
    *("wait_share", "rounds", "bytes_to_target", "run"),
}


def silent(line):
    pass


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return compare(CONFIG, tmp_path_factory.mktemp("runs"), name="one", say=silent)


def test_a_disk_that_fills_up_keeps_the_runs_before_and_names_no_hidden_folder(tmp_path, fill_disk_at):
    fill_disk_at("losp-seed0")
    config = dataclasses.replace(CONFIG, lr_grid=(0.2,))
    with pytest.raises(OutputError) as caught:
        compare(config, tmp_path, name="one", say=silent)
    assert str(caught.value) == (
        f"results cannot be written to {str(tmp_path / 'one')!r}: No space left on device; give another --out. "
        f"1 of 4 runs are kept in {str(tmp_path / 'one')!r}."
    )
    assert [folder.name for folder in tmp_path.iterdir()] == ["one"]
    kept = load_comparison(tmp_path / "one")
    assert [row.rule for row in kept.rows] == ["bsp"]
    assert kept.interrupted
    assert len(kept.runs()["bsp"]) == 1


def test_a_comparison_without_its_table_names_its_runs(tmp_path, fill_disk_at):
    fill_disk_at("comparison.json")
    config = dataclasses.replace(CONFIG, lr_grid=(0.2,), seeds=(0,))
    with pytest.raises(OutputError, match=r"2 of 2 runs are kept"):
        compare(config, tmp_path, name="one", say=silent)
    assert not (tmp_path / "one" / "comparison.json").exists()
    with pytest.raises(DataError, match=r"incomplete comparison; show its runs one by one: bsp-seed0, losp-seed0\."):
        load_run(tmp_path / "one")
    assert load_run(tmp_path / "one" / "bsp-seed0").config.rule == "bsp"


def test_a_damaged_run_of_a_comparison_is_left_out_and_told(tmp_path, caplog):
    found = compare(dataclasses.replace(CONFIG, lr_grid=(0.2,), seeds=(0,)), tmp_path, name="one", say=silent)
    (tmp_path / "one" / "bsp-seed0" / "steps.parquet").write_bytes(b"half")
    assert {rule: len(runs) for rule, runs in found.runs().items()} == {"bsp": 0, "losp": 1}
    assert "a run is left out: " in caplog.text


def test_the_json_has_the_promised_schema_and_reads_back(comparison):
    values = json.loads(json.dumps(comparison.to_json()))
    assert [SCHEMA - set(row) for row in values["runs"]] == [set()] * 4
    assert Comparison.from_json(values) == comparison
    assert load_comparison(comparison.folder) == comparison


def test_every_rule_met_every_seed_with_its_own_lr(comparison):
    tuned = {one.rule: one.lr for one in comparison.tuned}
    assert [(row.rule, row.seed, row.lr) for row in comparison.rows] == [
        (rule, seed, tuned[rule]) for seed in (0, 1) for rule in ("bsp", "losp")
    ]
    for row in comparison.rows:
        run = load_run(comparison.folder / run_name(dataclasses.replace(BASE, rule=row.rule, seed=row.seed)))
        assert run.config.lr == row.lr
        assert "tuned on virtual ranks, seeds 1000" in run.config.lr_source
        assert run.summary.seconds_to_target == row.seconds_to_target


def test_losp_beats_bsp_under_a_straggler(comparison):
    bsp, losp = comparison.of("bsp"), comparison.of("losp")
    assert [row.speedup for row in bsp] == [1.0, 1.0]
    for before, after in zip(bsp, losp, strict=True):
        assert after.speedup == pytest.approx(before.seconds_to_target / after.seconds_to_target)
        assert after.speedup > 1.5
        assert after.limit_share > 0.93 > 0.34 > before.limit_share


def test_equal_samples_are_what_every_run_reached(comparison):
    assert comparison.equal_samples == min(row.samples for row in comparison.rows)
    slowest = min(comparison.rows, key=lambda row: row.samples)
    assert slowest.accuracy_at_equal_samples == slowest.final_accuracy


def test_tuning_takes_the_fastest_rate_on_seeds_that_do_not_count():
    config = dataclasses.replace(CONFIG, seeds=(0, 1000, 1002), tuning_runs=2)
    assert config.tuning_seeds == (1001, 1003)
    tuned = tune(dataclasses.replace(CONFIG, lr_grid=(0.0001, 0.05, 0.1, 0.2)), "losp")
    reached = {lr: seconds for lr, (seconds, _) in tuned.tried.items() if seconds is not None}
    assert tuned.lr == min(reached, key=reached.get)
    assert tuned.tried[0.0001][0] is None


def test_where_no_rate_reaches_the_target_the_best_accuracy_counts():
    base = dataclasses.replace(BASE, target=1.0, seconds=4.0)
    tuned = tune(CompareConfig(base, ("losp",), lr_grid=(0.0001, 0.1), tuning_runs=1), "losp")
    assert tuned.lr == 0.1
    assert tuned.at_edge
    assert tuned.tried[0.1][0] is None


def test_a_rate_that_diverges_is_passed_over(monkeypatch, tmp_path):
    real = compare_module.train_virtual

    def train_virtual(config, size, **kwargs):
        if config.lr == 0.2:
            raise DivergedError("the loss was not finite.")
        return real(config, size, **kwargs)

    for module in (compare_module, launch):
        monkeypatch.setattr(module, "train_virtual", train_virtual)
    tuned = tune(CONFIG, "losp")
    assert (tuned.lr, tuned.tried[0.2]) == (0.05, (None, None))
    # And a run that counts and diverges is a row without figures.
    fixed = dataclasses.replace(CONFIG, lr_grid=(0.2,), seeds=(0,))
    found = compare(fixed, tmp_path, say=silent)
    assert [(row.diverged, row.seconds_to_target, row.run) for row in found.rows] == [(True, None, None)] * 2
    assert "No rule reached" in verdict(found)
    _printed(found)


def _printed(comparison, width=100):
    out = io.StringIO()
    print_comparison(comparison, Console(file=out, width=width))
    return out.getvalue()


def test_the_table_says_what_was_injected_and_how_the_lr_was_chosen(comparison):
    text = _printed(comparison)
    assert "step time 0.1 s, straggler persistent:ranks=2+3,factor=1.3+4" in text
    assert "tuned by itself on virtual ranks with other seeds" in text
    assert "First at 0.8: losp" in text
    assert "*" in text  # of two rates, one is always at the edge
    assert max(map(len, text.splitlines()[:12])) <= 100


def test_where_bsp_wins_the_table_says_so(comparison):
    swapped = {"bsp": "losp", "losp": "bsp"}
    rows = tuple(dataclasses.replace(row, rule=swapped[row.rule]) for row in comparison.rows)
    assert "Plain BSP was first" in verdict(dataclasses.replace(comparison, rows=rows))


def test_a_target_that_was_missed_is_a_dash_and_not_a_figure(comparison):
    rows = tuple(
        dataclasses.replace(row, seconds_to_target=None, speedup=None) if row.rule == "losp" else row
        for row in comparison.rows
    )
    line = next(
        line for line in _printed(dataclasses.replace(comparison, rows=rows)).splitlines() if line.startswith(" losp")
    )
    assert line.split()[2:4] == ["-", "-"]
    # One of two runs is no median.
    rows = (rows[0], dataclasses.replace(comparison.rows[1]), *rows[2:])
    assert "1 of 2 runs" in _printed(dataclasses.replace(comparison, rows=rows), width=140)


def test_plots_show_every_rule(comparison, tmp_path):
    runs = comparison.runs()
    figure = accuracy_plot(runs)
    axes = figure.axes[0]
    assert [line.get_label() for line in axes.lines[:2]] == ["bsp", "losp"]
    assert "(s)" in axes.get_xlabel()
    last = axes.lines[1].get_ydata()[-1]
    finals = [run.summary.final_accuracy for run in runs["losp"]]
    assert min(finals) <= last <= max(finals)
    figure.savefig(tmp_path / "accuracy.png")
    timeline = timeline_plot({rule: group[0] for rule, group in runs.items()})
    assert [panel.get_title(loc="left").split(":")[0] for panel in timeline.axes] == ["bsp", "losp"]
    timeline.savefig(tmp_path / "timeline.png")
    assert {file.name for file in comparison.folder.iterdir()} >= {"accuracy.png", "timeline.png", "comparison.json"}


def test_the_plot_shows_target_and_curves_also_where_nothing_was_learnt(comparison, tmp_path):
    run = comparison.runs()["bsp"][0]
    poor = dataclasses.replace(run, curve=run.curve.assign(accuracy=run.curve["accuracy"] / 8))
    axes = accuracy_plot({"bsp": [poor]}).axes[0]
    low, high = axes.get_ylim()
    assert low < poor.curve["accuracy"].max() < run.config.target < high
    axes.figure.savefig(tmp_path / "accuracy.png")


def test_an_interrupt_keeps_the_runs_that_were_made(tmp_path, monkeypatch):
    interrupt = Interrupt()

    def save(run, folder, name):
        interrupt.signal = signal.SIGINT
        return real(run, folder, name)

    real = launch.save_run
    monkeypatch.setattr(launch, "save_run", save)
    found = compare(dataclasses.replace(CONFIG, lr_grid=(0.1,)), tmp_path, interrupt=interrupt, say=silent)
    assert (len(found.rows), found.interrupted) == (1, True)
    assert "Interrupted" in _printed(found)
    assert load_comparison(found.folder).interrupted


def test_an_interrupt_before_any_run_leaves_nothing(tmp_path):
    interrupt = Interrupt()
    interrupt.signal = signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        compare(CONFIG, tmp_path, interrupt=interrupt, say=silent)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rules": ("bsp", "bsp:accumulate=1")}, "each once"),
        ({"rules": ()}, "at least one rule"),
        ({"workers": 0}, "--workers"),
        ({"lr_grid": ()}, "--lr-grid"),
        ({"lr_grid": (0.1, -1.0)}, "--lr-grid"),
        ({"seeds": (1, 1)}, "--seeds"),
        ({"base": dataclasses.replace(BASE, seconds=None, rounds=3)}, "give --seconds"),
        ({"workers": 2}, "names rank"),
    ],
)
def test_what_cannot_be_compared_is_refused(changes, told):
    with pytest.raises(SpecError, match=told):
        dataclasses.replace(CONFIG, **changes)


def test_a_folder_that_is_no_comparison_is_one_clear_error(tmp_path):
    with pytest.raises(DataError, match="not the folder of a comparison"):
        load_comparison(tmp_path)
