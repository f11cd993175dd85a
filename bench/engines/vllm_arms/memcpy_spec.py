"""vLLM's own CPU offloading on a machine without a GPU: its scheduler, its manager, its keys; only the copies are here,
since vLLM's own need CUDA. One thread copies whole blocks, so that the engine's loop goes on meanwhile."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemcpyWorker(OffloadingWorker):
    """Copies between vLLM's cache and host tensors of the same rows, in the order of submission."""

    def __init__(self, kv_caches: CanonicalKVCaches, host: list[torch.Tensor], cleanup=lambda: None) -> None:
        self._device = [t.tensor.view(torch.int8).view(-1, t.page_size_bytes) for t in kv_caches.tensors]
        self._host = host
        self._cleanup = cleanup
        self._thread = ThreadPoolExecutor(1)
        self._jobs: dict[int, Future[None]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(job_id, self._device, src_spec, self._host, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, self._host, src_spec, self._device, dst_spec)

    def _submit(self, job_id, sources, src_spec, targets, dst_spec) -> bool:
        pairs = list(zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True))
        self._jobs[job_id] = self._thread.submit(_copy, sources, targets, pairs)
        return True

    def get_finished(self) -> list[TransferResult]:
        ended = [job_id for job_id, job in self._jobs.items() if job.done()]
        return [TransferResult(job_id, self._jobs.pop(job_id).exception() is None) for job_id in ended]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._jobs.keys():
            self._jobs[job_id].exception()

    def shutdown(self) -> None:
        self._thread.shutdown()
        self._host.clear()
        self._cleanup()


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
    for source, target in zip(sources, targets, strict=True):
        for here, there in pairs:
            target[there].copy_(source[here])


class MemcpySpec(CPUOffloadingSpec):
    """`CPUOffloadingSpec` with the worker above; one chunk is one block."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self.blocks_per_chunk != 1:
            raise ValueError(f"block_size: {self.blocks_per_chunk} blocks in a chunk; expected the engine's own")
        if self._worker is None:
            host = [torch.zeros(self.num_chunks, t.page_size_bytes, dtype=torch.int8) for t in kv_caches.tensors]
            self._worker = MemcpyWorker(kv_caches, host)
        return self._worker


class MemcpyTieringSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec` likewise: its memory is a file that the scheduler's process maps too."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self.blocks_per_chunk != 1:
            raise ValueError(f"block_size: {self.blocks_per_chunk} blocks in a chunk; expected the engine's own")
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            host = [region.create_next_worker_view(t.page_size_bytes) for t in kv_caches.tensors]
            self._worker = MemcpyWorker(kv_caches, host, region.cleanup)
        return self._worker
