"""CacheManager: the prefix cache as an engine sees it. Requests in, block tables out; the tiers stay out of sight.

Who calls what, in which order, all from the engine's one thread:

    get_computed_blocks → allocate_slots → [poll until ready] → (compute) → cache_blocks … → free

``append_tokens`` and ``allocate_slots`` grow a running request, ``advance`` a batch of them by what a pass has made;
``preempt`` and ``resume`` take one off the device and bring it back; ``poll`` once a step. Every call returns at once;
only ``flush``, ``invalidate``, ``reset`` and ``poll`` with a timeout may wait. ``free`` is legal in every state.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from itertools import count
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier import _core, arguments
from kvtier.arguments import whole, words
from kvtier.catalog import DEVICE, NO_IDS, Catalog, Tier
from kvtier.content import Content, as_media
from kvtier.costmodel import CostModel
from kvtier.decoding import Decoding
from kvtier.gathering import Gathering
from kvtier.layers import Layers
from kvtier.loading import Loader
from kvtier.lookup import SCRATCH, Lookup
from kvtier.messages import DataPlane
from kvtier.namespace import check_agreement
from kvtier.placement import Placement, tier_specs
from kvtier.policy import LoadPolicy
from kvtier.prefetch import Prefetched, Prefetcher
from kvtier.profile import Profile
from kvtier.ranges import Ranges
from kvtier.requests import Requests
from kvtier.sequence import ComputedBlocks, Loaded, Sequence, Slots, State
from kvtier.stats import CacheStats, Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

    from kvtier.config import CacheConfig
    from kvtier.content import Media
    from kvtier.decoding import Made
    from kvtier.geometry import KVGeometry
    from kvtier.lookup import Positions
    from kvtier.namespace import Namespace
    from kvtier.tiers.device import DevicePool

__all__ = ["CacheManager"]


class CacheManager:
    """A prefix cache over ``device`` (the engine's own KV tensors), host memory and disk, sized by ``config``.

    ``plane`` and, with it, ``clock`` (monotonic seconds) are for simulations; without them the data plane of this
    process is built. ``max_nodes`` bounds the blocks that the catalog can name; by default what the tiers can hold and
    more.
    Raises :class:`kvtier.config.ConfigError` for sizes, paths and shapes that cannot be served or do not agree, and for
    a ``device`` that another cache has.
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
        costs: CostModel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if plane is None:
            from kvtier.plane import LocalDataPlane, check_parts  # a simulation needs no tier and no native thread

            check_parts(config, geometry, device)
        check_agreement(config, geometry, namespace)
        self.config, self.geometry, self.namespace = config, geometry, namespace
        self._clock = clock
        self._block = config.block_size
        with ExitStack() as stack:
            local = LocalDataPlane(config, geometry, device) if plane is None else None
            if local is not None:
                stack.callback(local.close)
                plane = local
            assert plane is not None
            self.plane = plane
            hello = plane.hello()
            self._tiers = sorted(hello.capacity)
            self.catalog = Catalog(
                tier_specs(config, hello.capacity, self._tiers),
                block_size=self._block,
                labels="content",
                max_nodes=max_nodes,
            )
            self._device_slots = hello.capacity[Tier.DEVICE]
            self.costs = costs or CostModel(hello.page_bytes, bytes_in_flight=config.mover.bytes_in_flight)
            if config.profile is not None:
                Profile.load(config.profile).seed(self.costs)
            mover = local.mover if local is not None else None
            self.placement = Placement(
                config, self.catalog, plane, self._tiers, hello.page_bytes, self.costs, clock, mover
            )
            self.adopted = self.placement.adopt(hello)
            stack.pop_all()
        self._counts = Counts()
        self._lookup = Lookup(self.catalog, plane, namespace, self._block)
        self.policy = LoadPolicy(config, self.catalog, self.placement, self.costs, clock)
        running = _core.Decoding(self.catalog.native, DEVICE, self._block)
        self._loader = Loader(
            config, self.catalog, self.placement, self._lookup, self.policy, self._counts, running, clock
        )
        self._requests = Requests()
        self._known, self._check_open = self._requests.known, self._requests.check_open
        self._sequences = self._requests.by_id
        queues = local.mover.stream if local is not None and device.cuda is not None else None
        self._gathering = Gathering(
            self._lookup, self.placement, self._sequences, self._loader.racing, hello.page_bytes, queues
        )
        self._decoding = Decoding(self._requests, self._gathering, self._loader.grow, running, self._block)
        self._numbers = count(SCRATCH + 1)  # the catalog's request ids
        self._prefetcher = Prefetcher(
            config, self.catalog, self.placement, self._lookup, self.costs, self._numbers.__next__, clock
        )
        self._ranges = Ranges(self._prefetcher)

    # ---- a request's life ----------------------------------------------------------------------------------------

    def get_computed_blocks(
        self,
        request_id: str,
        tokens: Iterable[int] | npt.NDArray[np.integer],
        *,
        salt: str | None = None,
        adapter: bytes | None = None,
        media: Iterable[Media] = (),
    ) -> ComputedBlocks:
        """Find the longest cached prefix of ``tokens`` and hold it for this request.

        ``salt`` separates tenants; ``adapter`` is the digest of a LoRA adapter's content; ``media`` are the images and
        the like among the tokens, each ``(start, length, digest)``: the position of its first placeholder token, how
        many there are, and 32 bytes over its whole content and the processor's settings. KV is shared only among
        requests with equal ones. At least one token is always left to compute. Asking again before ``allocate_slots``
        replaces the answer; asking for a request that has slots is a ValueError.
        """
        self._check_open("get_computed_blocks")
        words("request_id", request_id)
        content = Content(tokens, media)
        if not len(content):
            raise ValueError(f"tokens: request {request_id!r} has none; accepted: one or more token ids")
        known = self._sequences.get(request_id)
        if known is not None and known.state is not State.MATCHED:
            raise ValueError(
                f"request_id: {request_id!r} is {known.state.value}; free it first, or resume a preempted one"
            )
        space = self._lookup.space(salt, adapter)
        if known is not None:
            self.free(request_id)
        sequence = Sequence(request_id, next(self._numbers), space, content)
        self._counts.requests += 1
        self._counts.tokens_asked += len(content)
        return self._match(sequence)

    def _match(self, sequence: Sequence) -> ComputedBlocks:
        self._gathering.flush()  # what has arrived since the last poll would add no block
        hit = self._loader.promise(sequence)
        self._sequences[sequence.request_id] = sequence
        found = sequence.tokens_by_tier(hit, self._block)
        return ComputedBlocks(sequence.request_id, hit * self._block, found, self._let_go)

    def _look(self) -> None:
        """Have the catalog know all that is known by now."""
        self._gathering.flush()
        self.placement.catch_up()

    def allocate_slots(self, request_id: str, num_tokens: int) -> Slots | None:
        """Give the request device slots for its first ``num_tokens`` tokens; the first call starts its loads.

        Returns the block table, uint32 [blocks] of device slots, or None when there is no room now: then nothing has
        changed, and the engine may wait, preempt or free. While the request loads, the table is not final: ask
        :meth:`block_table` once :meth:`ready` says so. Existing entries of a final table never change.
        """
        sequence = self._known(request_id)
        if sequence.state is State.PREEMPTED:
            raise ValueError(f"request_id: {request_id!r} is preempted; resume it first")
        if type(num_tokens) is not int or num_tokens < 1:
            num_tokens = whole("num_tokens", num_tokens, 1, request_id)
        blocks = -(-num_tokens // self._block)
        if blocks > self._device_slots:
            raise ValueError(
                f"num_tokens: {num_tokens} of request {request_id!r} need {blocks} device slots; there are "
                f"{self._device_slots}"
            )
        if sequence.state is State.RUNNING:
            return sequence.table if self._loader.grow(sequence, blocks) else None
        if sequence.state is State.LOADING:
            return self._loader.table(sequence) if self._loader.grow(sequence, blocks) else None
        if not self._loader.begin(sequence, blocks):
            return None
        self._ranges.started(request_id)
        return self._loader.table(sequence)

    def num_computed_tokens(self, request_id: str) -> int:
        """How many of the request's first tokens are in its slots: what is to be computed begins here.

        This is what the loads really brought, which may be less than ``get_computed_blocks`` promised. ValueError
        before the request is ready.
        """
        sequence = self._known(request_id)
        if sequence.state is not State.RUNNING:
            raise ValueError(f"request_id: {request_id!r} is {sequence.state.value}; only a ready request knows this")
        self._gathering.flush()
        return sequence.cached * self._block

    def ready(self, request_id: str) -> bool:
        """Whether the request has its slots and nothing of its prefix is still loading."""
        return self._known(request_id).state is State.RUNNING

    def block_table(self, request_id: str) -> Slots:
        """Device slots of the request's blocks in order, uint32 [blocks]. Not final while the request loads."""
        return self._loader.table(self._known(request_id))

    def comes_by_layer(self, request_id: str) -> bool:
        """Whether computing may begin before the request is ready, for engines that said :meth:`can_wait_for_layers`.

        True: all that was promised is on its way, the first layers first, to the slots that :meth:`block_table` names,
        and the slots behind it are the request's own. A pass may compute tokens from ``num_tokens`` of the promise on,
        and asks :meth:`wait_for_layer` before it reads a layer. It counts when the next ``poll`` reports the request
        with all that was promised; if it reports less, it is computed again from there.
        """
        return self._loader.comes_by_layer(self._known(request_id))

    def wait_for_layer(self, request_id: str, layer: int) -> bool:
        """Wait until this layer of the promised prefix is in its slots, and all before it.

        False: it will not be, at once or at the load's deadline; give the pass up and ``poll``. ValueError for a layer
        that there is not, and for an engine that did not say :meth:`can_wait_for_layers`.
        """
        if self._loader.layers is None:
            raise ValueError(f"wait_for_layer: request {request_id!r}; accepted: after can_wait_for_layers")
        return self._loader.wait_for_layer(self._known(request_id), layer)

    def skip(self, request_id: str) -> Loaded | None:
        """Whether the request's next tokens were loaded while those before them were computed.

        For engines that said :meth:`can_split`, to ask before each pass of a prompt. None: compute on. Else the first
        ``num_computed_tokens`` are in the slots of the table as :meth:`block_table` has it now, of which those behind
        what was computed are others than before; ``tokens_by_tier`` says where the skipped ones came from.
        """
        sequence = self._known(request_id)
        return self._loader.skip(sequence) if sequence.tail is not None and sequence.state is State.RUNNING else None

    def append_tokens(
        self, request_id: str, tokens: Iterable[int] | npt.NDArray[np.integer], *, media: Iterable[Media] = ()
    ) -> None:
        """Tell the tokens that were generated, or that follow in a later turn with the media among them; their blocks
        can be cached once computed. Positions of ``media`` count from the request's first token."""
        content = self._known(request_id).content
        if media or not content.native.append(tokens):  # nearly always a few plain ints
            content.append(tokens, media)

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
        if type(num_computed_tokens) is not int or num_computed_tokens < 0:
            num_computed_tokens = whole("num_computed_tokens", num_computed_tokens, 0, request_id)
        covered = min(len(sequence.content), len(sequence.growing) * self._block)
        if num_computed_tokens > covered:
            raise ValueError(
                f"num_computed_tokens: {num_computed_tokens} for request {request_id!r}; its tokens and slots cover "
                f"{covered}"
            )
        self._gathering.add(sequence, num_computed_tokens // self._block)

    def advance(self, tokens: Made) -> dict[str, list[int] | None]:
        """A pass has ended: of each of these requests the KV of every token that it had is computed and in its slots,
        and ``tokens`` are those that it made, a token id or some by request id.

        The same as ``append_tokens`` for each, ``allocate_slots`` for all that each has then, and ``cache_blocks`` of
        what it had before. Returns the slots that were added at the end of block tables, by request id; None: there was
        no room for this one. Its tokens and its blocks count, only the slots are missing: preempt somebody and ask
        ``allocate_slots``. ValueError, and nothing of the call has changed, for an unknown id, a request that
        is not ready or whose slots do not cover what it had, what is no token id, and more than the device holds.
        """
        return self._decoding.advance(tokens)

    def free(self, request_id: str) -> None:
        """End the request, in whatever state it is. What it computed stays cached; an unknown id is no error."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._decoding.forget(request_id)
            self._gathering.let_go(sequence)
            del self._sequences[request_id]
            self._loader.withdraw(sequence)

    def _let_go(self, request_id: str) -> None:
        """The end of a ``with`` over ComputedBlocks: free the request if it was given no slots."""
        if self._loader.waits_for_slots(request_id):
            self.free(request_id)

    def preempt(self, request_id: str) -> None:
        """Take a request off the device. Its full blocks go down if they have not yet; ``resume`` brings them back.

        Legal while the request loads. What is in the last, partial block is computed again after ``resume``.
        """
        sequence = self._known(request_id)
        if sequence.state is State.PREEMPTED:
            return
        self._decoding.forget(request_id)
        self._gathering.let_go(sequence)
        if sequence.state is State.RUNNING and sequence.cacheable:
            self.placement.swap_out(sequence.nodes)
        self._loader.withdraw(sequence)
        sequence.state = State.PREEMPTED
        sequence.private = sequence.nodes = NO_IDS
        sequence.growing.clear()

    def resume(self, request_id: str) -> ComputedBlocks:
        """Match a preempted request again, with the tokens it has by now; then ``allocate_slots`` as for a new one."""
        sequence = self._known(request_id)
        if sequence.state is not State.PREEMPTED:
            raise ValueError(
                f"request_id: {request_id!r} is {sequence.state.value}; only a preempted request can resume"
            )
        return self._match(sequence)

    def poll(self, timeout: float = 0.0) -> list[Loaded]:
        """Take note of what the data plane finished; returns the requests whose loads have ended since the last call.

        Waits at most ``timeout`` seconds for news, 0 or more and finite. When a request got less than promised and the
        device is full, its table is shorter by as much: call ``allocate_slots`` again before computing past it.
        """
        idle = (type(timeout) is not float or bool(timeout)) and arguments.seconds("timeout", timeout, 0) > 0
        if idle:
            self.plane.wait(self._loader.patience(timeout))
            self.placement.catch_up()
        ended = self.placement.settle_reported()
        loading, matched, racing = self._loader.heeds
        loaded = self._loader.advance(ended) if loading or matched or racing else []
        spent = 1 if ended else 0  # of what a step may do for things that nobody waits for
        if self._gathering.waiting and self._gathering.step(busy=bool(ended)):
            spent = 2
        if self._prefetcher.expected or self._prefetcher.leaving:
            self._prefetcher.pump(ended, spent=spent, idle=idle)
        if self.placement.ahead or ended:
            self.placement.maintain()
        return loaded

    # ---- what things take ----------------------------------------------------------------------------------------

    def observe_prefill(self, new_tokens: int, context: int, seconds: float, request_id: str | None = None) -> None:
        """One pass of the engine computed ``new_tokens`` behind ``context`` tokens in so many ``seconds``.

        Until the first such word everything found is loaded. ``new_tokens`` counts what the pass computed, padding and
        repeated rows too; with ``request_id``, :meth:`explain` tells of it.
        """
        whole("new_tokens", new_tokens, 1)
        whole("context", context)
        if type(seconds) is not float or not 0.0 <= seconds < inf:
            arguments.seconds("seconds", seconds, 0)
        self.costs.observe_prefill(new_tokens, context, seconds)
        if request_id is not None:
            self.policy.computed(request_id, new_tokens, seconds)

    def can_split(self) -> None:
        """This engine asks :meth:`skip` before each pass of a prompt: so a front may be computed while the rest loads,
        and such a request is ready at once, with no more promised than is on the device."""
        self.policy.splits = True

    def can_wait_for_layers(self) -> None:
        """This engine asks :meth:`wait_for_layer` before it reads a layer: so what is loaded from host memory comes
        layer by layer, and computing may begin while it does (:meth:`comes_by_layer`)."""
        self._loader.layers = Layers(self.geometry.layers, self.geometry.payload_bytes)

    def explain(self, request_id: str) -> str:
        """One line: what was found for one of the last 1024 requests, what of it was loaded and why, with predicted and
        actual times. ValueError for another request."""
        return self.policy.explain(request_id)

    # ---- hints ---------------------------------------------------------------------------------------------------

    def expect(
        self,
        request_id: str,
        tokens: Iterable[int] | npt.NDArray[np.integer],
        within: float,
        *,
        positions: Positions | None = None,
        salt: str | None = None,
        adapter: bytes | None = None,
        media: Iterable[Media] = (),
    ) -> None:
        """A request of this id will start in about ``within`` seconds, or a session will be back by then.

        Only noted here, in microseconds; the next ``poll`` begins to bring its pages up from disk, the most urgent
        request's first. ``positions`` (a, b) narrows that to what will be read: of a prompt computed in chunks, or of a
        preempted request; as a list of (a, b, seconds) to what is read so long after the start. Said again it replaces
        what was said before. ``tokens`` must not change until it has started; they are looked at then, and a hint that
        cannot be read is dropped, counted in ``stats()`` and told of by :meth:`describe`. ``within`` may be negative:
        it is late already.
        """
        self._check_open("expect")
        due = self._clock() + arguments.seconds("within", within)
        arguments.items("tokens", tokens, "token ids")
        reading = self._lookup.reading(self._lookup.space(salt, adapter), tokens, as_media(media), positions)
        self._ranges.expect(words("request_id", request_id), reading, due)

    def reorder(self, within: Mapping[str, float]) -> None:
        """Requests that were announced will start in so many seconds now; those that were not are passed over."""
        self._ranges.reorder(within)

    def dismiss(self, request_id: str) -> None:
        """A request that was announced will not come. One that was not is no error."""
        self._ranges.dismiss(request_id)

    def prefetch(
        self,
        tokens: Iterable[int] | npt.NDArray[np.integer],
        *,
        within: float | None = None,
        salt: str | None = None,
        adapter: bytes | None = None,
        media: Iterable[Media] = (),
    ) -> Prefetched:
        """Bring the pages of these tokens up from disk now, to have arrived ``within`` so many seconds if given; what
        comes later is given up. Nothing keeps them for anybody: :meth:`expect` does that."""
        self._check_open("prefetch")
        deadline = 0.0 if within is None else self._clock() + arguments.seconds("within", within)
        self._look()
        return self._prefetcher.fetch(self._lookup.space(salt, adapter), Content(tokens, media), deadline)

    # ---- invalidation, the rest ----------------------------------------------------------------------------------

    def invalidate(self, *, salt: str | None = None, adapter: bytes | None = None) -> int:
        """Forget all pages of one namespace, in every tier and for ever: durable on return. Returns pages dropped.

        Running requests keep the pages they hold, those not running yet lose what they were promised (``poll`` reports
        them with no computed tokens), and what any of them computes is not cached.
        """
        self._check_open("invalidate")
        return self._invalidate(self._lookup.space(salt, adapter))

    def reset(self) -> int:
        """Forget every page of every namespace, as after a change of weights. Returns pages dropped."""
        self._check_open("reset")
        return self._invalidate(None)

    def _invalidate(self, space: bytes | None) -> int:
        self._gathering.flush()  # what was computed before is among what is forgotten
        try:
            generation = self.plane.invalidate(space)
        except OSError:  # not durable, but in force here: what was computed before may be served to nobody
            self._forget(space, self.plane.generation(self.namespace.fingerprint if space is None else space))
            raise
        return self._forget(space, generation)

    def _forget(self, space: bytes | None, generation: int) -> int:
        dropped = self.catalog.invalidate(space, generation)
        for sequence in self._sequences.values():
            if space is None or sequence.space == space:
                sequence.cacheable = False
                self._loader.revoke(sequence)
        self._prefetcher.forgotten()
        return dropped

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until nothing is under way, stores included; False when ``timeout`` seconds were not enough. Nothing is
        brought ahead meanwhile that was not under way."""
        end = self._clock() + arguments.seconds("timeout", timeout, 0)
        self._look()
        with self._prefetcher.rest_all():
            self.poll()
            while self.placement.under_way:
                left = end - self._clock()
                if left <= 0:
                    return False
                self.poll(min(left, 0.1))
        return True

    def stats(self) -> CacheStats:
        self._look()
        ahead, cuts = self._prefetcher, self.policy.cuts
        return CacheStats.gather(
            self._counts, self.catalog, self.placement, self._tiers, ahead.blocks, ahead.refused, cuts
        )

    def describe(self) -> str:
        """One line: what was really built, a clause for each tier with its bytes and pages, the I/O path, the write
        policy, and warnings. ``replace("; ", "\\n")`` makes it a list."""
        writes = f"writes: host {self.config.host.write}"
        if Tier.DISK in self._tiers:
            writes += f", disk {self.config.disk.write}"
        warnings = [*self.plane.warnings(), *self._prefetcher.warnings]
        return "; ".join([self.plane.describe(), writes, *(f"WARNING {text}" for text in warnings)])

    def close(self, flush_seconds: float = 10.0) -> None:
        """Let the stores that are under way arrive, for at most ``flush_seconds``, then close everything.

        What has not arrived by then is dropped. The manager serves nothing afterwards: calls that would begin or change
        something are ValueErrors, while ``free``, ``poll``, ``stats`` and ``close`` stay legal.
        """
        arguments.seconds("flush_seconds", flush_seconds, 0)
        if self._requests.closed:
            return
        self._requests.closed = True
        self._decoding.close()
        self._prefetcher.dismiss_all()
        try:
            self.flush(flush_seconds)
        finally:
            self.plane.close()

    def __enter__(self) -> CacheManager:
        self._check_open("with")
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
        media: Iterable[Media] = (),
    ) -> dict[str, int]:
        """Tokens of the cached prefix by the fastest tier that would serve them now. Holds and touches nothing."""
        self._look()
        return self._lookup.locate(self._lookup.space(salt, adapter), Content(tokens, media))

    def evict(
        self,
        tier: Tier,
        tokens: Iterable[int] | npt.NDArray[np.integer],
        *,
        salt: str | None = None,
        adapter: bytes | None = None,
        media: Iterable[Media] = (),
    ) -> Slots:
        """Drop the cached prefix's pages that nobody uses from ``tier``; returns the slots that are free by it.

        A page on its way to a lower tier is in use: :meth:`flush` first to have it go.
        """
        self._check_open("evict")
        if tier not in self._tiers:
            raise ValueError(f"tier: {tier!r}; accepted: {', '.join(str(t) for t in self._tiers)}")
        self._look()
        return self._lookup.evict(tier, self._lookup.space(salt, adapter), Content(tokens, media))
