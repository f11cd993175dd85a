"""CacheManager on real tiers: what was computed once is found in whichever tier it went to, byte for byte."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvtier import CacheConfig, ConfigError
from kvtier.catalog import PageStatus, Residency, Tier
from kvtier.content import Content
from kvtier.geometry import KVGeometry
from kvtier.manager import CacheManager
from kvtier.messages import Completion
from kvtier.namespace import chain_digests
from kvtier.placement import SPILL
from kvtier.plane import LocalDataPlane
from kvtier.sim.plane import SimulatedPlane
from kvtier.tiers.device import DevicePool

BLOCK = 4
PROMPT = list(range(100, 100 + 6 * BLOCK + 1))


@pytest.fixture
def geometry():
    return KVGeometry.named("smollm2-135m", block_size=BLOCK)


class Rig:
    """A manager over a NumPy device pool, and an engine whose "KV" of a block depends on all tokens up to its end."""

    def __init__(self, geometry, namespace, disk=None, device_slots=32, *, by_message=False, **config):
        self.pool = DevicePool.allocate(geometry, device_slots)
        config = {"block_size": BLOCK, "host": {"size": 64 * self.pool.page_bytes}} | config
        if disk is not None:
            config["disk"] = {"path": str(disk), "size": "64MiB"} | config.get("disk", {})
        config = CacheConfig(**config)
        plane = LocalDataPlane(config, geometry, self.pool) if by_message else None
        self.manager = CacheManager(config, geometry, namespace, self.pool, plane=plane)

    def page(self, tokens, block):
        key = hash(tuple(tokens[: (block + 1) * BLOCK])) & 0xFFFFFFFF
        return np.random.default_rng(key).integers(0, 256, self.pool.payload_bytes, np.uint8)

    def run(self, name, tokens, *, free=True, **identity):
        """One request from start to end; returns the tokens found by tier after checking each found page's bytes."""
        manager = self.manager
        computed = manager.get_computed_blocks(name, tokens, **identity).num_tokens
        assert manager.allocate_slots(name, len(tokens)) is not None
        found = None
        while not manager.ready(name):
            for loaded in manager.poll(1.0):
                computed, found = loaded.num_computed_tokens, loaded.tokens_by_tier
        table = manager.block_table(name)
        if found is None:
            found = {"device": computed} if computed else {}
        for block in range(computed // BLOCK):
            assert (self.pool.read_page(int(table[block])) == self.page(tokens, block)).all()
        for block in range(computed // BLOCK, len(tokens) // BLOCK):
            self.pool.write_page(int(table[block]), self.page(tokens, block))
        manager.cache_blocks(name, len(tokens))
        if free:
            manager.free(name)
        return found

    def evict(self, *tiers, tokens=PROMPT):
        """Empty the given tiers of the prompt's pages, and overwrite the device's bytes so that luck is no help."""
        assert self.manager.flush()
        catalog = self.manager.catalog
        root = catalog.root(self.manager.namespace.fingerprint)
        nodes = catalog.match([root], Content(tokens).whole(BLOCK), 0, 1).nodes
        catalog.release(1)
        for tier in tiers:
            catalog.drop(tier, nodes)
            assert (catalog.state(nodes)[1][:, tier] == Residency.ABSENT).all()
        if Tier.DEVICE in tiers:
            self.pool.fill(np.arange(self.pool.slots), 0xAB)


@pytest.fixture
def rig(geometry, namespace, tmp_path):
    rig = Rig(geometry, namespace, tmp_path)
    yield rig
    rig.manager.close()


@pytest.fixture
def message_rig(geometry, namespace, tmp_path):
    """Whose transfers are messages, as to another process."""
    rig = Rig(geometry, namespace, tmp_path, by_message=True)
    yield rig
    rig.manager.close()


WHOLE = 6 * BLOCK


def test_serves_the_whole_prefix_from_each_tier(rig):
    assert rig.run("a", PROMPT) == {}
    assert rig.run("b", PROMPT) == {"device": WHOLE}
    rig.evict(Tier.DEVICE)
    assert rig.run("c", PROMPT) == {"host": WHOLE}
    rig.evict(Tier.DEVICE, Tier.HOST)
    assert rig.run("d", PROMPT) == {"disk": WHOLE}
    rig.manager.flush()
    rig.manager.catalog.check()
    assert rig.manager.stats().failures == {}


def test_always_leaves_a_token_to_compute(rig):
    rig.run("a", PROMPT[:-1])
    with rig.manager.get_computed_blocks("b", PROMPT[:-1]) as computed:
        assert computed.num_tokens == WHOLE - BLOCK


def test_serves_after_a_restart_what_the_disk_held(geometry, namespace, tmp_path):
    rig = Rig(geometry, namespace, tmp_path)
    rig.run("a", PROMPT)
    assert rig.manager.flush()
    rig.manager.close()
    rig = Rig(geometry, namespace, tmp_path)
    assert rig.manager.adopted == 6
    assert rig.run("b", PROMPT) == {"disk": WHOLE}
    rig.manager.close()


def test_serves_nothing_after_a_restart_that_was_invalidated_before(geometry, namespace, tmp_path):
    rig = Rig(geometry, namespace, tmp_path)
    rig.run("a", PROMPT)
    rig.run("salted", PROMPT, salt="tenant")
    rig.manager.flush()
    assert rig.manager.invalidate(salt="tenant") > 0
    rig.manager.close()
    rig = Rig(geometry, namespace, tmp_path)
    assert rig.run("b", PROMPT) == {"disk": WHOLE}
    assert rig.run("salted", PROMPT, salt="tenant") == {}
    rig.manager.reset()
    assert rig.run("c", PROMPT) == {}
    rig.manager.close()


def test_separates_salts_and_adapters(rig):
    rig.run("a", PROMPT)
    assert rig.run("b", PROMPT, salt="x") == {}
    assert rig.run("c", PROMPT, salt="y") == {}
    assert rig.run("d", PROMPT, adapter=b"\1" * 32) == {}
    assert rig.run("e", PROMPT, adapter=b"\1" * 32, salt="x") == {}
    assert rig.run("f", PROMPT, salt="x") == {"device": WHOLE}


def test_a_page_damaged_on_disk_is_a_counted_miss_and_a_shorter_prefix(geometry, namespace, tmp_path):
    rig = Rig(geometry, namespace, tmp_path)
    rig.run("a", PROMPT)
    rig.evict(Tier.DEVICE, Tier.HOST)
    root = rig.manager.catalog.root(namespace.fingerprint)
    nodes = rig.manager.catalog.match([root], Content(PROMPT).whole(BLOCK), 0, 1)
    rig.manager.catalog.release(1)
    with (tmp_path / "slab").open("r+b") as slab:
        slab.seek(int(nodes.slots[3]) * rig.pool.page_bytes + 17)
        byte = slab.read(1)
        slab.seek(-1, 1)
        slab.write(bytes([byte[0] ^ 4]))
    assert rig.run("b", PROMPT) == {"disk": 3 * BLOCK}
    assert rig.manager.stats().failures == {"corrupt": 1}
    rig.evict(Tier.DEVICE, Tier.HOST)
    assert rig.run("c", PROMPT) == {"disk": WHOLE}, "the page computed again has replaced the damaged one"
    rig.manager.close()


def test_preempted_requests_come_back_with_their_pages(rig):
    rig.run("a", PROMPT, free=False)
    rig.manager.preempt("a")
    rig.evict(Tier.DEVICE)
    computed = rig.manager.resume("a")
    assert computed.tokens_by_tier == {"host": WHOLE}
    rig.manager.free("a")


def test_two_requests_load_the_same_pages_once(rig):
    rig.run("a", PROMPT)
    rig.evict(Tier.DEVICE, Tier.HOST)
    before = rig.manager.stats().bytes_moved["device_to_host"]
    for name in ("b", "c"):
        assert rig.manager.get_computed_blocks(name, PROMPT).num_tokens == WHOLE
        assert rig.manager.allocate_slots(name, len(PROMPT)) is not None
    while not (rig.manager.ready("b") and rig.manager.ready("c")):  # c at once, where b's load has ended by then
        rig.manager.poll(1.0)
    assert [rig.manager.num_computed_tokens(name) for name in "bc"] == [WHOLE, WHOLE]
    assert rig.manager.stats().bytes_moved["disk_to_host"] == 6 * rig.pool.page_bytes
    assert rig.manager.stats().bytes_moved["device_to_host"] == before
    assert (rig.manager.block_table("b")[:6] == rig.manager.block_table("c")[:6]).all()


def test_prefetch_brings_pages_from_disk_to_host(rig):
    rig.run("a", PROMPT)
    rig.evict(Tier.DEVICE, Tier.HOST)
    hint = rig.manager.prefetch(PROMPT)
    assert (hint.found, hint.staged) == (6, 6)
    assert rig.manager.flush()
    assert rig.run("b", PROMPT) == {"host": WHOLE}


def test_says_none_and_changes_nothing_when_the_device_is_full(geometry, namespace):
    rig = Rig(geometry, namespace, device_slots=8)
    rig.run("a", PROMPT, free=False)
    assert rig.manager.get_computed_blocks("b", [1, 2, 3, 4, 5]).num_tokens == 0
    assert rig.manager.flush()
    before = rig.manager.stats().slots
    assert rig.manager.allocate_slots("b", 5) is None
    assert rig.manager.stats().slots == before
    rig.manager.free("a")
    assert rig.manager.allocate_slots("b", 5) is not None
    rig.manager.close()


@pytest.mark.parametrize("how", ["begin", "grow", "advance"])
def test_what_was_stored_gives_room_though_nobody_has_polled_since(geometry, namespace, how):
    rig = Rig(geometry, namespace, device_slots=8)
    manager = rig.manager
    assert manager.get_computed_blocks("b", range(2 * BLOCK)).num_tokens == 0
    if how != "begin":
        assert manager.allocate_slots("b", 2 * BLOCK) is not None
    rig.run("a", PROMPT[: 6 * BLOCK])
    lanes = ["something"]
    while any(lanes):
        lanes = [lane["queued_pages"] for lane in manager.plane.mover.stats()["lanes"].values()]
    assert manager.plane.mover.native.has_reports(), "the stores were settled before anybody needed it"
    if how == "begin":
        assert manager.allocate_slots("b", 8 * BLOCK) is not None
    elif how == "grow":
        assert manager.allocate_slots("b", 2 * BLOCK + 1) is not None
    else:
        assert manager.advance({"b": 1}) == {"b": manager.block_table("b")[2:].tolist()}
    assert manager.flush()
    manager.catalog.check()
    manager.close()


@pytest.mark.parametrize("state", ["matched", "loading", "running", "preempted"])
def test_abort_is_legal_in_every_state_and_leaks_nothing(rig, state):
    rig.run("a", PROMPT)
    rig.evict(Tier.DEVICE, Tier.HOST)
    rig.manager.get_computed_blocks("b", PROMPT)
    if state != "matched":
        rig.manager.allocate_slots("b", len(PROMPT))
    if state in ("running", "preempted"):
        while not rig.manager.ready("b"):
            rig.manager.poll(1.0)
    if state == "preempted":
        rig.manager.preempt("b")
    rig.manager.free("b")
    rig.manager.free("b")
    assert rig.manager.flush()
    rig.manager.catalog.check()
    for usage in rig.manager.stats().slots.values():
        assert usage["pinned"] == usage["private"] == usage["filling"] == usage["draining"] == 0
    assert sum(rig.run("c", PROMPT).values()) == WHOLE


def test_a_promise_that_expired_is_no_promise(geometry, namespace):
    now = [0.0]
    pool = DevicePool.allocate(geometry, 32)
    config = CacheConfig(block_size=BLOCK, host={"size": "16MiB"}, lease_seconds=5)
    with CacheManager(config, geometry, namespace, pool, clock=lambda: now[0]) as manager:
        manager.get_computed_blocks("a", PROMPT)
        manager.allocate_slots("a", len(PROMPT))
        manager.cache_blocks("a", len(PROMPT))
        manager.free("a")
        assert manager.flush()
        assert manager.get_computed_blocks("b", PROMPT).num_tokens == WHOLE
        now[0] = 6.0
        manager.poll()
        assert manager.stats().expired == 1
        assert manager.stats().slots["device"]["pinned"] == 0
        assert manager.allocate_slots("b", len(PROMPT)) is not None
        assert not manager.ready("b")
        (loaded,) = manager.poll()
        assert loaded.num_computed_tokens == 0
        assert len(manager.block_table("b")) == 7


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda m: m.get_computed_blocks("r", []), "tokens"),
        (lambda m: m.get_computed_blocks("r", [-1]), "tokens"),
        (lambda m: m.get_computed_blocks("r", [1.5]), "tokens"),
        (lambda m: m.allocate_slots("unknown", 1), "request_id"),
        (lambda m: m.resume("unknown"), "request_id"),
        (lambda m: m.get_computed_blocks("r", [1]) and m.allocate_slots("r", 0), "num_tokens"),
        (lambda m: m.get_computed_blocks("r", [1]) and m.cache_blocks("r", 1), "request_id"),
        (lambda m: m.get_computed_blocks("r", [1]) and m.resume("r"), "request_id"),
    ],
)
def test_bad_calls_name_the_argument(rig, call, names):
    with pytest.raises(ValueError, match=f"^{names}: "):
        call(rig.manager)
    rig.manager.catalog.check()


