"""The handshake before the first round: ranks that disagree learn so, and which rank it is."""

from __future__ import annotations

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
        odd = {rank: value for rank, value in enumerate(values) if value != usual}
        if odd:
            told = "; ".join(f"rank {rank} has {_short(value)}" for rank, value in odd.items())
            raise AgreementError(
                f"ranks differ in {fact}: {told}, while most have {_short(usual)}; start every rank alike."
            )


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."
