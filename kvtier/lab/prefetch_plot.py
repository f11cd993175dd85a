"""The plot of ``kvtier bench prefetch``, as PNG bytes, without a display: a panel for each share and look-ahead."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.lab.prefetch_results import PrefetchResult

__all__ = ["draw"]

# Okabe and Ito's colours; marker and dash differ too, for print in grey.
_STYLES = {
    "recompute": ("#000000", "s", (0, (5, 2))),
    "load": ("#D55E00", "D", "-."),
    "kvtier": ("#0072B2", "o", "-"),
    "device": ("#009E73", "^", ":"),
}


def draw(result: PrefetchResult) -> bytes:
    """Median TTFT over the drive's speed, by arm."""
    from matplotlib.figure import Figure

    from kvtier.lab.plots import log_axis

    reuses = sorted({row.reuse for row in result.rows})
    ahead = sorted({row.lookahead_ms for row in result.rows})
    figure = Figure(figsize=(3.4 * len(ahead) + 0.6, 3.0 * len(reuses) + 0.6), layout="constrained")
    panels = figure.subplots(len(reuses), len(ahead), sharex=True, sharey=True, squeeze=False)
    for i, reuse in enumerate(reuses):
        for j, lookahead in enumerate(ahead):
            rows = [row for row in result.rows if row.reuse == reuse and row.lookahead_ms == lookahead]
            rows.sort(key=lambda row: row.idle_gbps)
            axes = panels[i][j]
            for arm, (colour, marker, dash) in _STYLES.items():
                times = [getattr(row.ttft_ms, arm).p50 for row in rows]
                axes.plot(
                    [row.idle_gbps for row in rows], times, color=colour, marker=marker, linestyle=dash, label=arm
                )
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.grid(True, color="#d8d8d8", linewidth=0.6)
            axes.set_title(f"{reuse:.0%} seen before, {lookahead:g} ms ahead", fontsize=9, loc="left")
    log_axis(panels[0][0].xaxis, lambda speed: f"{speed:g}")  # all panels share its axes
    log_axis(panels[0][0].yaxis, lambda ms: f"{ms:g}")
    figure.supxlabel("GB/s of the lane from disk, idle", fontsize=10)
    figure.supylabel("median time to first token, ms", fontsize=10)
    panels[0][0].legend(fontsize=8, frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=130)
    return out.getvalue()
