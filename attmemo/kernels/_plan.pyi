from typing import Any

def plan(
    arrays: tuple[Any, ...],
    rule: tuple[int, int, int, bool, bool],
    demand: tuple[float, float, float, int, int, int, int, bool],
    threads: int,
    /,
) -> int: ...
def use_team(path: str, /) -> bool: ...
