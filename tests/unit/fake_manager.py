"""A stand-in for CacheManager that shows the engine what a real one seldom does: late loads, short loads, no room.

Device slots plus an unbounded "host" of page copies. Plain Python, one block at a time: for tests only.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np

from kvtier.lab.attention import KVPool


@dataclass
class Found:
    num_tokens: int
    tokens_by_tier: dict[str, int]


@dataclass
class Loaded:
    request_id: str
    num_computed_tokens: int
    tokens_by_tier: dict[str, int]


@dataclass
class _Sequence:
    tokens: list[int]
    state: str = "matched"
    keys: list[tuple[int, ...]] = field(default_factory=list)
    where: list[str] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    shared: set[int] = field(default_factory=set)
    cached: int = 0
    wait: int = 0


class FakeManager:
    """``load_polls``: polls until a load ends. ``lose``: pages (counted over all loads) that fail to come."""

    def __init__(self, pool: KVPool, *, load_polls: int = 2, host: bool = True) -> None:
        self.pool, self.block, self.load_polls, self.use_host = pool, pool.block_size, load_polls, host
        self.free_slots = deque(range(pool.blocks))
        self.device: OrderedDict[tuple[int, ...], int] = OrderedDict()  # coldest first
        self.host: dict[tuple[int, ...], list] = {}
        self.pins = dict.fromkeys(range(pool.blocks), 0)
        self.sequences: dict[str, _Sequence] = {}
        self.lose: set[int] = set()
        self.loads = 0
        self.calls: list[str] = []

    # -- what the engine calls

    def can_split(self):
        pass

    def can_wait_for_layers(self):
        pass

    def comes_by_layer(self, request_id):
        return False

    def skip(self, request_id):
        return None

    def expect(self, request_id, tokens, within, *, salt=None):
        self.calls.append(f"expect {request_id}")

    def reorder(self, within):
        self.calls.append(f"reorder {', '.join(within)}")

    def dismiss(self, request_id):
        pass

    def observe_prefill(self, new_tokens, context, seconds, request_id=None):
        self.prefills = [*getattr(self, "prefills", []), (new_tokens, context, seconds, request_id)]

    def get_computed_blocks(self, request_id, tokens, *, salt=None, adapter=None):
        assert request_id not in self.sequences
        self.sequences[request_id] = _Sequence([int(t) for t in tokens])
        return self._match(request_id)

    def _key(self, tokens, block):
        return tuple(tokens[: (block + 1) * self.block])

    def _match(self, request_id):
        seq = self.sequences[request_id]
        seq.state, seq.keys, seq.where = "matched", [], []
        for block in range((len(seq.tokens) - 1) // self.block):
            key = self._key(seq.tokens, block)
            if key in self.device:
                self.device.move_to_end(key)
                self._pin(seq, self.device[key])
            elif key not in self.host:
                break
            seq.keys.append(key)
            seq.where.append("device" if key in self.device else "host")
        counts = {t: seq.where.count(t) * self.block for t in ("device", "host") if t in seq.where}
        return Found(len(seq.keys) * self.block, counts)

    def allocate_slots(self, request_id, num_tokens):
        seq = self.sequences[request_id]
        assert seq.state != "preempted"
        blocks = -(-num_tokens // self.block)
        if seq.state == "matched":
            needed = max(blocks, len(seq.keys)) - seq.where.count("device")
            slots = self._take(needed)
            if slots is None:
                return None
            fresh = iter(slots)
            seq.table = [
                self.device[k] if w == "device" else next(fresh) for k, w in zip(seq.keys, seq.where, strict=True)
            ]
            seq.table += list(fresh)
            seq.wait = self.load_polls if "host" in seq.where else 0
            seq.state = "loading"
            if not seq.wait:
                self._end_load(request_id)
        elif blocks > len(seq.table):
            slots = self._take(blocks - len(seq.table))
            if slots is None:
                return None
            seq.table += slots
        return np.array(seq.table, np.uint32)

    def ready(self, request_id):
        return self.sequences[request_id].state == "running"

    def poll(self, timeout=0.0):
        ended = []
        for request_id, seq in self.sequences.items():
            if seq.state == "loading":
                seq.wait -= 1
                if seq.wait <= 0:
                    kept = self._end_load(request_id)
                    counts = {t: seq.where[:kept].count(t) * self.block for t in ("device", "host")}
                    ended.append(Loaded(request_id, kept * self.block, counts))
        return ended

    def _end_load(self, request_id):
        seq = self.sequences[request_id]
        kept = len(seq.keys)
        for block, (key, where) in enumerate(zip(seq.keys, seq.where, strict=True)):
            if where == "device":
                continue
            self.loads += 1
            if self.loads - 1 in self.lose or key in self.device:
                del self.host[key]
                kept = block
                break
            slot = seq.table[block]
            for tensor, page in zip(self.pool.tensors, self.host[key], strict=True):
                tensor[slot] = page
            self.device[key] = slot
            self._pin(seq, slot)
        for slot in seq.table[kept : len(seq.keys)]:
            self._let_go(seq, slot)
        del seq.table[kept : len(seq.keys)]
        seq.cached, seq.state = kept, "running"
        return kept

    def block_table(self, request_id):
        return np.array(self.sequences[request_id].table, np.uint32)

    def append_tokens(self, request_id, tokens):
        self.sequences[request_id].tokens += [int(t) for t in tokens]

    def cache_blocks(self, request_id, num_computed_tokens):
        seq = self.sequences[request_id]
        assert seq.state == "running"
        assert num_computed_tokens <= min(len(seq.tokens), len(seq.table) * self.block)
        for block in range(seq.cached, num_computed_tokens // self.block):
            key = self._key(seq.tokens, block)
            if key not in self.device:
                self.device[key] = seq.table[block]
                self._pin(seq, seq.table[block])
                if self.use_host and key not in self.host:
                    self.host[key] = [t[seq.table[block]].clone() for t in self.pool.tensors]
        seq.cached = max(seq.cached, num_computed_tokens // self.block)

    def advance(self, tokens):
        grown = {}
        for request_id, token in tokens.items():
            seq = self.sequences[request_id]
            self.cache_blocks(request_id, len(seq.tokens))
            seq.tokens.append(token)
            if len(seq.tokens) > len(seq.table) * self.block:
                before, table = len(seq.table), self.allocate_slots(request_id, len(seq.tokens))
                grown[request_id] = None if table is None else table[before:].tolist()
        return grown

    def free(self, request_id):
        seq = self.sequences.pop(request_id, None)
        if seq is not None:
            self._release(seq)

    def preempt(self, request_id):
        seq = self.sequences[request_id]
        self._release(seq)
        seq.state = "preempted"

    def resume(self, request_id):
        assert self.sequences[request_id].state == "preempted"
        return self._match(request_id)

    # -- slots

    def _pin(self, seq, slot):
        if slot not in seq.shared:
            seq.shared.add(slot)
            self.pins[slot] += 1

    def _let_go(self, seq, slot):
        if slot in seq.shared:
            seq.shared.remove(slot)
            self.pins[slot] -= 1
        elif slot not in self.device.values():
            self.free_slots.append(slot)

    def _release(self, seq):
        for slot in {*seq.table, *seq.shared}:
            self._let_go(seq, slot)
        seq.table, seq.keys, seq.where, seq.cached = [], [], [], 0

    def _take(self, count):
        # children are longer keys and were touched after their parents' last use: evict the longest cold ones first
        victims = sorted((k for k, s in self.device.items() if not self.pins[s]), key=len, reverse=True)
        if count > len(self.free_slots) + len(victims):
            return None
        while len(self.free_slots) < count:
            self.free_slots.append(self.device.pop(victims.pop(0)))
        slots = [self.free_slots.popleft() for _ in range(count)]
        for tensor in self.pool.tensors:
            tensor[slots] = float("nan")  # whoever reads what was not written shall notice
        return slots

    def empty_device(self):
        """Drop every unpinned device page, as if others had needed the room."""
        for key in [k for k, s in self.device.items() if not self.pins[s]]:
            self.free_slots.append(self.device.pop(key))

    def check(self):
        owned = {s for q in self.sequences.values() for s in q.table}
        assert len(self.free_slots) == len(set(self.free_slots))
        assert not set(self.free_slots) & (owned | set(self.device.values()))
        assert set(self.free_slots) | owned | set(self.device.values()) == set(range(self.pool.blocks))
