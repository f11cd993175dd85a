"""The catalog's promises, one by one, on small pools."""

from __future__ import annotations

import contextlib
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier._core import Growing
from kvtier.catalog import NO_SLOT, Catalog, PageStatus, Residency, Tier, TierSpec
from kvtier.content import Content

SPACE = bytes(range(32))
BLOCK = 4
OK, PENDING = int(PageStatus.OK), int(PageStatus.PENDING)


def tokens(*blocks: int) -> NDArray[np.uint32]:
    """Labels of blocks that are told apart by one number each."""
    return np.repeat(np.array(blocks, np.uint32), BLOCK)


def words(*blocks: int) -> Content:
    """The same as content."""
    return Content(tokens(*blocks))


def make(
    host: int = 8,
    *,
    device: int = 0,
    disk: int = 0,
    max_nodes: int | None = None,
    labels: Literal["token", "content"] = "token",
    keeps_last: bool = True,
) -> Catalog:
    sizes = [(Tier.DEVICE, device), (Tier.HOST, host), (Tier.DISK, disk)]
    specs = [TierSpec(tier, slots, keeps_last=keeps_last) for tier, slots in sizes if slots]
    return Catalog(specs, block_size=BLOCK, labels=labels, max_nodes=max_nodes or sum(s.slots for s in specs) + 64)


def named(catalog: Catalog, *blocks: int) -> NDArray[np.uint32]:
    return tokens(*blocks) if catalog.labels == "token" else words(*blocks).whole(BLOCK)


def store(catalog: Catalog, request: int, *blocks: int, tier: Tier = Tier.HOST) -> NDArray[np.uint32]:
    """Cache a chain as a running request does, and let go of it."""
    root, labels = catalog.root(SPACE), named(catalog, *blocks)
    hit = catalog.match([root], labels, 0, request).hit
    nodes = catalog.insert(root, labels, request)
    slots = catalog.take(tier, len(blocks) - hit, request)
    catalog.adopt(tier, nodes[hit : hit + slots.size], slots, request)
    catalog.release(request)
    catalog.check()
    return nodes


def hit(catalog: Catalog, *blocks: int) -> int:
    return sum(catalog.peek([catalog.root(SPACE)], named(catalog, *blocks)))


def statuses(hops: int, count: int, value: int = OK) -> NDArray[np.uint8]:
    return np.full((hops, count), value, np.uint8)


# --- matching -------------------------------------------------------------------------------------------------------


def test_hit_is_the_unbroken_prefix_and_names_its_slots() -> None:
    catalog = make()
    nodes = store(catalog, 1, 1, 2, 3)
    match = catalog.match([catalog.root(SPACE)], tokens(1, 2, 9), 0, 2)
    assert match.hit == 2
    assert match.nodes.tolist() == nodes[:2].tolist()
    assert match.tiers.tolist() == [Tier.HOST] * 2
    slots, residency = catalog.state(match.nodes)
    assert match.slots.tolist() == slots[:, Tier.HOST].tolist()
    assert residency[:, Tier.HOST].tolist() == [Residency.READY] * 2


def test_equal_blocks_after_different_prefixes_are_different() -> None:
    catalog = make()
    store(catalog, 1, 1, 7)
    assert hit(catalog, 2, 7) == 0
    assert hit(catalog, 7) == 0


def test_a_namespace_never_sees_anothers_pages() -> None:
    catalog = make()
    store(catalog, 1, 1, 2)
    other = catalog.root(b"x" * 32)
    assert catalog.match([other], tokens(1, 2), 0, 2).hit == 0
    assert catalog.match([catalog.root(SPACE, group=1)], tokens(1, 2), 0, 2).hit == 0


@pytest.mark.parametrize("block_size", [1, 3, 4, 8, 16, 24])  # some are compared by code of their own
def test_one_different_token_is_a_miss_in_any_block(block_size: int) -> None:
    catalog = Catalog([TierSpec(Tier.HOST, 4)], block_size=block_size, max_nodes=64)
    root = catalog.root(SPACE)
    labels = np.arange(3 * block_size, dtype=np.uint32)
    nodes = catalog.insert(root, labels, 1)
    catalog.adopt(Tier.HOST, nodes, catalog.take(Tier.HOST, 3, 1), 1)
    assert sum(catalog.peek([root], labels)) == 3
    for i in range(labels.size):
        for bit in (0, 31):
            changed = labels.copy()
            changed[i] ^= 1 << bit
            assert sum(catalog.peek([root], changed)) == i // block_size, "other tokens are served"


def test_labels_that_share_a_hash_are_told_apart() -> None:
    # Among this many siblings some share all 32 bits of their hash, whatever the catalog's secret seed: 7 expected.
    siblings = 250_000
    catalog = Catalog([TierSpec(Tier.HOST, 1)], block_size=1, max_nodes=siblings + 64)
    root = catalog.root(SPACE)
    labels = np.arange(siblings, dtype=np.uint32)
    nodes = [catalog.insert(root, labels[i : i + 1], 1)[0] for i in range(siblings)]
    assert len(set(nodes)) == siblings, "two blocks of different tokens are taken for one"


