"""vLLM's real scheduler and the connector's two sides, over simulated data planes and without a model: whatever happens
to the requests and to their copies, no step reads a block that does not hold what it should, and at the end nothing is
held."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs the environment that `make test-vllm` makes")

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvtier.catalog import PageStatus, Tier
from kvtier.connectors.vllm import KVTierConnector
from kvtier.connectors.vllm import scheduler as scheduler_side
from kvtier.connectors.vllm import worker as worker_side
from kvtier.connectors.vllm.step_loads import StepLoads
from kvtier.offload import OffloadManager
from kvtier.relay import RankPlane, RelayPlane
from kvtier.sim.plane import Faults, SimulatedPlane, ViolationError
from kvtier.waiting import Waiting

BLOCK = 32
LAYERS = [f"model.layers.{layer}.self_attn.attn" for layer in range(2)]
GARBAGE = b"computed behind a block that was not there"
WRONG = 999  # the token that such a pass leads to
GENERATION = slice(96, 104)  # of an identity
LABEL = slice(112, 144)  # of an identity: vLLM's own hash of the block
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}


class Clock:
    def __init__(self):
        self.now = 1.0

    def __call__(self):
        return self.now


class Plane(SimulatedPlane):
    """Blocks are named by vLLM's hashes and followed by the version of the weights that computed them. Some transfers
    lie still until their deadline, or for a while where they have none."""

    def __init__(self, capacity, seed, faults, clock, lost):
        super().__init__(capacity, seed, faults)
        self._clock, self._lost = clock, lost
        self._still: dict[int, float] = {}

    def submit(self, transfer):
        accepted = super().submit(transfer)
        if accepted and self._random.random() < self._lost:
            self._still[transfer.ticket] = transfer.deadline or self._clock() + 1.0
            self.injected["lost"] += 1
        return accepted

    def _claim(self, transfer):
        """A block that a cancelled load will not write any more is free, though an earlier hop of it may still run."""
        if transfer.path[-1] == Tier.DEVICE:
            for running in self._running.values():
                end = 0 if running.transfer.path[0] == Tier.DEVICE else -1
                used = running.transfer.slots[end][running.status[end] == PageStatus.PENDING]
                if running.transfer.path[end] == Tier.DEVICE and (shared := set(transfer.slots[-1]) & set(used)):
                    raise ViolationError(f"blocks {shared} are loaded while {running.transfer.ticket} uses them")
            transfer = transfer._replace(path=transfer.path[:-1], slots=transfer.slots[:-1])
        super()._claim(transfer)

    def cancel(self, ticket):
        super().cancel(ticket)
        self._still.pop(ticket, None)

    def wait(self, timeout):
        self._clock.now += min(timeout, 0.02)
        return super().wait(timeout)

    def wait_for_slices(self, ticket, count, timeout):
        end = self._clock() + timeout
        while ticket in self._running and self._clock() < end:
            self.wait(end - self._clock())
        return any(done.ticket == ticket and done.whole for done in self._reports)

    def step(self, moves=1):
        for ticket in [ticket for ticket, until in self._still.items() if until <= self._clock()]:
            self.cancel(ticket)
        asleep = {ticket: self._running.pop(ticket) for ticket in self._still if ticket in self._running}
        super().step(moves)
        self._running |= asleep

    def _copy(self, transfer, hop, page):
        source, target = transfer.path[hop], transfer.path[hop + 1]
        held = self.content[source][int(transfer.slots[hop, page])]
        if source == Tier.DEVICE and held == GARBAGE:  # another rank says that the page is none
            self.content[target][int(transfer.slots[hop + 1, page])] = held
            return
        if held is None or held[:32] != transfer.identities[page, LABEL].tobytes():
            raise ViolationError(f"transfer {transfer.ticket} copies a {source.name} slot that holds another block")
        generation = int.from_bytes(transfer.identities[page, GENERATION].tobytes(), "little")
        void = target == Tier.DEVICE and generation < self._generation
        self.content[target][int(transfer.slots[hop + 1, page])] = None if void else held


class Engine:
    """vLLM's loop around its scheduler. A worker's model is only what it leaves behind: in each block the hash of all
    tokens up to its end and, where the block is not full, of how far it is filled. What it computes behind a block that
    a load should have filled and did not is garbage, and somebody has to say so."""

    def __init__(self, seed, folder, monkeypatch, *, ranks, blocks, tiers, faults, lost, extra, options=None):
        self.random = random.Random(seed)
        self.clock, self.ranks, self.blocks = Clock(), ranks, blocks
        self.seen: Counter[str] = Counter()
        self.version = 0
        self.count = 0
        self.texts: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}
        self.stems = [[self.random.randrange(600) for _ in range(320)] for _ in range(3)]
        self.planes: list[Plane] = []
        self.awaited: set[str] = set()
        self.garbled: set[str] = set()

        def plane(config, geometry, device, *, label_bytes, rank, world):
            assert (label_bytes, world) == (32, ranks)
            self.planes.append(Plane({Tier.DEVICE: blocks} | tiers, seed + rank, faults, self.clock, lost))
            return self.planes[-1]

        monkeypatch.setattr(worker_side, "LocalDataPlane", plane)
        monkeypatch.setattr(worker_side, "RankPlane", partial(RankPlane, clock=self.clock))
        monkeypatch.setattr(worker_side, "StepLoads", partial(StepLoads, clock=self.clock))
        monkeypatch.setattr("kvtier.layers._SLICE_BYTES", 1)
        monkeypatch.setattr(scheduler_side, "RelayPlane", partial(RelayPlane, clock=self.clock))
        monkeypatch.setattr(scheduler_side, "OffloadManager", partial(OffloadManager, clock=self.clock, max_nodes=300))
        monkeypatch.setattr(scheduler_side, "Waiting", partial(Waiting, clock=self.clock))
        monkeypatch.setattr(scheduler_side, "time", SimpleNamespace(monotonic=self.clock))
        self.config = self._configure(folder, extra, options or {})
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=2, dtype=torch.float32)
        page = spec.page_size_bytes
        kv = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[KVCacheTensor(page * blocks, [layer], page * blocks, page) for layer in LAYERS],
            kv_cache_groups=[KVCacheGroupSpec(LAYERS, spec)],
            hash_block_size=BLOCK,
        )
        self.scheduler = Scheduler(self.config, kv, StructuredOutputManager(self.config), BLOCK, log_stats=True)
        self.workers = []
        for rank in range(ranks):
            monkeypatch.setattr(
                "vllm.distributed.parallel_state.get_tensor_model_parallel_rank", lambda rank=rank: rank
            )
            worker = KVTierConnector(self.config, KVConnectorRole.WORKER, kv)
            worker.register_kv_caches({layer: torch.zeros(blocks, 1, BLOCK, 4) for layer in LAYERS})
            self.workers.append(worker)
        met = {rank: worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        self.scheduler.get_kv_connector().set_xfer_handshake_metadata(pickle.loads(pickle.dumps(met)))
        self.aggregator = KVOutputAggregator(ranks)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)

    def _configure(self, folder, extra, options):
        (folder / "config.json").write_text(json.dumps(MODEL))
        (folder / "disk").mkdir()
        extra = {
            "min_load_tokens": 0,
            "load_policy": "always",
            "lease_seconds": 5.0,
            "load_timeout_seconds": 2.0,
        } | extra
        if extra.pop("disk"):
            extra |= {"disk.path": str(folder / "disk"), "disk.size": "64MiB", "weights_revision": "1"}
        transfer = KVTransferConfig(
            kv_connector="KVTierConnector",
            kv_connector_module_path="kvtier.connectors.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"host.size": "64MiB", "load_timeout_seconds": 2.0} | extra,
        )
        config = EngineArgs(
            model=str(folder),
            dtype="float32",
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=320,
            block_size=BLOCK,
            max_num_seqs=4,
            max_num_batched_tokens=96,
            kv_transfer_config=transfer,
            **options,
        ).create_engine_config()
        config.parallel_config.tensor_parallel_size = self.ranks
        config.cache_config.num_gpu_blocks = self.blocks
        layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "none"))
        config.compilation_config.static_forward_context |= dict.fromkeys(LAYERS, layer)
        return config

    # ---- one step ------------------------------------------------------------------------------------------------

    def step(self):
        self.clock.now += self.random.random() * 0.02
        if self.scheduler.has_requests() or self.side.manager.placement.under_way:
            scheduled = self.scheduler.schedule()
            executed = self.execute(scheduled)
            if self.random.random() < 0.05:
                self.abort()
            told = self.scheduler.update_from_output(scheduled, executed)
            answers = [token for one in told.values() for output in one.outputs for token in output.new_token_ids]
            assert WRONG not in answers, "an answer to what was not there"
        self.side.manager.catalog.check()

    @property
    def side(self):
        return self.scheduler.get_kv_connector()._scheduler

    def execute(self, scheduled):
        """What an executor does: every worker gets the metadata by pickle, and their answers are put together."""
        self.remember_tables(scheduled)
        self.seen["preempted"] += len(scheduled.preempted_req_ids or ())
        self.seen["resumed"] += len(scheduled.scheduled_cached_reqs.resumed_req_ids)
        metadata = [pickle.loads(pickle.dumps(scheduled.kv_connector_metadata)) for _ in self.workers]
        for worker, mine in zip(self.workers, metadata, strict=True):
            worker.handle_preemptions(mine)
            worker.bind_connector_metadata(mine)
        self.advance()
        self.awaited = {name for name, load in metadata[0].loads.items() if load.synchronous}
        self.seen["awaited"] += len(self.awaited)
        assert bool(self.awaited) == scheduled.has_sync_kv_loads
        if self.awaited:
            for worker in self.workers:
                worker.start_load_kv(None)
        if self.random.random() < 0.9:  # else the pass is a recorded one
            self.ask_by_layer()
        sampled = {name: self.compute(name, n) for name, n in scheduled.num_scheduled_tokens.items()}
        outputs = []
        for worker in self.workers:
            if not self.awaited:
                worker.start_load_kv(None)
            worker.wait_for_save()
            self.advance()
            outputs.append(self.answer(worker, scheduled, sampled))
            worker.clear_connector_metadata()
        answer = self.aggregator.aggregate(outputs)
        for name in self.garbled:
            invalid = answer.kv_connector_output.invalid_block_ids
            assert not invalid.isdisjoint(self.tables[name]), f"{name} read what had not come, and nobody said so"
        self.seen["garbled"] += len(self.garbled)
        self.garbled.clear()
        assert self.awaited.isdisjoint(answer.kv_connector_output.finished_recving or ()), "reported twice"
        return answer

    def ask_by_layer(self):
        for layer in LAYERS:
            self.advance()
            for worker in self.workers:
                worker.wait_for_layer_load(layer)

    def answer(self, worker, scheduled, sampled):
        results = worker.get_transfer_results(scheduled.finished_req_ids)
        told = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        self.seen["failed blocks"] += len(told.invalid_block_ids)
        names = list(sampled)
        return ModelRunnerOutput(
            names,
            {name: index for index, name in enumerate(names)},
            list(sampled.values()),
            kv_connector_output=pickle.loads(pickle.dumps(told)),
        )

    def advance(self):
        for plane in self.planes:
            plane.step(self.random.randint(0, 2))

    def remember_tables(self, scheduled):
        """A model runner's block tables, from what it is told."""
        for name in scheduled.finished_req_ids:
            self.tables.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
        old = scheduled.scheduled_cached_reqs
        for name, blocks in zip(old.req_ids, old.new_block_ids, strict=True):
            if name in old.resumed_req_ids:
                self.tables[name] = []
            self.tables[name] += blocks[0] if blocks is not None else []

    def compute(self, name, tokens):
        """Read what the request has, write its next ``tokens``; the token after them where they reach the end."""
        request, table = self.scheduler.requests[name], self.tables[name]
        end = request.num_computed_tokens  # the scheduler has counted this step already
        before = end - tokens
        for index in range(-(-before // BLOCK)):
            wanted = self.content(request, index, before)
            for plane in self.planes:
                held = plane.content[Tier.DEVICE][table[index]]
                if held != wanted:
                    assert name in self.awaited, f"{name}: block {index} of {before} tokens holds something else"
                    self.garbled.add(name)
        garbled = name in self.garbled
        for index in range(before // BLOCK, -(-end // BLOCK)):
            for plane in self.planes:
                plane.content[Tier.DEVICE][table[index]] = GARBAGE if garbled else self.content(request, index, end)
        return [WRONG if garbled else self.texts[name][end]] if end == request.num_tokens else []

    def content(self, request, index, tokens):
        """What a block holds when ``tokens`` of the request are computed."""
        version = self.version.to_bytes(4, "little")
        if (index + 1) * BLOCK <= tokens:
            return bytes(request.block_hashes[index]) + version
        return sha256(tuple(request.all_token_ids[:tokens])) + version

    # ---- what happens to it --------------------------------------------------------------------------------------

    def live(self):
        habits = {self.arrive: 8, self.abort: 2, self.reset: 0.1, self.sleep: 0.1, self.nothing: 12}
        self.random.choices(list(habits), list(habits.values()))[0]()
        self.step()

    def nothing(self):
        """Happens."""

    def arrive(self):
        if len(self.scheduler.requests) > 7:
            return
        self.count += 1
        name, stem = f"r{self.count}", self.random.choice(self.stems)
        fork = self.random.choice([0, 70, 150, 320, 320])
        prompt, answer = self.random.randint(1, 230), self.random.choice([1, 2, 20, 60])
        self.texts[name] = stem[:fork] + [self.random.randrange(600) for _ in range(321 - fork)]
        salt = self.random.choice([None, None, None, "a tenant"])
        request = Request(
            name,
            self.texts[name][:prompt],
            SamplingParams(max_tokens=answer, ignore_eos=True),
            None,
            cache_salt=salt,
            priority=self.random.randint(0, 2),
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)

    def abort(self):
        if self.scheduler.requests:
            states = sorted({request.status for request in self.scheduler.requests.values()})
            state = self.random.choice(states)
            name = self.random.choice([n for n, r in self.scheduler.requests.items() if r.status == state])
            self.seen[f"aborted {self.scheduler.requests[name].status.name}"] += 1
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self):
        """As after a change of weights, which an engine makes only where nothing is left of the old ones. What requests
        are loading meanwhile is worth nothing."""
        connector_too = self.random.random() < 0.9
        try:
            done = self.scheduler.reset_prefix_cache(self.random.random() < 0.7, reset_connector=connector_too)
        except RuntimeError:  # vLLM's: a request that loads holds blocks, and the connector was not asked
            self.seen["reset refused"] += 1
            return
        if done and connector_too:
            self.version += 1
            self.seen["new weights"] += 1
        if connector_too:
            for worker, plane in zip(self.workers, self.planes, strict=True):
                for loading in worker._worker._loading.values():
                    self.seen["voided"] += 1
                    for block in loading.blocks:
                        plane.content[Tier.DEVICE][block] = None

    def sleep(self):
        self.clock.now += 100.0

    def finish(self):
        for _ in range(20_000):
            if not self.scheduler.has_requests() and not self.side.manager.placement.under_way:
                break
            self.step()
        assert not self.scheduler.requests, f"never ends: {self.scheduler.requests}"

    # ---- what must hold ------------------------------------------------------------------------------------------

    def look(self):
        assert self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == self.blocks - 1, "blocks leak"
        side, manager = self.side, self.side.manager
        manager.catalog.check()
        assert manager.catalog.stats()["leases"] == 0
        for tier, usage in manager.stats().slots.items():
            assert usage["free"] + usage["ready"] == usage["capacity"], f"{tier} leaks: {usage}"
        for tier in manager._tiers:
            slots, ready, identities = manager.catalog.contents(tier)
            for slot, identity in zip(slots[ready], identities[ready], strict=True):
                for plane in self.planes:
                    assert plane.content[tier][int(slot)][:32] == identity[LABEL].tobytes(), "garbage is ready"
        for what in (side._requests, side._loads, side._written, side._void, side._unproven, side._beside):
            assert not what
        assert not len(side._waiting)
        for what in (manager._requests, manager._loads._tickets, manager._reading, manager.placement.under_way):
            assert not what
        assert not side.busy
        assert side._relay.pending() == 0
        for worker in self.workers:
            ours = worker._worker
            for what in (
                ours._loading,
                ours._by_ticket,
                ours._void,
                ours._invalid,
                ours._news,
                ours._step_loads._loads,
            ):
                assert not what
            assert not ours._rank_plane._shapes


TIERS = [{Tier.HOST: 40, Tier.DISK: 80}, {Tier.HOST: 6, Tier.DISK: 60}, {Tier.HOST: 60}]
FAULTS = {"calm": (Faults(), 0.0), "faulty": (Faults(page=0.1, repeat=0.2, refuse=0.1), 0.1)}


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.mark.parametrize("kind", sorted(FAULTS))
@pytest.mark.parametrize("tiers", TIERS, ids=lambda tiers: "-".join(map(str, tiers.values())))
@pytest.mark.parametrize(
    ("ranks", "write", "mode"), [(1, "at_once", "async"), (2, "second_use", "async"), (2, "at_once", "sync")]
)
def test_no_story_reads_a_wrong_block_or_leaves_anything_behind(
    seed, kind, tiers, ranks, write, mode, tmp_path, monkeypatch
):
    faults, lost = FAULTS[kind]
    engine = Engine(
        seed,
        tmp_path,
        monkeypatch,
        ranks=ranks,
        blocks=14,
        tiers=tiers,
        faults=faults,
        lost=lost,
        extra={"disk": Tier.DISK in tiers, "host.write": write, "load_mode": mode},
        options={"long_prefill_token_threshold": 40} if mode == "sync" else {},
    )
    for _ in range(600):
        engine.live()
    engine.finish()
    engine.look()
    found = engine.side.manager.stats().tokens_found
    ahead = engine.side.manager.stats().prefetched
    print(dict(sorted(engine.seen.items())), found, ahead, [dict(plane.injected) for plane in engine.planes])
    assert kind == "faulty" or sum(found.values()), "nothing was loaded in a whole story"
