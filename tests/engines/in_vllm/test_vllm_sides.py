"""The connector's two sides with vLLM's types and real bytes, without a model: the ranks in one process."""

import os
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs the environment that `make test-vllm` makes")

import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.config import ConfigError
from kvtier.connectors.vllm import KVTierConnector, support
from kvtier.connectors.vllm.adapters import Adapters
from kvtier.connectors.vllm.metadata import WorkerReport
from kvtier.connectors.vllm.metrics import Stats
from kvtier.connectors.vllm.pass_clock import PassClock
from kvtier.connectors.vllm.scheduler import MOST_TIMED, SchedulerSide
from kvtier.connectors.vllm.settings import Settings
from kvtier.connectors.vllm.worker import WorkerSide, geometry_of
from kvtier.tiers.cuda import CudaDevice
from kvtier.tiers.device import DevicePool

BLOCKS, HEADS, TOKENS, ROW, LAYERS = 16, 2, 32, 16, 3


def config(ranks=2, **cache):
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "CPU_ATTN"), isa="vec")
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks, data_parallel_size=1, data_parallel_rank=0, pipeline_parallel_size=1
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo="sha256", enable_prefix_caching=True, **cache
        ),
        model_config=SimpleNamespace(
            model="m",
            revision=None,
            dtype="float32",
            quantization=None,
            max_model_len=512,
            hf_overrides={},
            hf_text_config=SimpleNamespace(rope_theta=1.0),
        ),
        load_config=SimpleNamespace(load_format="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
        scheduler_config=SimpleNamespace(async_scheduling=False, max_num_seqs=1),
        compilation_config=SimpleNamespace(static_forward_context={"layer.0": layer}),
    )


class Engine:
    """vLLM's part: blocks, and the order of calls in a step."""

    def __init__(self, extra, ranks=2, events=False):
        settings = Settings.read(extra, TOKENS)
        self.config = config(ranks)
        self.config.kv_events_config = SimpleNamespace(enable_kv_cache_events=events)
        self.scheduler = SchedulerSide(self.config, settings)
        self.workers, self.caches = [], []
        for rank in range(ranks):
            buffer = torch.zeros(LAYERS, BLOCKS, HEADS, TOKENS, ROW)
            worker = WorkerSide(self.config, settings, rank)
            worker.adopt({f"layer.{i}": buffer[i] for i in range(LAYERS)})
            self.workers.append(worker)
            self.caches.append(buffer)
        self.connect()
        self.finished, self.invalid = set(), set()
        self.ended = Counter()  # how many ranks have reported a request

    def connect(self):
        self.scheduler.connect({rank: worker.introduction for rank, worker in enumerate(self.workers)})

    def orders(self, new=(), preempted=None):
        """The scheduler's side of a step; ``new``: (request, table, computed tokens); ``preempted``: set of ids, or
        None."""
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=request.request_id, block_ids=(table,), num_computed_tokens=done)
                for request, table, done in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
            ),
            num_scheduled_tokens={request.request_id: request.num_tokens - done for request, _, done in new},
            total_num_scheduled_tokens=sum(request.num_tokens - done for request, _, done in new),
            preempted_req_ids=preempted,
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: next((t,) for r, t, _ in new if r.request_id == name)
            ),
        )
        for request, _, done in new:
            request.num_computed_tokens = done
        return self.scheduler.step(output)

    def step(self, new=(), compute=None, preempted=None):
        """``compute`` writes KV."""
        orders = self.orders(new, preempted)
        report = None
        for worker in self.workers:
            worker.before_forward(orders)
        if compute:
            compute()
        for worker in self.workers:
            worker.after_forward(orders)
            self.ended.update(worker.ended_loads(orders))
            self.invalid |= worker.take_invalid()
            told = worker.report()
            report = told if report is None else report.aggregate(told) if told is not None else report
        self.scheduler.take(report, self.invalid)
        self.finished |= {name for name, ranks in self.ended.items() if ranks == len(self.workers)}
        return orders

    def until(self, condition):
        for _ in range(2000):
            if condition():
                return
            self.step()
        raise AssertionError("never")

    def close(self):
        for worker in self.workers:
            worker.close()
        self.scheduler.close()


