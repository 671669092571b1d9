"""docs/commands.md and docs/environment.md, made from the program: python scripts/reference_pages.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer
from marked import replace_measured

from attmemo.cli import app as program
from attmemo.cli.app import app

ROOT = Path(__file__).parents[1]
GROUPS: Final = (
    program.START, program.SERVE, program.DATABASES, program.MAPS, program.BENCHMARKS, program.GENERATION
)  # fmt: skip
COMMON: Final = {"--help", "--json", "--quiet"}
PAGES: Final = {"serve": "[all options](environment.md)", "generate": "[its page](fastseq.md#a-file-attmemo-generate)"}
"""Commands whose options have a page of their own."""
OTHERS: Final = {
    "ATTMEMO_CACHE": "folder of databases with the place `auto`; default: in the user's cache directory",
    "ATTMEMO_WITHOUT": "instruction sets that are not to be used, for example `amx avx512`",
    "ATTMEMO_TRACEBACK": "1: commands show the traceback of an error",
    "ATTMEMO_ATTENTION": "text generation: which attention operator runs (`auto`, `cpu`, `triton`, `reference`)",
    "ATTMEMO_SANITIZE": "for developers: sanitizers that C code is built with",
    "OMP_NUM_THREADS": "threads of a forward; default of commands: the cores of the quota",
    "OMP_WAIT_POLICY": "how waiting threads wait; `attmemo doctor` says when it harms",
    "GOMP_SPINCOUNT": "how long a waiting thread spins before it sleeps; commands set 30000 if nothing is set",
    "KMP_BLOCKTIME": "the same for another OpenMP library; `attmemo doctor` shows it",
    "RAYON_NUM_THREADS": "threads of the tokenizer; actors of Ray set it to their own threads",
    "TRITON_INTERPRET": "1: kernels of Triton run on a CPU, for tests",
    "COLUMNS": "width of tables where the output is no terminal",
}
"""Variables that are no option of a command."""


def commands() -> Iterator[tuple[str, str, Any]]:
    """Group, name and command of every command; of a group of commands each one in it."""
    root: Any = typer.main.get_command(app)
    for group in GROUPS:
        for name, command in root.commands.items():
            if command.rich_help_panel == group:
                for sub, own in getattr(command, "commands", {"": command}).items():
                    yield group, f"{name} {sub}".strip(), own


def command_tables() -> str:
    """A table for each group: the call, what it does, and its options."""
    lines, last = list[str](), ""
    for group, name, command in commands():
        if group != last:
            lines += [f"## {group}", "", "| command | what it does | options |", "|---|---|---|"]
            lines[-4:-4] = [""] if last else []
            last = group
        given = [one for one in command.params if one.param_type_name == "argument"]
        words = " ".join(_argument(one) for one in given)
        help_text = command.get_short_help_str(limit=1000).rstrip(".")
        options = [one.opts[0] for one in command.params if one.param_type_name == "option"]
        shown = ", ".join(f"`{option}`" for option in options if option not in COMMON)
        shown = PAGES.get(name, shown)
        lines.append(f"| `attmemo {name}{' ' * bool(words)}{words}` | {help_text} | {shown} |".replace("\n", " "))
    return "\n".join(lines)


def _argument(one: Any) -> str:
    word = one.metavar or one.name.upper().replace("_", "-")
    return word if one.required else f"[{word}]"


def environment_tables() -> str:
    """The options of the service with their variables, and all others."""
    serve: Any = next(command for _, name, command in commands() if name == "serve")
    lines = ["## The service", "", "| variable | option | default | meaning |", "|---|---|---|---|"]
    for one in serve.params:
        variable = "MODEL_ID" if one.param_type_name == "argument" else one.envvar
        if not variable and one.opts[0] in COMMON:
            continue
        option = "MODEL" if one.param_type_name == "argument" else f"`{one.opts[0]}`"
        default = "" if one.default is None or callable(one.default) else str(one.default).lower()
        text = re.sub(r"\s*\[.*?\]", "", one.help or "").strip()
        first = re.split(r"(?<=[.;])\s", text)[0].rstrip(".;")
        lines.append(f"| `{variable or 'HOSTNAME'}` | {option} | {default} | {first} |")
    lines += ["", "## All others", "", "| variable | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in OTHERS.items()]
    return "\n".join(lines)


def main() -> None:
    """Write both pages."""
    replace_measured(ROOT / "docs" / "commands.md", command_tables())
    replace_measured(ROOT / "docs" / "environment.md", environment_tables())


if __name__ == "__main__":
    main()
