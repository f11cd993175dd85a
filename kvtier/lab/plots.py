"""The plots of a benchmark result, as PNG bytes, drawn without a display.

Colours are Okabe and Ito's, which stay apart for colour-blind readers; marker and dash differ too, for print in grey.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvtier.lab.results import SOURCES, BenchResult, ContextRow, LoadRow

__all__ = ["draw", "log_axis", "tokens_in_words"]


@dataclass(frozen=True, slots=True)
class _Style:
    label: str
    colour: str
    marker: str
    dash: str | tuple[int, tuple[int, ...]] = "-"


_STYLES = {
    "recompute": _Style("recompute", "#000000", "s", (0, (5, 2))),
    "device": _Style("found on device", "#009E73", "o"),
    "host": _Style("found in host memory", "#0072B2", "^"),
    "disk": _Style("found on disk", "#D55E00", "D"),
}
_OFFLOAD = {
    False: _Style("offload off", "#D55E00", "s", (0, (5, 2))),
    True: _Style("offload on", "#0072B2", "o"),
}
_LEAST_RANGE = 3.0  # of a logarithmic axis, its upper end over its lower one
_RC = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d8d8d8",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
}


def draw(result: BenchResult) -> dict[str, bytes]:
    """Every plot that the result has rows for: file name without its ending → PNG bytes."""
    plots: dict[str, Callable[[BenchResult], Any]] = {}
    if result.contexts:
        plots["ttft"] = _ttft
    if result.load:
        plots["load"] = _load
    return {name: _png(plot, result) for name, plot in plots.items()}


def _png(plot: Callable[[BenchResult], Any], result: BenchResult) -> bytes:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with mpl.rc_context(_RC):
        figure = plot(result)
        FigureCanvasAgg(figure)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=140, facecolor="white")
        return out.getvalue()


def tokens_in_words(tokens: float) -> str:
    """2048 → "2k", 512 → "512": as contexts are named on the command line."""
    return f"{tokens / 1024:.4g}k" if tokens >= 1024 and tokens % 256 == 0 else f"{tokens:.0f}"


def _duration(ms: float) -> str:
    return f"{ms / 1000:g} s" if ms >= 1000 else f"{ms:g} ms"


def _ttft(result: BenchResult) -> Any:
    """Median TTFT against context, both logarithmic; the band is p50 to the highest percentile that there is."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(8.2, 5.2), layout="constrained")
    axes = figure.add_subplot()
    contexts = sorted({row.context for row in result.contexts})
    ends: list[tuple[float, str, _Style]] = []
    for source in SOURCES:
        rows = sorted((r for r in result.contexts if r.tier == source and r.ttft_ms.p50), key=lambda r: r.context)
        if not rows:
            continue
        style, modelled = _STYLES[source], rows[0].kind == "modelled"
        x, y = [row.context for row in rows], [row.ttft_ms.p50 or 0.0 for row in rows]
        axes.plot(
            x, y, color=style.colour, marker=style.marker, linestyle=":" if modelled else style.dash,
            markerfacecolor="white" if modelled else style.colour, zorder=3,
        )  # fmt: skip
        high = [_highest(row) for row in rows]
        if not modelled and any(h > m for h, m in zip(high, y, strict=True)):
            axes.fill_between(x, y, high, color=style.colour, alpha=0.15, linewidth=0)
        label = f"{style.label}\n(modelled, not run)" if modelled else style.label
        if source != "recompute" and rows[-1].ttft_to_recompute:
            label += f"\n{_times(rows[-1])}"
        ends.append((y[-1], label, style))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(contexts))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tokens_in_words(x)))
    _log_times(axes)
    axes.set_xlim(contexts[0] / 1.15, contexts[-1] * 1.15)
    _label_ends(axes, contexts[-1], ends)
    axes.set_xlabel("tokens of the prefix that was seen before (log scale)")
    if any(row.kind == "measured load" for row in result.contexts):
        axes.set_ylabel("time until the prefix is on the device (log scale)")
        title, what = "Time to load a prefix, by where it is found", "random pages, nothing computed"
    else:
        axes.set_ylabel("time to first token (log scale)")
        title, what = "Time to first token, by where the prefix is found", _samples(result.contexts)
    axes.set_title(f"{title}\n{result.model.name} · {what}", loc="left", fontsize=11)
    return figure


def _samples(rows: Iterable[ContextRow]) -> str:
    """What a point is: of one or two runs a median says little, so how many they are is part of the plot."""
    counts = {row.n for row in rows if row.n}
    of = f" of {' to '.join(str(n) for n in sorted({min(counts), max(counts)}))}" if counts else ""
    shade = any(row.ttft_ms.p90 is not None for row in rows)
    return f"median{of}; shade: up to the highest percentile" if shade else f"median{of}"