def test_hash_labels_compare_all_32_bytes() -> None:
    catalog = Catalog([TierSpec(Tier.HOST, 4)], block_size=16, labels="hash")
    root = catalog.root(SPACE)
    labels = np.arange(64, dtype=np.uint8).reshape(2, 32)
    nodes = catalog.insert(root, labels, 1)
    catalog.adopt(Tier.HOST, nodes, catalog.take(Tier.HOST, 2, 1), 1)
    assert sum(catalog.peek([root], labels)) == 2
    for i in range(64):
        changed = labels.copy()
        changed[i // 32, i % 32] ^= 1
        assert sum(catalog.peek([root], changed)) == i // 32


def test_a_hole_ends_the_hit_and_filling_it_mends_the_chain() -> None:
    catalog = make()
    nodes = store(catalog, 1, 1, 2, 3)
    assert catalog.drop(Tier.HOST, nodes[1:2]) == 1
    catalog.check()
    assert hit(catalog, 1, 2, 3) == 1
    store(catalog, 2, 1, 2)
    assert hit(catalog, 1, 2, 3) == 3


def test_blocks_before_start_are_only_walked() -> None:
    catalog = make()
    store(catalog, 1, 1, 2, 3)
    match = catalog.match([catalog.root(SPACE)], tokens(1, 2, 3), 2, 2)
    assert (match.hit, match.nodes.size) == (3, 1)
    assert catalog.usage(Tier.HOST).pinned == 1
    assert catalog.match([catalog.root(SPACE)], tokens(1, 9, 3), 2, 2).hit == 0
    assert catalog.usage(Tier.HOST).pinned == 0


def test_limit_caps_the_hit() -> None:
    catalog = make()
    store(catalog, 1, 1, 2, 3)
    assert catalog.match([catalog.root(SPACE)], tokens(1, 2, 3), 0, 2, limit=2).hit == 2
    assert catalog.match([catalog.root(SPACE)], tokens(1, 2, 3), 2, 2, limit=1).hit == 0


def test_matching_again_replaces_the_earlier_promise() -> None:
    catalog = make()
    store(catalog, 1, 1, 2, 3)
    store(catalog, 1, 5, 6)
    root = catalog.root(SPACE)
    catalog.match([root], tokens(1, 2, 3), 0, 2)
    private = catalog.take(Tier.HOST, 1, 2)
    catalog.match([root], tokens(5), 0, 2)
    catalog.check()
    usage = catalog.usage(Tier.HOST)
    assert (usage.pinned, usage.private) == (1, 1)
    catalog.give_back(Tier.HOST, private, 2)


def test_the_fastest_ready_tier_serves() -> None:
    catalog = make(device=2, host=4)
    nodes = store(catalog, 1, 1, 2)
    r = catalog.reserve([Tier.HOST, Tier.DEVICE], nodes[:1])
    match = catalog.match([catalog.root(SPACE)], tokens(1, 2), 0, 3)
    assert match.tiers.tolist() == [Tier.HOST, Tier.HOST], "a page was offered before its write had completed"
    assert match.filling.tolist() == [r.ticket, 0]
    catalog.settle(r.ticket, statuses(1, 1))
    match = catalog.match([catalog.root(SPACE)], tokens(1, 2), 0, 3)
    assert match.tiers.tolist() == [Tier.DEVICE, Tier.HOST]
    assert match.filling.tolist() == [0, 0]
    assert catalog.peek([catalog.root(SPACE)], tokens(1, 2)) == (1, 1, 0, 0)


# --- eviction -------------------------------------------------------------------------------------------------------


def test_evicts_leaf_before_parent() -> None:
    catalog = make(4)
    store(catalog, 1, 1, 2, 3, 4)
    for n, left in ((1, 3), (2, 2), (3, 1)):
        catalog.take(Tier.HOST, 1, 10 + n)
        catalog.check()
        assert hit(catalog, 1, 2, 3, 4) == left


def test_evicts_the_least_recent_chain_first() -> None:
    catalog = make(4)
    store(catalog, 1, 1, 2)
    store(catalog, 1, 3, 4)
    store(catalog, 2, 1, 2)  # used again
    catalog.take(Tier.HOST, 2, 3)
    assert (hit(catalog, 1, 2), hit(catalog, 3, 4)) == (2, 0)


def test_never_evicts_what_is_leased() -> None:
    catalog = make(4)
    store(catalog, 1, 1, 2)
    catalog.match([catalog.root(SPACE)], tokens(1, 2), 0, 2)
    assert catalog.evictable(Tier.HOST) == 0
    assert catalog.take(Tier.HOST, 3, 3).size == 0
    assert catalog.take(Tier.HOST, 2, 3).size == 2
    assert hit(catalog, 1, 2) == 2
    catalog.release(2)
    assert catalog.take(Tier.HOST, 2, 3).size == 2


def test_a_take_that_fails_evicts_nothing() -> None:
    catalog = make(4)
    store(catalog, 1, 1, 2, 3, 4)
    catalog.match([catalog.root(SPACE)], tokens(1, 2), 0, 2)
    assert catalog.take(Tier.HOST, 3, 3).size == 0
    assert hit(catalog, 1, 2, 3, 4) == 4
    assert catalog.take(Tier.HOST, 2, 3).size == 2


def test_a_leased_continuation_keeps_its_prefix() -> None:
    catalog = make(4)
    store(catalog, 1, 1, 2, 3)
    catalog.match([catalog.root(SPACE)], tokens(1, 2, 3), 2, 2)  # pins block 3 only
    assert catalog.usage(Tier.HOST).pinned == 1
    assert catalog.evictable(Tier.HOST) == 0
    assert catalog.take(Tier.HOST, 2, 3).size == 0
    catalog.check()
    catalog.release(2)
    assert catalog.evictable(Tier.HOST) == 3


def test_evicting_in_an_inverted_order_is_still_leaf_first() -> None:
    catalog = make(host=5, disk=5)
    root = catalog.root(SPACE)
    nodes = catalog.insert(root, tokens(1, 2, 3, 4), 1)
    tickets = [catalog.reserve([Tier.DEVICE, Tier.HOST], nodes[i : i + 1]).ticket for i in range(4)]
    for ticket in tickets:  # ready root first: the root is the coldest
        catalog.settle(ticket, statuses(1, 1))
    catalog.release(1)
    catalog.check()
    for left in (3, 2, 1, 0):
        catalog.take(Tier.HOST, 5 - left, 9)
        catalog.check()
        assert hit(catalog, 1, 2, 3, 4) == left, "a block was evicted before its continuation"
        catalog.release(9)


def test_the_coldest_page_waits_for_its_continuation() -> None:
    catalog = make(host=2, disk=2)
    nodes = store(catalog, 1, 1, 2)
    r = catalog.reserve([Tier.HOST, Tier.DISK], nodes, cold=True)  # both stay as cold as they were, the first below
    catalog.settle(r.ticket, statuses(1, 2))
    for left in (1, 0):
        catalog.take(Tier.HOST, 2 - left, 9)
        catalog.check()
        ready = (catalog.state(nodes)[1][:, Tier.HOST] == Residency.READY).tolist()
        assert ready == [True] * left + [False] * (2 - left), "a block was evicted before its continuation"
        catalog.release(9)


@pytest.mark.parametrize("used", [False, True])
def test_copying_a_cold_page_down_is_no_use_of_it(used: bool) -> None:
    catalog = make(host=3, disk=3)
    nodes = [store(catalog, 1, block)[0] for block in (1, 2, 3)]
    r = catalog.reserve([Tier.HOST, Tier.DISK], nodes[:2], cold=True)
    if used:
        catalog.match([catalog.root(SPACE)], tokens(1), 0, 2)
        catalog.release(2)
    catalog.settle(r.ticket, statuses(1, 2))
    catalog.check()
    for number in (2, 3, 1) if used else (1, 2, 3):
        assert catalog.state([nodes[number - 1]])[1][0, Tier.HOST] == Residency.READY
        catalog.take(Tier.HOST, 1, 9)
        assert catalog.state([nodes[number - 1]])[1][0, Tier.HOST] == Residency.ABSENT, f"{number} should go next"
    catalog.check()


def test_contents_are_all_pages_of_a_tier_and_their_blocks() -> None:
    catalog = make(host=4, disk=2)
    nodes = store(catalog, 1, 1, 2)
    ticket = catalog.reserve([Tier.HOST, Tier.DISK], nodes[1:]).ticket
    slots, ready, identities = catalog.contents(Tier.HOST)
    assert slots.tolist() == sorted(catalog.state(nodes)[0][:, Tier.HOST].tolist())
    assert ready.tolist() == [True, True]
    order = np.argsort(catalog.state(nodes)[0][:, Tier.HOST])
    assert (identities == catalog.identities(nodes[order])).all()
    slots, ready, _ = catalog.contents(Tier.DISK)
    assert (len(slots), ready.tolist()) == (1, [False])
    catalog.settle(ticket, statuses(1, 1))
    assert catalog.contents(Tier.DISK)[1].tolist() == [True]
    with pytest.raises(ValueError, match="remote"):
        catalog.contents(Tier.REMOTE)


def test_evictable_is_what_eviction_frees() -> None:
    catalog = make(10)
    store(catalog, 1, 1, 2, 3, 4)
    store(catalog, 1, 1, 5, 6)
    store(catalog, 1, 7, 8, 9, 10)
    catalog.match([catalog.root(SPACE)], tokens(1, 5, 6), 1, 2)
    n = catalog.evictable(Tier.HOST) + catalog.usage(Tier.HOST).free
    assert catalog.take(Tier.HOST, n + 1, 3).size == 0
    assert catalog.take(Tier.HOST, n, 3).size == n
    catalog.check()
    assert hit(catalog, 1, 5, 6) == 3


def test_evicted_pages_are_counted_by_whether_a_copy_is_left() -> None:
    catalog = make(host=2, disk=2)
    nodes = store(catalog, 1, 1, 2)
    r = catalog.reserve([Tier.HOST, Tier.DISK], nodes[:1])
    catalog.settle(r.ticket, statuses(1, 1))
    catalog.take(Tier.HOST, 2, 2)
    usage = catalog.usage(Tier.HOST)
    assert (usage.evictions, usage.dropped) == (1, 1)
    assert catalog.peek([catalog.root(SPACE)], tokens(1, 2)) == (0, 0, 1, 0)


# --- private slots --------------------------------------------------------------------------------------------------


def test_a_block_that_is_present_keeps_the_private_slot_private() -> None:
    catalog = make()
    nodes = store(catalog, 1, 1)
    catalog.match([catalog.root(SPACE)], tokens(1), 0, 2)
    slots = catalog.take(Tier.HOST, 1, 2)
    assert catalog.adopt(Tier.HOST, nodes, slots, 2).tolist() == [False]
    assert catalog.usage(Tier.HOST).private == 1
    catalog.release(2)
    catalog.check()
    assert catalog.usage(Tier.HOST).private == 0


def test_adopted_pages_stay_until_release() -> None:
    catalog = make(2)
    root = catalog.root(SPACE)
    nodes = catalog.insert(root, tokens(1, 2), 1)
    assert catalog.adopt(Tier.HOST, nodes, catalog.take(Tier.HOST, 2, 1), 1).all()
    assert catalog.narrow(1, Tier.HOST) == 0
    assert catalog.take(Tier.HOST, 1, 2).size == 0
    catalog.release(1)
    assert catalog.take(Tier.HOST, 1, 2).size == 1


def test_only_the_owner_can_give_back_or_adopt_a_private_slot() -> None:
    catalog = make()
    slots = catalog.take(Tier.HOST, 2, 1)
    nodes = catalog.insert(catalog.root(SPACE), tokens(1, 2), 2)
    for call in (
        lambda: catalog.give_back(Tier.HOST, slots, 2),
        lambda: catalog.give_back(Tier.HOST, [slots[0], slots[0]], 1),
        lambda: catalog.give_back(Tier.HOST, [99], 1),
        lambda: catalog.adopt(Tier.HOST, nodes, slots, 2),
        lambda: catalog.adopt(Tier.HOST, nodes, [slots[0], slots[0]], 1),
        lambda: catalog.adopt(Tier.HOST, nodes, slots[:1], 1),
    ):
        with pytest.raises(ValueError, match="slots"):
            call()
        catalog.check()
    assert catalog.usage(Tier.HOST).private == 2


# --- transfers ------------------------------------------------------------------------------------------------------


def growing(request: int, content: Content, slots: NDArray[np.uint32]) -> Growing:
    grows = Growing(content.native, request)
    grows.put(0, slots)
    return grows


@pytest.mark.parametrize("present", [0, 1, 2])
def test_extending_a_chain_is_inserting_and_adopting_it(present: int) -> None:
    """Of what is there already the private slots stay private; where the catalog is full, a prefix is extended."""
    catalog = make(labels="content")
    root = catalog.root(SPACE)
    held = store(catalog, 1, 1, 2)[:present].tolist()
    catalog.drop(Tier.HOST, store(catalog, 1, 1, 2)[present:])
    slots = catalog.take(Tier.HOST, 3, 2)
    with pytest.raises(ValueError, match="table: it has fewer slots"):
        catalog.extend([(growing(2, words(1, 2, 3), slots[:2]), 3, root)], Tier.HOST)
    with pytest.raises(ValueError, match="of 4 tokens given; 8 tokens are known"):
        catalog.extend([(growing(2, words(1, 2), slots), 3, root)], Tier.HOST)
    with pytest.raises(ValueError, match="not a private slot of this request"):
        catalog.extend([(growing(3, words(1, 2, 3), slots), 3, root)], Tier.HOST)
    assert hit(catalog, 1, 2, 3) == present  # nothing was done
    content = words(1, 2, 3)
    request = growing(2, content, slots)
    fresh = catalog.extend([(request, 3, root)], Tier.HOST)
    nodes = request.take_later()
    assert (request.cached, request.leaf, request.take_later()) == (3, nodes[-1], [])
    assert nodes[:present] == held
    assert fresh == nodes[present:]
    assert catalog.state(nodes)[0][present:, Tier.HOST].tolist() == slots[present:].tolist()
    assert hit(catalog, 1, 2, 3) == 3
    catalog.check()
    content.append([4] * BLOCK)
    assert request.lengthen(catalog.native, Tier.HOST, 1)
    assert (len(request), request.slots()[:3].tolist()) == (4, slots.tolist())
    more = catalog.extend([(request, 4, None)], Tier.HOST)  # below what it has
    assert request.take_later() == more
    assert catalog.state(more)[0][:, Tier.HOST].tolist() == request.slots()[3:].tolist()
    assert not request.lengthen(catalog.native, Tier.HOST, 99)
    assert len(request) == 4  # no room, and nothing was taken
    catalog.release(2)
    catalog.check()
    assert hit(catalog, 1, 2, 3, 4) == 4


def test_a_full_catalog_extends_a_prefix() -> None:
    catalog = make(max_nodes=9, labels="content")
    root = catalog.root(SPACE)
    catalog.insert(root, named(catalog, *range(11, 18)), 1)
    slots = catalog.take(Tier.HOST, 3, 2)
    request, none = growing(2, words(1, 2, 3), slots), growing(2, words(4), slots[:0])
    request.noted = none.noted = 3
    fresh = catalog.extend([(request, 3, root), (none, 1, None)], Tier.HOST)
    nodes = request.take_later()
    assert 1 <= len(nodes) == len(fresh) < 3
    assert request.cached == request.noted == len(nodes), "what found no room will not be offered again"
    assert none.cached == none.noted == 0
    assert hit(catalog, 1, 2, 3) == len(nodes)
    catalog.check()


def test_extending_does_without_a_root_that_went_and_refuses_what_is_no_request() -> None:
    """With as many namespaces as there can be, the first new one's empty root goes when the next one's is asked for."""
    catalog = make(labels="content")
    gone, request = catalog.root(b"g" * 32), growing(2, words(1), catalog.take(Tier.HOST, 1, 2))
    catalog.native.invalidate(None, 7)
    request.noted = 1
    there = growing(3, words(1), catalog.take(Tier.HOST, 1, 3))
    for number in range(1 << 16):
        catalog.root(number.to_bytes(32))
    root = catalog.root(SPACE, generation=7)
    assert catalog.extend([(request, 1, gone), (there, 1, root)], Tier.HOST) == [there.leaf]
    assert (request.cached, request.noted, request.leaf) == (0, 0, None)
    with pytest.raises(TypeError, match="computed: None"):
        catalog.extend([(None, 1, root)], Tier.HOST)  # type: ignore[list-item]
    catalog.check()


def test_extending_several_chains_is_extending_each() -> None:
    """Also where one is the beginning of another: the second has its page already, and keeps its own slot."""
    catalog = make(labels="content")
    root = catalog.root(SPACE)
    requests = []
    for number, blocks in enumerate([(1, 2), (1, 2, 3), (1, 4)], 2):
        requests.append(growing(number, words(*blocks), catalog.take(Tier.HOST, len(blocks), number)))
    fresh = catalog.extend([(request, len(request), root) for request in requests], Tier.HOST)
    one, two, three = (request.take_later() for request in requests)
    assert one == two[:2]
    assert one[0] == three[0]
    assert fresh == [*one, two[2], three[1]]
    assert catalog.usage(Tier.HOST).private == 3
    catalog.check()


def test_lacking_pages_are_ready_above_and_absent_below() -> None:
    catalog = make(8, disk=8)
    nodes = store(catalog, 1, 1, 2, 3, 4)
    done, moving = catalog.reserve([Tier.HOST, Tier.DISK], nodes[:1]), nodes[1:2]
    assert catalog.settle_whole(done.ticket)
    catalog.reserve([Tier.HOST, Tier.DISK], moving)
    catalog.drop(Tier.HOST, nodes[3:])
    assert catalog.lacking(nodes, Tier.HOST, Tier.DISK) == nodes[2:3].tolist()
    assert (catalog.count_ready(Tier.HOST, nodes), catalog.count_ready(Tier.DISK, nodes)) == (3, 1)


def test_foreseeing_keeps_nodes_alive_and_leaves_their_pages_free_to_go() -> None:
    """Of six blocks the first two are in host memory too, the third is being brought there, the last is not cached."""
    catalog = make(8, disk=8, labels="content")
    root = catalog.root(SPACE)
    nodes = store(catalog, 1, 1, 2, 3, 4, 5)
    catalog.settle_whole(catalog.reserve([Tier.HOST, Tier.DISK], nodes).ticket)
    assert catalog.drop(Tier.HOST, nodes[2:]) == 3
    assert catalog.reserve([Tier.DISK, Tier.HOST], nodes[2:3]).count == 1
    content = words(1, 2, 3, 4, 5, 6)
    found, below = catalog.foresee(root, content, 0, None, Tier.DISK, False, 7)
    assert found == nodes.tolist()
    assert below == nodes[3:].tolist()
    found, below = catalog.foresee(root, content, 1, 4, Tier.DISK, False, 7)  # again, and part of it
    assert (found, below) == (nodes[1:4].tolist(), nodes[3:4].tolist())
    found, below = catalog.foresee(root, content, 0, None, Tier.DISK, True, 8)
    assert (found, below) == (nodes[:2].tolist(), [])
    assert catalog.drop(Tier.DISK, nodes) == 4  # all but the one that is read
    assert catalog.stats()["nodes"] == 5
    catalog.release(7)
    with pytest.raises(ValueError, match="is not a node"):
        catalog.drop(Tier.DISK, nodes)
    assert catalog.drop_ahead(Tier.HOST, nodes) == 0, "none of what is left was brought ahead"
    catalog.check()


def test_what_was_brought_ahead_goes_until_somebody_asked_for_it() -> None:
    """Of four blocks on disk, three of which come ahead: a match uses the first two, wherever it is served from."""
    catalog = make(8, disk=8)
    root = catalog.root(SPACE)
    nodes = store(catalog, 1, 1, 2, 3, 4)
    catalog.settle_whole(catalog.reserve([Tier.HOST, Tier.DISK], nodes).ticket)
    catalog.drop(Tier.HOST, nodes)
    catalog.settle_whole(catalog.reserve([Tier.DISK, Tier.HOST], nodes[3:]).ticket)
    coming = catalog.reserve([Tier.DISK, Tier.HOST], nodes[:3], ahead=True).ticket
    assert catalog.drop_ahead(Tier.HOST, nodes) == 0, "they are on their way, and one was asked for"
    catalog.match([root], tokens(1, 2), 0, 5)
    catalog.settle_whole(coming)
    catalog.release(5)
    assert catalog.drop_ahead(Tier.DISK, nodes) == 0
    assert catalog.drop_ahead(Tier.HOST, nodes) == 1
    there = catalog.state(nodes)[1][:, Tier.HOST] == Residency.READY
    assert there.tolist() == [True, True, False, True]
    # A slot that is used again begins anew, and so does what is loaded because somebody waits for it.
    catalog.settle_whole(catalog.reserve([Tier.DISK, Tier.HOST], nodes[2:3]).ticket)
    assert catalog.drop_ahead(Tier.HOST, nodes) == 0
    catalog.drop(Tier.HOST, nodes[3:])
    catalog.settle_whole(catalog.reserve([Tier.DISK, Tier.HOST], nodes[3:], ahead=True).ticket)
    catalog.settle_whole(catalog.reserve([Tier.HOST, Tier.REMOTE], nodes[3:]).ticket)
    assert catalog.drop_ahead(Tier.HOST, nodes) == 0, "somebody had it carried on"
    catalog.check()


@pytest.mark.parametrize(
    ("due", "now", "goes"), [(9.0, 2.0, True), (10.0, 2.0, False), (0.0, 2.0, False), (20.0, 10.5, True)]
)
def test_what_comes_ahead_takes_no_place_of_what_is_needed_sooner(due: float, now: float, goes: bool) -> None:
    """The two blocks of which the coldest is needed by 10."""
    catalog = make(2, disk=8, labels="content")
    root = catalog.root(SPACE)
    wanted = store(catalog, 9, 9)
    catalog.settle_whole(catalog.reserve([Tier.HOST, Tier.DISK], wanted).ticket)
    catalog.drop(Tier.HOST, wanted)
    for word in (1, 2):
        nodes = store(catalog, word, word)
        catalog.settle_whole(catalog.reserve([Tier.HOST, Tier.DISK], nodes, cold=True).ticket)
    first, _ = catalog.foresee(root, words(2), 0, None, Tier.DISK, False, 7, 1.0, 12.0)
    first, _ = catalog.foresee(root, words(2), 0, None, Tier.DISK, False, 7, 1.0, 10.0)
    catalog.foresee(root, words(2), 0, None, Tier.DISK, False, 7, now, 30.0)
    came = catalog.reserve([Tier.DISK, Tier.HOST], wanted, ahead=True, due=due).count == 1
    assert came == goes
    there = catalog.state(first)[1][0, Tier.HOST] == Residency.READY
    assert there != goes
    assert catalog.reserve([Tier.DISK, Tier.HOST], wanted).count == (0 if came else 1), "who waits for it has the place"
    catalog.check()


def test_foreseeing_is_no_use_of_a_page() -> None:
    catalog = make(2, labels="content")
    store(catalog, 1, 1)
    store(catalog, 2, 2)
    found, _ = catalog.foresee(catalog.root(SPACE), words(1), 0, None, Tier.DISK, False, 9)
    assert catalog.usage(Tier.HOST).pinned == 0
    catalog.take(Tier.HOST, 1, 3)
    assert catalog.state(found)[1][0, Tier.HOST] == Residency.ABSENT, "it outlived one that was used later"
    catalog.check()


def test_foreseeing_goes_by_labels_as_well_as_by_the_content_that_makes_them() -> None:
    catalog = make(4, disk=4, labels="content")
    root = catalog.root(SPACE)
    nodes = store(catalog, 1, 1, 2)
    catalog.settle_whole(catalog.reserve([Tier.HOST, Tier.DISK], nodes).ticket)
    catalog.drop(Tier.HOST, nodes[1:])
    content = words(1, 2, 3)
    for labels in (content, content.whole(catalog.block_size)):
        found, below = catalog.foresee(root, labels, 0, None, Tier.DISK, False, 7)
        assert (found, below) == (nodes.tolist(), nodes[1:].tolist())


@pytest.mark.parametrize(("labels", "block_size"), [("token", 4), ("token", 16), ("hash", 16)])
def test_content_is_no_label_of_a_catalog_of_other_ones(labels: Literal["token", "hash"], block_size: int) -> None:
    """Not even where they are as long: 8 tokens and no image would be 16 tokens, the last of them 0."""
    catalog = Catalog([TierSpec(Tier.HOST, 8)], block_size=block_size, labels=labels)
    root, slots = catalog.root(SPACE), catalog.take(Tier.HOST, 1, 1)
    for call in (
        lambda: catalog.foresee(root, Content([5] * 16), 0, None, Tier.HOST, False, 1),
        lambda: catalog.extend([(growing(1, Content([5] * 16), slots), 1, root)], Tier.HOST),
    ):
        with pytest.raises(ValueError, match=f"content: this catalog's labels are '{labels}'; 'content' is needed"):
            call()
    assert catalog.usage(Tier.HOST).private == 1
    assert catalog.stats()["nodes"] == 0


@pytest.mark.parametrize("tier", [-1, 4, 256])
def test_a_tier_that_is_none_is_refused(tier: int) -> None:
    with pytest.raises(ValueError, match=f"tiers: unknown tier {tier}"):
        Catalog([TierSpec(tier, 8)], block_size=BLOCK)  # type: ignore[arg-type]


def test_settling_as_a_whole_is_settling_with_ok() -> None:
    catalog = make(8, disk=8)
    nodes = store(catalog, 1, 1, 2, 3)
    reserved = catalog.reserve([Tier.HOST, Tier.DISK], nodes)
    assert reserved.identities.tobytes() == catalog.identities(nodes).tobytes()
    first = statuses(1, 3, PENDING)
    first[0, 1] = PageStatus.READ_ERROR  # the first word on a page counts
    assert catalog.settle(reserved.ticket, first)
    assert catalog.settle_whole(reserved.ticket)
    assert catalog.state(nodes)[1][:, Tier.DISK].tolist() == [Residency.READY, Residency.ABSENT, Residency.READY]
    assert not catalog.settle_whole(reserved.ticket)
    assert not catalog.settle_whole(0)
    catalog.check()


def test_arrays_of_another_kind_are_refused_by_the_native_calls() -> None:
    """What is behind the typed face takes arrays by their bytes, so it must not take other ones for them."""
    native = make().native
    good = np.zeros(2, np.uint32)
    assert native.state(good)[0].shape == (2, 4)
    for bad in (good.astype(np.int32), good.astype(np.uint64), good.astype(np.float32), good.reshape(1, 2),
                np.zeros(6, np.uint32)[::2], bytes(8), None,
                (0, 0), [0, -1], [0, 1 << 32], [0, 1.0], [0, True], [0, None], [np.uint32(0)]):  # fmt: skip
        with pytest.raises(TypeError):
            native.state(bad)
    assert native.state([0, 0])[0].tolist() == native.state(good)[0].tolist()  # a list of ids says what it is
    assert native.state(np.zeros(0, np.uint32))[1].shape == native.state([])[1].shape == (0, 4)
    slots, _ = native.state(good)
    slots[0, 0] = 7  # what comes back is the caller's own


def test_a_filling_page_is_not_matched_until_it_settles() -> None:
    catalog = make()
    nodes = catalog.insert(catalog.root(SPACE), tokens(1, 2), 1)
    r = catalog.reserve([Tier.DEVICE, Tier.HOST], nodes)
    assert r.count == 2
    assert r.slots[0].tolist() == [NO_SLOT] * 2
    assert hit(catalog, 1, 2) == 0
    status = statuses(1, 2, PENDING)
    status[0, 0] = OK
    assert catalog.settle(r.ticket, status)
    assert hit(catalog, 1, 2) == 1
    assert catalog.settle(r.ticket, statuses(1, 2))
    assert hit(catalog, 1, 2) == 2, "what had settled was settled a second time"
    catalog.check()


def test_a_repeated_late_or_unknown_settle_changes_nothing() -> None:
    catalog = make()
    nodes = catalog.insert(catalog.root(SPACE), tokens(1), 1)
    r = catalog.reserve([Tier.DEVICE, Tier.HOST], nodes)
    assert catalog.settle(r.ticket, statuses(1, 1))
    assert not catalog.settle(r.ticket, statuses(1, 1, int(PageStatus.CORRUPT)))
    assert not catalog.settle(12345, statuses(1, 1))
    assert not catalog.settle(0, statuses(1, 1))
    assert catalog.stats()["settled_late"] == 3
    assert hit(catalog, 1) == 1


def test_the_first_word_on_a_page_counts() -> None:
    catalog = make()
    nodes = catalog.insert(catalog.root(SPACE), tokens(1, 2), 1)
    r = catalog.reserve([Tier.DEVICE, Tier.HOST], nodes)
    catalog.settle(r.ticket, np.array([[OK, PENDING]], np.uint8))
    catalog.settle(r.ticket, np.array([[PageStatus.OVERDUE, OK]], np.uint8))
    assert hit(catalog, 1, 2) == 2


@pytest.mark.parametrize("again", [PageStatus.OK, PageStatus.OVERDUE, PageStatus.CORRUPT])
def test_the_second_word_on_a_page_changes_nothing(again: PageStatus) -> None:
    """Its transfer is open as long as another page fills, no source is let go twice, and what has come stays."""
    catalog = make(device=2, host=2)
    nodes = store(catalog, 1, 1, 2)
    r = catalog.reserve([Tier.HOST, Tier.DEVICE], nodes)
    for word in (PageStatus.OK, again, again):
        assert catalog.settle(r.ticket, np.array([[word, PENDING]], np.uint8)), "the second word on a page counted"
        assert catalog.stats()["transfers"] == 1, "the second word on a page counted"
        pinned, usage = catalog.usage(Tier.HOST).pinned, catalog.usage(Tier.DEVICE)
        assert (pinned, usage.filling, usage.ready) == (1, 1, 1)
        catalog.check()
    assert catalog.settle(r.ticket, np.array([[again, OK]], np.uint8))
    assert catalog.stats()["transfers"] == 0
    assert catalog.usage(Tier.HOST).pinned == 0
    assert hit(catalog, 1, 2) == 2
    catalog.check()


def test_a_reservation_stops_at_the_first_node_that_cannot_move() -> None:
    catalog = make(host=8, disk=8)
    nodes = store(catalog, 1, 1, 2, 3)
    catalog.reserve([Tier.HOST, Tier.DISK], nodes[2:])
    r = catalog.reserve([Tier.HOST, Tier.DISK], nodes)
    assert r.count == 2
    none = catalog.reserve([Tier.HOST, Tier.DISK], nodes)
    assert (none.ticket, none.count) == (0, 0)
    catalog.check()


def test_a_full_tier_reserves_what_fits() -> None:
    catalog = make(host=8, disk=2)
    nodes = store(catalog, 1, 1, 2, 3)
    r = catalog.reserve([Tier.HOST, Tier.DISK], nodes)
    assert r.count == 2
    catalog.check()


@pytest.mark.parametrize("keeps", [True, False])
def test_ahead_drops_no_last_copy_of_a_tier_that_keeps_them(keeps: bool) -> None:
    catalog = make(host=2, disk=4, keeps_last=keeps)
    first = store(catalog, 1, 1, 2)
    catalog.settle(catalog.reserve([Tier.HOST, Tier.DISK], first[1:]).ticket, statuses(1, 1))
    nodes = catalog.insert(catalog.root(SPACE), tokens(8, 9), 2)
    r = catalog.reserve([Tier.DEVICE, Tier.HOST], nodes, ahead=True)
    assert r.count == (1 if keeps else 2)
    assert catalog.usage(Tier.HOST).dropped == (0 if keeps else 1)
    assert hit(catalog, 1, 2) == (2 if keeps else 0)


def test_sources_stay_pinned_until_their_page_settled() -> None:
    catalog = make(host=2, disk=2)
    nodes = store(catalog, 1, 1, 2)
    r = catalog.reserve([Tier.HOST, Tier.DISK], nodes)
    assert catalog.usage(Tier.HOST).pinned == 2
    assert catalog.take(Tier.HOST, 1, 2).size == 0
    catalog.settle(r.ticket, np.array([[PENDING, OK]], np.uint8))
    assert catalog.usage(Tier.HOST).pinned == 1
    catalog.check()


def test_two_hops_make_both_pages_ready_and_hold_the_middle_one_meanwhile() -> None:
    catalog = make(device=2, host=2, disk=2)
    nodes = store(catalog, 1, 1, tier=Tier.DISK)
    r = catalog.reserve([Tier.DISK, Tier.HOST, Tier.DEVICE], nodes, request=5)
    assert r.slots.shape == (3, 1)
    catalog.settle(r.ticket, np.array([[OK], [PENDING]], np.uint8))
    assert catalog.peek([catalog.root(SPACE)], tokens(1)) == (0, 1, 0, 0)
    assert catalog.evictable(Tier.HOST) == 0
    catalog.settle(r.ticket, statuses(2, 1))
    catalog.check()
    assert catalog.peek([catalog.root(SPACE)], tokens(1)) == (1, 0, 0, 0)
    assert catalog.evictable(Tier.HOST) == 1
    assert catalog.evictable(Tier.DEVICE) == 0
    catalog.release(5)
    assert catalog.evictable(Tier.DEVICE) == 1


def test_a_later_hop_is_not_believed_before_the_earlier_ones() -> None:
    catalog = make(device=2, host=2, disk=2)
    nodes = store(catalog, 1, 1, tier=Tier.DISK)
    r = catalog.reserve([Tier.DISK, Tier.HOST, Tier.DEVICE], nodes)
    catalog.settle(r.ticket, np.array([[PENDING], [OK]], np.uint8))
    catalog.settle(r.ticket, np.array([[PageStatus.CORRUPT], [OK]], np.uint8))
    catalog.check()
    assert hit(catalog, 1) == 0


def test_a_lost_source_is_never_matched_again() -> None:
    catalog = make(host=4, disk=4)
    nodes = store(catalog, 1, 1, 2, tier=Tier.DISK)
    catalog.match([catalog.root(SPACE)], tokens(1, 2), 0, 2)
    r = catalog.reserve([Tier.DISK, Tier.HOST], nodes, request=2)
    catalog.settle(r.ticket, np.array([[OK, PageStatus.CORRUPT]], np.uint8))
    catalog.check()
    assert hit(catalog, 1, 2) == 1
    assert catalog.usage(Tier.DISK).draining == 1  # the lease still holds it
    assert catalog.narrow(2, Tier.HOST) == 1
    catalog.check()
    assert catalog.usage(Tier.DISK).draining == 0
    assert catalog.stats()["pages_lost"] == 1


def test_a_failed_write_leaves_the_source_as_it_was() -> None:
    catalog = make(host=4, disk=4)
    nodes = store(catalog, 1, 1)
    r = catalog.reserve([Tier.HOST, Tier.DISK], nodes)
    catalog.settle(r.ticket, statuses(1, 1, int(PageStatus.WRITE_ERROR)))
    assert catalog.peek([catalog.root(SPACE)], tokens(1)) == (0, 1, 0, 0)
    assert catalog.usage(Tier.DISK).free == 4


def test_a_cancelled_page_drains_until_it_settles_even_if_it_arrived() -> None:
    catalog = make()
    nodes = catalog.insert(catalog.root(SPACE), tokens(1), 1)
    r = catalog.reserve([Tier.DEVICE, Tier.HOST], nodes)
    assert catalog.cancel(r.ticket)
    assert catalog.usage(Tier.HOST).draining == 1, "a slot was freed while a copy into it runs"
    assert catalog.reserve([Tier.DEVICE, Tier.HOST], nodes).count == 0
    catalog.check()
    catalog.settle(r.ticket, statuses(1, 1))
    assert hit(catalog, 1) == 0
    assert catalog.usage(Tier.HOST).free == 8
    assert not catalog.cancel(r.ticket)


def test_a_cancelled_slot_stays_taken_until_no_copy_can_touch_it() -> None:
    catalog = make(host=2, device=2, disk=2)
    nodes = store(catalog, 1, 1, 2, tier=Tier.DISK)
    r = catalog.reserve([Tier.DISK, Tier.HOST, Tier.DEVICE], nodes, 7)
    catalog.cancel(r.ticket)
    catalog.check()
    catalog.release(7)  # who asked for it has gone; what fills the slots goes on
    catalog.check()
    assert [catalog.usage(tier).draining for tier in (Tier.HOST, Tier.DEVICE)] == [2, 2]
    catalog.settle(r.ticket, np.array([[OK, OK], [PENDING, PENDING]], np.uint8))  # the middle is read now
    catalog.check()
    assert [catalog.usage(tier).draining for tier in (Tier.HOST, Tier.DEVICE)] == [2, 2]
    catalog.settle(r.ticket, statuses(2, 2))
    catalog.check()
    assert [catalog.usage(tier).free for tier in (Tier.HOST, Tier.DEVICE)] == [2, 2]


def test_release_in_mid_transfer_leaks_nothing() -> None:
    catalog = make(device=4, host=4)
    nodes = store(catalog, 1, 1, 2)
    catalog.match([catalog.root(SPACE)], tokens(1, 2), 0, 2)
    r = catalog.reserve([Tier.HOST, Tier.DEVICE], nodes, request=2)
    catalog.release(2)
    catalog.check()
    assert catalog.usage(Tier.DEVICE).filling == 2
    catalog.settle(r.ticket, np.array([[OK, PageStatus.CANCELLED]], np.uint8))
    catalog.check()
    usage = catalog.usage(Tier.DEVICE)
    assert (usage.ready, usage.free, usage.pinned) == (1, 3, 0)
    assert catalog.usage(Tier.HOST).pinned == 0


def test_narrow_holds_exactly_what_arrived() -> None:
    catalog = make(device=4, host=4)
    nodes = store(catalog, 1, 1, 2, 3)
    catalog.match([catalog.root(SPACE)], tokens(1, 2, 3), 0, 2)
    r = catalog.reserve([Tier.HOST, Tier.DEVICE], nodes, request=2)
    catalog.settle(r.ticket, np.array([[OK, PageStatus.OVERDUE, OK]], np.uint8))
    assert catalog.narrow(2, Tier.DEVICE) == 1
    catalog.check()
    assert catalog.usage(Tier.DEVICE).pinned == 1
    assert catalog.usage(Tier.HOST).pinned == 0
    assert catalog.narrow(77, Tier.DEVICE) == 0


def test_what_came_to_a_tier_by_others_is_held_there_and_the_rest_as_it_was() -> None:
    catalog = make(device=4, host=4)
    nodes = store(catalog, 1, 1, 2, 3)
    catalog.match([catalog.root(SPACE)], tokens(1, 2, 3), 0, 2)
    assert catalog.usage(Tier.HOST).pinned == 3
    other = catalog.reserve([Tier.HOST, Tier.DEVICE], nodes[1:])  # for someone else, who holds nothing of it
    catalog.settle(other.ticket, np.array([[OK, OK]], np.uint8))
    assert catalog.usage(Tier.DEVICE).pinned == 0
    for _ in range(2):
        catalog.hold_in(2, Tier.DEVICE)
        catalog.check()
        assert (catalog.usage(Tier.DEVICE).pinned, catalog.usage(Tier.HOST).pinned) == (2, 1)
    catalog.hold_in(77, Tier.DEVICE)  # nobody
    catalog.release(2)
    catalog.check()
    assert (catalog.usage(Tier.DEVICE).pinned, catalog.usage(Tier.HOST).pinned) == (0, 0)


def test_narrow_keeps_one_pin_on_each_page_however_it_came() -> None:
    catalog = make(device=8, host=8)
    nodes = store(catalog, 1, 1, 2, 3, 4, 5)
    path = [Tier.HOST, Tier.DEVICE]
    first = catalog.reserve(path, nodes[:1])  # there before the request
    catalog.settle(first.ticket, np.array([[OK]], np.uint8))
    match = catalog.match([catalog.root(SPACE)], tokens(1, 2, 3, 4, 5), 0, 2)
    assert match.tiers.tolist() == [Tier.DEVICE] + 4 * [Tier.HOST]
    for part in (nodes[1:2], nodes[2:3]):  # loaded for the request, in two goes
        r = catalog.reserve(path, part, request=2)
        catalog.settle(r.ticket, np.array([[OK]], np.uint8))
    other = catalog.reserve(path, nodes[3:4])  # loaded for someone else
    catalog.settle(other.ticket, np.array([[OK]], np.uint8))
    late = catalog.reserve(path, nodes[4:], request=2)  # not there yet
    assert catalog.narrow(2, Tier.DEVICE) == 4
    catalog.check()
    assert (catalog.usage(Tier.DEVICE).pinned, catalog.usage(Tier.HOST).pinned) == (4, 1)
    assert catalog.narrow(2, Tier.DEVICE) == 4
    catalog.settle(late.ticket, np.array([[OK]], np.uint8))
    catalog.release(2)
    catalog.check()
    assert (catalog.usage(Tier.DEVICE).pinned, catalog.usage(Tier.HOST).pinned) == (0, 0)


# --- invalidation and restart ---------------------------------------------------------------------------------------


def test_invalidated_pages_are_never_matched_and_go_when_let_go() -> None:
    catalog = make()
    nodes = store(catalog, 1, 1, 2, 3)
    root = catalog.root(SPACE)
    match = catalog.match([root], tokens(1, 2), 0, 2)
    filling = catalog.insert(root, tokens(7), 4)
    r = catalog.reserve([Tier.DEVICE, Tier.HOST], filling)
    assert catalog.invalidate(SPACE, 3) == 4
    catalog.check()
    assert hit(catalog, 1, 2, 3) == 0
    usage = catalog.usage(Tier.HOST)
    assert (usage.ready, usage.draining) == (0, 3)
    slots = catalog.take(Tier.HOST, 5, 5)
    assert not set(slots.tolist()) & set(match.slots.tolist())
    # The running request goes on below its own blocks, and nothing of it is shared.
    mine = catalog.insert(int(nodes[1]), tokens(9), 2)
    catalog.give_back(Tier.HOST, slots[:1], 5)
    assert not catalog.adopt(Tier.HOST, mine, catalog.take(Tier.HOST, 1, 2), 2).any()
    catalog.settle(r.ticket, statuses(1, 1))
    catalog.release(2)
    catalog.release(4)
    catalog.release(5)
    catalog.check()
    assert catalog.usage(Tier.HOST).free == 8
    assert catalog.stats()["nodes"] == 0
    store(catalog, 6, 1, 2)
    assert catalog.identities(catalog.insert(root, tokens(1), 7))[0, 96:104].view(np.uint64)[0] == 3


def test_pages_of_an_invalidated_chain_cannot_be_adopted_or_stored() -> None:
    catalog = make()
    nodes = catalog.insert(catalog.root(SPACE), tokens(1), 1)
    slots = catalog.take(Tier.HOST, 1, 1)
    catalog.invalidate(None, 1)
    assert catalog.adopt(Tier.HOST, nodes, slots, 1).tolist() == [False]
    assert catalog.reserve([Tier.DEVICE, Tier.HOST], nodes).count == 0
    assert catalog.insert(catalog.root(SPACE), tokens(1), 2).tolist() != nodes.tolist()
    catalog.check()


def test_invalidating_one_namespace_leaves_the_others() -> None:
    catalog = make()
    store(catalog, 1, 1, 2)
    catalog.root(b"y" * 32)
    assert catalog.invalidate(b"y" * 32, 1) == 0
    assert hit(catalog, 1, 2) == 2


def test_a_newer_generation_drops_what_is_older() -> None:
    catalog = make()
    store(catalog, 1, 1)
    catalog.root(SPACE, generation=2)
    assert hit(catalog, 1) == 0
    store(catalog, 1, 1)
    catalog.root(SPACE, generation=1)
    assert hit(catalog, 1) == 1


def test_identities_chain_by_digest() -> None:
    import hashlib

    catalog = make()
    nodes = store(catalog, 1, 1, 2)
    identities = catalog.identities(nodes[::-1])[::-1]
    root = hashlib.sha256(b"kvtier.root.v1" + SPACE + (0).to_bytes(4, "little")).digest()
    first = hashlib.sha256(root + tokens(1).tobytes()).digest()
    second = hashlib.sha256(first + tokens(2).tobytes()).digest()
    assert identities[0, :32].tobytes() == first
    assert identities[0, 32:64].tobytes() == root
    assert identities[1, :32].tobytes() == second
    assert identities[1, 32:64].tobytes() == first
    assert identities[1, 64:96].tobytes() == SPACE
    assert identities[1, 108:112].view(np.uint32)[0] == 1
    assert identities[1, 112:].tobytes() == tokens(2).tobytes()


def test_restored_pages_are_hit_and_strangers_are_not_adopted() -> None:
    old = make(host=8, disk=8)
    nodes = store(old, 1, 1, 2, 3, tier=Tier.DISK)
    branch = store(old, 1, 1, 5, tier=Tier.DISK)
    identities = old.identities([nodes[2], nodes[0], branch[1], nodes[1]])
    bad = identities[1:2].copy()
    bad[0, 112] ^= 1  # a label that is not its digest's
    orphan = old.identities(store(old, 2, 8, 9, tier=Tier.DISK)[1:])
    other = identities[1:2].copy()
    other[0, 96] = 1  # another generation than its namespace's

    new = make(host=8, disk=8)
    flags = new.restore(
        Tier.DISK, [7, 0, 3, 2, 1, 4, 5, 6], np.vstack([identities, bad, orphan, identities[1:2], other])
    )
    assert flags.tolist() == [True] * 4 + [False] * 4
    new.check()
    assert new.peek([new.root(SPACE)], tokens(1, 2, 3)) == (0, 0, 3, 0)
    match = new.match([new.root(SPACE)], tokens(1, 5), 0, 1)
    assert match.slots.tolist() == [0, 3]
    assert new.usage(Tier.DISK).free == 4


def test_a_match_uses_what_the_engine_holds_and_what_lies_below_too() -> None:
    catalog = make(host=2)
    store(catalog, 1, 1)
    store(catalog, 2, 2)
    catalog.match([catalog.root(SPACE)], tokens(1), 1, 3)  # the engine has it: only touched
    catalog.release(3)
    catalog.take(Tier.HOST, 1, 4)
    assert (hit(catalog, 1), hit(catalog, 2)) == (1, 0)

    catalog = make(host=2, device=1)
    nodes = store(catalog, 1, 1)
    store(catalog, 2, 2)
    r = catalog.reserve([Tier.HOST, Tier.DEVICE], nodes)
    catalog.settle(r.ticket, statuses(1, 1))
    store(catalog, 3, 2)
    catalog.match([catalog.root(SPACE)], tokens(1), 0, 3)  # served by the device; the copy below is used with it
    catalog.release(3)
    catalog.take(Tier.HOST, 1, 4)
    assert catalog.state(nodes)[1][0].tolist() == [Residency.READY, Residency.READY, 0, 0]
    assert hit(catalog, 2) == 0


def test_an_eviction_that_stops_leaves_the_order_as_it_was() -> None:
    catalog = make(host=3, disk=3)
    backed = store(catalog, 1, 1)
    catalog.settle(catalog.reserve([Tier.HOST, Tier.DISK], backed).ticket, statuses(1, 1))
    catalog.match([catalog.root(SPACE)], tokens(1), 0, 1)
    catalog.release(1)
    store(catalog, 2, 2)
    store(catalog, 3, 3)
    nodes = catalog.insert(catalog.root(SPACE), tokens(7, 8, 9), 4)
    assert catalog.reserve([Tier.REMOTE, Tier.HOST], nodes, ahead=True).count == 1
    catalog.check()
    catalog.take(Tier.HOST, 1, 5)
    assert (hit(catalog, 2), hit(catalog, 3)) == (0, 1)


def test_a_node_named_twice_is_filled_once() -> None:
    catalog = make(host=4)
    nodes = catalog.insert(catalog.root(SPACE), tokens(1, 2), 1)
    r = catalog.reserve([Tier.REMOTE, Tier.HOST], [nodes[0], nodes[1], nodes[1], nodes[0]])
    assert r.count == 2
    catalog.check()


def test_a_block_outlives_the_eviction_that_makes_room_for_it() -> None:
    catalog = make(host=2)
    nodes = store(catalog, 1, 1, 2)
    catalog.drop(Tier.HOST, nodes[:1])  # only its continuation keeps the first block now …
    store(catalog, 2, 9)
    r = catalog.reserve([Tier.REMOTE, Tier.HOST], nodes[:1])  # … and that is the one to go
    catalog.check()
    assert catalog.settle(r.ticket, statuses(1, 1))
    catalog.check()
    assert hit(catalog, 1) == 1


def test_a_record_with_any_byte_wrong_is_not_adopted() -> None:
    def fresh() -> Catalog:
        return Catalog([TierSpec(Tier.DISK, 2)], block_size=3, max_nodes=16)  # 12 bytes of label, 4 of padding

    old = fresh()
    nodes = old.insert(old.root(SPACE), np.arange(6, dtype=np.uint32), 1)
    good = old.identities(nodes)
    for record in (0, 1):
        for byte in range(old.identity_bytes):
            changed = good.copy()
            changed[record, byte] ^= 1 << byte % 8
            new = fresh()
            flags = new.restore(Tier.DISK, [0, 1], changed).tolist()
            # Of a beginning, what names the namespace and its generation may be another's; then the rest is an orphan.
            another = record == 0 and 96 <= byte < 104
            assert flags == ([True, False] if record or another else [False, False]), f"byte {byte} may be wrong"
            new.check()


def test_restored_pages_leave_oldest_first() -> None:
    old = make(host=8, disk=8)
    nodes = [store(old, 1, i, tier=Tier.DISK)[0] for i in range(4)]
    new = make(host=8, disk=4)
    assert new.restore(Tier.DISK, [3, 1, 0, 2], old.identities(nodes)).all()
    new.take(Tier.DISK, 2, 1)
    assert [hit(new, i) for i in range(4)] == [0, 0, 1, 1]


def test_a_restored_chain_leaves_leaf_first_although_its_beginning_is_the_oldest() -> None:
    old = make(host=8, disk=8)
    nodes = store(old, 1, 1, 2, 3, tier=Tier.DISK)
    new = make(host=8, disk=3)
    assert new.restore(Tier.DISK, [0, 1, 2], old.identities(nodes)).all()
    for left in (2, 1, 0):
        new.take(Tier.DISK, 1, 10 + left)
        new.check()
        assert hit(new, 1, 2, 3) == left, "a block was evicted before its continuation"


def test_restore_refuses_slots_that_are_taken() -> None:
    catalog = make(host=8, disk=8)
    identities = catalog.identities(store(catalog, 1, 1, tier=Tier.DISK))
    slot = catalog.match([catalog.root(SPACE)], tokens(1), 0, 2).slots
    for slots in (slot, [9]):
        with pytest.raises(ValueError, match="slots"):
            catalog.restore(Tier.DISK, slots, identities)
    with pytest.raises(ValueError, match="slots"):
        catalog.restore(Tier.DISK, [4, 4], np.vstack([identities, identities]))
    catalog.check()


def test_cold_names_pages_without_a_copy_parents_first() -> None:
    catalog = make(host=8, disk=8)
    nodes = store(catalog, 1, 1, 2, 3)
    other = store(catalog, 1, 5)
    assert catalog.cold(Tier.HOST, 2, Tier.DISK).tolist() == [nodes[1], nodes[2]]
    catalog.settle(catalog.reserve([Tier.HOST, Tier.DISK], nodes[2:]).ticket, statuses(1, 1))
    assert set(catalog.cold(Tier.HOST, 9, Tier.DISK).tolist()) == {nodes[0], nodes[1], other[0]}


# --- limits and errors ----------------------------------------------------------------------------------------------


def test_a_full_node_pool_inserts_what_fits_after_pruning_the_unreachable() -> None:
    catalog = make(4, max_nodes=6)
    nodes = store(catalog, 1, 1, 2, 3)
    catalog.drop(Tier.HOST, nodes[:1])  # blocks 2 and 3 can't be reached now
    made = catalog.insert(catalog.root(SPACE), tokens(5, 6, 7, 8, 9, 10, 11), 2)
    catalog.check()
    assert made.size == 6
    assert catalog.stats()["nodes_pruned"] == 3
    assert catalog.insert(catalog.root(SPACE), tokens(5, 6, 20), 3).size == 2
    catalog.check()


def test_a_root_id_is_never_used_for_another_namespace() -> None:
    catalog = make()
    first = catalog.root(SPACE)
    assert catalog.root(SPACE) == first
    ids = {catalog.root(i.to_bytes(32, "little")) for i in range(1, 70000)}
    assert len(ids) == 69999
    assert first not in ids
    with pytest.raises(ValueError, match="root"):
        catalog.peek([first], tokens(1))
    catalog.check()


def test_a_namespace_with_pages_outlives_many_empty_ones() -> None:
    catalog = make()
    store(catalog, 1, 1)
    for i in range(1, 70000):
        catalog.root(i.to_bytes(32, "little"))
    assert hit(catalog, 1) == 1


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda c, r: c.match([], tokens(1), 0, 1), "roots"),
        (lambda c, r: c.match([r, c.root(SPACE, 1)], tokens(1), 0, 1), "groups other than one"),
        (lambda c, r: c.match([r], tokens(1)[:3], 0, 1), "labels"),
        (lambda c, r: c.match([r], [-1, 2, 3, 4], 0, 1), "labels"),
        (lambda c, r: c.match([r], [1 << 32, 2, 3, 4], 0, 1), "labels"),
        (lambda c, r: c.match([r], [0.5, 2, 3, 4], 0, 1), "labels"),
        (lambda c, r: c.match([r], tokens(1), 2, 1), "start"),
        (lambda c, r: c.match([r], tokens(1), 0, 0), "request"),
        (lambda c, r: c.match([r], tokens(1), 0, -1), "request"),
        (lambda c, r: c.match([5], tokens(1), 0, 1), "root"),
        (lambda c, r: c.insert(3, tokens(1), 1), "parent"),
        (lambda c, r: c.root(b"short"), "space"),
        (lambda c, r: c.take(Tier.REMOTE, 1, 1), "tier"),
        (lambda c, r: c.take(Tier.HOST, -1, 1), "n:"),
        (lambda c, r: c.reserve([Tier.HOST], [], 0), "path"),
        (lambda c, r: c.reserve([Tier.HOST, Tier.HOST], [], 0), "path"),
        (lambda c, r: c.reserve([Tier.DEVICE, Tier.REMOTE], [], 0), "path"),
        (lambda c, r: c.reserve([Tier.DEVICE, Tier.HOST], [7], 0), "nodes"),
        (lambda c, r: c.settle(1, [[200]]), "status"),
        (lambda c, r: c.settle(1, [1]), "status"),
        (lambda c, r: c.settle(1, [[-1]]), "status"),
        (lambda c, r: c.drop(Tier.HOST, [999999]), "nodes"),
        (lambda c, r: c.cold(Tier.DISK, 1, Tier.HOST), "lower"),
        (lambda c, r: c.restore(Tier.HOST, [0], np.zeros((1, 3), np.uint8)), "identities"),
        (lambda c, r: Catalog([], block_size=4), "tiers"),
        (lambda c, r: Catalog([TierSpec(Tier.HOST, 0)], block_size=4), "slots"),
        (lambda c, r: Catalog([TierSpec(Tier.DISK, 1), TierSpec(Tier.HOST, 1)], block_size=4), "tiers"),
        (lambda c, r: Catalog([TierSpec(Tier.HOST, 1)], block_size=0), "block_size"),
        (lambda c, r: Catalog([TierSpec(Tier.HOST, 1, "random")], block_size=4), "known policies: lru"),
        (lambda c, r: Catalog([TierSpec(Tier.HOST, 9)], block_size=4, max_nodes=9), "max_nodes"),
        (lambda c, r: Catalog([TierSpec(Tier.HOST, 9)], block_size=4, labels="word"), "labels"),
    ],
)
def test_bad_input_is_refused_by_name_and_changes_nothing(call, field) -> None:  # type: ignore[no-untyped-def]
    catalog = make(host=4, disk=4)
    root = catalog.root(SPACE)
    before = catalog.stats()["leases"]
    with pytest.raises(ValueError, match=field):
        call(catalog, root)
    catalog.check()
    assert catalog.stats()["leases"] == before
    assert catalog.usage(Tier.HOST).free == 4


def test_a_settle_of_the_wrong_shape_is_refused() -> None:
    catalog = make()
    nodes = catalog.insert(catalog.root(SPACE), tokens(1, 2), 1)
    r = catalog.reserve([Tier.DEVICE, Tier.HOST], nodes)
    for shape in ((1, 1), (2, 2), (2, 1)):
        with pytest.raises(ValueError, match="status"):
            catalog.settle(r.ticket, statuses(*shape))
    assert catalog.settle(r.ticket, statuses(1, 2))


def test_a_lease_used_as_a_context_cannot_be_forgotten() -> None:
    catalog = make()
    store(catalog, 1, 1)
    with contextlib.suppress(RuntimeError), catalog.lease(4) as request:
        catalog.match([catalog.root(SPACE)], tokens(1), 0, request)
        raise RuntimeError
    assert catalog.usage(Tier.HOST).pinned == 0
    assert not catalog.release(4)


def test_memory_does_not_grow_with_use() -> None:
    catalog = make(64)
    before = catalog.memory_bytes
    for i in range(50):
        store(catalog, 1, *range(i, i + 8))
    assert catalog.memory_bytes == before
