"""`kvtier calibrate-copies`: measure a GPU's copy paths, and keep them in a file that the configuration names."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvtier.cli.options import check_file
from kvtier.config import parse_size


def command(
    profile: Annotated[
        Path, typer.Option("--out", "--profile", help="The file to keep it in; cuda.profile names it later.")
    ],
    model: Annotated[
        str,
        typer.Option("--geometry", "--model", help="A well-known model's name, or a folder with a config.json."),
    ] = "llama-3-8b",
    block_size: Annotated[int, typer.Option(min=1, max=4096, help="Tokens in a block.")] = 16,
    layout: Annotated[str, typer.Option(help="How the engine lays its KV out; default: the lab's way.")] = "",
    size: Annotated[str, typer.Option(help="Bytes that each measurement moves.")] = "256MiB",
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Measurements of each path; the median is kept.")] = 5,
    device: Annotated[int, typer.Option(min=0, help="Which CUDA device.")] = 0,
) -> None:
    """Which way of copying pages between a GPU and host memory is fastest, for one model's pages."""
    from kvtier.geometry import KVGeometry
    from kvtier.tiers import copy_paths
    from kvtier.tiers.cuda import CudaDevice, CudaError
    from kvtier.tiers.device import DevicePool
    from kvtier.tiers.host import HostArena

    check_file("out", profile)
    if Path(model).exists():
        geometry = KVGeometry.from_config(model, block_size=block_size, layout=layout)
    else:
        geometry = KVGeometry.named(model, block_size=block_size, layout=layout)
    slots = max(2, parse_size(size) // geometry.payload_bytes)
    try:
        cuda = CudaDevice.of(device)  # before anything is allocated, so that a missing driver is what is said
        pool = DevicePool(geometry, _on_device(geometry, slots, device), cuda=cuda)
        arena = HostArena(slots, geometry, numa_node=cuda.numa_node)
        rates = copy_paths.measure(pool, arena, rounds=rounds, bytes_a_round=parse_size(size))
    except CudaError as error:
        raise ValueError(str(error)) from None
    copy_paths.store(profile, rates)
    table = Table("path", "offload GB/s", "onboard GB/s", title=f"{rates.device}: {geometry.layout_tag}")
    for path in copy_paths.PATHS:
        table.add_row(path, f"{rates.offload[path] / 1e9:.1f}", f"{rates.onboard[path] / 1e9:.1f}")
    ends = Table(
        "ends by",
        "a page's load, us",
        "of a core",
        title=f"loads by {max(rates.onboard, key=rates.onboard.__getitem__)}",
    )
    for way, cost in rates.ends.items():
        ends.add_row(way, f"{cost.wait_s * 1e6:.0f}", f"{cost.processor:.0%}")
    Console().print(table, ends)
    print(f"kept in {profile}; use it by cuda.profile")


def _on_device(geometry: Any, slots: int, ordinal: int) -> list[Any]:
    """KV arrays of `slots` blocks on the device, of raw integers, as `geometry.allocate` makes them in host memory."""
    import torch

    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[geometry.item_bytes]
    layout, shape = geometry.memory_layout, geometry.array_shape(slots)
    where = torch.device("cuda", ordinal)
    if "l" not in layout.order:
        return [torch.zeros(shape, dtype=kind, device=where) for _ in range(geometry.layers * layout.per_layer)]
    sizes = dict(zip(layout.axes, shape, strict=True)) | {"l": geometry.layers}
    buffer = torch.zeros([sizes[axis] for axis in layout.order], dtype=kind, device=where)
    return list(buffer.permute([layout.order.index(axis) for axis in f"l{layout.axes}"]))
