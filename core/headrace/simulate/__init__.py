"""The simulator: the run's own flow and policies on a virtual clock, for planning and for tests at scale.

Open :mod:`headrace.simulate.simulation` first. Invariant: nothing here decides what :mod:`headrace.flow` decides in a
real run; what is modelled is what things cost.
"""

from headrace.simulate.comparing import Prepared, Wishes, as_plain, as_text, prepare, simulate
from headrace.simulate.planning import Plan, plan, plan_as_plain, plan_as_text

__all__ = [
    "Plan",
    "Prepared",
    "Wishes",
    "as_plain",
    "as_text",
    "plan",
    "plan_as_plain",
    "plan_as_text",
    "prepare",
    "simulate",
]
