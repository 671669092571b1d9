"""What a service is now: levels for Prometheus, and the numbers of the live page."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from attmemo.fingerprint import arithmetic

if TYPE_CHECKING:
    from attmemo.serve.service import Service

_TEXT: Final = re.compile(r"\((\w+): .*\)$")  # an error's own text may hold a path of this machine: it is for the log
STATES: Final = {"learning": 0, "certified": 1, "alarm": -1}
SHOWN: Final = ("learning", "certified", "alarm")
"""Of several guards one is shown: that in the last of these states."""
SUMS: Final = ("records", "record_bytes", "failed", "reused", "repeated", "rows_afterwards")
"""Of `stats()`: what is added up over namespaces."""


def gauges(service: Service) -> dict[str, tuple[str, float | None]]:
    """Levels by name, each with what it means; None: there is no such number."""
    found, spaces = stats_of(service), getattr(service.model.handle, "spaces", None)
    guard, shadow = found.get("guard") or {}, found.get("shadow") or {}
    return {
        "te_queue_size": ("Sequences that wait for the model.", service.waiting),
        "attmemo_inside": ("Sequences that were accepted and are not answered.", service.inside),
        "attmemo_draining": ("1: the service is about to end.", service.draining),
        "attmemo_records": ("Records that came while the model ran.", found.get("records")),
        "attmemo_record_bytes": ("Bytes of these records.", found.get("record_bytes")),
        "attmemo_namespaces": ("Namespaces that requests have named.", None if spaces is None else len(spaces)),
        "attmemo_failed": ("Sequences that an error left exact, or without a check.", found.get("failed")),
        "attmemo_guard_state": ("0: collects evidence, 1: certified, -1: alarm.", STATES.get(guard.get("state", ""))),
        "attmemo_guard_budget": ("Share of answers that may change.", guard.get("budget")),
        "attmemo_guard_changed_at_most": (
            "Share of answers that changed, at most, at the confidence given.", guard.get("highest_share_changed"),
        ),
        "attmemo_reused": ("Answers that came from a record of another text.", found.get("reused")),
        "attmemo_repeated": ("Answers that the record of the very text gave again.", found.get("repeated")),
        "attmemo_guard_verified": ("Reused answers that were verified.", guard.get("verified")),
        "attmemo_guard_rows_afterwards": (
            "Tokens recomputed to check answers after they were given.", found.get("rows_afterwards"),
        ),
        "attmemo_guard_changed": ("Of these, answers that had changed.", guard.get("changed")),
        "attmemo_shadow_tried": ("Exact answers that shadow mode has tried with records.", shadow.get("tried")),
        "attmemo_shadow_reused": ("Of these, would have been reused.", shadow.get("reused")),
        "attmemo_shadow_changed": ("Of these, would have been another answer.", shadow.get("changed")),
    }  # fmt: skip


def live(service: Service) -> dict[str, Any]:
    """The numbers of the live page, JSON-able."""
    found, model = stats_of(service), service.model
    guard = found.get("guard")
    failures = Counter[str]()
    for text, count in (found.get("failures") or {}).items():
        failures[_TEXT.sub(r"(\1)", text)] += count
    alarms = [f"{count:,} sequences: {text}" for text, count in failures.items()]
    if guard is not None and guard["state"] == "alarm":
        alarms.insert(0, f"The guard reuses nothing: {guard['says']}")
    if not service.alive:
        alarms.insert(0, "The model's thread ended: start the service anew.")
    if service.draining:
        alarms.insert(0, "The service is about to end; it takes no new clients.")
    counts = service.metrics.counts()
    return {
        "time": time.time(),
        "model": service.settings.name,
        "task": model.task,
        "reuse": model.reuse,
        "dtype": arithmetic(service.settings.dtype, found.get("linear") or "exact"),
        "waiting": service.waiting,
        "inside": service.inside,
        "limit": service.settings.max_concurrent_requests,
        "requests": sum(count for (name, _), count in counts.items() if name == "te_request_success"),
        "refused": {
            reason: count for (name, reason), count in sorted(counts.items()) if name == "te_request_failure"
        },
        "tokens": counts.get(("attmemo_tokens", ""), 0),
        "rows": counts.get(("attmemo_rows_computed", ""), 0),
        "sequences": counts.get(("attmemo_sequences", ""), 0),
        "reused": found.get("reused"),
        "repeated": found.get("repeated"),
        "guard": guard,
        "shadow": found.get("shadow"),
        "database": {
            "records": found.get("records"), "bytes": found.get("record_bytes"),
            "kept_in": "memory" if found.get("folder") is None and found.get("database") is None else "a folder",
        },
        "alarms": alarms,
        **service.metrics.recent.show(),
    }  # fmt: skip


def stats_of(service: Service) -> dict[str, Any]:
    """`stats()` of the handle; nothing without one. Of namespaces the sums, and the guard that is to be looked at."""
    handle = service.model.handle
    if handle is None:
        return {}
    found, spaces = dict(handle.stats()), [one for one in handle.namespaces().values() if one["open"]]
    for name in SUMS if spaces else ():
        if name in found:
            found[name] += sum(one[name] for one in spaces)
    if spaces and found.get("guard") is not None:
        guards = [found["guard"], *(one["guard"] for one in spaces)]
        worst = max(guards, key=lambda guard: SHOWN.index(guard["state"]))
        sums = {name: sum(guard[name] for guard in guards) for name in ("verified", "changed")}
        found["guard"] = worst | sums | {"verified_needed": None}  # each of them needs its own
    return found
