"""May a record serve? A threshold on the predicted similarity score, and the guard of answers."""

from attmemo.guard.answers import AnswerRule, Answers, is_class_of_first_row
from attmemo.guard.guard import Guard
from attmemo.guard.keeper import Keeper
from attmemo.guard.ledger import Ledger, all_in
from attmemo.guard.threshold import Threshold
from attmemo.guard.verdict import Verdict

__all__ = [
    "AnswerRule", "Answers", "Guard", "Keeper", "Ledger", "Threshold", "Verdict", "all_in",
    "is_class_of_first_row",
]  # fmt: skip
