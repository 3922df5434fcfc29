"""What a run trains under, as text: a rule of the ring, or a policy of the parameter server."""

from __future__ import annotations

from slackring.errors import RuleError, SpecError
from slackring.rules import Rule
from slackring.rules.text import rules_for, split_rules
from slackring.server import POLICIES, Policy
from slackring.spec import parse

__all__ = ["parse_choice", "parse_choices", "refuse_off_virtual"]


def parse_choice(text: str) -> Rule | Policy:
    """Read a rule such as ``losp:k_max=16``, or a policy such as ``server/ssp:staleness=3``.

    Raises
    ------
    RuleError
        For an unknown one (with the nearest valid name), a malformed value or an impossible combination.

    Examples
    --------
    >>> parse_choice("bsp"), parse_choice("server/bsp")
    (BSP(accumulate=1), BSP())
    """
    known: dict[str, type[Rule] | type[Policy]] = {**rules_for(text), **POLICIES}
    return parse(text, known, kind="rule", error=RuleError)


def parse_choices(text: str) -> list[Rule | Policy]:
    """Read several, joined by commas.

    Examples
    --------
    >>> [str(choice) for choice in parse_choices("losp,server/dssp:lower=1,upper=4,server/asp")]
    ['losp', 'server/dssp:lower=1,upper=4', 'server/asp']
    """
    return [parse_choice(item) for item in split_rules(text)]


def refuse_off_virtual(choice: Rule | Policy) -> None:
    """Refuse to run a policy of the parameter server on real ranks.

    Raises
    ------
    SpecError
        If it is one.
    """
    if isinstance(choice, Policy):
        raise SpecError(
            f"rule '{choice}' needs a parameter server, which there is in virtual time only; add --virtual."
        )
