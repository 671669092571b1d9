"""The house: which room imports which, and how long files are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEAVES = {"errors", "arguments", "fingerprint", "loading", "system", "wording"}
"""Modules of the hall, and a room, that import nothing of attmemo but each other: every room may use them."""

# A room may import the rooms in its row, itself, and leaves. The face `attmemo` and `cli` may import everything.
ROOMS: dict[str, set[str]] = {
    "kernels": set(),
    "mmap": set(),
    "perfmodel": set(),
    "db": {"mmap"},
    "models": {"kernels"},
    "embed": {"db", "kernels"},
    "forward": {"models", "embed", "db", "kernels"},
    "packed": {"forward", "models", "kernels"},
    "maps": {"forward", "models", "embed", "db", "mmap", "perfmodel", "kernels"},
    "rows": {"packed", "forward", "models", "embed", "db", "mmap", "kernels"},
    "prefix": {"packed", "forward", "models", "kernels"},
    "guard": {"rows", "packed", "forward", "models", "kernels"},
    "handle": {"guard", "rows", "prefix", "packed", "forward", "models", "db", "kernels"},
    "memoization": {"handle", "guard", "maps", "forward", "models", "embed", "db", "mmap", "kernels"},
    "serve": {"memoization", "guard", "forward"},
    "ray": {"serve", "memoization", "db"},
    "fastseq": {"kernels", "models"},
}
HALL = 12
LONGEST = 450


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of attmemo with its file; the profiler lies in a folder of its own."""
    for file in sorted((ROOT / "attmemo").rglob("*.py")):
        parts = file.relative_to(ROOT / "attmemo").with_suffix("").parts
        if parts[0] != "profiler":
            yield ".".join(parts).removesuffix(".__init__"), file


def room_of(module: str) -> str:
    return module.split(".")[0]


def imports(file: Path) -> Iterator[str]:
    """Modules of attmemo that a file imports, without the prefix ``attmemo.``."""
    tree = ast.parse(file.read_text())
    checks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    hidden = {id(inner) for check in checks for inner in ast.walk(check)}
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "attmemo":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attmemo."):
            yield str(node.module).removeprefix("attmemo.")
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from (name.removeprefix("attmemo.") for name in names if name.startswith("attmemo."))


def test_every_room_is_in_the_table() -> None:
    free = {"__init__", "__main__", "cli", "profiler", *LEAVES}
    assert {room_of(module) for module, _ in modules()} - free <= set(ROOMS)


def test_imports_point_down_the_table() -> None:
    wrong = []
    for module, file in modules():
        room = room_of(module)
        allowed = LEAVES if room in LEAVES else ROOMS.get(room)
        if allowed is None:  # the face and the command line
            continue
        for target in imports(file):
            if room_of(target) not in {room, *allowed, *LEAVES}:
                wrong.append(f"{module} imports attmemo.{target}")
    assert not wrong


def test_the_table_has_no_cycle() -> None:
    def below(room: str) -> set[str]:
        return set().union(*({other} | below(other) for other in ROOMS[room])) if ROOMS[room] else set()

    assert all(room not in below(room) for room in ROOMS)


def test_no_file_of_the_core_is_longer_than_a_reader_likes() -> None:
    files = [file for module, file in modules() if room_of(module) != "fastseq"]
    files += sorted((ROOT / "profiler").rglob("*.py"))
    long = {str(file.relative_to(ROOT)): n for file in files if (n := len(file.read_text().splitlines())) > LONGEST}
    assert not long


def test_the_hall_has_few_files() -> None:
    assert len(list((ROOT / "attmemo").glob("*.py"))) <= HALL
