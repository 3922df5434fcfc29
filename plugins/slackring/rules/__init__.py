"""Synchronisation rules: what closes a window, what is sent, how it merges."""

from slackring.rules.base import Compensation, Every, Payload, Rule, Trigger, Weighting, WhenFree
from slackring.rules.named import BSP, LOSP, OSP, CoCoD, LocalSGD, Relaxed
from slackring.rules.text import parse_rule, parse_rules, rules

__all__ = [
    "BSP",
    "LOSP",
    "OSP",
    "CoCoD",
    "Compensation",
    "Every",
    "LocalSGD",
    "Payload",
    "Relaxed",
    "Rule",
    "Trigger",
    "Weighting",
    "WhenFree",
    "parse_rule",
    "parse_rules",
    "rules",
]
