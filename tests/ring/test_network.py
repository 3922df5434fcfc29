"""What a round costs, and the text of a network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import slackring as sr
from slackring.errors import SpecError
from slackring.ring.network import parse_network


@pytest.mark.parametrize(
    ("network", "nbytes", "size", "seconds"),
    [
        (sr.Network(), 10**9, 4, 0.0),
        (sr.Network(latency=0.25), 10**9, 4, 0.25),
        (sr.Network(bandwidth=100.0), 50, 1, 0.0),  # nothing to send
        (sr.Network(bandwidth=100.0), 50, 2, 0.5),
        (sr.Network(latency=1.0, bandwidth=100.0), 100, 4, 2.5),
    ],
)
def test_a_ring_sends_everything_almost_twice(network: sr.Network, nbytes: int, size: int, seconds: float) -> None:
    assert network.seconds(nbytes, size) == pytest.approx(seconds)


@given(st.floats(0, 100), st.just(float("inf")) | st.floats(1e-3, 1e12))
def test_text_round_trips(latency: float, bandwidth: float) -> None:
    network = sr.Network(latency, bandwidth)
    assert (parse_network(str(network)) or sr.Network()) == network


def test_none_is_no_network() -> None:
    assert parse_network("none") is None
    assert parse_network(" ") is None
    assert str(sr.Network()) == "none"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("latency=-1", "0 or more"),
        ("latency=inf", "0 or more"),
        ("latency=nan", "0 or more"),
        ("bandwidth=0", "above 0"),
        ("bandwidth=nan", "above 0"),
        ("latency=fast", "is not a number"),
        ("lateny=1", "^network has no option 'lateny'; did you mean 'latency'"),
        ("0.1", r"^network: '0\.1' is not of the form key=value\.$"),
    ],
)
def test_a_network_that_cannot_be_is_refused(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_network(text)
