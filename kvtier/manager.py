"""CacheManager: the prefix cache as an engine sees it. Requests in, block tables out; the tiers stay out of sight.

Who calls what, in which order, all from the engine's one thread:

    get_computed_blocks → allocate_slots → [poll until ready] → (compute) → cache_blocks … → free

``append_tokens`` and ``allocate_slots`` grow a running request; ``preempt`` and ``resume`` take it off the device and
bring it back; ``poll`` once a step. Every call returns at once; only ``flush``, ``invalidate``, ``reset`` and ``poll``
with a timeout may wait. ``free`` is legal in every state.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.catalog import Catalog, Residency, Tier, TierSpec
from kvtier.lookup import SCRATCH, Lookup
from kvtier.messages import DataPlane
from kvtier.placement import Placement
from kvtier.prefetch import Prefetched, Prefetcher
from kvtier.sequence import ComputedBlocks, Loaded, Sequence, Slots, State, as_tokens
from kvtier.stats import CacheStats, Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from kvtier.config import CacheConfig
    from kvtier.geometry import KVGeometry
    from kvtier.namespace import Namespace
    from kvtier.tiers.device import DevicePool

__all__ = ["CacheManager"]


def _check_agreement(config: CacheConfig, geometry: KVGeometry, namespace: Namespace) -> None:
    """What is said in several places must be said equally: a page under a wrong name is a wrong answer."""
    sizes = {config.block_size, geometry.block_size, namespace.block_size}
    if len(sizes) > 1:
        raise ValueError(
            f"block_size: {config.block_size} in the configuration, {geometry.block_size} in the geometry, "
            f"{namespace.block_size} in the namespace; they must agree"
        )
    if geometry.dtype != namespace.dtype:
        raise ValueError(
            f"dtype: {geometry.dtype} in the geometry, {namespace.dtype} in the namespace; they must agree"
        )


class CacheManager:
    """A prefix cache over ``device`` (the engine's own KV tensors), host memory and disk, sized by ``config``.

    ``plane`` and ``clock`` (monotonic seconds) are for simulations; without them the data plane of this process is
    built. ``max_nodes`` bounds the blocks that the catalog can name; by default what the tiers can hold and more.
    Raises :class:`kvtier.config.ConfigError` or ValueError for sizes, paths and shapes that cannot be served.
    """

    def __init__(
        self,
        config: CacheConfig,
        geometry: KVGeometry,
        namespace: Namespace,
        device: DevicePool,
        *,
        plane: DataPlane | None = None,
        max_nodes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_agreement(config, geometry, namespace)
        self.config, self.geometry, self.namespace = config, geometry, namespace
        self._clock = clock
        self._block = config.block_size
        with ExitStack() as stack:
            if plane is None:
                from kvtier.plane import LocalDataPlane  # a simulation needs no tier and no native thread

                plane = LocalDataPlane(config, geometry, device)
                stack.callback(plane.close)
            self.plane = plane
            hello = plane.hello()
            policies = {Tier.HOST: config.host.policy, Tier.DISK: config.disk.policy}
            self._tiers = sorted(hello.capacity)
            self.catalog = Catalog(
                [TierSpec(tier, hello.capacity[tier], policies.get(tier, "lru")) for tier in self._tiers],
                block_size=self._block,
                max_nodes=max_nodes,
            )
            self._device_slots = hello.capacity[Tier.DEVICE]
            self.adopted = self._adopt_inventory(hello.inventory_slots, hello.inventory_identities)
            stack.pop_all()
        self.placement = Placement(config, self.catalog, plane, self._tiers, hello.page_bytes)
        self._lookup = Lookup(self.catalog, plane, self.placement, namespace, self._block)
        self._prefetcher = Prefetcher(self.catalog, self.placement, SCRATCH)
        self._sequences: dict[str, Sequence] = {}
        self._loading: dict[str, Sequence] = {}
        self._matched: dict[str, Sequence] = {}
        self._next_request = SCRATCH + 1
        self._counts = Counts()
        self._closed = False

    # ---- a request's life ----------------------------------------------------------------------------------------

    def get_computed_blocks(
        self,
        request_id: str,
        tokens: Iterable[int] | npt.NDArray[np.integer],
        *,
        salt: str | None = None,
        adapter: bytes | None = None,
    ) -> ComputedBlocks:
        """Find the longest cached prefix of ``tokens`` and hold it for this request.

        ``salt`` separates tenants; ``adapter`` is the digest of a LoRA adapter's content: KV is shared only among
        requests with equal ones. At least one token is always left to compute. Asking again before ``allocate_slots``
        replaces the answer; asking for a request that has slots is a ValueError.
        """
        if self._closed:
            raise ValueError(f"get_computed_blocks: request {request_id!r} came after close; accepted: nothing")
        ids = as_tokens(tokens)
        if not len(ids):
            raise ValueError(f"tokens: request {request_id!r} has none; accepted: one or more token ids")
        known = self._sequences.get(request_id)
        if known is not None and known.state is not State.MATCHED:
            raise ValueError(
                f"request_id: {request_id!r} is {known.state.value}; free it first, or resume a preempted one"
            )
        space = self._lookup.space(salt, adapter)
        if known is not None:
            self.free(request_id)
        sequence = Sequence(request_id, self._next_request, space)
        self._next_request += 1
        sequence.append(ids)
        self._counts.requests += 1
        self._counts.tokens_asked += len(ids)
        return self._match(sequence)

    def _match(self, sequence: Sequence) -> ComputedBlocks:
        """Put ``sequence`` into state MATCHED, holding what the catalog has of its tokens."""
        hit = self._lookup.find(sequence)
        sequence.state = State.MATCHED
        sequence.broken = sequence.failed = False
        sequence.table = sequence.private = np.empty(0, np.uint32)
        sequence.expires = self._clock() + self.config.lease_seconds
        self._sequences[sequence.request_id] = self._matched[sequence.request_id] = sequence
        found = sequence.tokens_by_tier(hit, self._block)
        return ComputedBlocks(sequence.request_id, hit * self._block, found, self._let_go)

    def allocate_slots(self, request_id: str, num_tokens: int) -> Slots | None:
        """Give the request device slots for its first ``num_tokens`` tokens; the first call starts its loads.

        Returns the block table, uint32 [blocks] of device slots, or None when there is no room now: then nothing has
        changed, and the engine may wait, preempt or free. While the request loads, the table is not final: ask
        :meth:`block_table` once :meth:`ready` says so. Existing entries of a final table never change.
        """
        sequence = self._known(request_id)
        if sequence.state is State.PREEMPTED:
            raise ValueError(f"request_id: {request_id!r} is preempted; resume it first")
        if num_tokens < 1:
            raise ValueError(f"num_tokens: {num_tokens} for request {request_id!r}; accepted: 1 or more")
        blocks = -(-num_tokens // self._block)
        if blocks > self._device_slots:
            raise ValueError(
                f"num_tokens: {num_tokens} of request {request_id!r} need {blocks} device slots; there are "
                f"{self._device_slots}"
            )
        if sequence.state is State.MATCHED:
            return self._start(sequence, max(blocks, sequence.promised))
        held = len(sequence.table) if sequence.state is State.RUNNING else sequence.promised + len(sequence.private)
        if blocks > held:
            more = self.catalog.take(Tier.DEVICE, blocks - held, sequence.request)
            if len(more) < blocks - held:
                return None
            if sequence.state is State.RUNNING:
                sequence.table = np.concatenate([sequence.table, more])
            else:
                sequence.private = np.concatenate([sequence.private, more])
                sequence.wanted = max(sequence.wanted, blocks)  # also where less arrives than was promised
        return self._table(sequence)

    def num_computed_tokens(self, request_id: str) -> int:
        """How many of the request's first tokens are in its slots: what is to be computed begins here.

        This is what the loads really brought, which may be less than ``get_computed_blocks`` promised. ValueError
        before the request is ready.
        """
        sequence = self._known(request_id)
        if sequence.state is not State.RUNNING:
            raise ValueError(f"request_id: {request_id!r} is {sequence.state.value}; only a ready request knows this")
        return sequence.cached * self._block

    def ready(self, request_id: str) -> bool:
        """Whether the request has its slots and nothing of its prefix is still loading."""
        return self._known(request_id).state is State.RUNNING

    def block_table(self, request_id: str) -> Slots:
        """Device slots of the request's blocks in order, uint32 [blocks]. Not final while the request loads."""
        return self._table(self._known(request_id))

    def append_tokens(self, request_id: str, tokens: Iterable[int] | npt.NDArray[np.integer]) -> None:
        """Tell the tokens that were generated; their blocks can be cached once computed."""
        self._known(request_id).append(as_tokens(tokens))

    def cache_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """The KV of the first ``num_computed_tokens`` tokens is computed and in its slots: index the full blocks.

        On a device with queues of its own, call it when the work that fills the slots has been queued; the data plane
        orders its copies after it.
        """
        sequence = self._known(request_id)
        if sequence.state is not State.RUNNING:
            raise ValueError(
                f"request_id: {request_id!r} is {sequence.state.value}; only a ready request computes blocks"
            )
        covered = min(sequence.num_tokens, len(sequence.table) * self._block)
        if num_computed_tokens > covered:
            raise ValueError(
                f"num_computed_tokens: {num_computed_tokens} for request {request_id!r}; "
                f"its tokens and slots cover {covered}"
            )
        last = num_computed_tokens // self._block
        if last <= sequence.cached or not sequence.cacheable:
            return
        labels = sequence.labels(sequence.cached, last, self._block)
        # A root is not leased: ask for it again rather than keep its number.
        parent = int(sequence.nodes[-1]) if len(sequence.nodes) else self._lookup.root(sequence.space)
        if parent is None:
            return
        nodes = self.catalog.insert(parent, labels, sequence.request)
        if not len(nodes):
            return
        adopted = self.catalog.adopt(
            Tier.DEVICE, nodes, sequence.table[sequence.cached : sequence.cached + len(nodes)], sequence.request
        )
        sequence.cached += len(nodes)
        sequence.nodes = np.concatenate([sequence.nodes, nodes])
        self.placement.on_computed(np.ascontiguousarray(nodes[adopted]))

    def free(self, request_id: str) -> None:
        """End the request, in whatever state it is. What it computed stays cached; an unknown id is no error."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        self._release(sequence)

    def _let_go(self, request_id: str) -> None:
        """The end of a ``with`` over ComputedBlocks: free the request if it was given no slots."""
        if request_id in self._matched:
            self.free(request_id)

    def _release(self, sequence: Sequence) -> None:
        self._loading.pop(sequence.request_id, None)
        self._matched.pop(sequence.request_id, None)
        self.placement.cancel(sequence.tickets)
        sequence.tickets.clear()
        self.catalog.release(sequence.request)

    def preempt(self, request_id: str) -> None:
        """Take a request off the device. Its full blocks go down if they have not yet; ``resume`` brings them back.

        Legal while the request loads. What is in the last, partial block is computed again after ``resume``.
        """
        sequence = self._known(request_id)
        if sequence.state is State.PREEMPTED:
            return
        if sequence.state is State.RUNNING and sequence.cacheable:
            self.placement.swap_out(sequence.nodes)
        self._release(sequence)
        sequence.state = State.PREEMPTED
        sequence.table = sequence.private = sequence.nodes = np.empty(0, np.uint32)

    def resume(self, request_id: str) -> ComputedBlocks:
        """Match a preempted request again, with the tokens it has by now; then ``allocate_slots`` as for a new one."""
        sequence = self._known(request_id)
        if sequence.state is not State.PREEMPTED:
            raise ValueError(
                f"request_id: {request_id!r} is {sequence.state.value}; only a preempted request can resume"
            )
        return self._match(sequence)

    # ---- loading -------------------------------------------------------------------------------------------------

    def _start(self, sequence: Sequence, blocks: int) -> Slots | None:
        """First allocation: private slots for what is to be computed, reserved ones for what is to be loaded."""
        device = self.catalog.state(sequence.nodes)[1][:, Tier.DEVICE]
        fresh = blocks - sequence.promised
        usage = self.catalog.usage(Tier.DEVICE)
        if fresh + int((device == Residency.ABSENT).sum()) > usage.free + self.catalog.evictable(Tier.DEVICE):
            return None
        private = self.catalog.take(Tier.DEVICE, fresh, sequence.request)
        if len(private) < fresh:
            return None
        # Room for these may have cost a page of its own that came to the device after the match, and is not held there.
        device = self.catalog.state(sequence.nodes)[1][:, Tier.DEVICE]
        self._matched.pop(sequence.request_id)
        sequence.private, sequence.wanted, sequence.state = private, blocks, State.LOADING
        sequence.deadline = self._clock() + self.config.load_timeout_seconds
        if not sequence.broken and bool((device == Residency.READY).all()):
            self._finish(sequence)
        else:
            # Even when nothing can be brought the engine hears of it by poll: it must not trust the promise.
            self._loading[sequence.request_id] = sequence
            self._bring(sequence, start=True)
        return self._table(sequence)

    def _bring(self, sequence: Sequence, *, start: bool) -> None:
        brought = self.placement.bring(sequence.nodes, sequence.request, sequence.deadline, start=start)
        sequence.nodes = sequence.nodes[: brought.blocks]
        sequence.tickets.update(brought.tickets)
        sequence.waits = brought.waits

    def _finish(self, sequence: Sequence) -> None:
        """All that will come is there: hold it on the device, let go of the rest, and make the table."""
        blocks = min(self.catalog.narrow(sequence.request, Tier.DEVICE), sequence.promised)
        sequence.nodes = sequence.nodes[:blocks]
        short = sequence.wanted - blocks - len(sequence.private)
        if short > 0:
            more = self.catalog.take(Tier.DEVICE, short, sequence.request)
            sequence.private = np.concatenate([sequence.private, more])
        shared = self.catalog.state(sequence.nodes)[0][:, Tier.DEVICE]
        sequence.table = np.concatenate([shared, sequence.private])
        sequence.private = np.empty(0, np.uint32)
        sequence.cached = blocks
        sequence.state = State.RUNNING
        self._counts.tokens_found.update(sequence.tokens_by_tier(blocks, self._block))
        self.placement.on_hit(sequence.nodes)

    def poll(self, timeout: float = 0.0) -> list[Loaded]:
        """Take note of what the data plane finished; returns the requests whose loads have ended since the last call.

        Waits at most ``timeout`` seconds for news. When a request got less than promised and the device is full, its
        table is shorter by as much: call ``allocate_slots`` again before computing past it.
        """
        if timeout > 0:
            self.plane.wait(self._patience(timeout))
        ended = self.placement.settle(self.plane.poll())
        now = self._clock()
        loaded: list[Loaded] = []
        for sequence in list(self._loading.values()):
            # A load that failed is not tried again for this request: what has come has come.
            sequence.failed |= not all(ended[ticket] for ticket in sequence.tickets & ended.keys())
            sequence.tickets -= ended.keys()
            if now >= sequence.deadline:  # whether or not the data plane says so
                self.placement.abandon(sequence.tickets)
                sequence.tickets.clear()
            late = sequence.failed or now >= sequence.deadline
            if sequence.tickets or (sequence.waits and not ended and not late):
                continue
            self._bring(sequence, start=not late)
            if sequence.tickets or sequence.waits:
                continue
            del self._loading[sequence.request_id]
            self._finish(sequence)
            found = sequence.tokens_by_tier(sequence.promised, self._block)
            loaded.append(Loaded(sequence.request_id, sequence.promised * self._block, found))
        for sequence in [s for s in self._matched.values() if s.expires <= now and s.promised]:
            self._counts.expired += 1
            self.catalog.release(sequence.request)
            sequence.forfeit()
        self.placement.maintain()
        return loaded

    def _patience(self, most: float) -> float:
        """How long to wait for news: past no load's deadline, and not at all while a request waits for nothing."""
        now = self._clock()
        for sequence in self._loading.values():
            most = min(most, sequence.deadline - now if sequence.tickets or sequence.waits else 0.0)
        return max(most, 0.0)

    # ---- hints, invalidation, the rest ---------------------------------------------------------------------------

    def prefetch(
        self,
        tokens: Iterable[int] | npt.NDArray[np.integer],
        *,
        within: float | None = None,
        salt: str | None = None,
        adapter: bytes | None = None,
    ) -> Prefetched:
        """A request with these tokens is expected, in ``within`` seconds if given: bring its pages up from disk."""
        ids = as_tokens(tokens)
        root = self._lookup.root(self._lookup.space(salt, adapter))
        if root is None:
            return Prefetched(0, 0, 0)
        labels = self._lookup.whole_blocks(ids)
        return self._prefetcher.hint(root, labels, 0.0 if within is None else self._clock() + within)

    def invalidate(self, *, salt: str | None = None, adapter: bytes | None = None) -> int:
        """Forget all pages of one namespace, in every tier and for ever: durable on return. Returns pages dropped.

        Running requests keep the pages they hold, those not running yet lose what they were promised (``poll`` reports
        them with no computed tokens), and what any of them computes is not cached.
        """
        return self._invalidate(self._lookup.space(salt, adapter))

    def reset(self) -> int:
        """Forget every page of every namespace, as after a change of weights. Returns pages dropped."""
        return self._invalidate(None)

    def _invalidate(self, space: bytes | None) -> int:
        try:
            generation = self.plane.invalidate(space)
        except OSError:  # not durable, but in force here: what was computed before may be served to nobody
            self._forget(space, self.plane.generation(self.namespace.fingerprint if space is None else space))
            raise
        return self._forget(space, generation)

    def _forget(self, space: bytes | None, generation: int) -> int:
        dropped = self.catalog.invalidate(space, generation)
        for sequence in self._sequences.values():
            if space is not None and sequence.space != space:
                continue
            sequence.cacheable = False
            if sequence.state in (State.MATCHED, State.LOADING):
                self.placement.cancel(sequence.tickets)
                sequence.forfeit()
            if sequence.state is State.MATCHED:  # it may never come back for its slots
                self.catalog.release(sequence.request)
        return dropped

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until nothing is under way, stores included; False when ``timeout`` seconds were not enough."""
        end = self._clock() + timeout
        self.poll()
        while self.placement.under_way:
            left = end - self._clock()
            if left <= 0:
                return False
            self.poll(min(left, 0.1))
        return True

    def stats(self) -> CacheStats:
        return CacheStats.gather(self._counts, self.catalog, self.placement, self._tiers)

    def describe(self) -> str:
        """One line: what was really built, bytes and slots per tier, I/O path, write policy, and warnings."""
        writes = f"writes: host {self.config.host.write}"
        if Tier.DISK in self._tiers:
            writes += f", disk {self.config.disk.write}; {self.adopted} pages adopted from disk"
        return "; ".join([self.plane.describe(), writes, *(f"WARNING {text}" for text in self.plane.warnings())])

    def close(self, flush_seconds: float = 10.0) -> None:
        """Let the stores that are under way arrive, for at most ``flush_seconds``, then close everything.

        What has not arrived by then is dropped. The manager serves nothing afterwards. May be repeated.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.flush(flush_seconds)
        finally:
            self.plane.close()

    def __enter__(self) -> CacheManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- for tests and benchmarks ------------------------------------------------------------------------------------

    def locate(
        self,
        tokens: Iterable[int] | npt.NDArray[np.integer],
        *,
        salt: str | None = None,
        adapter: bytes | None = None,
    ) -> dict[str, int]:
        """Tokens of the cached prefix by the fastest tier that would serve them now. Holds and touches nothing."""
        return self._lookup.locate(self._lookup.space(salt, adapter), as_tokens(tokens))

    def evict(
        self,
        tier: Tier,
        tokens: Iterable[int] | npt.NDArray[np.integer],
        *,
        salt: str | None = None,
        adapter: bytes | None = None,
    ) -> Slots:
        """Drop the cached prefix's pages that nobody uses from ``tier``; returns the slots that are free by it.

        A page on its way to a lower tier is in use: :meth:`flush` first to have it go.
        """
        if tier not in self._tiers:
            raise ValueError(f"tier: {tier!r}; accepted: {', '.join(str(t) for t in self._tiers)}")
        return self._lookup.evict(tier, self._lookup.space(salt, adapter), as_tokens(tokens))

    # ---- private -------------------------------------------------------------------------------------------------

    def _known(self, request_id: str) -> Sequence:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            raise ValueError(f"request_id: {request_id!r} is not known; call get_computed_blocks first")
        return sequence

    def _table(self, sequence: Sequence) -> Slots:
        if sequence.state is State.RUNNING:
            return sequence.table
        return np.concatenate([self.catalog.state(sequence.nodes)[0][:, Tier.DEVICE], sequence.private])

    def _adopt_inventory(self, slots: npt.NDArray[np.uint32], identities: npt.NDArray[np.uint8]) -> int:
        """Rebuild the trie from what the disk holds, clearing what cannot be reached any more; returns pages adopted"""
        if not len(slots):
            return 0
        adopted = self.catalog.restore(Tier.DISK, slots, identities)
        self.plane.forget(np.ascontiguousarray(slots[~adopted]))
        return int(adopted.sum())
