"""kvtier's disk below vLLM's own offloading: a secondary tier of its `TieringOffloadingSpec`.

    "secondary_tiers": [{"type": "KVTierSecondaryTier", "module_path": "kvtier.connectors.vllm",
                         "disk.path": "/data/kv", "disk.size": "200GiB"}]

vLLM's primary tier is memory that it shares with its workers; a chunk of it, all ranks' parts side by side, is one page
here, whose content is opaque. A little host memory of kvtier's own lies between it and the disk. All calls come from
the scheduler's thread and none waits, but `drain_jobs`: vLLM calls it when it is told to forget what it has, for new
weights too, so everything is forgotten here as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import vllm
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvtier.config import CacheConfig, ConfigError
from kvtier.geometry import KVGeometry
from kvtier.keyed import Key, KeyedPages
from kvtier.namespace import DIGEST_BYTES, Namespace, model_revision
from kvtier.plane import LocalDataPlane
from kvtier.tiers.device import DevicePool

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from vllm.v1.kv_offload.base import OffloadingSpec

__all__ = ["KVTierSecondaryTier"]

HOST_SIZE = 256 << 20  # bytes of staging, if nothing else is said: vLLM's primary tier is the cache

logger = init_logger(f"vllm.{__name__}")


class KVTierSecondaryTier(SecondaryTierManager):
    """``settings``: keys of :class:`kvtier.config.CacheConfig`, dotted, ``disk.path`` among them, and
    ``weights_revision``, needed where the model is no local folder. Raises ConfigError at start."""

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        weights_revision: str = "",
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if settings.get("host.write", "at_once") != "at_once":
            raise ConfigError(f"host.write: {settings['host.write']!r}: expected 'at_once', as vLLM gives pages once")
        config = CacheConfig.load(**{"host.size": HOST_SIZE} | settings | {"block_size": 1})
        if config.disk.path is None or not config.disk.path.is_dir():
            raise ConfigError(f"disk.path: {str(config.disk.path)!r}: expected a directory that exists")
        size = self.block_size_bytes
        geometry = KVGeometry(
            layers=1, kv_heads=1, head_dim=size, latent=True, dtype="uint8", block_size=1, layout="mla.bnc"
        )
        name = _namespace(offloading_spec, geometry, weights_revision)
        folder = config.disk.path / f"tier-{offloading_spec.config.parallel.data_parallel_index}"
        folder.mkdir(mode=0o700, exist_ok=True)
        config = config.model_copy(update={"disk": config.disk.model_copy(update={"path": folder})})
        chunks = np.frombuffer(primary_kv_view, np.uint8).reshape(-1, 1, size)
        plane = LocalDataPlane(config, geometry, DevicePool(geometry, [chunks]), label_bytes=DIGEST_BYTES)
        try:
            self._pages = KeyedPages(config, name, plane)
        except BaseException:
            plane.close()
            raise
        self._jobs: dict[int, tuple[TransferJob, tuple[OffloadKey, ...]]] = {}
        self._missed: dict[str, set[OffloadKey]] = {}  # by request: what could not be had once is not tried again
        logger.info("kvtier: %s", self._pages.describe())

    # ---- requests ------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if key in self._missed.get(req_context.req_id, ()):
            return LookupResult.MISS
        return LookupResult.HIT if self._pages.find(_key(key)) else LookupResult.MISS

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._pages.touch([_key(key) for key in keys])

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._missed.pop(req_context.req_id, None)

    # ---- jobs ----------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        keys = self._begin(job_metadata)
        self._pages.store(job_metadata.job_id, [_key(key) for key in keys], _slots(job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        keys = self._begin(job_metadata)
        self._pages.load(job_metadata.job_id, [_key(key) for key in keys], _slots(job_metadata))

    def _begin(self, job: TransferJob) -> tuple[OffloadKey, ...]:
        keys = tuple(job.keys)
        self._jobs[job.job_id] = job, keys
        return keys

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        for done in self._pages.poll():
            job, keys = self._jobs.pop(done.job)
            came = tuple(key for key, arrived in zip(keys, done.arrived, strict=True) if arrived)
            if job.is_promotion and len(came) < len(keys):
                self._missed.setdefault(job.req_context.req_id, set()).update(set(keys) - set(came))
            results.append(
                JobResult(
                    done.job,
                    success=len(came) == len(keys),
                    successful_keys=came if job.is_promotion else None,
                    transfer_bytes=len(came) * self.block_size_bytes,
                )
            )
        return results

    def has_pending_work(self) -> bool:
        return self._pages.busy

    def drain_jobs(self) -> None:
        self._pages.drain()
        try:
            self._pages.reset()
        except OSError as error:
            logger.error("kvtier: the reset is in force but a restart may bring old pages back: %s", error)

    def shutdown(self) -> None:
        self._pages.close()
        del self._pages  # and its hold on vLLM's memory, which goes next


def _key(key: OffloadKey) -> Key:
    return Key(bytes(get_offload_block_hash(key)), get_offload_group_idx(key))


def _slots(job: TransferJob) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.asarray(job.chunk_ids).astype(np.uint32)


def _namespace(spec: OffloadingSpec, geometry: KVGeometry, weights_revision: str) -> Namespace:
    """All of it that a tier is told. Which attention kernel lays the blocks out it is not, but what decides that is."""
    config = spec.config
    if not weights_revision and not Path(config.model.name).is_dir():
        raise ConfigError("weights_revision: '': expected what the weights are, since the model is no local folder")
    machine = (
        torch.backends.cpu.get_cpu_capability() if current_platform.is_cpu() else current_platform.get_device_name()
    )
    groups = [
        {"tokens": group.tokens_per_block, "layers": list(group.layer_names), "id": group.group_id}
        for group in config.groups
    ]
    parallel = config.parallel
    return Namespace(
        model=config.model.name,
        revision=weights_revision or model_revision(config.model.name),
        dtype="uint8",
        rope={},
        layout=f"{config.kv_cache_layout}/{geometry.layout_tag}",
        attention=f"{machine}/amx-{torch.cpu._is_amx_tile_supported()}/torch-{torch.__version__}",
        block_size=1,
        extra={
            "cache_dtype": str(config.model.dtype),
            "tokens_per_hash": config.cache.tokens_per_hash,
            "blocks_per_chunk": config.cache.blocks_per_chunk,
            "groups": groups,
            "parallel": [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
            "canonical": config.canonical_layout,
            "replicated": spec.replicated_layout,
            "vllm": vllm.__version__,
        },
    )
