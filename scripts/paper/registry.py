"""The figures, in the order of the page."""

from __future__ import annotations

from importlib import import_module

from paper.frame import Figure

NAMES = (
    "fig01", "fig03", "fig04", "fig07", "sec52", "sec53", "table2", "table3", "fig10", "table4", "table5", "fig11",
    "table6", "table7", "fig12", "table8", "table9", "fig15",
    "fastseq_fig1", "fastseq_table1", "fastseq_table2", "fastseq_table3", "fastseq_table4",
    "el_table1", "el_table2", "el_table3", "el_table4", "el_fig4", "pmx", "kvcache",
)  # fmt: skip


def figure(name: str) -> Figure:
    """A figure by its name."""
    found: Figure = import_module(f"paper.{name}").FIGURE
    assert found.name == name
    return found
