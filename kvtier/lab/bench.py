"""`kvtier bench ttft` without its command line: settings in, a result out, nothing left behind."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvtier.lab import machine
from kvtier.lab.results import BenchResult, ContextRow, LaneRate, Model
from kvtier.lab.rig import Progress, Rig, disk_io, lane_rates, open_model, shape_of
from kvtier.lab.ttft import ContextBench, rows

if TYPE_CHECKING:
    from kvtier.lab.settings import Fitted, Settings

__all__ = ["run"]

# By when, in shares of the time that may pass where it is limited, each part has ended.
_CONTEXT_SHARE, _LOAD_SHARE = 0.36, 0.95


def run(settings: Settings, progress: Progress) -> BenchResult:
    """Measure what ``settings`` ask for.

    Raises :class:`~kvtier.lab.settings.BenchError` or another ValueError for what cannot be measured, before time is
    spent on it, and :class:`~kvtier.lab.rig.ProofError` when a row could not be shown to be what it says. Temporary
    stores are removed in every case.
    """
    began = time.monotonic()
    if settings.uses_disk:
        settings.check_disk(0)
    if settings.geometry is not None:
        return _run_geometry(settings, progress)
    progress("loading the model", 0.0)
    model = open_model(settings.model, settings.seed, settings.device)
    fitted = settings.fitted(shape_of(model, settings.cache.block_size))
    store = settings.store_parent if settings.uses_disk else None
    with_load = bool(settings.users)
    first = _part(progress, 0.0, 0.5 if with_load else 1.0)
    with Rig(model, fitted.cache_config(), fitted.device_blocks, store, chunk_tokens=settings.chunk_tokens) as rig:
        contexts = ContextBench(rig, fitted, first)
        contexts.run(_left(settings, began, _CONTEXT_SHARE if with_load else 1.0))
        rates = lane_rates(rig.manager)
        device_bytes = rig.pool.bytes
        io = disk_io(rig.manager)
    table = rows(contexts.samples, settings.tiers, device_bytes)
    header = Model(
        name=model.name,
        revision=model.revision,
        dtype=str(model.dtype).removeprefix("torch."),
        weights="random" if model.random_weights else "real",
        kv_bytes_per_token=fitted.shape.device_bytes // fitted.shape.block_size,
        context_limit=model.context_limit,
    )
    result = _result(settings, fitted, contexts.contexts, header, io, table, rates, [])
    if not with_load:
        return result
    from kvtier.lab.load import LoadBench

    load = LoadBench(model, fitted, _part(progress, 0.5, 1.0))
    load.run(_left(settings, began, _LOAD_SHARE), contexts.tokens_per_s)
    extra = {"load": load.rows, "concurrency": load.concurrency, "notes": [*result.notes, *load.notes]}
    return result.model_copy(update=extra)


def _run_geometry(settings: Settings, progress: Progress) -> BenchResult:
    from kvtier.lab.geometry_bench import GeometryBench, shape_of_geometry

    assert settings.geometry is not None
    fitted = settings.fitted(shape_of_geometry(settings.geometry, settings.cache.block_size))
    with GeometryBench(fitted, settings.store_parent if settings.uses_disk else None, progress) as bench:
        bench.run(settings.seconds)
        rates = lane_rates(bench.manager)
        measured = rows(bench.samples, settings.tiers, bench.device.bytes, loads_only=True)
        modelled, note = bench.modelled()
        io, dtype = disk_io(bench.manager), bench.manager.geometry.dtype
    order = {id(row): index for index, row in enumerate([*modelled, *measured])}
    table = sorted([*modelled, *measured], key=lambda row: (row.context, order[id(row)]))
    header = Model(
        name=fitted.shape.name,
        revision=None,
        dtype=dtype,
        weights="none",
        kv_bytes_per_token=fitted.shape.device_bytes // fitted.shape.block_size,
        context_limit=None,
    )
    return _result(settings, fitted, fitted.contexts, header, io, table, rates, [note] if note else [])


def _result(
    settings: Settings,
    fitted: Fitted,
    contexts: tuple[int, ...],
    model: Model,
    io: str,
    table: list[ContextRow],
    rates: list[LaneRate],
    notes: list[str],
) -> BenchResult:
    options: dict[str, Any] = {k: v for k, v in asdict(settings).items() if k != "cache"}
    options = {k: str(v) if k in ("out", "disk_path") and v is not None else v for k, v in options.items()}
    options["contexts"] = contexts
    dropped = [context for context in settings.contexts or settings.usual_contexts if context not in contexts]
    if dropped:
        words = ", ".join(str(context) for context in dropped)
        notes = [
            *notes,
            f"Contexts that the model, the memory or the time has no room for were left out: {words} tokens.",
        ]
    return BenchResult(
        date=time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        machine=machine.describe(settings.store_parent if settings.uses_disk else None),
        model=model,
        config={"options": options, "cache": fitted.cache_config().model_dump(mode="json")},
        io=io,
        device=_device(settings.device),
        contexts=table,
        lanes=rates,
        notes=notes,
    )


def _device(name: str) -> str:
    """What the device tier really is."""
    if name == "cpu":
        return "host memory"
    import torch

    return str(torch.cuda.get_device_name(name))


def _left(settings: Settings, began: float, share: float) -> float | None:
    """What is left of ``share`` of the time that may pass."""
    if settings.seconds is None:
        return None
    return max(settings.seconds * share - (time.monotonic() - began), 0.0)


def _part(progress: Progress, first: float, last: float) -> Progress:
    """Progress of a part, as the whole's."""
    return lambda words, share: progress(words, first + share * (last - first))
