"""A run's folder."""

from __future__ import annotations

import dataclasses
import json

import pandas as pd
import pytest

from slackring.errors import DataError, OutputError
from slackring.lab.checkpoint import RunFolder
from slackring.lab.config import SINGLE_RANK_LR, TrainConfig
from slackring.lab.runs import check_writable, load_run, new_folder, save_run
from slackring.lab.train import train_virtual
from slackring.naming import new_name


@pytest.fixture(scope="module")
def run():
    config = TrainConfig(
        task="digits", rule="losp", step_time=0.1, straggler="persistent:ranks=1,factor=2", seconds=2.0
    )
    return train_virtual(config, 2)


def test_a_folder_reads_back_as_it_was(run, tmp_path):
    folder = save_run(run, tmp_path / "runs", "one")
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json", "curve.parquet", "rounds.parquet", "steps.parquet", "summary.json", "timeline.json",
    ]  # fmt: skip
    again = load_run(folder)
    assert (again.config, again.summary, again.facts) == (run.config, run.summary, run.facts)
    for table in ("steps", "rounds", "curve"):
        pd.testing.assert_frame_equal(getattr(again, table), getattr(run, table))


def test_the_config_says_what_a_reader_needs(run, tmp_path):
    config = json.loads((save_run(run, tmp_path, "one") / "config.json").read_text())
    assert config["schema"] == 1
    assert config["injected"] == {"step_time": 0.1, "straggler": "persistent:ranks=1,factor=2.0", "network": "none"}
    assert config["lr"] == SINGLE_RANK_LR
    assert config["lr_source"].startswith("default")
    assert {"seed", "git", "versions", "processor", "cores", "ranks"} <= set(config)
    assert config["versions"]["torch"]


def test_nothing_is_overwritten(run, tmp_path):
    save_run(run, tmp_path, "one")
    before = (tmp_path / "one" / "summary.json").stat().st_mtime_ns
    with pytest.raises(DataError, match="never overwritten"):
        save_run(run, tmp_path, "one")
    assert (tmp_path / "one" / "summary.json").stat().st_mtime_ns == before
    assert [file.name for file in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize("file", ["config.json", "steps.parquet", "summary.json"])
def test_a_full_disk_leaves_nothing_by_half_and_one_line(run, tmp_path, fill_disk_at, file):
    fill_disk_at(file)
    with pytest.raises(OutputError) as caught:
        save_run(run, tmp_path, "one")
    told = f"results cannot be written to {str(tmp_path)!r}: No space left on device; give another --out."
    assert str(caught.value) == told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("file", "lost"), [("rank-1.pt", "checkpoint"), ("timeline.json", "timeline.json")])
def test_a_disk_that_fills_up_late_loses_no_results(run, tmp_path, fill_disk_at, file, lost):
    fill_disk_at(file)
    whole_run = dataclasses.replace(run, checkpoint=(b"one", b"two"))
    with pytest.raises(OutputError, match=rf"/one/{lost}'.* The rest of the run is there\.$") as caught:
        save_run(whole_run, tmp_path, "one")
    assert "\n" not in str(caught.value)
    assert load_run(tmp_path / "one").summary == run.summary
    assert not (tmp_path / "one" / lost).exists()
    folder = RunFolder(tmp_path, "two")
    folder.keep(whole_run)  # a warning
    assert not list(tmp_path.glob("*two*"))


def test_a_run_that_cannot_be_written_names_its_last_checkpoint(run, tmp_path, fill_disk_at):
    folder = RunFolder(tmp_path, "one")
    folder.keep(run)
    fill_disk_at("steps.parquet")
    with pytest.raises(OutputError, match=r"The last checkpoint on the way is '.*/one-round\d+'\.$"):
        folder.finish(run)
    (kept,) = tmp_path.iterdir()
    assert load_run(kept).summary == run.summary


def test_a_folder_appears_only_when_it_is_complete(tmp_path):
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path, "one") as folder:
        (folder / "half").write_text("x")
        assert not (tmp_path / "one").exists()
        assert folder.name.startswith(".")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_written_is_found_before_the_run(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot be written"):
        check_writable(tmp_path / "file")
    check_writable(tmp_path / "new" / "folder")
    assert not list((tmp_path / "new" / "folder").iterdir())


def test_names_differ():
    assert new_name("losp") != new_name("losp")


@pytest.mark.parametrize("damage", ["missing", "schema", "garbled"])
def test_a_damaged_folder_is_one_clear_error(run, tmp_path, damage):
    folder = save_run(run, tmp_path, "one")
    if damage == "missing":
        (folder / "rounds.parquet").unlink()
    elif damage == "garbled":
        (folder / "steps.parquet").write_bytes(b"PAR")
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "schema": 99}))
    with pytest.raises(DataError, match="schema 99" if damage == "schema" else "not the folder of a finished run"):
        load_run(folder)
