"""`kvtier calibrate`: measure lanes and prefill, and keep them in a file that a cache begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvtier.cli.bench_ttft import progress, terminable
from kvtier.cli.options import check_file

_WAYS = {
    "offload": "device → host",
    "onboard": "host → device",
    "spill": "host → disk",
    "stage": "disk → host",
}


def command(
    out: Annotated[Path, typer.Option(help="File to write; name it as `profile` in the configuration.")] = Path(
        "kvtier-profile.json"
    ),
    disk_path: Annotated[
        Path | None, typer.Option(help="A directory on the disk to measure; a temporary store is made and removed.")
    ] = None,
    geometry: Annotated[str, typer.Option(help="Whose pages to move, such as llama-3-8b.")] = "llama-3-8b",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 16,
    model: Annotated[
        str | None, typer.Option(help="Measure this one's prefill too: hub id, folder, smollm2, random, random-tiny.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Of each size and lane.")] = 6,
) -> None:
    """Measure how fast pages move on this machine, and a model's prefill, so that the first request is decided well.

    A cache learns the same in service; this only spares it the first requests.
    """
    from kvtier.geometry import KVGeometry
    from kvtier.lab.calibrate import calibrate

    check_file("out", out)
    console, errors = Console(), Console(stderr=True)
    with terminable(), progress(errors) as tell:
        profile = calibrate(
            KVGeometry.named(geometry, block_size=block_size), disk_path, model=model, rounds=rounds, progress=tell
        )
    profile.save(out)
    for lane, speed in profile.lanes.items():
        line = f"{lane:8} {_WAYS[lane]}  {speed.bytes_per_s / 1e9:7.2f} GB/s  + {1e3 * speed.fixed_s:.3f} ms"
        console.print(line, highlight=False)
    if profile.prefill is not None:
        each = profile.prefill
        seconds = each.pass_s + each.token_s * each.pass_tokens + each.pair_s * each.pass_tokens**2 / 2
        console.print(
            f"prefill                 {each.pass_tokens / seconds:7.0f} tokens/s  {each.model}", highlight=False
        )
    console.print(f"written: {out}", highlight=False, soft_wrap=True)
