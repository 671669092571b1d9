"""`attmemo families`: which models attmemo supports, and why one is not."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from attmemo.cli.console import output
from attmemo.cli.options import Json, Quiet
from attmemo.wording import counted

_NEXT = "docs/own-family.md says how to add a family"
_MODES = ["none", "rows", "maps"]  # what memoize takes as reuse=
_PROVEN = "memoize proves it on the weights"
_EQUAL = {
    "prefix": "reuse='prefix', tokens see those before them",
    "local": "reuse='local', tokens see {} tokens to each side",
}


def families(
    model: Annotated[
        str | None, typer.Argument(help="Model directory or hub name: only its configuration is read.")
    ] = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """List the families that attmemo supports, or ask about a model.

    A model is known by how its attention modules are built and not by its name. When it is memoized its own output is
    reproduced from its own maps first, so a lookalike is refused before anything is changed.
    """
    with output(json, quiet) as out:
        if model is None:
            from attmemo.models import ADAPTERS, Adapter

            sees = {True: "what came before", False: "everything"}
            found: dict[str, Any] = {"families": [
                {
                    "family": it.family, "models": list(it.models), "attends_to": sees[it.causal],
                    "reuse": _modes(type(it).blocks is not Adapter.blocks, it.has_rows and not it.causal, it.has_maps),
                    "limits": it.limits,
                }
                for it in ADAPTERS
            ]}  # fmt: skip
            rows = [
                (
                    row["family"], ", ".join(row["models"]), row["attends_to"],
                    *("yes" if mode in row["reuse"] else "no" for mode in _MODES), row["limits"] or "-",
                )
                for row in found["families"]
            ]  # fmt: skip
            columns = ("family", "models", "attends to", "exact, 8 bits", "rows", "maps", "refused or left exact")
            remark = (
                "What memoize(model, reuse=…) can do: 'none' is exact (packed blocks; in 8 bits with linear='int8'), "
                "'rows' and 'maps' reuse records. Other families may work: attmemo families MODEL tells. "
                "docs/own-family.md adds one."
            )
            out.table("Families of self-attention", columns, rows, remark)
        else:
            found = _look_at(model)
            about = f"{model} ({found['architecture']}, {found['model_type']})"
            if found["supported"]:
                out.say(f"{about}: looks like {found['family']}; {_PROVEN}")
                layers, heads = counted(found["layers"], "layer"), counted(found["heads"], "head")
                out.say(f"  {layers}, {heads}, {found['mask_kind']}")
                modes = {"none": "exact (packed blocks)", "rows": "rows", "maps": "maps"}
                out.say(f"  works: {', '.join(modes[mode] for mode in found['reuse'])}")
                if found["equal"]:
                    out.say(f"  equal rows, exactly: {_EQUAL[found['equal']].format(found['reach'])}")
                if found["no_rows"]:
                    why = "no rows" if "none" in found["reuse"] else "no packed blocks, so no rows"
                    out.say(f"  {why}: {found['no_rows']}")
            else:
                out.say(f"{about}: not supported: {found['reason']}")
                out.say(f"  Next: {_NEXT}")
        out.result(found)
        if not found.get("supported", True):
            raise typer.Exit(1)


def _look_at(name: str) -> dict[str, Any]:
    """What the library makes of a model by its configuration alone: no weights are loaded.

    A lookalike that computes otherwise is told only when it is memoized.
    """
    import torch
    from transformers import AutoModel

    from attmemo.errors import UnsupportedModelError
    from attmemo.loading import load_config, quiet
    from attmemo.models import adapter_for
    from attmemo.models.blocks import find_blocks

    config = load_config(name)
    about = {"model": name, "model_type": config.model_type, "architecture": (config.architectures or ["?"])[0]}
    try:
        with quiet(), torch.device("meta"):
            bare = AutoModel.from_config(config)
    except (ValueError, KeyError, ImportError) as error:
        raise UnsupportedModelError(
            f"transformers has no model for {name}: {str(error).strip().splitlines()[0]}",
            "pip install -U transformers",
        ) from error
    try:
        adapter, sites = adapter_for(bare)
    except UnsupportedModelError as error:
        return about | {"supported": False, "reason": error.what.rstrip(".")}
    blocks = find_blocks(adapter, bare)
    no_rows = blocks if isinstance(blocks, str) else blocks.no_rows
    reach = None if isinstance(blocks, str) else blocks.reach
    prefixes = not isinstance(blocks, str) and blocks.has_prefixes
    return about | {
        "reuse": _modes(not isinstance(blocks, str), no_rows is None, adapter.has_maps), "no_rows": no_rows,
        "equal": "prefix" if prefixes else None if reach is None else "local", "reach": reach,
        "supported": True, "known_by": f"structure; {_PROVEN}", "family": adapter.family,
        "mask_kind": adapter.mask_kind, "layers": len(sites), "heads": adapter.shape(sites[0].module)[0],
    }  # fmt: skip


def _modes(blocks: bool, rows: bool, maps: bool) -> list[str]:
    """What a family can do, with packed blocks and without, with rows that may serve them, and with maps."""
    return [mode for mode, has in zip(_MODES, (blocks, blocks and rows, maps), strict=True) if has]
