"""`kvtier bench prefetch`: kvtier against always loading and always computing, over drives and look-aheads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvtier.cli.bench_ttft import UNPROVED, progress, terminable
from kvtier.cli.options import check_folder

if TYPE_CHECKING:
    from kvtier.lab.prefetch_results import PrefetchResult


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--{name}: {text!r}; expected numbers such as 0,50,200") from None


def command(
    lookahead: Annotated[str, typer.Option(help="Milliseconds between hint and request.")] = "0,50,200,1000",
    gbps: Annotated[str, typer.Option(help="Drives to emulate, GB/s; 0: the machine's own.")] = "0.01,0.1,1,0",
    reuse: Annotated[str, typer.Option(help="Shares of a prompt that were seen before.")] = "0.5,0.9",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts a cell; each is served once by each arm.")] = 100,
    hold_every: Annotated[
        int, typer.Option(min=1, help="Of so many prompts one has its look-ahead pass as a whole.")
    ] = 20,
    prompt_tokens: Annotated[int, typer.Option(min=32, help="Tokens of a prompt.")] = 1024,
    token_us: Annotated[float, typer.Option(min=0.1, help="Modelled prefill: microseconds for each token.")] = 50.0,
    model: Annotated[
        str | None,
        typer.Option(help="A real model in place of the modelled one: hub id, folder, smollm2, random-tiny."),
    ] = None,
    disk_path: Annotated[Path, typer.Option(help="Where a temporary store is made, and removed.")] = Path("."),
    page_cache: Annotated[
        bool, typer.Option("--page-cache", help="Read the store from memory: a drive faster than the machine's own.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for result.json and prefetch.png.")] = Path("out"),
    json: Annotated[bool, typer.Option("--json", help="Print result.json in place of a table.")] = False,
    seed: Annotated[int, typer.Option(help="Of prompts and weights.")] = 0,
) -> None:
    """Time to first token of kvtier against always loading, always computing, and the better of both.

    Without --model the time of a forward pass is slept, as labelled in the result; bytes, lanes and decisions are real.
    """
    from kvtier.lab.prefetch_bench import PrefetchSettings, run
    from kvtier.lab.prefetch_plot import draw
    from kvtier.lab.results import write_private
    from kvtier.lab.rig import ProofError

    check_folder("out", out)
    settings = PrefetchSettings(
        lookaheads_ms=_numbers("lookahead", lookahead),
        gbps=_numbers("gbps", gbps),
        reuses=_numbers("reuse", reuse),
        prompts=prompts,
        hold_every=hold_every,
        prompt_tokens=prompt_tokens,
        token_us=token_us,
        model=model,
        disk_path=disk_path,
        page_cache=page_cache,
        seed=seed,
    )
    console, errors = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 132
    try:
        with terminable(), progress(errors) as tell:
            result = run(settings, tell)
    except ProofError as error:
        errors.print(f"kvtier: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(UNPROVED) from None
    out.mkdir(parents=True, exist_ok=True)
    write_private(out / "result.json", result.to_json().encode())
    write_private(out / "prefetch.png", draw(result))
    if json:
        print(result.to_json(), end="")
        return
    console.print(_table(result))
    console.print(f"written: {out / 'result.json'}, {out / 'prefetch.png'}", highlight=False, soft_wrap=True)


def _table(result: PrefetchResult) -> Table:
    paced = ", modelled compute" if result.compute == "paced" else ""
    table = Table(title=f"Time to first token, median ms ({result.model}{paced})", title_justify="left")
    names = ("GB/s", "seen", "ahead", "load", "compute", "kvtier", "device")
    for name in (*names, "to best (upper)", "to floor", "hidden", "loaded"):
        table.add_column(name, justify="right")
    for row in result.rows:
        times = row.ttft_ms
        table.add_row(
            f"{row.idle_gbps:.3g}",
            f"{row.reuse:.0%}",
            f"{row.lookahead_ms:g} ms",
            *(f"{arm.p50:.4g}" for arm in (times.load, times.recompute, times.kvtier, times.device)),
            f"{row.ratio_to_best:.2f} ({row.ratio_to_best_upper:.2f})",
            f"{row.load_to_floor:.2f}",
            "" if row.hidden is None else f"{row.hidden:.2f}",
            f"{row.loaded_share:.0%}",
        )
    return table
