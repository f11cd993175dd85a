"""A benchmark result for people: tables on the terminal, plots, and one HTML page that needs no other file."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.config import readable_size
from kvtier.lab.plots import draw, tokens_in_words
from kvtier.lab.results import BenchResult, ConcurrencyRow, ContextRow, LoadRow, write_private

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Table", "page", "print_tables", "tables", "write"]


@dataclass(frozen=True, slots=True)
class Table:
    """A table in words; terminal and page show the same."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str


def tables(result: BenchResult) -> list[Table]:
    """Every table that the result has rows for."""
    found = []
    if result.contexts:
        found.append(_context_table(result.contexts))
    if result.load:
        found.append(_load_table(result.load))
    if result.concurrency:
        found.append(_concurrency_table(result.concurrency))
    if result.lanes:
        rows = tuple(
            (lane.lane.replace("_to_", " → "), _bytes(lane.bytes), f"{(lane.bytes_per_s or 0) / 1e9:.2f}")
            for lane in result.lanes
        )
        caption = "Bytes over the seconds in which the lane was moving them, the whole run together."
        found.append(Table("Lanes", ("lane", "moved", "GB/s"), rows, caption))
    return found


def _context_table(rows: Sequence[ContextRow]) -> Table:
    columns = "context|found in|n|TTFT p50|p90|p99|TPOT p50|to recompute|to floor|loaded|outputs"
    cells = []
    for row in rows:
        name = f"{row.tier} (modelled)" if row.kind == "modelled" else row.tier
        times = (row.ttft_ms.p50, row.ttft_ms.p90, row.ttft_ms.p99, row.tpot_ms.p50)
        loaded = row.bytes_moved.host_to_device if row.tier != "recompute" else 0
        cells.append(
            (
                tokens_in_words(row.context), name, str(row.n) if row.n else "–", *map(_ms, times),
                _ratio(row.ttft_to_recompute), _ratio(row.ttft_to_floor), _bytes(loaded), _match(row.outputs_match),
            )
        )  # fmt: skip
    if any(row.kind == "measured load" for row in rows):
        caption = (
            "Pages of this geometry with random bytes, really moved; TTFT is the time until the prefix is on the "
            "device, and nothing is computed. Recompute is modelled from FLOPs and a rate, and not compared."
        )
        return Table("Time to load a prefix, by where it is found", tuple(columns.split("|")), tuple(cells), caption)
    caption = (
        "TTFT and TPOT in ms, as vllm bench serve defines them. To recompute: TTFT over that of computing everything "
        "in the same round. To floor: TTFT over the time in which the load's busiest lane was moving its bytes; the "
        "rest is computing the last block of the prompt, and us. –: too few samples, or nothing to compare."
    )
    return Table("Time to first token, by where the prefix is found", tuple(columns.split("|")), tuple(cells), caption)


def _load_table(rows: Sequence[LoadRow]) -> Table:
    columns = "working set|users|offload|n|TTFT p50|p99|TPOT p50|requests/s|peak RSS|on device|below|recomputed|outputs"
    cells = []
    for row in sorted(rows, key=lambda r: (r.working_set, r.users, r.offload)):
        found = row.tokens_by_tier
        below = found.host + found.disk + found.remote
        total = max(1, found.device + below + found.computed)
        cells.append(
            (
                f"{row.working_set:g}×", str(row.users), _on(row.offload), str(row.n), _ms(row.ttft_ms.p50),
                _ms(row.ttft_ms.p99), _ms(row.tpot_ms.p50), f"{row.requests_per_s:.2f}", _bytes(row.peak_memory_bytes),
                f"{found.device / total:.0%}", f"{below / total:.0%}", f"{row.recomputed_tokens:,}",
                _match(row.outputs_match),
            )
        )  # fmt: skip
    caption = (
        "Multi-round chat at equal device bytes. Working set: KV of all conversations over the device pool. On "
        "device, below: share of prompt tokens found there. Recomputed: tokens computed again although an "
        "earlier round had. Peak RSS: the whole process, its model included."
    )
    return Table("Under load, offload off and on", tuple(columns.split("|")), tuple(cells), caption)


def _concurrency_table(rows: Sequence[ConcurrencyRow]) -> Table:
    cells = tuple(
        (
            _on(row.offload),
            f"{row.max_concurrent_requests} or more" if row.at_least else str(row.max_concurrent_requests),
            str(row.tokens_per_conversation),
            _bytes(row.device_bytes),
        )
        for row in rows
    )
    caption = (
        "The largest number of chats side by side, found by running, that all finish without computing a prefix twice."
    )
    columns = ("offload", "max concurrent requests", "tokens each", "device pool")
    return Table("Concurrent requests", columns, cells, caption)


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}×" if value >= 100 else f"{value:.3g}×"


def _bytes(value: int | None) -> str:
    return readable_size(value) if value else "–"


def _on(offload: bool) -> str:
    return "on" if offload else "off"


def _match(value: bool | None) -> str:
    return {None: "–", True: "match", False: "DIFFER"}[value]


