"""The handshake before the first round: ranks that disagree learn so, and which rank it is."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping

from slackring.errors import AgreementError
from slackring.ring.base import Ring

__all__ = ["agree"]


def agree(ring: Ring, facts: Mapping[str, object], name: str) -> None:
    """Compare facts over all ranks; collective.

    Parameters
    ----------
    ring
        The ranks.
    facts
        What must be the same on all of them, by a readable name; values that JSON can carry.
    name
        Name of the collective.

    Raises
    ------
    AgreementError
        On every rank alike, naming the ranks that differ from most and how.
    """
    everyone = [json.loads(payload) for payload in ring.gather(json.dumps(facts).encode(), name)]
    for fact in facts:
        values = [json.dumps(theirs.get(fact)) for theirs in everyone]
        usual = Counter(values).most_common(1)[0][0]
        told = [
            "rank {} has {}, while most have {}".format(rank, *_apart(json.loads(value), json.loads(usual)))
            for rank, value in enumerate(values)
            if value != usual
        ]
        if told:
            raise AgreementError(f"ranks differ in {fact}: {'; '.join(told)}; start every rank alike.")


def _apart(mine: object, usual: object) -> tuple[str, str]:
    """Tell two different values; of lists, which may be long, only the first place where they differ."""
    if not (isinstance(mine, list) and isinstance(usual, list)):
        return _short(mine), _short(usual)
    place = sum(itertools.takewhile(bool, (a == b for a, b in zip(mine, usual, strict=False))))
    first, second = (_short(each[place]) if place < len(each) else "none" for each in (mine, usual))
    return f"{first} as number {place + 1}", second


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
