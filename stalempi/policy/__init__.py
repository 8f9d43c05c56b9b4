"""Decides WHEN a worker may go on: events in, decisions out, nothing else.

base        events, decisions, what a policy is; clocks, gate and checks serve it
bsp, asp, ssp, cached, allreduce
            one policy each
dssp        DSSP: narrowing, and the threshold from one of the controllers: paper, or dyn (with forecast, predictors
            and replay)
make        from the words of a command line
"""

from stalempi.policy.allreduce import Allreduce
from stalempi.policy.asp import ASP
from stalempi.policy.base import Apply, Clocks, Continue, Decision, Drop, Event, Leave, Policy, Push, Release
from stalempi.policy.bsp import BSP
from stalempi.policy.cached import CachedSSP
from stalempi.policy.dssp import CONTROLLERS, DSSP
from stalempi.policy.make import POLICIES, make_policy
from stalempi.policy.paper import UnboundedGapWarning
from stalempi.policy.predictors import PREDICTORS
from stalempi.policy.ssp import SSP

__all__ = [
    "ASP",
    "BSP",
    "CONTROLLERS",
    "DSSP",
    "POLICIES",
    "PREDICTORS",
    "SSP",
    "Allreduce",
    "Apply",
    "CachedSSP",
    "Clocks",
    "Continue",
    "Decision",
    "Drop",
    "Event",
    "Leave",
    "Policy",
    "Push",
    "Release",
    "UnboundedGapWarning",
    "make_policy",
]
