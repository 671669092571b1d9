"""Does trying memoization pay here, and which threshold keeps the promise made to the user?

* `cost`    milliseconds of a batch as a function of its sequence lengths
* `profile` what was measured for one database on one machine: costs per layer, held-out scores by length
* `gate`    Eq. 3 of the paper, asked for every batch, and switched off when live traffic drifts away
* `tuner`   the threshold that keeps a stated budget of changed answers, with a stated confidence
* `policy`  the same for a threshold of its own for each layer, where one lookup serves all layers

Pure functions and small classes: nothing here reads a file, runs a model or needs torch.
"""

from __future__ import annotations

from attmemo.perfmodel.cost import CostModel
from attmemo.perfmodel.gate import Gate
from attmemo.perfmodel.policy import NEVER, PolicyPoint, PolicyResult, choose_policy, split_halves
from attmemo.perfmodel.profile import MIN_SAMPLES, SEQUENCE, HitRates, LayerCosts, Profile
from attmemo.perfmodel.tuner import (
    CurvePoint,
    TuningResult,
    choose_from_counts,
    choose_threshold,
    sequences_needed,
    upper_bound,
)

__all__ = [
    "MIN_SAMPLES",
    "NEVER",
    "SEQUENCE",
    "CostModel",
    "CurvePoint",
    "Gate",
    "HitRates",
    "LayerCosts",
    "PolicyPoint",
    "PolicyResult",
    "Profile",
    "TuningResult",
    "choose_from_counts",
    "choose_policy",
    "choose_threshold",
    "sequences_needed",
    "split_halves",
    "upper_bound",
]
