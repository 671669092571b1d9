"""Planners: what could serve, may it, does it pay. A planner turns one forward into one immutable plan.

`Whole` serves every forward from nothing, `MapPlanner` from stored maps, `RowPlanner` from stored rows,
`GuardedPlanner` from stored rows whose answers are guarded.
"""

from attmemo.planner.base import Given, Planner, Whole
from attmemo.planner.guarded import GuardedPlanner
from attmemo.planner.maps import MapPlanner
from attmemo.planner.rows import RowPlanner

__all__ = ["Given", "GuardedPlanner", "MapPlanner", "Planner", "RowPlanner", "Whole"]
