"""Plots of what the other steps left in ``$OUT``."""

from __future__ import annotations

import json
from typing import Any

from rig import OUT, PATHS, skip


def main() -> None:
    try:
        import matplotlib
    except ImportError as error:
        skip(f"{error}: give the wheels of requirements/gpu.txt, or draw from the JSON elsewhere by bench/gpu/plots.py")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [draw(pyplot) for draw in (link, serve)]
    print("drawn:", ", ".join(name for name in drawn if name) or "nothing")


def read(name: str) -> Any:
    path = OUT / f"gpu-{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def link(pyplot: Any) -> str | None:
    data = read("link")
    if not data:
        return None
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    sizes = [row["segment_bytes"] / 1024 for row in data["rows"]]
    for axis, lane in zip(axes, ("offload", "onboard"), strict=True):
        for path in PATHS:
            axis.plot(sizes, [row[f"{lane} GB/s"][path] for row in data["rows"]], marker="o", label=path)
        if not data["dry_run"]:
            axis.plot(sizes, [row[f"{lane} limit GB/s"] for row in data["rows"]], "k--", label="one large pinned copy")
        axis.set(xscale="log", xlabel="segment, KiB", title=lane)
    axes[0].set_ylabel("GB/s")
    axes[1].legend()
    return save(figure, data, "link")


def serve(pyplot: Any) -> str | None:
    data = read("serve")
    if not data:
        return None
    figure, axis = pyplot.subplots(figsize=(7, 4))
    rows = [row for row in data["rows"] if row["kind"] == "context"]
    for source in ("recompute", "device", "host", "disk"):
        own = [row for row in rows if row["source"] == source]
        axis.plot([row["context"] for row in own], [row["ttft_ms"] for row in own], marker="o", label=source)
    floor = [row for row in rows if "floor_ms" in row and row["source"] == "host"]
    if floor:
        axis.plot([row["context"] for row in floor], [row["floor_ms"] for row in floor], "k--", label="bytes / link")
    axis.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="time to first token, ms")
    axis.legend()
    return save(figure, data, "serve")


def save(figure: Any, data: Any, name: str) -> str:
    if data["dry_run"]:
        figure.suptitle("dry run over an emulated device: no figure of a GPU")
    figure.tight_layout()
    figure.savefig(OUT / f"gpu-{name}.png", dpi=120)
    return f"gpu-{name}.png"


if __name__ == "__main__":
    main()
