"""kvtier as a KV connector of vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVTierConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvtier.connectors.vllm", "kv_connector_extra_config": {"host.size": "16GiB"}}'

vLLM makes one connector in the scheduler's process and one in each worker's; they meet only in vLLM's own messages.
`scheduler` holds the control plane, `worker` a data plane, `metadata` what goes between them, `settings` what may be
configured, `support` what is served at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.logger import init_logger

from kvtier.connectors.vllm import support
from kvtier.connectors.vllm.metadata import Introduction, StepOrders, WorkerReport
from kvtier.connectors.vllm.metrics import PromMetrics, Stats
from kvtier.connectors.vllm.scheduler import SchedulerSide
from kvtier.connectors.vllm.settings import Settings
from kvtier.connectors.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["KVTierConnector", "KVTierSecondaryTier"]

logger = init_logger(f"vllm.{__name__}")


def __getattr__(name: str) -> Any:
    """The tier for vLLM's own offloading, of which an engine with the connector needs nothing."""
    if name == "KVTierSecondaryTier":
        from kvtier.connectors.vllm.secondary import KVTierSecondaryTier

        return KVTierSecondaryTier
    raise AttributeError(name)


class KVTierConnector(KVConnectorBase_V1):
    """What vLLM loads; it sends each call to the side that this process is. Raises
    :class:`kvtier.config.ConfigError` at start for what cannot be served."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        support.check_interface(KVTierConnector, KVConnectorBase_V1)
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        settings = Settings.read(transfer.kv_connector_extra_config, block_size)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        notes = support.check(vllm_config, kv_cache_config, settings)
        if role == KVConnectorRole.WORKER:
            from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

            self._worker = WorkerSide(vllm_config, settings, get_tensor_model_parallel_rank())
            return
        if transfer.kv_load_failure_policy != "recompute":
            # Of this object the scheduler reads the policy right after it has made its connector.
            transfer.kv_load_failure_policy = "recompute"
            notes.append("kv_load_failure_policy is 'recompute' now: a page that cannot be loaded is computed")
        for note in notes:
            logger.warning("kvtier: %s", note)
        self._scheduler = SchedulerSide(vllm_config, settings)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: what is not stored is only computed again

    # ---- worker --------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._on_worker.adopt(kv_caches)

    def get_handshake_metadata(self) -> Introduction | None:
        return self._on_worker.introduction

    def handle_preemptions(self, kv_connector_metadata: StepOrders) -> None:
        """vLLM's first call in a step, before anything is written."""
        self._on_worker.before_forward(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads have begun in :meth:`handle_preemptions` already; those that the step reads must be there now, or come
        layer by layer."""
        self._on_worker.before_pass()

    def wait_for_layer_load(self, layer_name: str) -> None:
        worker = self._worker  # each layer of every step comes here: no further where there is nothing to wait for
        if worker is not None and worker.layers_ask:
            worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are stored whole, in :meth:`wait_for_save`."""

    def finish_forward(self) -> None:
        self._on_worker.pass_ended()

    def wait_for_save(self) -> None:
        self._on_worker.after_forward(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        step = self._get_connector_metadata() if self.has_connector_metadata() else None
        return None, self._on_worker.ended_loads(step) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._on_worker.take_invalid()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._on_worker.report()

    # ---- scheduler -----------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._on_scheduler.bind(kv_cache_manager.evict_blocks)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Introduction]) -> None:
        self._on_scheduler.connect(metadata)

    def on_new_request(self, request: Request) -> None:
        self._on_scheduler.begin(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._on_scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        table = blocks.get_block_ids()[0] if num_external_tokens else ()
        self._on_scheduler.allocated(request, table, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        return self._on_scheduler.sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepOrders:
        return self._on_scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._on_scheduler.take(connector_output.kv_connector_worker_meta, connector_output.invalid_block_ids)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._on_scheduler.finish(request)
        return False, None

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._on_scheduler.events()

    def has_pending_push_work(self) -> bool:
        return self._on_scheduler.busy

    def reset_cache(self) -> bool:
        return self._on_scheduler.reset()

    # ---- both ----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Stats | None:
        return self._scheduler.stats() if self._scheduler is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    @property
    def _on_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler's call in a worker"
        return self._scheduler

    @property
    def _on_worker(self) -> WorkerSide:
        assert self._worker is not None, "a worker's call in the scheduler"
        return self._worker
