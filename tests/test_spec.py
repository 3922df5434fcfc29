"""The small language of ``--rule``, ``--straggler`` and ``--network``."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackring import spec
from slackring.errors import RuleError, SpecError


@dataclasses.dataclass(frozen=True)
class Plain:
    pass


@dataclasses.dataclass(frozen=True)
class Full:
    count: int
    share: float = 0.5
    limit: int | None = None
    compensation: float | Literal["auto"] = 1.0
    mode: Literal["mean", "sum"] = "mean"
    ranks: tuple[int, ...] = ()
    factor: float | tuple[float, ...] = 1.0
    label: str = ""
    loud: bool = False
    weights: tuple[float, ...] = dataclasses.field(default_factory=tuple)
    derived: int = dataclasses.field(init=False, default=3)


@dataclasses.dataclass(frozen=True)
class Picky:
    value: int = 0

    def __post_init__(self) -> None:
        if self.value < 0:
            raise RuleError("negative")
        if self.value == 13:
            raise TypeError("from inside")


KNOWN = {"plain": Plain, "full": Full, "picky": Picky}


def parse(text: str) -> object:
    return spec.parse(text, KNOWN, kind="rule", error=RuleError)


numbers = st.floats(allow_nan=False)
texts = st.text(st.characters(codec="utf-8", exclude_characters=","), min_size=1).filter(
    lambda text: text == text.strip()
)
values = st.builds(
    Full,
    count=st.integers(),
    share=numbers,
    limit=st.none() | st.integers(),
    compensation=numbers | st.just("auto"),
    mode=st.sampled_from(["mean", "sum"]),
    ranks=st.lists(st.integers(), max_size=3).map(tuple),
    # One number written as a tuple reads back as the number, so a tuple here has at least two.
    factor=numbers | st.lists(numbers, min_size=2, max_size=3).map(tuple),
    label=st.just("") | texts,
    loud=st.booleans(),
    weights=st.lists(numbers, max_size=3).map(tuple),
)


@given(values)
def test_text_round_trips(value: Full) -> None:
    assert parse(spec.render("full", value)) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", Plain()),
        ("plain:", Plain()),
        (" full : count = 3 , share = 1e-3,", Full(3, 0.001)),
        ("full:count=3,limit=none,compensation=auto", Full(3, compensation="auto")),
        ("full:count=3,limit=7,compensation=0", Full(3, limit=7, compensation=0.0)),
        ("full:count=3,ranks=1+0,factor=2+3", Full(3, ranks=(1, 0), factor=(2.0, 3.0))),
        ("full:count=3,ranks=1,factor=2", Full(3, ranks=(1,), factor=2.0)),
        ("full:count=3,label=a=b", Full(3, label="a=b")),
        ("full:count=3,loud=Yes", Full(3, loud=True)),
        ("full:count=3,loud=0", Full(3, loud=False)),
    ],
)
def test_parses(text: str, expected: object) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ful:count=3", "there is no rule named 'ful'; did you mean 'full'? Known: full, picky, plain."),
        ("FULL", "there is no rule named 'FULL'; did you mean 'full'? Known: full, picky, plain."),
        ("", "there is no rule named ''; Known: full, picky, plain."),
        ("plain:size=3", "rule 'plain' has no option 'size'; it takes none."),
        ("picky:valu=3", "rule 'picky' has no option 'valu'; did you mean 'value'? Known: value."),
        ("full", "rule 'full' needs count=."),
        ("full:count=3,derived=4", "rule 'full' has no option 'derived'"),
        ("full:count", "rule 'full': 'count' is not of the form key=value."),
        ("full:count=", "rule 'full': 'count=' is not of the form key=value."),
        ("full:count=1,count=1", "rule 'full': the option 'count' is given twice."),
        ("full:count=1.5", "rule 'full': count='1.5' is not a whole number."),
        ("full:share=x", "rule 'full': share='x' is not a number."),
        ("full:limit=x", "rule 'full': limit='x' is not a whole number or none."),
        ("full:compensation=x", "rule 'full': compensation='x' is not a number or 'auto'."),
        ("full:mode=x", "rule 'full': mode='x' is not 'mean' or 'sum'."),
        ("full:ranks=1+", "rule 'full': ranks='1+' is not a whole number."),
        ("full:factor=1+x", "rule 'full': factor='1+x' is not a number."),
        ("full:loud=maybe", "rule 'full': loud='maybe' is not true or false."),
    ],
)
def test_refuses_with_one_clear_sentence(text: str, message: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse(text)
    assert str(caught.value).startswith(message)


def test_errors_of_the_class_itself_pass_through() -> None:
    with pytest.raises(RuleError, match=r"^negative$"):
        parse("picky:value=-1")
    with pytest.raises(TypeError, match=r"^from inside$"):
        parse("picky:value=13")


def test_default_error_and_rendering() -> None:
    with pytest.raises(SpecError):
        spec.parse("x", KNOWN, kind="thing")
    assert spec.render("plain", Plain()) == "plain"
    assert spec.render("full", Full(2, label="a")) == "full:count=2,label=a"


def test_nearest_without_a_close_name() -> None:
    assert spec.nearest("zzzz", ["b", "a"]) == "Known: a, b"
