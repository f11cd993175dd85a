"""The catalog: what is cached where, for whom it is kept, and what goes when room is needed.

Protocol, for one request, every call from the scheduler's thread:

    root → match (leases what it promises) → take, reserve (slots, a ticket) → the mover runs the ticket → settle →
    narrow (what really arrived) → … the engine computes … → insert, adopt (full blocks) → release

Completions may come late, twice, in part or out of order. Bad arguments raise ``ValueError`` before anything has
changed. Calls are for whole chains, keep the GIL and never wait. Node ids are good as long as a page, a continuation
or a lease keeps the node; root ids are never used twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtier import _core
from kvtier._core import NO_NODE, NO_SLOT, PageStatus, Tier
from kvtier.content import Content, label_words
from kvtier.enums import direct
from kvtier.namespace import DIGEST_BYTES

__all__ = [
    "DEVICE",
    "DISK",
    "HOST",
    "NOTHING",
    "NO_IDS",
    "NO_NODE",
    "NO_SLOT",
    "NO_TIERS",
    "POLICIES",
    "Catalog",
    "Match",
    "PageStatus",
    "Reservation",
    "Residency",
    "SomeNodes",
    "Tier",
    "TierSpec",
    "Usage",
    "memory_bound",
]

POLICIES = ("lru",)
_SPARE_NODES = 65536  # for chains that are being computed, and holes
_WORDS = np.dtype(np.uint8)
_U32 = 0xFFFFFFFF
_U64 = 0xFFFFFFFFFFFFFFFF

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
"""Looked up once: where an engine's pass has left all of this cold, finding a member takes as long as a native call."""

NodeIds = NDArray[np.uint32]
SomeNodes: TypeAlias = "NodeIds | list[int]"
"""A few of them are a list sooner than an array."""
Slots = NDArray[np.uint32]


@direct
class Residency(IntEnum):
    """Where a page is in its life. Only READY is ever read; DRAINING is no longer offered and goes when nobody uses
    it.
    """

    ABSENT = 0
    FILLING = 1
    READY = 2
    DRAINING = 3


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier that the catalog allocates and evicts: which, how many page-sized slots, by which policy it evicts."""

    tier: Tier
    slots: int
    policy: str = "lru"
    keeps_last: bool = True
    """Whether no page that is the last copy goes from it for what is brought ahead."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a request was promised: the blocks ``[start, hit)``, one entry each in every array, leased to it."""

    hit: int  # blocks from 0 that need not be computed; 0, or at least start
    nodes: NodeIds
    tiers: NDArray[np.uint8]  # the fastest tier in which the page is ready; pinned there
    slots: Slots  # in that tier
    filling: NDArray[np.uint64]  # the ticket that is filling a still faster tier, or 0


NO_IDS = np.empty(0, np.uint32)
NO_TIERS = np.empty(0, np.uint8)
NOTHING = Match(0, NO_IDS, NO_TIERS, NO_IDS, np.empty(0, np.uint64))
"""Of a prompt that nobody has seen before. Made once, as what it is made of: arrays are slow to make."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A transfer to hand to the mover: its ticket (0: nothing was to be had) and every page's slot in every tier."""

    ticket: int
    count: int  # how many of the nodes, from the first
    slots: Slots  # [len(path), count]; NO_SLOT in tiers that are not owned, for the caller to fill in
    identities: NDArray[np.uint8]  # [count, identity_bytes] of the pages


class Usage(NamedTuple):
    """A tier's slots. ``free + filling + ready + draining == capacity``; private slots are counted as filling."""

    capacity: int
    free: int
    filling: int
    ready: int
    draining: int
    private: int
    pinned: int
    evictions: int  # evicted pages that a lower owned tier still held
    dropped: int  # evicted pages that were the last copy


def memory_bound(slots: int, tiers: int, label_bytes: int) -> int:
    """An upper bound on :attr:`Catalog.memory_bytes` by default; ``slots`` of all ``tiers`` together.

    For each node its label, digest, links and hash-table entries; for each node and tier a page's state and its place
    in the order of eviction; for each slot its owner, its ticket and a place in the free list.
    """
    nodes = 2 * slots + _SPARE_NODES
    return nodes * (label_bytes + 128 + 32 * tiers) + 32 * slots + (1 << 20)


