"""Synchronisation rules: what closes a window, what is sent, how it merges."""

from slackring.rules.anytime import AnytimeMinibatch
from slackring.rules.base import Compensation, Payload, Plan, Rule, Seen, Weighting
from slackring.rules.elastic import ElasticBSP
from slackring.rules.named import BSP, LOSP, OSP, CoCoD, LocalSGD, Relaxed
from slackring.rules.text import parse_rule, parse_rules, rules
from slackring.rules.triggers import Deadline, Every, Moment, Planned, Trigger, WhenFree

__all__ = [
    "BSP",
    "LOSP",
    "OSP",
    "AnytimeMinibatch",
    "CoCoD",
    "Compensation",
    "Deadline",
    "ElasticBSP",
    "Every",
    "LocalSGD",
    "Moment",
    "Payload",
    "Plan",
    "Planned",
    "Relaxed",
    "Rule",
    "Seen",
    "Trigger",
    "Weighting",
    "WhenFree",
    "parse_rule",
    "parse_rules",
    "rules",
]
