"""Does a lookup pay, and which thresholds keep the budget of changed answers?

* `cost`    milliseconds of a batch as a function of its sequence lengths
* `profile` what was measured for one database on one machine: costs by layer, held-out scores by length
* `gate`    Eq. 3 of AttMEMO, asked for every batch, and switched off when live traffic drifts away
* `policy`  thresholds worth a test, from forced passes over one half of the tuning data
* `tuner`   which of them keeps a budget of changed answers, with a stated confidence

Pure functions and small classes: nothing here reads a file, runs a model or needs torch.
"""

from __future__ import annotations

from attmemo.perfmodel.cost import CostModel
from attmemo.perfmodel.gate import Gate, Verdict
from attmemo.perfmodel.policy import NEVER, propose, split_halves
from attmemo.perfmodel.profile import MIN_SAMPLES, SEQUENCE, Conditions, HitRates, LayerCosts, Profile
from attmemo.perfmodel.tuner import (
    Candidate,
    Choice,
    Outcome,
    changes_allowed,
    choose,
    sequences_needed,
    upper_bound,
)

__all__ = [
    "MIN_SAMPLES",
    "NEVER",
    "SEQUENCE",
    "Candidate",
    "Choice",
    "Conditions",
    "CostModel",
    "Gate",
    "HitRates",
    "LayerCosts",
    "Outcome",
    "Profile",
    "Verdict",
    "changes_allowed",
    "choose",
    "propose",
    "sequences_needed",
    "split_halves",
    "upper_bound",
]
