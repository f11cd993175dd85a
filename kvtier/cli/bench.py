"""`kvtier bench`: what this machine does, beside what it could do, measured in the same run."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.cli import bench_prefetch, bench_ttft
from kvtier.cli.options import DIRECTORY
from kvtier.cli.tables import print_figures
from kvtier.lab.figures import Figure

app = typer.Typer(help="Measure this machine with kvtier and with its limit in the same run.", no_args_is_help=True)

app.command("ttft")(bench_ttft.command)
app.command("prefetch")(bench_prefetch.command)

Json = Annotated[
    bool, typer.Option("--json", help="One JSON object a line: name, value, unit, limit, limit_is, ratio.")
]
Pairs = Annotated[int, typer.Option("--pairs", min=1, max=1000, help="Interleaved pairs; the median is shown.")]


def _measure(room: str, **options: Any) -> Iterator[Figure]:
    # Imported when asked for, so that `kvtier --help` does not load the native engine.
    figures: Iterator[Figure] = import_module(f"kvtier.lab.micro.{room}").figures(**options)
    return figures


@app.command("catalog")
def catalog(json: Json = False, pairs: Pairs = 5) -> None:
    """Match, reserve, settle and release of a long prompt in a catalog of a million blocks."""
    print_figures("catalog", _measure("catalog", pairs=pairs), json)


@app.command("copy")
def copy(json: Json = False, pairs: Pairs = 5) -> None:
    """Page copies with their checksum against a plain memcpy of the same bytes."""
    print_figures("page copies", _measure("copy", pairs=pairs), json)


@app.command("disk")
def disk(
    path: Annotated[Path, typer.Option("--path", help="A directory on the disk to measure.", **DIRECTORY)] = Path("."),
    json: Json = False,
    pairs: Pairs = 5,
) -> None:
    """Page reads and writes against the disk's own speed at the same size and bytes in flight."""
    print_figures("disk", _measure("disk", path=path, pairs=pairs), json)


@app.command("overlap")
def overlap(
    path: Annotated[Path, typer.Option("--path", help="A directory for a temporary store.", **DIRECTORY)] = Path("."),
    json: Json = False,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=10000, help="Of all arms; the median is shown.")] = 30,
) -> None:
    """What loading hides behind computing, layer by layer, and one lane behind the other."""
    measured: Iterator[Figure] = import_module("kvtier.lab.overlap").figures(path, rounds)
    print_figures("overlap", measured, json)


@app.command("overhead")
def overhead(
    path: Annotated[Path, typer.Option("--path", help="A directory for a temporary store.", **DIRECTORY)] = Path("."),
    json: Json = False,
    steps: Annotated[int, typer.Option("--steps", min=100, help="Decode steps of each run.")] = 2000,
) -> None:
    """What kvtier's calls cost an engine's step: CPU without reuse, and the worst steps with all lanes saturated."""
    measured: Iterator[Figure] = import_module("kvtier.lab.overhead").figures(path, steps)
    print_figures("overhead", measured, json)
