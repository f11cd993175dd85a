"""Measures what the cost model wants to know before the first request: every lane, and a model's prefill.

Nothing is measured by other means than in service: requests of several sizes run through a cache whose pages are then
found in host memory and on disk, and the cost model learns from what their transfers report.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtier.catalog import Tier
from kvtier.config import CacheConfig, DiskConfig, HostConfig
from kvtier.geometry import KVGeometry
from kvtier.lab import machine
from kvtier.lab.stores import temporary_store
from kvtier.manager import CacheManager
from kvtier.namespace import Namespace
from kvtier.profile import Profile
from kvtier.tiers.device import DevicePool

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.costmodel import CostModel
    from kvtier.lab.model import LabModel

__all__ = ["calibrate"]

_SIZES = (1, 4, 16, 64)  # blocks
_MOST_BYTES = 256 << 20  # of a request's pages, beyond which larger sizes are left out
_PROMPT_TOKENS = 1024


def calibrate(
    geometry: KVGeometry,
    disk_path: Path | None,
    *,
    model: str | None = None,
    rounds: int = 6,
    progress: Callable[[str, float], None] = lambda words, share: None,
) -> Profile:
    """Measure the lanes with pages of ``geometry``, the disk's in a temporary store below ``disk_path`` (None: no
    disk), and the prefill of ``model`` (a name as ``kvtier bench ttft`` takes them; None: not measured).

    Raises ValueError for what cannot be measured, OSError where the disk refuses.
    """
    prefills = None if model is None else _open(model)  # first: what is no model is refused before the time has gone
    with ExitStack() as stack:
        disk = DiskConfig()
        largest = max(size for size in _SIZES if size == 1 or size * geometry.page_bytes <= _MOST_BYTES)
        if disk_path is not None:
            store = stack.enter_context(temporary_store(disk_path))
            disk = DiskConfig(path=store, size=4 * largest * (geometry.page_bytes + 8192) + (4 << 20))
        config = CacheConfig(
            block_size=geometry.block_size,
            host=HostConfig(size=2 * largest * geometry.page_bytes),
            disk=disk,
            load_policy="always",
        )
        pool = DevicePool.allocate(geometry, largest + 2)
        manager = stack.enter_context(CacheManager(config, geometry, _namespace(geometry), pool))
        for number in range(rounds):
            progress(f"lanes, round {number + 1} of {rounds}", number / rounds * (0.5 if model else 1.0))
            for size in _SIZES:
                if size <= largest:
                    _one(manager, size, number, with_disk=disk_path is not None)
        costs = manager.costs
    name = None
    if prefills is not None:
        progress("the model's prefill", 0.5)
        name = _prefill(prefills, costs)
    where = machine.describe(disk_path)
    date = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    return Profile.of(costs, date=date, machine=f"{where.cpu}, disk {where.disk}", model=name)


def _namespace(geometry: KVGeometry) -> Namespace:
    return Namespace(
        model="calibration", revision="1", dtype=geometry.dtype, rope={}, attention="none",
        layout=geometry.layout_tag, block_size=geometry.block_size,
    )  # fmt: skip


def _one(manager: CacheManager, blocks: int, number: int, *, with_disk: bool) -> None:
    """Blocks that go down as far as there are tiers, then come up from host memory, then from disk."""
    block = manager.config.block_size
    tokens = np.random.default_rng((number, blocks)).integers(0, 1 << 31, blocks * block + 1).astype(np.uint32)
    for turn in range(3 if with_disk else 2):
        name = f"{number}-{blocks}-{turn}"
        manager.get_computed_blocks(name, tokens)
        if manager.allocate_slots(name, len(tokens)) is None:
            raise ValueError(f"calibrate: {blocks} blocks found no room")
        while not manager.ready(name):
            manager.poll(1.0)
        manager.cache_blocks(name, len(tokens))
        manager.free(name)
        manager.flush()
        for tier in (Tier.DEVICE, Tier.HOST)[: 1 + (turn > 0 and with_disk)]:
            manager.evict(tier, tokens)
    manager.evict(Tier.DEVICE, tokens)


def _open(name: str) -> LabModel:
    from kvtier.lab.rig import open_model

    return open_model(name, 0)


def _prefill(model: LabModel, costs: CostModel) -> str:
    """Compute a prompt through the lab's engine, three times: the first is slower than any other."""
    from kvtier.lab.rig import Rig
    from kvtier.lab.workload import document

    tokens = min(_PROMPT_TOKENS, model.context_limit - 1)
    config = CacheConfig(host=HostConfig(size=1 << 20, write="never"), load_policy="never")
    with Rig(model, config, 2 * (tokens // config.block_size + 2), None, chunk_tokens=64) as rig:
        for turn in range(3):
            rig.serve(document(model, tokens, 0, turn), 1)
        known = rig.manager.costs.prefill_speed()
    assert known is not None, "an engine that computed says how long it took"
    costs.seed_prefill(*known)
    return str(model.name)
