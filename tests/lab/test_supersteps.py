"""``slackring plan``: files of times in, a plan and its timeline out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from slackring import cli

ITERATIONS = "0.1,0.1\n0.1,0.1\n0.13,0.13\n0.41,0.4\n"
ENDS = "worker,next,after\nleft,2,4\nmiddle,7,12\n# faster than it looks\nright,3,6,\n"


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Call the command on a file of this text; return its exit code, stdout and stderr."""

    def call(text: str, *options: str, name: str = "times.csv") -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(sys, "argv", ["slackring", "plan", name, *options])
        try:
            cli.main()
            code = 0
        except SystemExit as exc:
            code = int(exc.code or 0)
        return code, *capsys.readouterr()

    return call


def test_past_iterations_go_on_as_the_last_one(plan) -> None:
    code, out, err = plan(ITERATIONS, "--json")
    found = json.loads(out)
    assert (code, err, found["times"]) == (0, "", "iterations")
    assert [worker["iterations"] for worker in found["workers"]] == [4, 4, 3, 1]
    assert [worker["wait"] for worker in found["workers"]] == pytest.approx([0, 0, 0.01, 0])
    assert (found["barrier"], found["gap"]) == (pytest.approx(0.4), pytest.approx(0.01))


def test_end_times_are_planned_with_as_they_are(plan) -> None:
    code, out, err = plan(ENDS, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found == {
        "times": "ends",
        "barrier": 7,
        "gap": 3,
        "workers": [
            {"worker": "left", "target": 1, "iterations": 2, "end": 4, "wait": 3},
            {"worker": "middle", "target": 0, "iterations": 1, "end": 7, "wait": 0},
            {"worker": "right", "target": 1, "iterations": 2, "end": 6, "wait": 1},
        ],
    }


def test_lookahead_bounds_the_iterations(plan) -> None:
    for text, kind in ((ITERATIONS, "iterations"), (ENDS, "ends")):
        code, out, _ = plan(text, "--lookahead", "1", "--times", kind, "--json")
        assert code == 0
        assert {worker["iterations"] for worker in json.loads(out)["workers"]} == {1}


@pytest.mark.parametrize("text", ["[[2, 4], [7, 12], [3, 6]]", '{"0": [2, 4], "1": [7, 12], "2": [3, 6]}'])
def test_json_may_be_lists_or_an_object(plan, text: str) -> None:
    code, out, _ = plan(text, "--json", name="times.json")
    assert code == 0
    assert [(row["worker"], row["target"]) for row in json.loads(out)["workers"]] == [("0", 1), ("1", 0), ("2", 1)]


def test_the_timeline_shows_targets_waits_and_the_barrier(plan) -> None:
    code, out, err = plan(ENDS)
    assert (code, err) == (0, "")
    assert "barrier 7, gap 3 (from end times)" in out
    lanes = {line.split()[0]: line.split()[1] for line in out.splitlines() if "●" in line and "─" in line}
    barrier = lanes["middle"].index("●")
    assert set(lanes) == {"left", "middle", "right"}
    for name in ("left", "right"):
        target = lanes[name].index("●")
        assert lanes[name][barrier] == "┃"
        assert set(lanes[name][target + 1 : barrier]) == {"░"}
        assert lanes[name][:target].count("|") == 1
    assert lanes["left"].index("●") < lanes["right"].index("●") < barrier


def test_workers_that_end_at_once_are_drawn(plan) -> None:
    code, out, _ = plan("5\n5\n", "--times", "ends")
    assert code == 0
    assert "barrier 5, gap 0" in out


def test_a_picture_is_drawn(plan, tmp_path: Path) -> None:
    code, _, err = plan(ITERATIONS, "--plot", "plan.png")
    assert (code, err) == (0, "")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", [], "has no workers"),
        ("a,b\n", [], "has no workers"),
        ("1,2\n1,soon\n", [], "line 2: 'soon' is not a number"),
        ("one,1,2\ntwo\n", [], "worker two has no times"),
        ("1,2\n1,nan\n", [], "a time of worker 1 is not finite"),
        ("1\n2\n", [], "say --times ends or --times iterations"),
        ("1,2\n2,1\n", ["--times", "ends"], "worker 1 descend"),
        ("1,1\n1,0\n", [], "an iteration took 0"),
        ("1,2\n", ["--lookahead", "0"], "--lookahead"),
        ("1,2\n", ["--plot", "no/such/folder.png"], "cannot be written"),
        ("1,2\n", ["--plot", "plan.nonsense"], "cannot be written"),
    ],
)
def test_a_mistake_is_one_line(plan, text: str, options: list[str], words: str) -> None:
    code, out, err = plan(text, *options)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert words in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[1, 2], [1", "is not JSON"),
        ("3", "neither a list"),
        ("[1, 2]", "worker 0 has no list of numbers"),
        ('{"a": [1, "x"]}', "worker a has no list of numbers"),
        ("[[1, true]]", "worker 0 has no list of numbers"),
        ("[[1, NaN]]", "a time of worker 0 is not finite"),
        ("[]", "has no workers"),
    ],
)
def test_a_mistake_in_json_is_one_line(plan, text: str, words: str) -> None:
    code, out, err = plan(text, name="times.json")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert words in err