def test_refuses_a_host_tier_without_room_for_a_page(geometry, namespace):
    with pytest.raises(ConfigError, match=r"host\.size"):
        Rig(geometry, namespace, host={"size": 1000})


def test_says_what_was_built(rig):
    line = rig.manager.describe()
    assert "\n" not in line
    clauses = line.split("; ")
    assert [clause.partition(":")[0] for clause in clauses[:5]] == ["device", "host", "disk", "memory", "writes"]
    for clause in clauses[:3]:
        assert re.match(r"\w+: [\d.]+ [KMGT]iB, \d+ pages of [\d.]+ [KMGT]iB", clause)


@pytest.mark.parametrize("started", [False, True], ids=["matched", "loading"])
def test_a_reset_takes_back_what_was_promised_and_not_yet_used(rig, started):
    rig.run("a", PROMPT)
    rig.evict(Tier.DEVICE)
    assert rig.manager.get_computed_blocks("b", PROMPT).num_tokens == WHOLE
    if started:
        assert rig.manager.allocate_slots("b", len(PROMPT)) is not None
    rig.manager.reset()
    if not started:
        assert rig.manager.allocate_slots("b", len(PROMPT)) is not None
    loaded = []
    while not loaded:
        loaded = rig.manager.poll(1.0)
    assert loaded[0].num_computed_tokens == 0
    assert len(rig.manager.block_table("b")) == 7
    rig.manager.cache_blocks("b", len(PROMPT))
    rig.manager.free("b")
    assert rig.run("c", PROMPT) == {}, "what was computed across a reset is nobody else's"


