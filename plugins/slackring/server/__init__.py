"""A parameter server in virtual time, and the policies by which it answers its workers.

The policies are those of the papers. Those named like a rule of the ring (:mod:`slackring.rules`) are what that rule was made
from: here each worker pushes gradients to a server that holds the one model, and nobody meets in an all-reduce.

Examples
--------
>>> from slackring.server import DSSP, parse_policy
>>> parse_policy("dssp:lower=3,upper=15") == DSSP(lower=3, upper=15)
True
"""

from __future__ import annotations

from slackring.server.policies import ASP, BSP, DSSP, POLICIES, SSP, ElasticBSP, Gate, Policy, Verdict, parse_policy

__all__ = ["ASP", "BSP", "DSSP", "POLICIES", "SSP", "ElasticBSP", "Gate", "Policy", "Verdict", "parse_policy"]