def request(name, tokens, stem=b"a", lora=None):
    hashes = [bytes([i]) + stem.ljust(31, b".") for i in range(tokens // TOKENS)]
    return SimpleNamespace(
        request_id=name,
        num_tokens=tokens,
        num_computed_tokens=0,
        block_hashes=hashes,
        mm_features=[],
        resumable=False,
        lora_request=lora,
        skip_reading_prefix_cache=False,
    )


@pytest.fixture(params=["host memory", "an emulated GPU"])
def device(request, monkeypatch):
    """Where vLLM's blocks lie: of a GPU all but the silicon is what serves one, its queues and its copies."""
    emulated = []

    def pool(geometry, tensors):
        emulated.append(CudaDevice.emulated_device(seed=len(emulated)))
        return DevicePool(geometry, tensors, cuda=emulated[-1])

    if request.param == "an emulated GPU":
        monkeypatch.setattr("kvtier.connectors.vllm.worker.DevicePool", pool)
    yield emulated
    assert [race for one in emulated for race in one.native.races()] == []


@pytest.fixture
def engine(device):
    made = []

    def make(extra=None, ranks=2, events=False):
        extra = {"host.size": "1MiB", "min_load_tokens": 0, "load_policy": "always"} | (extra or {})
        made.append(Engine(extra, ranks, events))
        return made[-1]

    yield make
    for one in made:
        one.close()


def fill(engine, table):
    for rank, cache in enumerate(engine.caches):
        for block in table:
            cache[:, block] = torch.randn(LAYERS, HEADS, TOKENS, ROW) + rank


def content(engine, table):
    return [cache[:, table].clone() for cache in engine.caches]


def store(engine, name="a", table=(1, 2, 3, 4), stem=b"a"):
    first = request(name, TOKENS * len(table) + 1, stem)
    engine.scheduler.begin(first)
    assert engine.scheduler.match(first, 0) == (0, False)
    engine.step([(first, [*table, 15], 0)], lambda: fill(engine, table))
    kept = content(engine, list(table))
    engine.scheduler.finish(first)
    engine.until(lambda: not engine.scheduler.busy)
    return kept


def load(engine, name="b", table=(5, 6, 7, 8)):
    again = request(name, TOKENS * len(table) + 1)
    engine.scheduler.begin(again)
    found = engine.scheduler.match(again, 0)
    if found[0]:
        engine.scheduler.allocated(again, list(table), found[0])
    return again, found


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_get_their_own_bytes_back(engine, ranks):
    all_of = engine(ranks=ranks)
    kept = store(all_of)
    again, found = load(all_of)
    assert found == (4 * TOKENS, True)
    assert all_of.scheduler.sources(again, 4 * TOKENS) == {CacheHitSource.HOST: 4 * TOKENS}
    all_of.until(lambda: "b" in all_of.finished)
    assert not all_of.invalid
    assert all(torch.equal(x, y) for x, y in zip(content(all_of, [5, 6, 7, 8]), kept, strict=True))
    assert not any(torch.equal(kept[0], other) for other in kept[1:])


def test_a_prefix_is_as_long_as_on_the_rank_that_has_the_least_of_it(engine, tmp_path):
    extra = {"disk.path": str(tmp_path), "disk.size": "8MiB", "weights_revision": "1"}
    first = engine(extra, ranks=4)
    store(first)
    name = request("a", 4 * TOKENS).block_hashes[2]
    disk = first.workers[3]._plane.disk
    slots, identities = disk.records()
    disk.clear(slots[[identity[112:144].tobytes() == name for identity in identities]])
    first.close()
    assert load(engine(extra, ranks=4))[1] == (2 * TOKENS, True)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_page_that_one_rank_lost_is_reported_and_the_rest_is_right(engine, tmp_path, ranks):
    extra = {"disk.path": str(tmp_path), "disk.size": "8MiB", "host.size": "1MiB", "weights_revision": "1"}
    first = engine(extra, ranks)
    kept = store(first)
    first.close()
    slab = next(tmp_path.rglob(f"rank-1-of-{ranks}/slab"))
    data = bytearray(slab.read_bytes())
    page = LAYERS * HEADS * TOKENS * ROW * 4
    broken = [n for n in range(len(data) // page) if any(data[n * page : (n + 1) * page])][2]
    data[broken * page + 77] ^= 1
    slab.write_bytes(data)
    second = engine(extra, ranks)
    _, found = load(second)
    assert found == (4 * TOKENS, True)
    second.until(lambda: "b" in second.finished)
    assert len(second.invalid) == 1
    good = [n for n, block in enumerate((5, 6, 7, 8)) if block not in second.invalid]
    for now, was in zip(content(second, [5, 6, 7, 8]), kept, strict=True):
        assert torch.equal(now[:, good], was[:, good])
    _, found = load(second, "c")
    assert found[0] in (0, None) or found[0] < 4 * TOKENS, "what was lost is not promised again"


def test_a_step_that_writes_a_block_waits_for_the_store_that_reads_it(engine):
    two = engine()
    first = request("a", TOKENS * 4 + 1)
    two.scheduler.begin(first)
    two.scheduler.match(first, 0)
    two.step([(first, [1, 2, 3, 4, 15], 0)], lambda: fill(two, [1, 2, 3, 4]))
    kept = content(two, [1, 2, 3, 4])
    two.scheduler.finish(first)
    other = request("b", TOKENS * 4 + 1, b"b")
    two.scheduler.begin(other)
    two.scheduler.match(other, 0)
    two.step([(other, [3, 4, 1, 2, 15], 0)], lambda: fill(two, [1, 2, 3, 4]))
    two.until(lambda: not two.scheduler.busy)
    _, found = load(two, "c")
    assert found == (4 * TOKENS, True)
    two.until(lambda: "c" in two.finished)
    assert all(torch.equal(x, y) for x, y in zip(content(two, [5, 6, 7, 8]), kept, strict=True))


def test_blocks_of_another_size_than_the_schedulers_are_refused():
    worker = WorkerSide(config(), Settings.read({"host.size": "1MiB"}, 2 * TOKENS), 0)
    halves = {f"layer.{i}": torch.zeros(BLOCKS, HEADS, TOKENS, ROW) for i in range(LAYERS)}
    with pytest.raises(ValueError, match="blocks of 32 tokens, but of 64 in vLLM's scheduler"):
        worker.adopt(halves)


@pytest.mark.parametrize("device", ["an emulated GPU"], indirect=True)
def test_a_step_waits_for_a_store_behind_what_a_gpu_has_not_computed_yet(engine, device):
    """The engine's queue is held, as where the next step is submitted before this one has been computed."""
    one = engine(ranks=1)
    (gpu,) = device
    queue = gpu.native.make_stream()
    gpu.follow(lambda: queue)
    first, other = request("a", TOKENS * 4 + 1), request("b", TOKENS * 4 + 1, b"b")
    for each in (first, other):
        one.scheduler.begin(each)
        one.scheduler.match(each, 0)
    gpu.native.hold(queue)
    one.step([(first, [1, 2, 3, 4, 15], 0)])
    one.scheduler.finish(first)
    went_on = threading.Timer(0.2, lambda: (fill(one, [1, 2, 3, 4]), gpu.native.hold(queue, False)))
    went_on.start()
    one.step([(other, [3, 4, 1, 2, 15], 0)], lambda: fill(one, [1, 2, 3, 4]))
    assert went_on.finished.is_set(), "the blocks were given to another while their store still had to read them"
    one.until(lambda: not one.scheduler.busy)


def test_the_speed_of_a_prefill_is_what_the_workers_say(engine, monkeypatch):
    two = engine({"load_policy": "cost"})
    ends = []
    monkeypatch.setattr(PassClock, "take", lambda self: {n: 0.25 * n for n in ends})
    costs = two.scheduler.manager.costs
    orders = two.orders([(request("a", TOKENS * 4), [1, 2, 3, 4], 0)])
    assert orders.timed == 0, "of a request that is not known"
    for number in range(1, 21):
        known = request(f"r{number}", TOKENS * 4, bytes([number]))
        two.scheduler.begin(known)
        assert two.orders([(known, [1, 2, 3, 4], 0)]).timed == number
    assert len(two.scheduler._timed) == MOST_TIMED, "what nobody answers for is kept"
    two.step()
    assert costs.recompute(128, 0) is None
    ends += [20, 4]
    two.step()
    assert costs.recompute(128, 0) == pytest.approx(5.0), "of a step that was forgotten, or not by number"
    two.step()
    assert 20 not in two.scheduler._timed
    few = request("few", 8)
    two.scheduler.begin(few)
    assert two.orders([(few, [1], 0)]).timed == 0
    media = request("media", TOKENS * 4, b"media")
    media.mm_features = ["an image"]
    two.scheduler.begin(media)
    assert two.orders([(media, [1, 2, 3, 4], 0)]).timed == 0, "images are encoded in the same pass"
    both = [request(name, TOKENS * 4, name.encode()) for name in ("x", "y")]
    for each in both:
        two.scheduler.begin(each)
    assert two.orders([(each, [1, 2, 3, 4], 0) for each in both]).timed == 0, "two at once are neither's time"


def test_what_follows_a_pass_is_no_part_of_its_time(engine):
    """vLLM samples between the end of the forward pass and its word to store, where it says the former."""
    one = engine(ranks=1)
    (worker,) = one.workers
    known = request("a", TOKENS * 4 + 1)
    one.scheduler.begin(known)
    orders = one.orders([(known, [1, 2, 3, 4, 15], 0)])
    assert orders.timed
    worker.before_forward(orders)
    worker.pass_ended()
    time.sleep(0.05)
    worker.after_forward(orders)
    assert worker.report().passes[orders.timed] < 0.05


def test_what_a_request_will_read_comes_up_from_disk_while_it_waits(engine, tmp_path):
    extra = {"disk.path": str(tmp_path), "disk.size": "8MiB", "weights_revision": "1", "prefetch.share": 0.9}
    first = engine(extra)
    store(first)
    first.close()
    second = engine(extra)
    moved = second.scheduler.manager.stats
    at_once, found = load(second, "a")
    assert second.scheduler.sources(at_once, found[0]) == {CacheHitSource.DISK: 4 * TOKENS}
    second.until(lambda: "a" in second.finished)
    assert sum(moved().prefetched.values()) == 0, "it did not wait"
    second.close()
    for again in ("", "it was preempted"):
        third = engine(extra)
        waiting = request("b", 4 * TOKENS + 1)
        third.scheduler.begin(waiting)
        if again:
            third.scheduler.allocated(waiting, [], 0)
        third.step(preempted={"b"} if again else None)
        third.until(lambda engine=third: engine.scheduler.manager.stats().bytes_moved.get("disk_to_host"))
        third.until(lambda engine=third: not engine.scheduler.busy)
        found = third.scheduler.match(waiting, 0)
        assert found == (4 * TOKENS, True)
        assert third.scheduler.sources(waiting, 4 * TOKENS) == {CacheHitSource.HOST: 4 * TOKENS}
        third.scheduler.allocated(waiting, [5, 6, 7, 8], 4 * TOKENS)
        third.until(lambda engine=third: "b" in engine.finished)
        assert third.scheduler.manager.stats().prefetched["used"] == 4
        third.scheduler.finish(waiting)
        third.close()


def test_a_load_into_a_block_waits_for_the_store_that_reads_it(engine):
    two = engine()
    store(two)
    other = request("x", TOKENS * 4 + 1, b"x")
    two.scheduler.begin(other)
    two.scheduler.match(other, 0)
    stores = {order.ticket for order in two.orders([(other, [5, 6, 7, 8, 15], 0)]).orders}
    two.scheduler.finish(other)
    assert load(two, "b", (5, 6, 7, 8))[1] == (4 * TOKENS, True)
    assert stores
    assert stores <= set(two.orders().must_end), "a block is loaded while a store reads it"


def test_the_last_token_is_left_to_compute(engine):
    two = engine()
    store(two)
    whole = request("b", TOKENS * 4)
    two.scheduler.begin(whole)
    assert two.scheduler.match(whole, 0) == (3 * TOKENS, True), "nothing is left to compute"


@pytest.mark.parametrize("patience", [60.0, 0.0])
def test_nobody_passes_a_request_whose_look_ahead_is_arriving_but_for_a_moment(engine, tmp_path, monkeypatch, patience):
    monkeypatch.setattr("kvtier.connectors.vllm.scheduler.TURN_PATIENCE", patience)
    extra = {"disk.path": str(tmp_path), "disk.size": "8MiB", "weights_revision": "1", "prefetch.share": 0.9}
    first = engine(extra)
    store(first)
    first.close()
    second = engine(extra)
    waiting, behind = request("b", 4 * TOKENS + 1), request("c", TOKENS, b"c")
    for one in (waiting, behind):
        second.scheduler.begin(one)
    second.step()  # at its end the look-ahead is ordered, and nothing of it has come
    assert second.scheduler.match(waiting, 0) == (None, False)
    assert second.scheduler.match(behind, 0) == ((None, False) if patience else (0, False))
    second.until(lambda: not second.scheduler.busy)
    assert second.scheduler.match(waiting, 0) == (4 * TOKENS, True)
    assert second.scheduler.match(behind, 0) == (0, False)
    for one in (waiting, behind):
        second.scheduler.finish(one)


ON_DISK = {"disk.size": "8MiB", "weights_revision": "1", "prefetch.share": 0.9}


def arriving(engine, tmp_path, stems, **extra):
    """An engine in whose queue a request for each stem waits, of which all is just coming up from disk, and behind them
    one for which nothing is kept."""
    extra = ON_DISK | {"disk.path": str(tmp_path)} | extra
    first = engine(extra)
    for stem in stems:
        store(first, stem.decode(), stem=stem)
    first.close()
    second = engine(extra)
    queue = [request(f"of {stem}", 4 * TOKENS + 1, stem) for stem in stems] + [request("cold", TOKENS, b"cold")]
    for one in queue:
        second.scheduler.begin(one)
    second.step()
    assert second.scheduler.manager.placement.under_way == len(stems)
    return second, queue


def test_a_queue_is_held_up_for_a_moment_in_all_until_somebody_is_admitted(engine, tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("kvtier.connectors.vllm.scheduler.time", SimpleNamespace(monotonic=lambda: now[0]))
    second, (one, other, cold) = arriving(engine, tmp_path, [b"a", b"d"])
    match = second.scheduler.match
    assert [match(each, 0) for each in (one, other, cold)] == [(None, False)] * 3
    now[0] += 0.2
    second.scheduler._held = False  # another step, in which nothing has come
    assert [match(each, 0) for each in (one, other)] == [(None, False)] * 2
    assert match(cold, 0) == (0, False), "each of those that wait holds it up anew"
    second.scheduler.allocated(cold, (), 0)
    assert match(one, 0) == (None, False)
    assert second.scheduler._held, "who passed took a place: the next one is kept"
    for each in (one, other, cold):
        second.scheduler.finish(each)


def test_nobody_is_held_up_where_there_are_places_for_all(engine, tmp_path):
    second, (one, cold) = arriving(engine, tmp_path, [b"a"])
    second.config.scheduler_config.max_num_seqs = 2
    assert second.scheduler.match(one, 0) == (None, False)
    assert second.scheduler.match(cold, 0) == (0, False), "it would have taken nobody's place"


def test_nobody_waits_for_less_than_is_worth_a_load(engine, tmp_path):
    second, (one, cold) = arriving(engine, tmp_path, [b"a"], min_load_tokens=5 * TOKENS)
    assert second.scheduler.match(one, 0) == (0, False), "it waits for what it would not load"
    assert second.scheduler.match(cold, 0) == (0, False)


def test_who_computes_its_whole_prompt_waits_for_nothing_and_is_stored(engine, tmp_path):
    """As vLLM does for prompt logprobs: it asks, and overrides what it is told."""
    extra = ON_DISK | {"disk.path": str(tmp_path)}
    first = engine(extra)
    store(first)
    first.close()
    second = engine(extra)
    one = request("b", 5 * TOKENS + 1)
    one.skip_reading_prefix_cache = True
    second.scheduler.begin(one)
    second.step()
    assert not second.scheduler.manager.placement.under_way, "what it will not read is brought up"
    assert second.scheduler.match(one, 0) == (0, False)
    second.scheduler.allocated(one, (), 0)
    assert second.orders([(one, [5, 6, 7, 8, 9, 10], 0)]).orders, "what it computes is of use to others"
    second.scheduler.finish(one)


def test_a_request_aborted_in_mid_load_is_still_reported_once(engine):
    two = engine()
    store(two)
    again, _ = load(two)
    two.scheduler.finish(again)
    two.until(lambda: "b" in two.finished)
    for _ in range(20):
        two.step()
    assert two.ended["b"] == 2
    assert two.scheduler.manager.catalog.stats()["leases"] == 0


def test_a_reset_voids_what_loads_and_outlives_the_engine(engine, tmp_path):
    extra = {"disk.path": str(tmp_path), "disk.size": "8MiB", "weights_revision": "1"}
    first = engine(extra)
    store(first)
    load(first)
    assert first.scheduler.reset() is True
    first.until(lambda: "b" in first.finished)
    assert first.invalid == {5, 6, 7, 8}
    first.close()
    second = engine(extra)
    assert load(second)[1] == (0, False)


def test_events_say_which_block_is_in_which_tier(engine, tmp_path):
    two = engine({"disk.path": str(tmp_path), "disk.size": "8MiB", "weights_revision": "1"}, events=True)
    assert two.scheduler.events() == []
    store(two)
    names = {maybe_convert_block_hash(name) for name in request("a", 4 * TOKENS).block_hashes}
    told = events(two)
    assert {event.medium for event in told} == {"CPU", "STORAGE"}
    for medium in ("CPU", "STORAGE"):
        assert {event.block_hashes[0] for event in told if event.medium == medium} == names
    assert {(type(event), event.block_size) for event in told} == {(BlockStored, TOKENS)}
    assert events(two) == [], "what was told is not told again"
    two.scheduler.reset()
    told = events(two)
    assert {(type(event), event.medium) for event in told} == {(BlockRemoved, "CPU"), (BlockRemoved, "STORAGE")}
    assert all(set(event.block_hashes) == names for event in told)


def events(engine):
    engine.scheduler._events._next = 0.0
    return engine.scheduler.events()


def test_copies_run_beside_the_core_that_vllm_has_bound_its_worker_to(engine, monkeypatch):
    everywhere, tasks = os.sched_getaffinity(os.getppid()), Path("/proc/self/task")
    one = {min(os.sched_getaffinity(0))}
    monkeypatch.setenv("GOMP_CPU_AFFINITY", str(min(one)))
    before, own = {task.name for task in tasks.iterdir()}, os.sched_getaffinity(0)
    os.sched_setaffinity(0, one)
    try:
        engine(ranks=1)
        assert os.sched_getaffinity(0) == one, "vLLM's own thread stays where it is"
        begun = [int(task.name) for task in tasks.iterdir() if task.name not in before]
        assert begun
        assert all(os.sched_getaffinity(thread) == everywhere for thread in begun)
    finally:
        os.sched_setaffinity(0, own)


def test_what_the_hashes_do_not_name_is_not_cached(engine, tmp_path):
    one = engine(ranks=1)
    picture = request("a", TOKENS * 4 + 1)
    picture.mm_features = [object()]
    one.scheduler.begin(picture)
    assert one.scheduler.match(picture, 0) == (0, False)
    one.step([(picture, [1, 2, 3, 4, 15], 0)])
    assert not one.scheduler.busy


def write_adapter(folder, value):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(bytes([value]) * 100)


def wait_for(adapters, adapter):
    while adapters.digest(adapter) is None:
        assert not all(f.done() and f.exception() for f in adapters._digests.values())
    return adapters.digest(adapter)


def test_an_adapter_is_its_content(tmp_path):
    adapters = Adapters()
    write_adapter(tmp_path / "a", 1)
    write_adapter(tmp_path / "b", 1)
    first = wait_for(adapters, LoRARequest("x", 1, str(tmp_path / "a")))
    assert wait_for(adapters, LoRARequest("y", 2, str(tmp_path / "b"))) == first
    write_adapter(tmp_path / "a", 2)
    assert adapters.digest(LoRARequest("x", 1, str(tmp_path / "a"))) == first, "what vLLM still has loaded"
    again = LoRARequest("x", 1, str(tmp_path / "a"), load_inplace=True)
    adapters.digest(again)
    assert wait_for(adapters, LoRARequest("x", 1, str(tmp_path / "a"))) != first
    missing = LoRARequest("z", 3, str(tmp_path / "nowhere"))
    adapters.digest(missing)
    adapters.close()
    assert adapters.digest(missing) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: setattr(c.parallel_config, "pipeline_parallel_size", 2), "pipeline_parallel_size: 2: expected 1"),
        (lambda c: setattr(c.cache_config, "enable_prefix_caching", False), "enable_prefix_caching: False"),
        (lambda c: setattr(c.cache_config, "prefix_caching_hash_algo", "xxhash"), "expected sha256 or sha256_cbor"),
        (lambda c: setattr(c.device_config, "device_type", "tpu"), "device: 'tpu': expected 'cpu' or an NVIDIA GPU"),
        (lambda c: setattr(c.device_config, "device_type", "cuda"), "device: 'cuda': .* unverified_gpu: true has it"),
        (lambda c: setattr(c.scheduler_config, "policy", "priority"), "scheduling_policy: 'priority': expected 'fcfs'"),
        (lambda c: None, "weights' revision is not known"),
        (lambda c: setattr(c.load_config, "load_format", "dummy"), "load_format: 'dummy'"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(change, said, tmp_path):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=ROW // 2, dtype=torch.float32)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)], hash_block_size=None)
    wrong = config()
    change(wrong)
    with pytest.raises(ConfigError, match=said):
        support.check(wrong, groups, Settings.read({"disk.path": str(tmp_path)}, TOKENS))
    assert support.check(config(), groups, Settings.read({}, TOKENS)) == []
    groups.kv_cache_groups *= 2
    with pytest.raises(ConfigError, match="kv_cache_groups: 2: expected 1"):
        support.check(config(), groups, Settings.read({}, TOKENS))


def test_pages_with_a_drafters_kv_are_for_that_drafter(engine):
    two = engine()

    def fingerprint(*drafter):
        named = config()
        if drafter:
            model, revision = drafter
            named.speculative_config = SimpleNamespace(
                draft_model_config=SimpleNamespace(model=model, revision=revision)
            )
        return support.name(named, Settings.read({}, TOKENS), two.workers[0].introduction).fingerprint

    assert fingerprint("m", None) == fingerprint(), "guesses by the prompt, or by the model's own layers"
    assert len({fingerprint(*drafter) for drafter in [(), ("d", None), ("e", None), ("e", "1")]}) == 4


def one_group(spec):
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)], hash_block_size=None)


def test_attention_is_served_whose_blocks_hold_all_that_their_tokens_left(monkeypatch):
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, RSWASpec

    settings = Settings.read({}, TOKENS)
    shape = {"block_size": TOKENS, "num_kv_heads": 1, "head_size": 576, "dtype": torch.float32}
    assert support.check(config(), one_group(FullAttentionSpec(**shape)), settings) == []
    assert support.check(config(), one_group(MLAAttentionSpec(**shape)), settings) == []
    with pytest.raises(ConfigError, match="attention: RSWASpec: expected full attention"):
        support.check(config(), one_group(RSWASpec(**shape, rswa_window=64)), settings)
    with pytest.raises(ConfigError, match="tokens_per_state: 4: expected 1"):
        support.check(config(), one_group(MLAAttentionSpec(**shape, tokens_per_state=4)), settings)


def test_an_engine_on_a_gpu_is_served_where_its_operator_says_so(monkeypatch):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    group = one_group(FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=8, dtype=torch.bfloat16))
    settings, on_gpu = Settings.read({"unverified_gpu": True}, TOKENS), config()
    on_gpu.device_config.device_type = "cuda"
    assert [note for note in support.check(on_gpu, group, settings) if "no run on a GPU has proven its bytes" in note]
    on_gpu.model_config.enable_sleep_mode = True
    with pytest.raises(ConfigError, match="enable_sleep_mode: True: expected False on a GPU"):
        support.check(on_gpu, group, settings)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ConfigError, match="device: 'ROCm': expected 'cpu' or an NVIDIA GPU"):
        support.check(on_gpu, group, settings)


