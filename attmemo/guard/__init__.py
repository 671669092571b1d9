"""May a record serve? A threshold on the predicted similarity score."""

from attmemo.guard.threshold import Threshold

__all__ = ["Threshold"]