def _log_times(axes: Any) -> None:
    """A logarithmic axis of milliseconds, with labels enough to read values off it also where its range is small."""
    axes.set_yscale("log")
    log_axis(axes.yaxis, _duration)


def log_axis(axis: Any, words: Callable[[float], str]) -> None:
    """Labels that can be read on a logarithmic axis, which is widened where its ends are so close that noise would
    look large on it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    if high / low < _LEAST_RANGE:
        middle, half = math.sqrt(low * high), math.sqrt(_LEAST_RANGE)
        low, high = middle / half, middle * half
        axis.axes.set(**{f"{axis.axis_name}lim": (low, high)})
    steps = (1.0, 2.0, 5.0) if high / low > 8 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: words(value)))
    axis.set_minor_formatter(NullFormatter())


def _times(row: ContextRow) -> str:
    ratio = row.ttft_to_recompute or 1.0
    factor, word = (1 / ratio, "sooner") if ratio <= 1 else (ratio, "later")
    return (
        f"{factor:.0f}× {word} at {tokens_in_words(row.context)}"
        if factor >= 10
        else f"{factor:.1f}× {word} at {tokens_in_words(row.context)}"
    )


def _highest(row: ContextRow) -> float:
    spread = row.ttft_ms
    return next(value for value in (spread.p99, spread.p95, spread.p90, spread.p50) if value is not None)


def _label_ends(axes: Any, x: float, ends: Iterable[tuple[float, str, _Style]]) -> None:
    """Name each line at its right end, in its colour, moved apart where lines meet."""
    ordered = sorted(ends, key=lambda end: end[0])
    if not ordered:
        return
    low, high = (float(v) for v in axes.get_ylim())
    ratio = high / low
    height = [(label.count("\n") + 1) * 0.042 for _, label, _ in ordered]
    places: list[float] = []
    for index, (y, _, _) in enumerate(ordered):
        place = math.log(y / low) / math.log(ratio)
        if places:
            place = max(place, places[-1] + (height[index - 1] + height[index]) / 2 + 0.012)
        places.append(place)
    over = places[-1] + height[-1] / 2 - 1.0
    for index in range(len(places) - 1, -1, -1) if over > 0 else ():
        limit = 1.0 - height[index] / 2
        if index + 1 < len(places):
            limit = places[index + 1] - (height[index] + height[index + 1]) / 2 - 0.012
        places[index] = min(places[index], limit)
    for (y, label, style), place in zip(ordered, places, strict=True):
        line = {"arrowstyle": "-", "color": style.colour, "lw": 0.5, "relpos": (0.0, 0.5)}
        axes.annotate(
            label, (x, y), (1.02, place), xycoords="data", textcoords="axes fraction", color=style.colour, va="center",
            fontsize=9, annotation_clip=False, arrowprops=line,
        )  # fmt: skip


def _load(result: BenchResult) -> Any:
    """TTFT, requests per second and memory against users: a column for each working set."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    sets = sorted({row.working_set for row in result.load})
    users = sorted({row.users for row in result.load})
    figure = Figure(figsize=(1.6 + 3.1 * len(sets), 7.6), layout="constrained")
    grid = figure.subplots(3, len(sets), sharex=True, sharey="row", squeeze=False)
    measures: tuple[tuple[str, Callable[[LoadRow], float | None]], ...] = (
        ("TTFT, median (log scale)", lambda row: row.ttft_ms.p50),
        ("requests per second", lambda row: row.requests_per_s),
        ("peak memory, GiB", lambda row: None if row.peak_memory_bytes is None else row.peak_memory_bytes / (1 << 30)),
    )
    for column, working_set in enumerate(sets):
        for line, (name, measure) in enumerate(measures):
            axes = grid[line][column]
            for offload, style in _OFFLOAD.items():
                rows = [r for r in result.load if r.working_set == working_set and r.offload is offload]
                points = [(r.users, value) for r in rows if (value := measure(r)) is not None]
                if points:
                    axes.plot(
                        *zip(*sorted(points), strict=True), color=style.colour, marker=style.marker,
                        linestyle=style.dash, label=style.label, markersize=5 if offload else 9,
                        markerfacecolor=style.colour if offload else "none",  # both are seen where they meet
                    )  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(FixedLocator(users))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
            if column == 0:
                axes.set_ylabel(name)
            if line == 0:
                axes.set_title(f"working set {working_set:g}× the device pool", fontsize=10)
            if line == len(measures) - 1:
                axes.set_xlabel("users at a time")
    _log_times(grid[0][0])
    for line in (1, 2):
        grid[line][0].set_ylim(
            0, grid[line][0].get_ylim()[1] * 1.08
        )  # a cut axis would make small differences look large
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    size = result.load[0].device_bytes / (1 << 20)
    figure.suptitle(
        f"Multi-round chat, {result.model.name}, device pool {size:.0f} MiB", x=0.01, ha="left", fontsize=11
    )
    return figure
