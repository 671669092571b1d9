"""The plot of `attmemo inspect --plot`: rows computed over time."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from attmemo.profiler.plots import BLUE, FAINT, GREY, STYLE, png


def plot_history(history: Sequence[Mapping[str, Any]]) -> bytes:
    """Share of the rows that was computed in each period, and its requests, as PNG."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained")
        rows, requests = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        begins = [datetime.datetime.fromtimestamp(part["begin"]).astimezone() for part in history]
        widths = [datetime.timedelta(seconds=part["seconds"]) for part in history]
        shares = [part["rows"] / max(part["tokens"], 1) for part in history]
        rows.bar(begins, shares, widths, align="edge", color=BLUE)
        rows.axhline(1.0, color=GREY, linewidth=1, linestyle="--")
        rows.set_title("Rows computed, verifications included")
        rows.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        rows.set_ylim(0.0, max(1.05, *shares))
        requests.bar(begins, [part["requests"] for part in history], widths, align="edge", color=FAINT)
        requests.set_title("Requests")
        locator = AutoDateLocator(tz=begins[0].tzinfo)  # type: ignore[no-untyped-call]
        requests.xaxis.set_major_locator(locator)
        form = ConciseDateFormatter(locator, tz=begins[0].tzinfo)  # type: ignore[no-untyped-call]
        requests.xaxis.set_major_formatter(form)
        return png(figure)
