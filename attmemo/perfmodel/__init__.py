"""Does a lookup pay, and which thresholds keep the budget of changed answers?

* `cost`    milliseconds of a batch as a function of its sequence lengths
* `profile` what was measured for one database on one machine: costs by layer, held-out scores by length
* `gate`    Eq. 3 of AttMEMO, asked for every batch, and switched off when live traffic drifts away
* `policy`  thresholds worth a test, from forced passes over a part of the tuning data
* `tuner`   which of them keeps a budget of changed answers, with a stated confidence
"""