class Catalog:
    """One trie of blocks over the owned ``tiers``, fastest first. All memory is allocated here; see ``memory_bytes``.

    ``labels="token"`` names a block by its ``block_size`` token ids, compared in full; ``"content"`` by these and the
    digest of the media among them (:mod:`kvtier.content`); ``"hash"`` by an engine's 32-byte cryptographic hash. An
    engine's own (foreign) tier is simply not listed.
    """

    def __init__(
        self,
        tiers: Sequence[TierSpec],
        *,
        block_size: int,
        labels: Literal["token", "content", "hash"] = "token",
        max_nodes: int | None = None,
    ) -> None:
        if labels not in ("token", "content", "hash"):
            raise ValueError(f"labels: {labels!r} is not known; 'token', 'content' and 'hash' are")
        if not 1 <= block_size <= 1 << 18:
            raise ValueError(f"block_size: {block_size} is out of range; 1 to 262144 tokens are accepted")
        for spec in tiers:
            if not 1 <= spec.slots < 1 << 31:
                raise ValueError(f"slots: {spec.slots} is out of range; 1 to 2147483647 are accepted")
        if max_nodes is None:
            max_nodes = 2 * sum(spec.slots for spec in tiers) + _SPARE_NODES
        if not 1 <= max_nodes <= 1 << 30:
            raise ValueError(f"max_nodes: {max_nodes} is out of range; 1 to 1073741824 are accepted")
        self.tiers = tuple(tiers)
        self.block_size = block_size
        self.labels = labels
        self._words = {"token": block_size, "content": label_words(block_size), "hash": 8}[labels]
        self.native = _core.Catalog(
            [(int(spec.tier), spec.slots, spec.policy, spec.keeps_last) for spec in tiers], 4 * self._words, max_nodes
        )
        self.identity_bytes: int = _core.identity_bytes(4 * self._words)

    @property
    def memory_bytes(self) -> int:
        """Bytes allocated at construction."""
        return int(self.native.memory_bytes)

    def root(self, space: bytes, group: int = 0, generation: int = 0) -> int:
        """The root of a namespace (its 32-byte fingerprint) and group; made if there is none.

        A ``generation`` newer than the root's drops what is older, as ``invalidate`` does; an older one changes
        nothing. OverflowError: 65536 namespaces hold pages, so there is no root for another one now.
        """
        return int(self.native.root(space, _number("group", group, _U32), _number("generation", generation, _U64)))

    # --- a request's side -----------------------------------------------------------------------------------------

    def match(
        self, roots: Sequence[int], labels: ArrayLike, start: int, request: int, limit: int | None = None
    ) -> Match:
        """Find the longest unbroken prefix of ``labels`` that is ready in any tier, and lease ``[start, hit)`` to
        ``request``.

        ``labels``: uint32 ``[n * block_size]`` (token mode), uint32 ``[n, label_words]`` (content) or uint8
        ``[n, 32]`` (hash). Blocks before ``start`` are held by the engine already: they are only walked and touched.
        ``limit`` caps ``hit``. Replaces what an earlier match of the request still holds.
        """
        hit, nodes, tiers, slots, filling = self.native.match(
            list(roots),
            self._labels(labels),
            _number("start", start, _U32),
            _number("request", request, _U64),
            _U64 if limit is None else _number("limit", limit, _U64),
        )
        return Match(hit, nodes, tiers, slots, filling)

    def find(self, space: bytes, generation: int, growing: _core.Growing, limit: int | None = None) -> Match:
        """:meth:`match` of a request's content below the :meth:`root` of its namespace, in a catalog of content labels.
        The last token is never part of it.

        Where there is no room for such a root nothing is found, and the request is not ``cacheable``.
        """
        if self.labels != "content":
            self._require_content()
        found = self.native.find(space, generation, growing, limit)
        return NOTHING if found is None else Match(*found)

    def peek(self, roots: Sequence[int], labels: ArrayLike) -> tuple[int, ...]:
        """How many blocks of the hit prefix each tier would serve, indexed by ``Tier``. Leases and touches nothing."""
        return tuple(self.native.peek(list(roots), self._labels(labels)))

    def insert(self, parent: int, labels: ArrayLike, request: int) -> NodeIds:
        """Find or create the chain of ``labels`` below ``parent`` (a root, or a node that ``request`` leases) and
        hold it.

        Returns its nodes: fewer than asked for when the catalog has no room for more.
        """
        return _u32(
            self.native.insert(_number("parent", parent, _U32), self._labels(labels), _number("request", request, _U64))
        )

    def adopt(self, tier: Tier, nodes: ArrayLike, slots: ArrayLike, request: int) -> NDArray[np.bool_]:
        """Make private slots of ``request`` the nodes' ready pages, pinned by its lease.

        False: the node has a page there already, ready or not, or was invalidated; the slot stays private.
        """
        flags: NDArray[np.bool_] = self.native.adopt(
            tier, _ids("nodes", nodes), _ids("slots", slots), _number("request", request, _U64)
        )
        return flags

    def extend(self, computed: list[tuple[_core.Growing, int, int | None]], tier: Tier) -> list[int]:
        """``insert`` and ``adopt`` for each of ``computed``, in a catalog of content labels: of a request that grows
        the slots of its first so many blocks, private from ``cached`` on, become the pages of these blocks of its
        content, below its ``leaf``, or where it has none below the node given.

        Returns those of their nodes whose pages are new in the tier; the slots of the others stay private. What there
        is no room for is not ``cached`` then, and no longer ``noted``.
        """
        self._require_content()
        return self.native.extend(computed, tier)

    def take(self, tier: Tier, n: int, request: int) -> Slots:
        """``n`` private slots for ``request``, evicting the shortfall; empty, and nothing evicted, when there are
        fewer.
        """
        return _u32(self.native.take(tier, _number("n", n, _U32), _number("request", request, _U64)))

    def give_back(self, tier: Tier, slots: ArrayLike, request: int) -> None:
        """Free private slots of ``request`` before its lease ends."""
        self.native.give_back(tier, _ids("slots", slots), _number("request", request, _U64))

    def narrow(self, request: int, tier: Tier) -> int:
        """Keep the longest prefix of the match whose pages are ready in ``tier``, and hold exactly those pages.

        Returns how many blocks that is, counted from the match's ``start``. What the request adopted stays.
        """
        return int(self.native.narrow(_number("request", request, _U64), tier))

    def hold_in(self, request: int, tier: Tier) -> None:
        """Of the match, hold the pages that are ready in ``tier`` there, in place of where they were found; the others
        stay held as they are. A page may have come there by another request, and is nobody's then."""
        self.native.hold_in(_number("request", request, _U64), tier)

    def hand_over(self, source: int, into: int) -> None:
        """The nodes that the one request keeps alive and the pages that come for it are the other's from now on; the
        one ends. ValueError for one that holds slots or was promised pages."""
        self.native.hand_over(source, into)

    def release(self, request: int) -> bool:
        """Let go of everything that ``request`` holds. False: it held nothing."""
        return bool(self.native.release(_number("request", request, _U64)))

    @contextlib.contextmanager
    def lease(self, request: int) -> Iterator[int]:
        """``with catalog.lease(r):`` whatever ``r`` comes to hold inside is let go at the end, however that comes."""
        try:
            yield request
        finally:
            self.release(request)

    # --- pages on their way ---------------------------------------------------------------------------------------

    def reserve(
        self,
        path: Sequence[Tier],
        nodes: ArrayLike,
        request: int = 0,
        ahead: bool = False,
        cold: bool = False,
        due: float = 0.0,
    ) -> Reservation:
        """Open a transfer of the nodes' pages along ``path``, for the longest prefix of ``nodes`` for which it can be
        had.

        For each node, all or nothing: its page in ``path[0]`` is ready and gets pinned, those in the other owned
        tiers are absent and become filling. With ``request`` the final page is pinned for it as well. ``ahead``
        is for what nobody has asked for yet: it evicts no page that was foreseen to be needed by ``due``, 0 for
        whenever, and no last copy from a tier that keeps these. ``cold``: being copied is no use of a page of
        ``path[0]``; what nobody else pins meanwhile is the next to be evicted, as it was.
        """
        number = _number("request", request, _U64)
        return Reservation(*self.native.reserve(list(path), _ids("nodes", nodes), number, ahead, cold, due))

    def settle(self, ticket: int, status: ArrayLike) -> bool:
        """Say what became of a transfer's pages: ``status`` uint8 ``[hops, count]`` of ``PageStatus``.

        PENDING entries stay open, and of several words on one entry the first counts. False: the ticket is closed or
        unknown, which is legal and counted.
        """
        if type(status) is np.ndarray and status.dtype is _WORDS and status.ndim == 2 and status.flags.c_contiguous:
            return bool(self.native.settle(_number("ticket", ticket, _U64), status))
        array = np.ascontiguousarray(status)
        if array.dtype != np.uint8:
            if array.dtype.kind not in "iu" or (array.size and not (array.min() >= 0 and array.max() <= 255)):
                raise ValueError(f"status: {array.dtype} given; PageStatus values as uint8 are needed")
            array = array.astype(np.uint8)
        if array.ndim != 2:
            raise ValueError(f"status: {array.ndim} dimensions given; [hops, count] is needed")
        return bool(self.native.settle(_number("ticket", ticket, _U64), array))

    def settle_whole(self, ticket: int) -> bool:
        """As ``settle``, with OK for every page on every hop."""
        return bool(self.native.settle_whole(ticket))

    def cancel(self, ticket: int) -> bool:
        """Give up a transfer's unsettled pages: they drain until they settle. False: ticket closed or unknown."""
        return bool(self.native.cancel(_number("ticket", ticket, _U64)))

    # --- upkeep ---------------------------------------------------------------------------------------------------

    def invalidate(self, space: bytes | None, generation: int) -> int:
        """Empty a namespace (``None``: all) and put it at ``generation``. Returns how many pages went or will.

        Nothing of it is matched again; requests that run keep their own pages until they let go.
        """
        return int(self.native.invalidate(space, _number("generation", generation, _U64)))

    def drop(self, tier: Tier, nodes: ArrayLike) -> int:
        """Remove the nodes' pages from ``tier``, where ready and unpinned. Returns how many."""
        return int(self.native.drop(tier, _ids("nodes", nodes)))

    def drop_ahead(self, tier: Tier, nodes: SomeNodes) -> int:
        """As ``drop``, of those pages that came by a reserve ``ahead`` and that nobody has matched since. Some of
        the nodes may have ended."""
        return self.native.drop_ahead(tier, nodes)

    def foresee(
        self,
        root: int,
        labels: Content | ArrayLike,
        first: int,
        last: int | None,
        source: Tier,
        lost: bool,
        request: int,
        now: float = 0.0,
        due: float = 0.0,
    ) -> tuple[list[int], list[int]]:
        """Look for the cached prefix of ``labels`` and keep its nodes alive for ``request``; their pages are free to
        go, and stay as cold as they are. ``labels`` are those of ``match``, or the content that makes them.
        With ``due``, a time after ``now``, no reserve ``ahead`` for what is needed later takes their place
        until then.

        Returns the nodes of its blocks [first, last), None for all, and those of them whose fastest page is in
        ``source`` and which nobody is bringing up. Where ``source`` is ``lost``, its pages end the prefix.
        """
        until = _U32 if last is None else last
        if isinstance(labels, Content):
            self._require_content()
            return self.native.foresee(root, labels.native, first, until, source, lost, request, now, due)
        return self.native.foresee(root, self._labels(labels), first, until, source, lost, request, now, due)

    def need(self, nodes: SomeNodes, now: float, due: float) -> None:
        """As ``foresee`` says it, of nodes that it found and that there are still; ``due`` 0: nobody needs them."""
        self.native.need(nodes, now, due)

    def cold(self, tier: Tier, n: int, lower: Tier) -> NodeIds:
        """Of the ``n`` next pages to be evicted from ``tier`` those that are absent in ``lower``, parents before
        children.
        """
        return _u32(self.native.cold(tier, _number("n", n, _U32), lower))

    def lacking(self, nodes: SomeNodes, source: Tier, target: Tier) -> list[int]:
        """Of ``nodes`` those whose pages are ready in ``source`` and absent in ``target``, both owned."""
        return self.native.lacking(nodes, source, target)

    def count_ready(self, tier: Tier, nodes: SomeNodes) -> int:
        """How many of the nodes' pages are ready in ``tier``. Some of the nodes may have ended."""
        return self.native.count_ready(tier, nodes)

    def identities(self, nodes: ArrayLike) -> NDArray[np.uint8]:
        """The nodes' page identities, uint8 ``[n, identity_bytes]``; the layout is csrc/common/identity.hpp's."""
        out: NDArray[np.uint8] = self.native.identities(_ids("nodes", nodes))
        return out

    def restore(self, tier: Tier, slots: ArrayLike, identities: ArrayLike) -> NDArray[np.bool_]:
        """Adopt the pages that a reopened store holds in ``slots`` (free ones), oldest first.

        False for an orphan, a duplicate, a digest that is not its label's, or another generation: the slot stays free.
        """
        records = np.ascontiguousarray(identities, dtype=np.uint8)
        if records.ndim != 2 or records.shape[1] != self.identity_bytes:
            raise ValueError(f"identities: shape {records.shape} given; [n, {self.identity_bytes}] is needed")
        flags: NDArray[np.bool_] = self.native.restore(tier, _ids("slots", slots), records)
        return flags

    def evictable(self, tier: Tier) -> int:
        """How many pages eviction could free in ``tier`` now; exact, and O(1)."""
        return int(self.native.evictable(tier))

    def usage(self, tier: Tier) -> Usage:
        """What the tier's slots are used for; O(1)."""
        return Usage(*self.native.usage(tier))

    def stats(self) -> dict[str, int]:
        """Counts since construction, and how full the catalog's own tables are."""
        return dict(self.native.stats())

    def state(self, nodes: ArrayLike) -> tuple[Slots, NDArray[np.uint8]]:
        """Slots uint32 ``[n, 4]`` (NO_SLOT where absent) and ``Residency`` uint8 ``[n, 4]``, by ``Tier``. A node that
        has ended is absent everywhere.
        """
        slots, residency = self.native.state(_ids("nodes", nodes))
        return slots, residency

    def contents(self, tier: Tier) -> tuple[Slots, NDArray[np.bool_], NDArray[np.uint8]]:
        """All pages of a tier, by slot: slots uint32 ``[n]``, whether each is ready, and the identities uint8
        ``[n, identity_bytes]`` of what they hold or will. O(slots); for tests and diagnosis.
        """
        slots, nodes, ready = self.native.contents(tier)
        return slots, ready, self.identities(nodes)

    def check(self) -> None:
        """Prove every promise about the catalog's tables anew; AssertionError names the first broken one.
        O(everything).
        """
        wrong = self.native.check()
        if wrong:
            raise AssertionError(wrong)

    def _require_content(self) -> None:
        # Of tokens alone a label may be as long, and mean others.
        if self.labels != "content":
            raise ValueError(f"content: this catalog's labels are '{self.labels}'; 'content' is needed")

    def _labels(self, labels: ArrayLike) -> NDArray[np.uint8]:
        if self.labels != "token":
            # In two dimensions only, so that bare token ids never pass for labels that say more.
            rows = np.ascontiguousarray(labels)
            shape = (np.uint8, DIGEST_BYTES) if self.labels == "hash" else (np.uint32, self._words)
            if rows.dtype != shape[0] or rows.ndim != 2 or rows.shape[1] != shape[1]:
                kind = np.dtype(shape[0]).name
                raise ValueError(f"labels: {rows.dtype} {rows.shape} given; {kind} [n, {shape[1]}] is needed")
            return rows.reshape(-1).view(np.uint8)
        tokens = _ids("labels", labels)
        if tokens.size % self._words:
            raise ValueError(
                f"labels: {tokens.size} tokens are not whole blocks of {self._words}; cut the trailing partial block"
            )
        out: NDArray[np.uint8] = tokens.view(np.uint8)
        return out


def _u32(array: Any) -> NDArray[np.uint32]:
    out: NDArray[np.uint32] = array
    return out


def _ids(name: str, values: ArrayLike) -> NDArray[np.uint32]:
    """``values`` as contiguous uint32 [n]; a value that does not fit is refused rather than wrapped into another id."""
    array = np.ascontiguousarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name}: {array.ndim} dimensions given; a flat array is needed")
    if array.dtype == np.uint32:
        return array
    if array.size == 0:
        return np.zeros(0, np.uint32)
    if array.dtype.kind not in "iu" or int(array.min()) < 0 or int(array.max()) > _U32:
        raise ValueError(f"{name}: {array.dtype} with values that are not all 32-bit unsigned integers")
    return array.astype(np.uint32)


def _number(name: str, value: int, most: int) -> int:
    if not 0 <= value <= most:
        raise ValueError(f"{name}: {value} is out of range; 0 to {most} are accepted")
    return int(value)