def facts(result: BenchResult) -> Iterator[tuple[str, str]]:
    """What was measured and where, as pairs of name and value."""
    machine, model = result.machine, result.model
    weights = {"real": "real weights", "random": "random weights", "none": "no weights: random pages of its geometry"}
    yield "date", result.date
    yield (
        "model",
        f"{model.name}, {model.dtype}, {weights[model.weights]}, {model.kv_bytes_per_token:,} B of KV per token",
    )
    yield "machine", f"{machine.cpu}, {machine.cores} cores, {_bytes(machine.memory_bytes)}, {machine.os}"
    yield "GPU", machine.gpu or "none"
    yield "device tier", result.device
    yield "disk", f"{machine.disk}; I/O {result.io}"
    yield "software", ", ".join(f"{name} {version}" for name, version in machine.software.items())


def print_tables(result: BenchResult, console: Console) -> None:
    """The tables and what they were measured on."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable

    for table in tables(result):
        shown = RichTable(title=table.title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
        for index, name in enumerate(table.columns):
            # Where it is narrow the headings are broken, never the cells.
            width = max(len(row[index]) for row in table.rows)
            shown.add_column(name, justify="left" if index == 0 else "right", min_width=width)
        for row in table.rows:
            shown.add_row(*row, style="bold red" if "DIFFER" in row else None)
        console.print(shown)
        console.print(table.caption, style="dim", markup=False, highlight=False)
        console.print()
    for name, value in facts(result):
        console.print(f"[dim]{name:>12}[/dim]  ", end="")
        console.print(value, markup=False, highlight=False)
    for note in result.notes:
        console.print(f"note: {note}", markup=False, highlight=False)


_CSS = """
body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;background:#fff}
h1{font-size:1.6rem;margin-bottom:.2rem}h2{font-size:1.15rem;margin-top:2.2rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}.wide{overflow-x:auto}
th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap}
th{border-bottom:2px solid #888}th:first-child,td:first-child{text-align:left}
tr.bad td{color:#b00020;font-weight:bold}figure{margin:1.5rem 0}img{max-width:100%;height:auto}
.caption{color:#555;max-width:60rem}dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem}
dt{color:#555}dd{margin:0}
pre{background:#f5f5f5;padding:1rem;overflow-x:auto;font-size:13px}
"""

_HOW_TO_READ = (
    "A hit is worth something where its line lies below the recompute line, at your context length. Before every "
    "measured hit the faster tiers were emptied, and the run ends with an error when the prefix did not come whole "
    "from the tier that the row names.",
    "Recompute and hits were measured by turns, round by round, and the ratio is the median of the rounds' ratios: "
    "on a shared machine trust the ratios more than the times.",
    "“Outputs match” says that greedy decoding gave the same tokens from loaded pages as from computed ones. Where "
    "it says DIFFER, do not trust anything else in that row.",
    "A percentile needs enough samples (p90: 10, p95: 20, p99: 100); with fewer it is left out.",
)

_TITLES = {"ttft": "Time to first token against context, by tier", "load": "TTFT, requests/s and memory against users"}


def page(result: BenchResult, plots: dict[str, bytes]) -> str:
    """The whole report as one HTML text: plots embedded, no scripts, nothing fetched from anywhere."""
    parts = [f"<h1>kvtier bench ttft</h1><p>{html.escape(result.model.name)}, {html.escape(result.date)}</p>"]
    for name, png in plots.items():
        data = base64.b64encode(png).decode()
        title = html.escape(_TITLES.get(name, name))
        parts.append(f'<figure><img alt="{title}" src="data:image/png;base64,{data}"></figure>')
    parts.extend(_html_table(table) for table in tables(result))
    parts.append("<h2>How to read it</h2>" + "".join(f"<p>{html.escape(text)}</p>" for text in _HOW_TO_READ))
    if result.notes:
        items = "".join(f"<li>{html.escape(note)}</li>" for note in result.notes)
        parts.append(f"<h2>Notes</h2><ul>{items}</ul>")
    measured = "".join(f"<dt>{html.escape(n)}</dt><dd>{html.escape(v)}</dd>" for n, v in facts(result))
    parts.append(f"<h2>What was measured, and where</h2><dl>{measured}</dl>")
    config = html.escape(json.dumps(result.config, indent=2, default=str))
    parts.append(f"<details><summary>Configuration</summary><pre>{config}</pre></details>")
    title = html.escape(f"kvtier bench ttft: {result.model.name}")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_CSS}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table.columns)
    rows = []
    for row in table.rows:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        rows.append(f'<tr class="bad">{cells}</tr>' if "DIFFER" in row else f"<tr>{cells}</tr>")
    return (
        f'<h2>{html.escape(table.title)}</h2><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f'<tbody>{"".join(rows)}</tbody></table></div><p class="caption">{html.escape(table.caption)}</p>'
    )


def write(result: BenchResult, folder: Path) -> list[Path]:
    """Write result.json, the plots and report.html into ``folder``, made if need be; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    plots = draw(result)
    files = {"result.json": result.to_json().encode(), "report.html": page(result, plots).encode()}
    files |= {f"{name}.png": png for name, png in plots.items()}
    for name, content in files.items():
        write_private(folder / name, content)
    return [folder / name for name in files]