def test_pages_of_an_early_report_are_nobodys_until_the_final_one(namespace):
    class Plane(SimulatedPlane):
        said: tuple[Completion, ...] = ()

        def poll(self):
            said, self.said = self.said, ()
            return list(said)

    plane = Plane({Tier.DEVICE: 16, Tier.HOST: 16, Tier.DISK: 16}, 0)
    config = CacheConfig(block_size=BLOCK, host={"write": "never"}, disk={"write": "never"})
    geometry = KVGeometry.named("smollm2-135m", block_size=BLOCK)
    namespace = namespace.with_(layout=geometry.layout_tag)
    manager = CacheManager(config, geometry, namespace, None, plane=plane)
    manager.get_computed_blocks("a", PROMPT)
    manager.allocate_slots("a", len(PROMPT))
    manager.cache_blocks("a", len(PROMPT))
    manager.free("a")
    root = manager.catalog.root(namespace.fingerprint)
    nodes = manager.catalog.match([root], Content(PROMPT).whole(BLOCK), 0, 1).nodes
    manager.catalog.release(1)
    for path in ((Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DISK)):
        manager.placement.store(path, nodes)
        (ticket,) = plane._running
        del plane._running[ticket]
        plane.said = (Completion(ticket, True, np.ones((1, 6), np.uint8), (), 0.0, 0.0),)
        manager.poll()
    manager.catalog.drop(Tier.DEVICE, nodes)
    manager.catalog.drop(Tier.HOST, nodes)

    assert manager.get_computed_blocks("b", PROMPT).tokens_by_tier == {"disk": WHOLE}
    manager.allocate_slots("b", len(PROMPT))
    (ticket,) = plane._running
    status = np.array([[0] * 6, [int(PageStatus.OVERDUE)] * 6], np.uint8)  # the read hangs, the copy will not run
    plane.said = (Completion(ticket, False, status, (), 0.0, 0.0),)
    (loaded,) = manager.poll()
    assert loaded.num_computed_tokens == 0
    residency = manager.catalog.state(nodes)[1]
    assert (residency[:, Tier.HOST] == Residency.DRAINING).all()
    assert (residency[:, Tier.DEVICE] == Residency.ABSENT).all()
    manager.free("b")
    plane.said = (Completion(ticket, True, np.maximum(status, 1), (), 0.0, 0.0),)
    manager.poll()
    assert (manager.catalog.state(nodes)[1][:, Tier.HOST] == Residency.ABSENT).all()
    manager.catalog.check()


