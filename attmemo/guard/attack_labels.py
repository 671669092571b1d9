"""Which classifiers look for attacks: who writes their inputs may know what others wrote.

Such a user can hide an attack in a text that is nearly one whose answer was harmless. Reuse of similar inputs pulls
the answer towards that one. So these classifiers take answers from equal inputs alone, unless their user insists.
"""

from __future__ import annotations

import re
from typing import Any, Final

STEMS: Final = (
    "abus", "attack", "exploit", "fraud", "harassment", "harmful", "hate", "inject", "insult", "jailbreak",
    "malicious", "malware", "obscen", "offens", "phish", "scam", "spam", "threat", "toxic", "unsafe", "violat",
)  # fmt: skip
"""How words of labels begin that are about attacks."""

_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def attack_labels(config: Any) -> list[str]:
    """Return the labels of a model's configuration that are about attacks, like ``"INJECTION"`` and ``"toxic"``."""
    labels = getattr(config, "id2label", None)
    found = labels.values() if isinstance(labels, dict) else ()
    return [label for label in map(str, found) if any(_is_about_attacks(word) for word in _WORD.findall(label))]


def _is_about_attacks(word: str) -> bool:
    return word.lower().startswith(STEMS)
