"""`attmemo doctor`: what this machine has, what attmemo will use, and what to change."""

from __future__ import annotations

from typing import Any

from attmemo.cli.console import Output, output, size, wrapped
from attmemo.cli.options import Json, Quiet
from attmemo.wording import counted


def doctor(json: Json = None, quiet: Quiet = False) -> None:
    """Show what attmemo uses of this machine, and what to change.

    Nothing is changed or measured. Exit code 0 also where there is something to change.
    """
    with output(json, quiet) as out:
        from attmemo.profiler.doctor import advise, examine, plan

        facts = examine()
        planned = plan(facts)
        advice = advise(facts, planned)
        _section(out, "This machine has", _facts(facts))
        _section(out, "attmemo will use", _planned(planned))
        if not advice:
            out.say("Nothing to change.")
        else:
            out.say("What to change")
        for item in advice:
            out.say("\n".join(wrapped(item["what"], "  - ", "    ")))
            out.say(f"      {item['command']}")
        out.result({"machine": facts, "plan": planned, "advice": advice})


def _section(out: Output, title: str, rows: list[tuple[str, str]]) -> None:
    out.say(title)
    for name, text in rows:
        out.say("\n".join(wrapped(text, f"  {name:<18}", " " * 20)))
    out.say()


def _facts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    quota = "no quota" if facts["quota"] is None else f"a quota of {facts['quota']:g}"
    limit = "no limit" if facts["memory_limit"] is None else f"a limit of {size(facts['memory_limit'])}"
    huge, cache = facts["huge_pages"], facts["cache"]
    settings = ", ".join(f"{name}={value}" for name, value in facts["settings"].items())
    packages = ", ".join(f"{name}: {'yes' if there else 'no'}" for name, there in facts["packages"].items())
    return [
        ("processor", facts["cpu"]),
        ("instructions", ", ".join(facts["features"]) or "none of those that matter"),
        ("cores", f"{facts['cores']}, {quota}"),
        ("memory", f"{_size(facts['memory'])}, {_size(facts['memory_available'])} can be taken, {limit}"),
        ("huge pages", f"{huge['anonymous'] or 'unknown'}; for files in memory: {huge['files'] or 'unknown'}; "
                       f"reserved: {huge['reserved'] or 0}"),
        ("mappings", f"{facts['max_map_count'] or 'unknown'} a process (vm.max_map_count)"),
        ("cache folder", f"{cache['path']} ({cache['filesystem'] or 'unknown'}, {size(cache['free'])} free of "
                         f"{size(cache['bytes'])}, {'can' if cache['writable'] else 'cannot'} be written)"),
        ("torch", f"{facts['torch']}, {counted(facts['threads'], 'thread')}"),
        ("environment", settings or "none of the settings that matter"),
        ("optional packages", packages),
    ]  # fmt: skip


def _planned(planned: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("attention", f"the kernel for {planned['attention']}; maps: {planned['map_product']}"),
        ("linear layers", planned["linear"]),
        ("number type", f"{planned['precision']} is the fastest here; a model keeps the one that it is loaded in"),
        ("threads", f"{planned['threads']} in attmemo's commands; in a program of yours as many as torch has there"),
        ("records", f"none without a budget; with one in memory, at most {size(planned['max_bytes'])}; with "
                    f"database='auto' in {planned['database']}"),
    ]


def _size(count: int | None) -> str:
    return "unknown" if count is None else size(count)
