"""Rules as text: ``losp:k_max=64`` and back."""

from __future__ import annotations

from importlib.metadata import entry_points

from slackring.errors import RuleError
from slackring.rules.anytime import AnytimeMinibatch
from slackring.rules.base import Rule
from slackring.rules.elastic import ElasticBSP
from slackring.rules.named import BSP, LOSP, OSP, CoCoD, LocalSGD, Relaxed
from slackring.spec import parse

__all__ = ["parse_rule", "parse_rules", "rules", "rules_for", "split_rules"]

_GROUP = "slackring.rules"
_BUILT_IN: dict[str, type[Rule]] = {
    rule.name: rule for rule in (BSP, LocalSGD, OSP, LOSP, CoCoD, ElasticBSP, AnytimeMinibatch, Relaxed)
}


def rules() -> dict[str, type[Rule]]:
    """All rules by text name: the built-in ones, and those announced by entry points in the group ``slackring.rules``."""
    found = dict(_BUILT_IN)
    for point in entry_points(group=_GROUP):
        found.setdefault(point.name, point.load())
    return found


def rules_for(text: str) -> dict[str, type[Rule]]:
    """The rules to find a text's name among; entry points are read from disk, so only if it is not known without them."""
    return _BUILT_IN if text.partition(":")[0].strip() in _BUILT_IN else rules()


def parse_rule(text: str | Rule) -> Rule:
    """Read a rule from its text; a rule is returned as it is.

    Raises
    ------
    RuleError
        For an unknown rule or option (with the nearest valid name), a malformed value or an impossible combination.

    Examples
    --------
    >>> parse_rule("losp:k_max=16,compensation=0.75")
    LOSP(k_min=1, k_max=16, weighting='steps', compensation=0.75)
    """
    if isinstance(text, Rule):
        return text
    return parse(text, rules_for(text), kind="rule", error=RuleError)


def parse_rules(text: str) -> list[Rule]:
    """Read several rules, joined by commas.

    Examples
    --------
    >>> [str(rule) for rule in parse_rules("bsp,losp:k_min=2,k_max=16,osp")]
    ['bsp', 'losp:k_min=2,k_max=16', 'osp']
    """
    return [parse_rule(item) for item in split_rules(text)]


def split_rules(text: str) -> list[str]:
    """Take a text of several rules apart.

    Raises
    ------
    RuleError
        If there is none in it.

    Examples
    --------
    >>> split_rules("bsp,losp:k_min=2,k_max=16")
    ['bsp', 'losp:k_min=2,k_max=16']
    """
    texts: list[str] = []
    for part in text.split(","):
        # "key=value" goes on with the rule before it; "name" and "name:key=value" start a new one.
        if texts and "=" in part and ":" not in part:
            texts[-1] += f",{part}"
        elif part.strip():
            texts.append(part.strip())
    if not texts:
        raise RuleError("no rule is named; give at least one, such as 'bsp' or 'losp'.")
    return texts