def test_a_request_keeps_the_adapter_and_the_salt_of_the_whole_manager(geometry, namespace, tmp_path):
    rig = Rig(geometry, namespace.with_(adapter=b"\2" * 32), tmp_path)
    rig.run("a", PROMPT, salt="x")
    assert rig.run("b", PROMPT, salt="x", adapter=b"\2" * 32) == {"device": WHOLE}
    rig.manager.flush()
    rig.manager.close()
    rig = Rig(geometry, namespace, tmp_path)
    assert rig.run("c", PROMPT, salt="x") == {}, "the pages of an adapter served without it"
    rig.manager.close()


def test_forgets_also_what_it_cannot_forget_durably(rig, monkeypatch):
    manager, other = rig.manager, list(range(500, 500 + 2 * BLOCK))
    rig.run("a", PROMPT)
    manager.get_computed_blocks("running", other)
    manager.allocate_slots("running", len(other))
    manager.get_computed_blocks("waiting", PROMPT)
    invalidate = manager.plane.disk.invalidate

    def fails(space):
        invalidate(space)
        raise OSError("no space left")

    monkeypatch.setattr(manager.plane.disk, "invalidate", fails)
    with pytest.raises(OSError, match="no space left"):
        manager.reset()
    manager.cache_blocks("running", len(other))
    assert manager.locate(other) == {}, "computed before the reset, and offered to those who came after it"
    manager.allocate_slots("waiting", len(PROMPT))
    assert [loaded.num_computed_tokens for loaded in manager.poll()] == [0]
    assert rig.run("b", PROMPT) == {}


