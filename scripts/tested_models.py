"""docs/tested-models.md, made from the models that tests run: python scripts/tested_models.py."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Final

from marked import replace_measured, table

ROOT: Final = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "tools"))

from families import FAMILIES  # noqa: E402
from packed_models import EXACT, SIGLIP, UNPADDED  # noqa: E402
from torch import nn  # noqa: E402

from attmemo.models import ADAPTERS, Adapter, adapter_for  # noqa: E402
from attmemo.models.blocks import find_blocks  # noqa: E402

HEAD: Final = "class in transformers | family | exact, 8 bits | rows | maps"


def modes_of(model: nn.Module) -> tuple[Adapter, bool, bool, bool]:
    """The adapter of a model, and whether it has packed blocks, rows and maps."""
    adapter, _ = adapter_for(model)
    blocks = find_blocks(adapter, model)
    packed = not isinstance(blocks, str)
    return adapter, packed, packed and blocks.no_rows is None, adapter.has_maps


def architectures() -> list[str]:
    """The table."""
    found: dict[tuple[int, str], list[str]] = {}
    order, said = [adapter.family for adapter in ADAPTERS], {True: "yes", False: "no"}
    for make in (*(family.make for family in FAMILIES.values()), *(EXACT | SIGLIP | UNPADDED).values()):
        model = make()
        adapter, *modes = modes_of(model)
        both = ", bidirectional" if getattr(model.config, "use_bidirectional_attention", False) else ""
        name = type(model).__name__ + both
        shown = f"`{type(model).__name__}`{both}"
        found[order.index(adapter.family), name] = [shown, adapter.family, *(said[mode] for mode in modes)]
    return table(HEAD, [row for _, row in sorted(found.items())])


def main() -> None:
    """Write the page."""
    lines = [f"With transformers {version('transformers')} and torch {version('torch')}:", "", *architectures()]
    replace_measured(ROOT / "docs" / "tested-models.md", "\n".join(lines))


if __name__ == "__main__":
    main()
