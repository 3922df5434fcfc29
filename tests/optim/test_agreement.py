"""The handshake: what ranks are told that differ."""

from __future__ import annotations

import pytest

import slackring as sr
from slackring.errors import AgreementError
from slackring.optim.agreement import agree


def _told(*facts):
    def fn():
        ring = sr.ring()
        agree(ring, {"parameters": facts[ring.rank]}, "test.agree")

    with pytest.raises(AgreementError) as caught:
        sr.VirtualCluster(len(facts)).run(fn)
    return str(caught.value)


def test_of_long_lists_the_first_difference_is_told():
    many = [f"layer.{index}.weight [64, 64] float32" for index in range(200)]
    other = [*many[:150], "layer.150.weight [64, 32] float32", *many[151:]]
    assert _told(many, other, many) == (
        'ranks differ in parameters: rank 1 has "layer.150.weight [64, 32] float32" as number 151, while most have '
        '"layer.150.weight [64, 64] float32"; start every rank alike.'
    )


def test_a_list_that_is_too_short_lacks_its_next_entry():
    assert 'rank 2 has none as number 2, while most have "b"' in _told(["a", "b"], ["a", "b"], ["a"])


def test_other_facts_are_told_in_whole_and_every_rank_that_differs():
    told = _told("losp", "losp", "losp", "bsp", "osp")
    assert 'rank 3 has "bsp", while most have "losp"; rank 4 has "osp", while most have "losp"' in told