def test_a_table_covers_what_was_asked_for_while_its_loads_failed(rig):
    rig.run("a", PROMPT)
    rig.evict(Tier.DEVICE, Tier.HOST)
    with (rig.manager.plane.disk.path / "slab").open("r+b") as slab:
        slab.write(bytes(64 * rig.pool.page_bytes))
    rig.manager.get_computed_blocks("b", PROMPT)
    rig.manager.allocate_slots("b", len(PROMPT))
    longer = len(PROMPT) + 3 * BLOCK
    assert rig.manager.allocate_slots("b", longer) is not None
    while not rig.manager.ready("b"):
        rig.manager.poll(1.0)
    assert len(rig.manager.block_table("b")) * BLOCK >= longer


def test_no_load_is_waited_for_after_its_deadline(geometry, namespace):
    now = [0.0]
    plane = SimulatedPlane({Tier.DEVICE: 16, Tier.HOST: 16}, 0)
    config = CacheConfig(block_size=BLOCK, load_timeout_seconds=5)
    manager = CacheManager(config, geometry, namespace, None, plane=plane, clock=lambda: now[0])
    manager.get_computed_blocks("a", PROMPT)
    table = manager.allocate_slots("a", len(PROMPT))
    for slot, digest in zip(table, chain_digests(namespace.fingerprint, 0, PROMPT, BLOCK), strict=False):
        plane.content[Tier.DEVICE][int(slot)] = digest
    manager.cache_blocks("a", len(PROMPT))
    manager.free("a")
    assert manager.flush()
    manager.evict(Tier.DEVICE, PROMPT)
    assert manager.get_computed_blocks("b", PROMPT).tokens_by_tier == {"host": WHOLE}
    manager.allocate_slots("b", len(PROMPT))
    now[0] = 4.0
    assert manager.poll() == []
    now[0] = 5.0
    (loaded,) = manager.poll()  # the data plane never said a word
    assert loaded.num_computed_tokens == 0
    assert len(manager.block_table("b")) == 7
    assert manager.stats().slots["device"]["draining"] == 6, "a late copy may still write there"
    manager.free("b")
    assert manager.flush()
    assert manager.stats().slots["device"]["free"] == 16
    manager.catalog.check()


