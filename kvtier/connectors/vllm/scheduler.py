"""The scheduler's side: vLLM's words to the control plane's. It touches no byte and never waits.

For each request vLLM asks what could be loaded behind its own prefix hit and allocates blocks; the step's orders have
the workers fill them, and the request waits until all workers report it, or computes in the same step, which waits.
What a step computes is offered for storing in the same step's orders. A block may be freed and given away while a store
still reads it: the step that writes it names the store as one that has to end first.

Blocks of a synchronous load are in vLLM's prefix cache from their allocation on, and so is what the step computes
behind them. Until the step's end nobody knows whether they came: no other request is admitted on top of them, and where
they did not come they leave the prefix cache again.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.connectors.vllm import support
from kvtier.connectors.vllm.adapters import Adapters
from kvtier.connectors.vllm.events import Events
from kvtier.connectors.vllm.metadata import Introduction, Load, StepOrders, WorkerReport
from kvtier.connectors.vllm.metrics import Stats, flatten
from kvtier.layers import Layers
from kvtier.offload import LoadMode, OffloadManager
from kvtier.relay import RelayPlane
from kvtier.waiting import Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import numpy.typing as npt
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvtier.connectors.vllm.settings import Settings

__all__ = ["SchedulerSide"]

JOURNAL = "generations"
PREFILL_TOKENS = 32  # a step of fewer tokens says little of the speed of a prefill
MOST_TIMED = 16  # steps: of one that no worker answers for nothing is kept
PREFILL_SHARE = 0.9  # of a step's tokens that must be one request's for its time to be that request's
TURN_PATIENCE = 0.1  # seconds for which nobody takes the last place before a request whose look-ahead is just arriving
SOURCES = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}

logger = init_logger(f"vllm.{__name__}")


class SchedulerSide:
    """Every call comes from the scheduler's own thread, `connect` first."""

    def __init__(self, vllm_config: VllmConfig, settings: Settings) -> None:
        self._config, self._settings = vllm_config, settings
        self._block = settings.cache.block_size
        self._adapters = Adapters()
        self._requests: dict[str, Request] = {}
        self._waiting = Waiting()  # in vLLM's queue: of those it asks about none but who is about to begin
        self._loads: dict[str, Load] = {}
        self._void: tuple[str, ...] = ()
        self._written: list[int] = []
        self._held = False  # whether nobody else is admitted in the step that is being made
        self._held_until: float | None = None  # at the latest; None: since the last admission nobody was held up
        self._admitted: set[str] = set()  # to compute in the step that is being made
        self._running: Mapping[str, int] = {}  # requests of the last step
        self._unproven: list[tuple[int, Any]] = []  # of that step's synchronous loads: at which block, named what
        self._beside: dict[str, list[int]] = {}  # request → blocks that a step loads, and computes, synchronously
        self._evict: Callable[[set[int]], None] | None = None
        self._steps = count(1)
        self._timed: dict[int, tuple[int, int]] = {}  # steps whose time is awaited: tokens, and those before them
        self._full: dict[str, int] = {}  # request → tokens with which the next block that it may offer is full
        self._reported: dict[str, float] = {}
        self._moved = True  # whether any of those may have changed
        self._events: Events | None = None
        self._relay: RelayPlane | None = None
        self.manager: OffloadManager | None = None

    def bind(self, evict: Callable[[set[int]], None]) -> None:
        """``evict`` takes blocks from vLLM's prefix cache; without it no load is synchronous. Before ``connect``."""
        self._evict = evict

    def connect(self, workers: Mapping[int, Introduction]) -> None:
        """Build the control plane over the workers' data planes, by rank. ValueError where they do not agree."""
        ranks = [workers[rank] for rank in sorted(workers)]
        kinds = {(worker.geometry, worker.attention) for worker in ranks}
        if len(kinds) != 1 or len(ranks) != self._config.parallel_config.tensor_parallel_size:
            raise ValueError(f"ranks: {len(ranks)} workers with caches of {len(kinds)} kinds; expected all alike")
        disk = self._settings.cache.disk.path
        journal = support.engine_folder(disk, self._config) / JOURNAL if disk is not None else None
        self._relay = RelayPlane([worker.hello for worker in ranks], journal)
        name = support.name(self._config, self._settings, ranks[0])
        geometry = ranks[0].geometry
        self.manager = OffloadManager(
            self._settings.cache,
            name,
            self._relay,
            load_mode=self._load_mode(),
            layers=Layers(geometry.layers, geometry.payload_bytes),
        )
        events = getattr(self._config, "kv_events_config", None)
        if events is not None and events.enable_kv_cache_events:
            self._events = Events(self.manager.catalog, self._block)
        logger.info("kvtier: %s", self.manager.describe())

    def _load_mode(self) -> LoadMode:
        """A step whose successor is made before its own end is known cannot wait for a load that may fail."""
        if self._evict is None or self._config.scheduler_config.async_scheduling:
            return "async"
        return self._settings.load_mode

    # ---- a request's life ----------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._waiting.enter(request.request_id)
        self._moved = True

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens could be loaded behind those that vLLM has, and whether the request waits for them beside the
        steps; None: ask again, others are bringing them."""
        self._full.pop(request.request_id, None)
        start = num_computed_tokens // self._block
        if any(at < start and request.block_hashes[at] == name for at, name in self._unproven):
            return None, False
        if self._held:
            return None, False
        if self.manager is None or not self._cacheable(request):
            return 0, False
        found = self.manager.match(
            request.request_id,
            self._usable(request),
            start,
            tokens=request.num_tokens,
            others=self._others(request.request_id),
            adapter=self._adapter(request),
        )
        tokens = (found.blocks + found.coming) * self._block
        if not tokens or tokens < self._settings.min_load_tokens:
            return 0, False
        if found.waits:
            self._held = found.soon and self._keeps_place(request.request_id)
            return None, False
        return tokens, not found.synchronous

    def _keeps_place(self, request_id: str) -> bool:
        """Whether those behind it in the queue wait too: a moment for all of it, and only where one of them would take
        the last place."""
        if self._config.scheduler_config.max_num_seqs - self._others(request_id) > 1:
            return False
        now = time.monotonic()
        if self._held_until is None:
            self._held_until = now + TURN_PATIENCE
        return now < self._held_until

    def _usable(self, request: Request) -> npt.NDArray[np.uint8]:
        """Hashes of what it could load: nothing where vLLM computes it all, as for prompt logprobs. The last token is
        always left to compute, so the block that holds it is too."""
        if request.skip_reading_prefix_cache:
            return as_labels(())
        return as_labels(request.block_hashes[: (request.num_tokens - 1) // self._block])

    def _adapter(self, request: Request) -> bytes | None:
        return self._adapters.digest(request.lora_request) if request.lora_request is not None else None

    def _others(self, request_id: str) -> int:
        """Requests that would wait too if the step that is being made waited for a load."""
        running = {name for name in self._running if name in self._requests} | self._admitted
        return len(running - {request_id})

    def _cacheable(self, request: Request) -> bool:
        """Not what its hashes do not name: media whose id a caller may choose, an adapter not read yet."""
        if request.mm_features or request.resumable:
            return False
        return request.lora_request is None or self._adapter(request) is not None

    def allocated(self, request: Request, table: Sequence[int], num_external_tokens: int) -> None:
        """vLLM gave the request blocks, the first to be loaded behind those that it had itself."""
        self._waiting.leave(request.request_id)
        self._held_until = None
        if self.manager is None or not num_external_tokens:
            self._admitted.add(request.request_id)
            return
        start = self.manager.begins(request.request_id)
        blocks = np.array(table[start : start + num_external_tokens // self._block], np.uint32)
        loading = self.manager.load(request.request_id, blocks)
        self._loads[request.request_id] = Load(loading.tickets, blocks, blocks[loading.blocks :], loading.synchronous)
        self._written += table[start:]
        if loading.synchronous:
            self._admitted.add(request.request_id)
            self._unproven.append((start, request.block_hashes[start]))
            self._beside[request.request_id] = list(table[start:])

    def sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        if self.manager is None or not num_external_tokens:
            return {}
        origin = self.manager.origin(request.request_id)
        return {SOURCES[tier]: blocks * self._block for tier, blocks in origin.items()}

    def finish(self, request: Request) -> None:
        """In whatever state. Its blocks may go at once: see :meth:`step` for stores that read them."""
        self._requests.pop(request.request_id, None)
        self._waiting.drop(request.request_id)
        self._full.pop(request.request_id, None)
        self._moved = True
        if self.manager is not None:
            self.manager.free(request.request_id)

    # ---- each step -----------------------------------------------------------------------------------------------

    def step(self, scheduled: SchedulerOutput) -> StepOrders:
        """The orders of this step. Stores of earlier steps that read a block which this one writes must end first."""
        if self.manager is None or self._relay is None:
            return StepOrders()
        must_end = self.manager.reading([*self._written, *self._rewritten(scheduled)])
        for request_id, tokens in scheduled.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is not None and request.num_computed_tokens + tokens >= self._full.get(request_id, 0):
                stores = self._store(request, tokens, scheduled)
                if (load := self._loads.get(request_id)) is not None:  # what it computes depends on it
                    self._loads[request_id] = replace(load, stores=stores)
        for request_id in scheduled.preempted_req_ids or ():  # by a reset: it may have begun again, or ended, since
            begun = request_id in scheduled.num_scheduled_tokens or request_id in self._loads
            if request_id in self._requests and not begun:
                self._waiting.enter(request_id, first=True)
        if len(self._waiting):
            self._announce()
        idle = scheduled.total_num_scheduled_tokens == 0
        orders = StepOrders(self._relay.orders(), must_end, self._loads, self._void, idle, self._time(scheduled))
        self._loads, self._void, self._written, self._unproven = {}, (), [], []
        self._admitted, self._running, self._held = set(), scheduled.num_scheduled_tokens, False
        return orders

    def _announce(self) -> None:
        """Have what those that could not begin in this step will read brought up from disk meanwhile."""
        assert self.manager is not None
        for request_id, within in self._waiting.news():
            request = self._requests.get(request_id)
            if request is not None and self._cacheable(request) and len(usable := self._usable(request)):
                self.manager.expect(request_id, usable, within, adapter=self._adapter(request))
        if changes := self._waiting.changes():
            self.manager.reorder(changes)

    def _time(self, scheduled: SchedulerOutput) -> int:
        """A number for a step that is one request's prefill and little else, to be told how long it took; else 0."""
        most = max(scheduled.num_scheduled_tokens, key=scheduled.num_scheduled_tokens.__getitem__, default=None)
        if most is None or most not in self._requests or self._requests[most].mm_features:
            return 0  # media are encoded in the same pass
        if any(load.synchronous for load in self._loads.values()):  # its time is not all computing
            return 0
        tokens = scheduled.num_scheduled_tokens[most]
        if tokens < PREFILL_TOKENS or tokens < PREFILL_SHARE * scheduled.total_num_scheduled_tokens:
            return 0
        number = next(self._steps)
        self._timed[number] = tokens, self._requests[most].num_computed_tokens
        self._timed.pop(number - MOST_TIMED, None)
        return number

    def _rewritten(self, scheduled: SchedulerOutput) -> Iterable[int]:
        """Blocks that were given to a request since the last step and hold nothing that it reads."""
        for new in scheduled.scheduled_new_reqs:
            yield from new.block_ids[0][new.num_computed_tokens // self._block :]
        old = scheduled.scheduled_cached_reqs
        for request_id, blocks, computed in zip(old.req_ids, old.new_block_ids, old.num_computed_tokens, strict=True):
            if blocks is not None:
                yield from blocks[0][computed // self._block if request_id in old.resumed_req_ids else 0 :]

    def _store(self, request: Request, tokens: int, scheduled: SchedulerOutput) -> tuple[int, ...]:
        """Offer the blocks that this step fills; returns the tickets of what was ordered. Only tokens that are settled
        have hashes, so guesses of a speculative step are never in them, nor is what the step before will answer. A
        block that only a request's last output settles is left to whoever continues it: keeping the engine's blocks
        for it would cost more than the few tokens that are computed again on average."""
        request_id = request.request_id
        first = self.manager.stored(request_id) if self.manager is not None else None
        if first is None or self.manager is None:
            return ()
        full = min(len(request.block_hashes), (request.num_computed_tokens + tokens) // self._block)
        tables = scheduled.kv_connector_block_state.get_block_ids(request_id) if full > first else None
        if tables is None:
            return ()
        hashes = as_labels(request.block_hashes[first:full])
        tickets = self.manager.store(request_id, hashes, np.array(tables[0][first:full], np.uint32))
        self._full[request_id] = (full + 1) * self._block
        return tickets

    def take(self, report: WorkerReport | None, invalid: Collection[int] = ()) -> None:
        """What the workers tell of the orders, and which blocks they could not fill."""
        if self.manager is None or self._relay is None:
            return
        if report is not None:
            self._hear(report)
        for loaded in self.manager.poll():
            if loaded.blocks < loaded.wanted:
                logger.warning(
                    "kvtier: %d of %d blocks of request %s did not arrive and are computed",
                    loaded.wanted - loaded.blocks,
                    loaded.wanted,
                    loaded.request_id,
                )
        self._undo(invalid)

    def _hear(self, report: WorkerReport) -> None:
        assert self.manager is not None
        assert self._relay is not None
        for number, seconds in report.passes.items():
            if (timed := self._timed.pop(number, None)) is not None:  # once, however many ranks say it, and when
                self.manager.observe_prefill(*timed, seconds)
        for rank, told in report.told.items():
            self._relay.deliver(rank, told)
        if report.told:
            self._note_moves()

    def _undo(self, invalid: Collection[int]) -> None:
        """Nobody may find what a step computed behind a load that failed; it is computed again, into the same blocks,
        which ranks that know nothing of the failure may be storing."""
        beside, self._beside = self._beside, {}
        for request_id, table in beside.items():
            lost = next((at for at, block in enumerate(table) if block in invalid), None)
            if lost is not None and self.manager is not None and self._evict is not None:
                self._evict(set(table[lost:]))
                self._written += table[lost:]
                self.manager.recompute(request_id)
                self._full.pop(request_id, None)

    @property
    def busy(self) -> bool:
        """Whether the workers should be asked for news although no request waits for any."""
        return self.manager is not None and self._relay is not None and (self.manager.busy or self._relay.has_orders)

    def _note_moves(self) -> None:
        self._moved = True
        if self._events is not None:
            self._events.moved()

    # ---- the rest ------------------------------------------------------------------------------------------------

    def reset(self) -> bool:
        """Forget everything in every tier, durably, as after a change of weights."""
        if self.manager is None:
            return True
        self._note_moves()
        try:
            self._void += self.manager.reset()
        except OSError as error:
            logger.error("kvtier: the reset is in force but a restart may bring old pages back: %s", error)
            return False
        return True

    def stats(self) -> Stats | None:
        """What was added since the last call; None where nothing has begun, moved or ended."""
        if self.manager is None or not self._moved:
            return None
        self._moved = False
        now = flatten(self.manager.stats())
        stats, self._reported = Stats.since(self._reported, now), now
        return stats

    def events(self) -> list[KVCacheEvent]:
        """What has come to the tiers and gone from them since the last call, where vLLM was told to say so."""
        return self._events.take() if self._events is not None else []

    def close(self) -> None:
        self._adapters.close()
        if self.manager is not None:
            self.manager.close()


def as_labels(hashes: Sequence[Any]) -> npt.NDArray[np.uint8]:
    """vLLM's block hashes as the catalog's labels, uint8 [n, 32]."""
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)
