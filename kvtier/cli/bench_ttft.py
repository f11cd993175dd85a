"""`kvtier bench ttft`: what a prefix that was seen before is worth, by the tier it is found in, and under load."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.cli.options import ConfigFile, load_config
from kvtier.cli.options import Settings as ConfigSettings

if TYPE_CHECKING:
    from kvtier.config import CacheConfig
    from kvtier.lab.rig import Progress as Tell
    from kvtier.lab.settings import Settings

UNPROVED = 1

_SIZE = "A size such as 4GiB."


def command(
    model: Annotated[
        str | None,
        typer.Option(help="Hub id, folder, smollm2, random (its shape) or random-tiny. Default: smollm2 if installed."),
    ] = None,
    geometry: Annotated[
        str | None, typer.Option(help="No model: move real bytes of this one's pages, such as llama-3-8b.")
    ] = None,
    contexts: Annotated[
        str | None, typer.Option(help="Tokens of the prefix: 2k,8k,32k,128k. Default: those that fit.")
    ] = None,
    tiers: Annotated[str | None, typer.Option(help="Rows: some of recompute,device,host,disk.")] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Tokens to generate for a request.")] = None,
    repeat: Annotated[int | None, typer.Option(help="Rounds; p90 needs 10, p95 20, p99 100.")] = None,
    users: Annotated[str | None, typer.Option(help='Users of the load table: 1,4,16,64; "none" leaves it out.')] = None,
    working_sets: Annotated[str | None, typer.Option(help="KV of all chats over the device pool: 0.5,3,10.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for result.json, the plots and report.html.")] = Path("out"),
    quick: Annotated[bool, typer.Option("--quick", help="A small setting that ends within five minutes.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print result.json in place of tables.")] = False,
    disk_path: Annotated[
        Path | None, typer.Option(help="Where a temporary store is made, and removed. Default: beside --out.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where the model runs: cpu, cuda, cuda:1.")] = None,
    device_size: Annotated[str | None, typer.Option(help=f"Device pool. {_SIZE} Default: just enough.")] = None,
    host_size: Annotated[str | None, typer.Option(help=f"Host tier. {_SIZE} Default: just enough.")] = None,
    disk_size: Annotated[str | None, typer.Option(help=f"Disk tier. {_SIZE} Default: just enough.")] = None,
    flops: Annotated[
        float | None, typer.Option(help="With --geometry: FLOP/s for the modelled recompute. Default: measured.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of prompts, random weights and pages.")] = None,
    config: ConfigFile = None,
    set_: ConfigSettings = None,
) -> None:
    """Time to first token: recompute against hits from each tier, and multi-round chat with offload off and on.

    Every hit's tier is proved before and after it is measured, and its output compared. Writes result.json, plots and
    one page, report.html.
    """
    from kvtier.lab import settings as lab

    cache = load_config(config, set_)
    settings = lab.settings_of(
        quick=quick,
        model=model,
        geometry=geometry,
        contexts=lab.parse_counts("contexts", contexts) if contexts is not None else None,
        tiers=lab.parse_tiers(tiers) if tiers is not None else None,
        output_tokens=output_tokens,
        repeat=repeat,
        users=() if users == "none" else lab.parse_counts("users", users) if users is not None else None,
        working_sets=lab.parse_ratios("working-sets", working_sets) if working_sets is not None else None,
        out=out,
        disk_path=disk_path.expanduser() if disk_path is not None else cache.disk.path,
        device=device,
        device_size=lab.parse_bytes("device-size", device_size) if device_size is not None else None,
        host_size=lab.parse_bytes("host-size", host_size) if host_size is not None else _host_size(cache),
        disk_size=lab.parse_bytes("disk-size", disk_size) if disk_size is not None else _disk_size(cache),
        flops=flops,
        seed=seed,
        cache=cache,
    )
    with terminable():
        _measure(settings, json=json, quick=quick)


def _host_size(cache: CacheConfig) -> int | None:
    return int(cache.host.size) if "size" in cache.host.model_fields_set else None


def _disk_size(cache: CacheConfig) -> int | None:
    return int(cache.disk.size) if "size" in cache.disk.model_fields_set else None


def _measure(settings: Settings, *, json: bool, quick: bool) -> None:
    from kvtier.lab import report
    from kvtier.lab.bench import run
    from kvtier.lab.rig import ProofError

    console, errors = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 132
    try:
        with progress(errors) as tell:
            result = run(settings, tell)
            tell("drawing", 1.0)
            written = report.write(result, settings.out)
    except ProofError as error:
        errors.print(f"kvtier: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(UNPROVED) from None
    if json:
        print(result.to_json(), end="")
        return
    report.print_tables(result, console)
    console.print(f"written: {', '.join(str(path) for path in written)}", highlight=False, soft_wrap=True)
    if quick:
        called = _called()
        full = f"{called} bench ttft" + (f" --geometry {settings.geometry}" if settings.geometry else "")
        console.print(
            f"This was a small setting. In full: {full} --out {settings.out}", highlight=False, soft_wrap=True
        )
        if settings.geometry is None:
            more = f"{called} bench ttft --geometry llama-3-8b --contexts 2k,8k"
            console.print(f"With the pages of a larger model: {more}", highlight=False, soft_wrap=True)
    if False in [*(row.outputs_match for row in result.contexts), *(row.outputs_match for row in result.load)]:
        raise typer.Exit(UNPROVED)


def _called() -> str:
    """How this command was called, so that what is printed can be called too: `make` does so by a path."""
    return sys.argv[0] if Path(sys.argv[0]).name == "kvtier" else "kvtier"


@contextmanager
def progress(console: Console) -> Iterator[Tell]:
    """A bar on a terminal, else a line for each tenth."""
    if not console.is_terminal:
        tenth = -1

        def tell(words: str, share: float) -> None:
            nonlocal tenth
            if int(share * 10) > tenth:
                tenth = int(share * 10)
                print(f"{share:4.0%}  {words}", file=console.file, flush=True)

        yield tell
        return
    columns = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda words, share: bar.update(task, description=words, completed=share)


@contextmanager
def terminable() -> Iterator[None]:
    """Let a termination end the run as Ctrl-C does, so that temporary stores go."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