def test_nothing_stays_reserved_for_a_transfer_that_could_not_be_submitted(message_rig, monkeypatch):
    rig = message_rig
    rig.run("a", PROMPT)
    rig.evict(Tier.DEVICE)
    rig.manager.get_computed_blocks("b", PROMPT)

    def raises(transfer):
        raise ValueError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(rig.manager.plane, "submit", raises)
        with pytest.raises(ValueError, match="refused"):
            rig.manager.allocate_slots("b", len(PROMPT))
    rig.manager.free("b")
    assert rig.manager.stats().slots["device"]["free"] == rig.pool.slots
    assert rig.run("c", PROMPT) == {"host": WHOLE}


def test_a_disk_out_of_service_takes_part_in_nothing(rig):
    rig.run("a", PROMPT)
    rig.evict(Tier.DEVICE, Tier.HOST)
    placement = rig.manager.placement
    placement._traffic.disk_offline = True
    hint = rig.manager.prefetch(PROMPT)
    assert (hint.found, hint.staged, hint.ticket) == (0, 0, 0)
    placement.ahead, placement._low, placement._high = [SPILL], 1.0, 1.0
    rig.run("b", list(range(900, 900 + 4 * BLOCK)))
    assert rig.manager.flush()
    dropped = rig.manager.stats().stores_dropped
    rig.manager.poll()
    assert rig.manager.stats().stores_dropped == dropped, "offered again at each step"


def test_a_failed_call_keeps_what_was_promised_before(rig):
    rig.run("a", PROMPT)
    rig.manager.get_computed_blocks("b", PROMPT)
    with pytest.raises(ValueError, match="adapter"):
        rig.manager.get_computed_blocks("b", PROMPT, adapter=b"short")
    assert rig.manager.allocate_slots("b", len(PROMPT)) is not None
    assert rig.manager.ready("b")


def test_one_namespace_too_many_does_without_the_cache(geometry, namespace):
    plane = SimulatedPlane({Tier.DEVICE: 16, Tier.HOST: 16}, 0)
    manager = CacheManager(CacheConfig(block_size=BLOCK), geometry, namespace, None, plane=plane, max_nodes=1 << 17)
    label = Content([0] * BLOCK).whole(BLOCK)
    for number in range(1 << 16):
        manager.catalog.insert(manager.catalog.root(number.to_bytes(32)), label, 99)
    assert manager.get_computed_blocks("a", PROMPT, salt="new").num_tokens == 0
    assert manager.allocate_slots("a", len(PROMPT)) is not None
    manager.cache_blocks("a", len(PROMPT))
    assert manager.prefetch(PROMPT, salt="new").found == 0
    manager.free("a")
    manager.catalog.release(99)
    manager.get_computed_blocks("b", PROMPT, salt="new")
    manager.allocate_slots("b", len(PROMPT))
    manager.cache_blocks("b", len(PROMPT))
    assert manager.get_computed_blocks("c", PROMPT, salt="new").num_tokens == WHOLE


def test_a_request_that_never_started_holds_nothing_after_an_invalidation(rig):
    rig.run("a", PROMPT)
    assert rig.manager.flush()
    rig.manager.get_computed_blocks("b", PROMPT)
    rig.manager.reset()
    for usage in rig.manager.stats().slots.values():
        assert usage["free"] == usage["capacity"]


def test_a_request_holds_nothing_that_it_is_not_promised(rig):
    rig.run("a", PROMPT)
    rig.evict(Tier.DEVICE, Tier.HOST)
    rig.manager.placement._traffic.disk_offline = True
    assert rig.manager.get_computed_blocks("b", PROMPT).num_tokens == 0
    assert rig.manager.stats().slots["disk"]["pinned"] == 0


