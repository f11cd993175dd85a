"""vLLM's real scheduler and the connector's two sides, over simulated data planes and without a model: whatever happens
to the requests and to their copies, no step reads a block that does not hold what it should, and at the end nothing is
held."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter, deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
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

CALM = Faults()
BLOCK = 32
LONGEST = 320
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
        if transfer.path[0] == Tier.DEVICE:
            for slot, identity in zip(transfer.slots[0], transfer.identities, strict=True):
                held = self.content[Tier.DEVICE][int(slot)]
                if held != GARBAGE and (held is None or held[:32] != identity[LABEL].tobytes()):
                    raise ViolationError(f"transfer {transfer.ticket} would store a block that holds another")
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
    a load should have filled and did not is garbage, and somebody has to say so.

    ``ahead``: steps that are made and submitted before the output of the first one is known, as vLLM's asynchronous
    scheduler does; what they leave behind is there in their order. ``drafts``: tokens that are guessed in each step of
    a request that answers; any number of them is right."""

    def __init__(
        self,
        seed,
        folder,
        monkeypatch,
        *,
        ranks,
        blocks,
        tiers,
        extra,
        options=None,
        faults=CALM,
        lost=0.0,
        ahead=0,
        drafts=0,
        v2=False,
    ):
        self.random = random.Random(seed)
        self.ahead, self.drafts = ahead, drafts
        self.slow = False  # for a while nothing is copied but what somebody waits for
        self.aborts = 0.05  # of a step's beginning and its end
        self.clock, self.ranks, self.blocks = Clock(), ranks, blocks
        self.seen: Counter[str] = Counter()
        self.version = 0
        self.count = 0
        self.flying: deque[tuple[Any, Any]] = deque()  # steps that were submitted, and their outputs that nobody knows
        self.texts: dict[str, list[int]] = {}  # of requests, their answers too
        self.chains: dict[str, list[bytes]] = {}  # vLLM's hashes of those
        self.prompts: dict[str, int] = {}
        self.told: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}  # as the workers know it
        self.known: dict[str, int] = {}
        self.stems = [[self.random.randrange(600) for _ in range(LONGEST)] for _ in range(3)]
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
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(v2)))  # which vLLM has not on a CPU either
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=2, dtype=torch.float32)
        page = spec.page_size_bytes
        kv = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[KVCacheTensor(page * blocks, [layer], page * blocks, page) for layer in LAYERS],
            kv_cache_groups=[KVCacheGroupSpec(LAYERS, spec)],
            hash_block_size=BLOCK,
        )
        kind = AsyncScheduler if ahead else Scheduler
        self.scheduler = kind(self.config, kv, StructuredOutputManager(self.config), BLOCK, log_stats=True)
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
            max_model_len=LONGEST,
            block_size=BLOCK,
            max_num_seqs=4,
            max_num_batched_tokens=96,
            kv_transfer_config=transfer,
            **options,
        ).create_engine_config()
        config.scheduler_config.async_scheduling = bool(self.ahead)  # which vLLM has not on a CPU
        config.parallel_config.tensor_parallel_size = self.ranks
        config.cache_config.num_gpu_blocks = self.blocks
        layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "none"))
        config.compilation_config.static_forward_context |= dict.fromkeys(LAYERS, layer)
        return config

    # ---- one step ------------------------------------------------------------------------------------------------

    def step(self):
        """As the engine's loop: up to ``ahead`` steps are made and submitted before the first one's output is known."""
        self.clock.now += self.random.random() * 0.02
        if self.wanted:
            scheduled = self.scheduler.schedule()
            self.flying.append((scheduled, self.execute(scheduled)))
            self.check_who_waits()
            if self.random.random() < self.aborts:
                self.abort()
            if len(self.flying) <= self.ahead:
                return
        if self.flying:
            self.hear()
        self.side.manager.catalog.check()

    @property
    def wanted(self):
        """Whether there is a step to make."""
        return self.scheduler.has_requests() or self.side.manager.placement.under_way

    @property
    def in_flight(self):
        return {name for scheduled, _ in self.flying for name in scheduled.num_scheduled_tokens}

    def check_who_waits(self):
        for name in self.side._waiting._announced:
            status = self.scheduler.requests[name].status if name in self.scheduler.requests else "gone"
            assert status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), f"{name} is said to wait and is {status}"

    def hear(self):
        """The output of the oldest step comes to the scheduler."""
        scheduled, executed = self.flying.popleft()
        told = self.scheduler.update_from_output(scheduled, executed)
        for output in (output for one in told.values() for output in one.outputs):
            self.told[output.request_id] += output.new_token_ids
            text, begin = self.texts[output.request_id], self.prompts[output.request_id]
            heard = self.told[output.request_id]
            self.seen["ended in flight"] += output.finish_reason is not None and output.request_id in self.in_flight
            assert heard == text[begin : begin + len(heard)], "an answer to what was not there"
        if self.drafts and not self.ahead:
            names = list(scheduled.num_scheduled_tokens)
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[0] * self.drafts for _ in names]))

    @property
    def side(self):
        return self.scheduler.get_kv_connector()._scheduler

    def execute(self, scheduled):
        """What an executor does: every worker gets the metadata by pickle, and their answers are put together."""
        self.remember_tables(scheduled)
        preempted = scheduled.preempted_req_ids or set()
        self.seen["preempted"] += len(preempted)
        self.seen["preempted in flight"] += len(preempted & self.in_flight)
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
        drafts = scheduled.scheduled_spec_decode_tokens
        sampled = {
            name: self.compute(name, tokens, len(drafts.get(name, ())))
            for name, tokens in scheduled.num_scheduled_tokens.items()
        }
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
        if self.random.random() < 0.02:
            self.slow = not self.slow
        for plane in self.planes:
            plane.step(0 if self.slow else self.random.randint(0, 2))

    def remember_tables(self, scheduled):
        """What a model runner knows of the requests: their blocks, how much is computed, and how many tokens there are.
        From what it is told; of those that go on it knows itself, and before the scheduler, what they have come to."""
        for name in scheduled.finished_req_ids:
            self.tables.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            self.begin(new.req_id, new.num_computed_tokens)
        old = scheduled.scheduled_cached_reqs
        for name, blocks, computed in zip(old.req_ids, old.new_block_ids, old.num_computed_tokens, strict=True):
            if name in old.resumed_req_ids:
                self.tables[name] = []
                self.begin(name, computed)
            elif not self.ahead:
                self.begin(name, computed)  # a load that failed has thrown it back
            else:  # the scheduler takes guesses of steps in flight for right
                assert 0 <= computed - self.computed[name] <= self.ahead * self.drafts
            self.tables[name] += blocks[0] if blocks is not None else []

    def begin(self, name, computed):
        self.computed[name], self.known[name] = computed, self.scheduler.requests[name].num_tokens

    def compute(self, name, tokens, drafts):
        """Read what the request has, write its next ``tokens``, of which the last ``drafts`` are guesses. Returns what
        they lead to where they reach the end of what is known."""
        table, before = self.tables[name], self.computed[name]
        end = before + tokens - drafts
        for index in range(-(-before // BLOCK)):
            wanted = self.content(name, index, before)
            for plane in self.planes:
                held = plane.content[Tier.DEVICE][table[index]]
                if held != wanted:
                    assert name in self.awaited, f"{name}: block {index} of {before} tokens holds something else"
                    self.garbled.add(name)
        garbled = name in self.garbled
        right = self.random.randint(0, drafts)
        self.seen["guesses right"] += right
        self.seen["guesses wrong"] += drafts - right
        for index in range(before // BLOCK, -(-(end + drafts) // BLOCK)):
            for plane in self.planes:
                content = GARBAGE if garbled else self.content(name, index, end + right)
                plane.content[Tier.DEVICE][table[index]] = content
        assert end <= self.known[name]
        self.computed[name] = end + right
        if end < self.known[name]:
            return []
        known = self.known[name]
        self.known[name] += right + 1
        return [WRONG] if garbled else self.texts[name][known : self.known[name]]

    def content(self, name, index, tokens):
        """What a block holds when ``tokens`` of the request are computed."""
        version = self.version.to_bytes(4, "little")
        if (index + 1) * BLOCK <= tokens:
            return self.chains[name][index] + version
        return sha256(tuple(self.texts[name][:tokens])) + version

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
        text = stem[:fork] + [self.random.randrange(600) for _ in range(LONGEST + 32 - fork)]
        stop = self.random.randrange(2 * answer)  # where it says so itself, if it gets there
        self.ask(name, text, prompt, answer, text[prompt + stop], self.random.choice([None, None, None, "a tenant"]))

    def ask(self, name, text, prompt, answer, stop, salt=None):
        """A request whose ``prompt`` first tokens are known, of a text that it will come to."""
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True, stop_token_ids=[stop])
        asked = partial(Request, sampling_params=sampling, pooling_params=None, cache_salt=salt)
        self.texts[name], self.prompts[name], self.told[name] = text, prompt, []
        self.chains[name] = asked(name, text, block_hasher=self.hasher).block_hashes
        priority = self.random.randint(0, 2)
        self.scheduler.add_request(asked(name, text[:prompt], priority=priority, block_hasher=self.hasher))

    def abort(self):
        if self.scheduler.requests:
            states = sorted({request.status for request in self.scheduler.requests.values()})
            state = self.random.choice(states)
            name = self.random.choice([n for n, r in self.scheduler.requests.items() if r.status == state])
            self.seen[f"aborted {self.scheduler.requests[name].status.name}"] += 1
            self.seen["aborted in flight"] += name in self.in_flight
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
            assert not any(scheduled.num_scheduled_tokens for scheduled, _ in self.flying)
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
            if not self.wanted and not self.flying:
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
        for what in (
            side._requests,
            side._loads,
            side._written,
            side._void,
            side._unproven,
            side._beside,
            side._full,
        ):
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
