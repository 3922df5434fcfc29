"""The command that hunts for an interleaving that breaks a promise."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from slackring.cli import cli
from slackring.optim.payload import DeltaPayload


def test_fuzz_says_what_it_played() -> None:
    result = CliRunner().invoke(cli, ["fuzz", "--rule", "bsp,losp", "--seed", "5", "--count", "6"])
    assert result.exit_code == 0
    assert "6 interleavings of bsp, losp from seed 5: no promise broken." in result.output


def test_fuzz_as_json() -> None:
    result = CliRunner().invoke(cli, ["fuzz", "--rule", "cocod:steps=2", "--count", "3", "--json"])
    found = json.loads(result.stdout)
    assert (result.exit_code, found) == (0, {"rules": ["cocod:steps=2"], "seed": 0, "count": 3, "broken": None})


def test_fuzz_ends_at_the_first_broken_promise_with_the_command_that_plays_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    land = DeltaPayload.land

    def land_too_much(self: DeltaPayload, *args: object) -> None:
        land(self, *args)  # type: ignore[arg-type]
        self._anchor.mul_(1.001)

    monkeypatch.setattr(DeltaPayload, "land", land_too_much)
    result = CliRunner().invoke(cli, ["fuzz", "--rule", "local_sgd", "--count", "50"])
    assert result.exit_code == 1
    command = result.output.split("Again: ")[1]
    assert command.startswith("slackring fuzz --rule 'local_sgd' --seed ")
    again = CliRunner().invoke(cli, command.replace("'", "").split()[1:])
    assert again.exit_code == 1
    assert again.output.split("Again: ")[1] == command
    found = json.loads(CliRunner().invoke(cli, [*command.replace("'", "").split()[1:], "--json"]).stdout)
    assert found["broken"].endswith(command.strip())