def test_poll_waits_for_nothing_that_will_not_come(message_rig, monkeypatch):
    rig = message_rig
    rig.run("a", PROMPT)
    rig.evict(Tier.DEVICE)
    waited = []
    monkeypatch.setattr(rig.manager.plane, "wait", waited.append)
    monkeypatch.setattr(rig.manager.plane, "poll", list)
    rig.manager.get_computed_blocks("b", PROMPT)
    rig.manager.allocate_slots("b", len(PROMPT))
    rig.manager.poll(1e6)
    assert 0 < waited.pop() <= rig.manager.config.load_timeout_seconds
    rig.manager.get_computed_blocks("c", PROMPT)
    rig.manager.reset()
    rig.manager.allocate_slots("c", len(PROMPT))
    assert [loaded.request_id for loaded in rig.manager.poll(1e6)] == ["c"]
    assert waited == [0]


def test_one_write_that_hangs_does_not_end_copying_ahead(message_rig, monkeypatch):
    rig = message_rig
    placement, plane = rig.manager.placement, rig.manager.plane
    placement.ahead, placement._low, placement._high = [SPILL], 1.0, 1.0
    spills, submit = [], plane.submit
    monkeypatch.setattr(plane, "submit", lambda t: spills.append(t) or True if t.path == SPILL else submit(t))
    rig.run("a", PROMPT)
    while not spills:
        rig.manager.poll(0.1)
    hung = spills.pop()
    pending = np.full((1, hung.slots.shape[1]), PageStatus.PENDING, np.uint8)
    placement.settle([Completion(hung.ticket, False, pending, (), 0.0, 0.0)])
    rig.run("b", list(range(900, 900 + 2 * BLOCK)))
    for _ in range(100):
        rig.manager.poll(0.05)
        if spills:
            break
    assert spills, "nothing goes to the disk any more, and nobody says so"
    assert not np.isin(spills[0].slots[1], hung.slots[1]).any()


def test_says_what_really_arrived_where_less_did_than_was_promised(geometry, namespace):
    rig = Rig(geometry, namespace, mover={"queue_pages": 4})  # so that the load of six pages is refused
    rig.run("a", PROMPT[: 4 * BLOCK + 1])
    rig.manager.flush()
    rig.run("b", PROMPT)
    rig.manager.flush()
    rig.evict(Tier.DEVICE)
    promised = rig.manager.get_computed_blocks("c", PROMPT).num_tokens
    rig.manager.allocate_slots("c", len(PROMPT))
    with pytest.raises(ValueError, match="only a ready request"):
        rig.manager.num_computed_tokens("c")
    while not rig.manager.ready("c"):
        rig.manager.poll(1.0)
    assert rig.manager.num_computed_tokens("c") < promised
    assert rig.manager.stats().failures["refused"] > 0
    rig.manager.close()


def test_refuses_what_can_never_fit(geometry, namespace):
    rig = Rig(geometry, namespace, device_slots=8)
    rig.manager.get_computed_blocks("a", list(range(33)))
    with pytest.raises(ValueError, match="need 9 device slots; there are 8"):
        rig.manager.allocate_slots("a", 33)
    rig.manager.close()


def test_closing_lets_what_is_under_way_arrive(geometry, namespace, tmp_path):
    for held in (0, 6):
        rig = Rig(geometry, namespace, tmp_path)
        assert rig.manager.adopted == held
        rig.run("a", PROMPT)
        rig.manager.close()
        rig.manager.close()
        with pytest.raises(ValueError, match="the cache is closed"):
            rig.manager.get_computed_blocks("b", PROMPT)


@pytest.mark.parametrize("change", [{"block_size": 8}, {"dtype": "float16"}, {"layout": "other"}], ids=str)
def test_refuses_a_namespace_that_says_something_else_than_the_geometry(geometry, namespace, change):
    with pytest.raises(ValueError, match=rf"^{next(iter(change))}: .*must agree"):
        Rig(geometry, namespace.with_(**change))


def test_tiers_of_a_tenant_can_be_looked_at_and_emptied(rig):
    rig.run("a", PROMPT, salt="tenant")
    rig.manager.flush()
    assert rig.manager.locate(PROMPT) == {}
    assert rig.manager.locate(PROMPT, salt="tenant") == {"device": WHOLE}
    assert len(rig.manager.evict(Tier.DEVICE, PROMPT, salt="tenant")) == 6
    assert rig.manager.locate(PROMPT, salt="tenant") == {"host": WHOLE}
    with pytest.raises(ValueError, match=r"^tier: "):
        rig.manager.evict(Tier.REMOTE, PROMPT)
