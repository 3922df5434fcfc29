"""What the ranks answer to a call, and which of them is to blame if it fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import cloudpickle

__all__ = ["Answer", "blamed", "culprit"]


@dataclass(frozen=True)
class Answer:
    """A rank's answer to a call.

    Attributes
    ----------
    rank
        Whose it is.
    kind
        "done"; or "raised" if the function raised, "died" if the rank's process has ended, "lost" if its worker has, "silent" if
        there was no answer when others had failed.
    content
        Pickled: what the function returned, or its exception; empty if there is none.
    sentence
        What went wrong, as the end of a sentence that begins with the rank; empty if it is done.
    details
        What belongs below that: the rank's own traceback, or the end of its log.
    of_peers
        Whether it raised an error that ranks raise because another one has failed.
    """

    rank: int
    kind: Literal["done", "raised", "died", "lost", "silent"]
    content: bytes = b""
    sentence: str = ""
    details: str = ""
    of_peers: bool = False

    def exception(self) -> BaseException | None:
        """The exception that the rank raised; None if it did not, or if it cannot be read here."""
        if self.kind != "raised" or not self.content:
            return None
        try:
            raised = cloudpickle.loads(self.content)
        except Exception:  # of any kind: the class is the user's
            return None
        return raised if isinstance(raised, BaseException) else None


def culprit(answers: Sequence[Answer]) -> Answer | None:
    """Find the rank that failed by itself; others fail because of it.

    Parameters
    ----------
    answers
        In the order in which they came.

    Returns
    -------
    Answer or None
        The first that failed by itself; if all failures came from peers, the first of those; None if there was none.

    Examples
    --------
    >>> broken = Answer(0, "raised", sentence="raised HorovodInternalError", of_peers=True)
    >>> culprit([broken, Answer(1, "done"), Answer(2, "died", sentence="died: SIGKILL")]).rank
    2
    """
    failed = [answer for answer in answers if answer.kind != "done"]
    return next((answer for answer in failed if not answer.of_peers), failed[0] if failed else None)


def blamed(guilty: Answer, silent: Sequence[int]) -> Answer:
    """Blame a rank that did not answer, where the others failed because of a peer.

    Parameters
    ----------
    guilty
        What :func:`culprit` found.
    silent
        Ranks that have not answered.

    Examples
    --------
    >>> blamed(Answer(0, "raised", sentence="raised HorovodInternalError: timed out", of_peers=True), [3]).sentence
    'does not answer: it hangs, or its process was stopped; rank 0 raised HorovodInternalError: timed out'
    """
    if not guilty.of_peers or not silent:
        return guilty
    sentence = f"does not answer: it hangs, or its process was stopped; rank {guilty.rank} {guilty.sentence}"
    return Answer(silent[0], "silent", sentence=sentence, details=guilty.details)