def test_a_changed_interface_is_refused_by_the_name_of_the_call():
    support.check_interface(KVTierConnector, KVConnectorBase_V1)

    class Later(KVConnectorBase_V1):
        reset_cache = None

        def get_finished(self, finished_req_ids, reason): ...

    with pytest.raises(ConfigError) as refused:
        support.check_interface(KVTierConnector, Later)
    said = str(refused.value).splitlines()
    assert said[1:] == [
        "get_finished: (self, finished_req_ids, reason) in Later; expected (self, finished_req_ids)",
        "reset_cache: not in Later",
    ]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"host.sise": 1}, "did you mean host.size"),
        ({"min_load_token": 1}, "did you mean min_load_tokens"),
        ({"min_load_tokens": -1}, "min_load_tokens: -1: expected a number of tokens, 0 or more"),
        ({"min_load_tokens": "many"}, "min_load_tokens: 'many'"),
        ({"block_size": 16}, f"block_size: 16: expected {TOKENS}, the engine's own"),
        ({"unverified_gpu": 1}, "unverified_gpu: 1: expected true or false"),
    ],
)
def test_wrong_settings_name_the_key_and_what_is_accepted(extra, said):
    with pytest.raises(ConfigError, match=said):
        Settings.read(extra, TOKENS)


def test_the_layout_is_read_from_the_strides():
    flat = torch.zeros(LAYERS * BLOCKS * HEADS * TOKENS * ROW)
    views = {
        "vllm.lbhnc": flat.view(LAYERS, BLOCKS, HEADS, TOKENS, ROW).unbind(0),
        "vllm.blhnc": flat.view(BLOCKS, LAYERS, HEADS, TOKENS, ROW).unbind(1),
        "vllm.lbnhc": flat.view(LAYERS, BLOCKS, TOKENS, HEADS, ROW).transpose(2, 3).unbind(0),
        "vllm.blnhc": flat.view(BLOCKS, LAYERS, TOKENS, HEADS, ROW).transpose(2, 3).unbind(1),
    }
    for layout, tensors in views.items():
        assert geometry_of(dict(enumerate(tensors))).layout == layout
    latent = geometry_of(dict(enumerate(flat[: 3 * 4 * 32 * 10].view(3, 4, 1, 32, 10).unbind(0))))
    assert (latent.layout, latent.payload_bytes) == ("vllm.lbhnc", 3 * 32 * 10 * 4), "MLA: a row for each token"
    apart = flat.view(LAYERS, HEADS, BLOCKS, TOKENS, ROW).transpose(1, 2).unbind(0)
    with pytest.raises(ValueError, match="heads lie apart; expected them together: VLLM_KV_CACHE_LAYOUT=LBHNC"):
        geometry_of(dict(enumerate(apart)))
    with pytest.raises(ValueError, match="expected all of one shape"):
        geometry_of({"a": flat.view(-1, 2, 32, 16), "b": flat.view(-1, 1, 64, 16)})
    with pytest.raises(ValueError, match=r"expected \[blocks, KV heads, tokens, K and V\]"):
        geometry_of({"a": flat.view(-1, 32, 16)})


def test_stats_add_up_over_steps_and_gauges_do_not():
    first = Stats.since({}, {"bytes_moved:host_to_device": 10, "pages:host": 3, "expired": 0})
    second = Stats.since(
        {"bytes_moved:host_to_device": 10, "pages:host": 3}, {"bytes_moved:host_to_device": 15, "pages:host": 2}
    )
    assert first.data == {"bytes_moved:host_to_device": 10, "pages:host": 3}
    assert first.aggregate(second).data == {"bytes_moved:host_to_device": 15, "pages:host": 2}
    assert Stats.since({"pages:host": 3}, {"pages:host": 3}).is_empty()


def test_reports_of_ranks_are_kept_apart():
    both = WorkerReport({0: [1]}, {7: 0.5, 8: 0.1}).aggregate(WorkerReport({1: [2]}, {7: 0.6, 9: 0.2}))
    assert both.told == {0: [1], 1: [2]}
    assert both.passes == {7: 0.6, 8: 0.1, 9: 0.2}, "a pass takes as long as the slowest rank"
