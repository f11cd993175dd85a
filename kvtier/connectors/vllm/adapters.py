"""What a LoRA adapter's weights are: vLLM's block hashes say an adapter's name and path, and those may be reused."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvtier.namespace import adapter_digest

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

__all__ = ["Adapters"]

logger = init_logger(f"vllm.{__name__}")

MOST_KNOWN = 4096


class Adapters:
    """Digests of adapters by (id, name, path), read once each, in a thread of its own.

    Until a digest is there, and where the files cannot be read, requests with the adapter do without the cache. vLLM
    keeps what it loaded under an id until it is told to load in place: then the files are read again.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvtier-adapters")
        self._digests: dict[tuple[int, str, str], Future[bytes]] = {}

    def digest(self, adapter: LoRARequest) -> bytes | None:
        """The adapter's 32 bytes; None: not known (yet). Never waits."""
        key = (adapter.lora_int_id, adapter.lora_name, adapter.lora_path)
        if adapter.load_inplace:
            self._digests.pop(key, None)
        future = self._digests.get(key)
        if future is None:
            if len(self._digests) >= MOST_KNOWN:
                self._digests.pop(next(iter(self._digests)))
            future = self._digests[key] = self._pool.submit(adapter_digest, adapter.lora_path)
            future.add_done_callback(_complain)
        known = future.done() and not future.cancelled() and future.exception() is None
        return future.result() if known else None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _complain(future: Future[bytes]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.warning("kvtier: requests with this adapter are not cached: %s", error)
