"""An engine over a CacheManager: it keeps the books that a real one would, and looks at every slot it was given.

What it checks, all through the manager's public calls:

- what is promised was computed, by somebody who may share it, since the last invalidation of its namespace;
- a ready request's table holds, block by block, the bytes of exactly its tokens, from then until it lets go;
- no table changes under a running request; nobody else writes a slot that it was given;
- a load ends at its deadline, whatever the data plane says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier.catalog import Tier
from kvtier.config import CacheConfig, DiskConfig, HostConfig, PrefetchConfig, WatermarksConfig
from kvtier.manager import CacheManager
from kvtier.namespace import DIGEST_BYTES, Namespace
from kvtier.sim.checks import audit, look, pages_of
from kvtier.sim.costs import known_costs
from kvtier.sim.disk import space_of
from kvtier.sim.ending import finish
from kvtier.sim.events import PAGE_BYTES, EventPlane
from kvtier.sim.names import BlockNames, prompt, prompt_digests
from kvtier.sim.plane import ViolationError
from kvtier.sim.requests import BLOCK, LOADING, MATCHED, PREEMPTED, RUNNING, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.geometry import KVGeometry
    from kvtier.sequence import ComputedBlocks
    from kvtier.sim.story import Setup

__all__ = ["SimulatedEngine"]


_CALLS = (
    *("arrive", "again", "start", "grow", "compute", "decode", "append", "free", "preempt", "resume", "poll", "wait"),
    *("hint", "expect", "reorder", "dismiss", "measure", "locate", "evict", "flush", "invalidate", "reset"),
)
_LAYERS = 4
_PARENT = slice(32, 64)  # of an identity: the digest of the block before
_ADAPTER = bytes(range(32))
_SPACES: list[dict[str, Any]] = [{}, {"salt": "a"}, {"salt": "b"}, {"adapter": _ADAPTER}]
_SPACES.append({"salt": "a", "adapter": _ADAPTER})


@dataclass(frozen=True, slots=True)
class _Geometry:
    """All that the control plane asks of a geometry."""

    block_size: int = BLOCK
    dtype: str = "bfloat16"
    layers: int = _LAYERS
    payload_bytes: int = _LAYERS << 18  # so large that any load is worth cutting
    layout_tag: str = "s"


class SimulatedEngine:
    """``calls`` are its steps by name. Each takes what a story's step holds and says whether it did anything."""

    def __init__(self, setup: Setup, plane: EventPlane, counts: Counter[str]) -> None:
        self.setup, self.counts = setup, counts
        self.requests: dict[int, Request] = {}
        self.room = setup.device * BLOCK
        space = Namespace(
            model="simulated", revision="1", dtype="bfloat16", layout="s", attention="s", block_size=BLOCK, rope={}
        )
        self._own = space
        self.spaces = [space.with_(**named).fingerprint for named in _SPACES[: setup.spaces]]
        self._serial = 1
        self.versions = self._durable_versions = [0] * setup.spaces
        self._made: set[bytes] = set()
        self._asked: set[bytes] = set()
        self.hints: set[int] = set()
        self.restart(plane)
        self.calls: dict[str, Callable[..., bool]] = {name: getattr(self, name) for name in _CALLS}

    def restart(self, plane: EventPlane) -> None:
        """A new process over what ``plane`` still has: no request lives on."""
        self.requests.clear()
        self.hints.clear()
        self.plane = plane
        plane.asked = self._asked
        self.versions = list(self._durable_versions)
        setup = self.setup
        config = CacheConfig(
            block_size=BLOCK,
            lease_seconds=setup.lease_seconds,
            load_timeout_seconds=setup.load_seconds,
            load_policy=setup.load_policy,
            prefetch=PrefetchConfig(grace_seconds=setup.grace_seconds),
            host=HostConfig(write=setup.host_write),
            disk=DiskConfig(write=setup.disk_write),
            watermarks=WatermarksConfig(low=setup.low, high=setup.high),
        )
        geometry: KVGeometry = _Geometry()  # type: ignore[assignment]
        self.manager = CacheManager(
            config,
            geometry,
            self._own,
            None,  # type: ignore[arg-type]
            plane=plane,
            max_nodes=setup.slots + setup.spare_nodes,
            costs=known_costs(PAGE_BYTES, BLOCK) if setup.splits else None,
            clock=plane.clock,
        )
        if setup.splits:
            self.manager.can_split()
        if setup.layers:
            self.manager.can_wait_for_layers()
        self.catalog = self.manager.catalog
        self.counts["pages adopted"] += self.manager.adopted

    # ---- a request's life ----------------------------------------------------------------------------------------

    def arrive(self, number: int, branch: int, length: int, tail: Sequence[int], space: int) -> bool:
        tokens = [*prompt(branch, length).tolist(), *tail]
        if number in self.requests or not 0 < len(tokens) <= self.room:
            return False
        request = Request(f"r{number}", space, tokens, names=BlockNames(self.spaces[space], 0, BLOCK))
        self._ask(request)
        found = self.manager.get_computed_blocks(request.name, tokens, **_SPACES[space])
        self.requests[number] = request
        self._promise(request, found)
        return True

    def again(self, number: int) -> bool:
        request = self._get(number, MATCHED)
        if request is None:
            return False
        self._promise(request, self.manager.get_computed_blocks(request.name, request.tokens, **_SPACES[request.space]))
        return True

    def _promise(self, request: Request, found: ComputedBlocks) -> None:
        count = found.num_tokens
        self.plane.decisions.update(b"%d" % count)
        if count % BLOCK or sum(found.tokens_by_tier.values()) != count or count >= len(request.tokens):
            raise ViolationError(f"{request.name} with {len(request.tokens)} tokens was promised {found}")
        request.state, request.promised, request.doomed, request.computed = MATCHED, count, False, 0
        space = self.spaces[request.space]
        request.renew(self.plane.generation(space), b"%d" % self.versions[request.space])
        self.counts["tokens promised"] += count
        for block, content in enumerate(request.contents(count // BLOCK)):
            if content not in self._made:
                raise ViolationError(f"{request.name} was promised block {block}, which nobody computed")

    def _ask(self, request: Request) -> None:
        self._asked.update(identity[:DIGEST_BYTES] for identity in request.names.extend(request.tokens))

    def start(self, number: int) -> bool:
        request = self._get(number, MATCHED)
        if request is None:
            return False
        if self._allocate(request.name, len(request.tokens)) is None:
            self.counts["fault: device full"] += 1
            return True
        self.hints.discard(number)
        request.state = LOADING
        request.deadline = self.plane.clock.now + self.setup.load_seconds
        if self.manager.ready(request.name):
            self._ready(request, request.promised)
        elif self.manager.comes_by_layer(request.name):
            self._wait_for_layers(request)
        return True

    def _wait_for_layers(self, request: Request) -> None:
        """As a pass would beside the load: what is said to be there must be."""
        if not self.manager.wait_for_layer(request.name, _LAYERS - 1):
            return
        self.counts["came by layers"] += 1
        wanted = request.contents(request.promised // BLOCK)
        slots = self.manager.block_table(request.name)[: len(wanted)].tolist()
        if [self.plane.content[Tier.DEVICE][slot] for slot in slots] != wanted:
            raise ViolationError(f"{request.name} was told that all layers are there; its slots hold other bytes")

    def _allocate(self, name: str, tokens: int) -> object:
        use = self.catalog.usage(Tier.DEVICE)
        room = use.free * BLOCK >= tokens * (1 + self.setup.splits)  # a tail is loaded beside what is computed
        before = set() if room else pages_of(self.catalog, Tier.DEVICE)[0]
        table = self.manager.allocate_slots(name, tokens)
        now = self.catalog.usage(Tier.DEVICE)
        if use.evictions + use.dropped == now.evictions + now.dropped:
            return table
        if room:
            raise ViolationError(f"{name} needed {tokens} tokens of the device, {use} had room, and pages were evicted")
        after, _ = pages_of(self.catalog, Tier.DEVICE)
        gone = {identity[:DIGEST_BYTES] for identity in before - after}
        if gone and any(identity[_PARENT] in gone for identity in after):  # ready ones are all of one generation
            raise ViolationError("a block was evicted from the device before its continuation")
        return table

    def grow(self, number: int, tokens: int) -> bool:
        """Slots ahead of need, for a request that loads or runs."""
        request = self._get(number, LOADING, RUNNING)
        if request is None or len(request.tokens) + tokens > self.room:
            return False
        if self._allocate(request.name, len(request.tokens) + tokens) is None:
            self.counts["fault: device full"] += 1
        elif request.state is RUNNING:
            self._take_table(request)
        return True

    def _ready(self, request: Request, exactly: int | None) -> None:
        """Its table is final: what it holds now must be what it asked for."""
        count = self.manager.num_computed_tokens(request.name)
        if count > request.promised or (request.doomed and count) or exactly not in (None, count):
            raise ViolationError(f"{request.name} was promised {request.promised} tokens and got {count}")
        request.state, request.computed = RUNNING, count
        request.table, request.held = [], request.contents(count // BLOCK)
        self._take_table(request)
        self.counts["tokens loaded"] += count
        self.counts["shorter than promised"] += count < request.promised

    def _take_table(self, request: Request) -> None:
        table: list[int] = self.manager.block_table(request.name).tolist()
        if table[: len(request.table)] != request.table:
            raise ViolationError(f"{request.name} runs and its block table changed")
        request.table = table
        self.plane.decisions.update(repr(table).encode())
        if len(table) < len(request.held):
            raise ViolationError(f"{request.name} has {len(request.held)} blocks in {len(table)} slots")
        for slot in table[len(request.held) :]:
            content = b"slot of %s" % request.name.encode()
            self.plane.write(slot, content)
            request.held.append(content)

    def compute(self, number: int, tokens: int) -> bool:
        request = self._get(number, RUNNING)
        if request is None or request.computed >= len(request.tokens):
            return False
        if self.setup.splits and self._skip(request):
            return True
        last = min(request.computed + tokens, len(request.tokens))
        if len(request.table) * BLOCK < last:
            if self._allocate(request.name, last) is None:
                self.counts["fault: device full"] += 1
                return True
            self._take_table(request)
        self._write(request, last)
        self.manager.cache_blocks(request.name, last)
        return True

    def _write(self, request: Request, last: int) -> None:
        """Its first ``last`` tokens are computed, in slots that it has."""
        first = request.computed
        contents = request.contents(last // BLOCK)
        for block in range(first // BLOCK, -(-last // BLOCK)):
            content = contents[block] if block < len(contents) else b"%d of %s" % (last, request.name.encode())
            self.plane.write(request.table[block], content)
            request.held[block] = content
        self._made.update(contents[first // BLOCK :])
        request.computed = last

    def decode(self, tokens: Sequence[int], skipped: int) -> bool:
        """A pass of all requests that run but each ``skipped``-th, in which each makes so many tokens as ``tokens``
        says in turn."""
        batch = {}
        for number, request in enumerate(self.requests.values()):
            made = [1 + (number + place) % 2 for place in range(tokens[number % len(tokens)])]
            if request.state is not RUNNING or (skipped and number % skipped == 0) or not self._decodes(request, made):
                continue
            self._write(request, len(request.tokens))
            request.tokens += made
            self._ask(request)
            batch[request.name] = made
        grown = self._advance(batch)
        for request in self.requests.values():
            if request.name not in grown:
                continue
            slots, table = grown[request.name], list(request.table)
            if slots is None:
                self.counts["no room while decoding"] += 1
                continue
            self._take_table(request)
            if request.table != [*table, *slots]:
                raise ViolationError(f"{request.name} was told that its table grew by {slots}")
        self.counts["tokens decoded"] += sum(map(len, batch.values()))
        return bool(batch)

    def _decodes(self, request: Request, made: Sequence[int]) -> bool:
        """Whether a pass can compute all that the request has."""
        if len(request.tokens) > len(request.table) * BLOCK or len(request.tokens) + len(made) > self.room:
            return False
        return not (self.setup.splits and self._skip(request))

    def _advance(self, made: dict[str, list[int]]) -> dict[str, list[int] | None]:
        return self.manager.advance({name: some[0] if len(some) == 1 else some for name, some in made.items()})

    def _skip(self, request: Request) -> bool:
        """Go on behind what was loaded while the front was computed, if it has come so far."""
        loaded = self.manager.skip(request.name)
        if loaded is None:
            return False
        count, kept = loaded.num_computed_tokens, request.computed // BLOCK
        table: list[int] = self.manager.block_table(request.name).tolist()
        if count <= request.computed // BLOCK * BLOCK or table[:kept] != request.table[:kept]:
            raise ViolationError(f"{request.name} computed {request.computed} tokens and skipped to {count}")
        self.counts["tails met"] += 1
        self.counts["tokens loaded"] += count - request.computed
        request.table, request.computed = table[:kept], count
        request.held = [*request.held[:kept], *request.contents(count // BLOCK)[kept:]]
        self._take_table(request)
        return True

    def append(self, number: int, tokens: Sequence[int]) -> bool:
        request = self.requests.get(number)
        if request is None or len(request.tokens) + len(tokens) > self.room:
            return False
        request.tokens += tokens
        self._ask(request)
        self.manager.append_tokens(request.name, list(tokens))
        return True

    def free(self, number: int) -> bool:
        request = self.requests.pop(number, None)
        if request is None:
            return False
        self.counts[f"aborted {self._moment(request)}"] += 1
        self.manager.free(request.name)
        return True

    def _moment(self, request: Request) -> str:
        if request.state is RUNNING:
            if self.plane.read_by_transfer(request.table):
                return "in mid-store"
            return "at its end" if request.computed == len(request.tokens) else "running"
        return {MATCHED: "while queued", LOADING: "in mid-load"}.get(request.state, request.state)

    def preempt(self, number: int) -> bool:
        request = self._get(number, MATCHED, LOADING, RUNNING)
        if request is None:
            return False
        self.counts[f"preempted {request.state}"] += 1
        self.manager.preempt(request.name)
        request.state, request.table, request.held = PREEMPTED, [], []
        return True

    def resume(self, number: int) -> bool:
        request = self._get(number, PREEMPTED)
        if request is None:
            return False
        self._promise(request, self.manager.resume(request.name))
        return True

    # ---- news ----------------------------------------------------------------------------------------------------

    def poll(self, picks: Sequence[int] = ()) -> bool:
        """Take note of the reports that ``picks`` deliver."""
        self.plane.deliver(picks)
        self._heard(0.0)
        return True

    def wait(self, seconds: float) -> bool:
        self._heard(seconds)
        return True

    def _heard(self, seconds: float) -> None:
        before = [request for request in self.requests.values() if request.state is LOADING]
        loaded = {news.request_id: news for news in self.manager.poll(seconds)}
        for request in before:
            news = loaded.pop(request.name, None)
            if news is not None:
                self.counts["load overdue"] += self.plane.clock.now >= request.deadline
                self._ready(request, news.num_computed_tokens)
            elif self.plane.clock.now >= request.deadline:
                raise ViolationError(f"{request.name} still waits for a load that was due at {request.deadline:.3f}")
        if loaded:
            raise ViolationError(f"{sorted(loaded)} were reported as loaded and did not load")

    # ---- the rest ------------------------------------------------------------------------------------------------

    def hint(self, branch: int, length: int, space: int, within: float) -> bool:
        self._asked |= prompt_digests(self.spaces[space], branch, length, BLOCK)
        hinted = self.manager.prefetch(prompt(branch, length), within=within or None, **_SPACES[space])
        self.plane.decisions.update(repr(hinted).encode())
        self.counts["pages prefetched"] += hinted.staged
        return True

    def expect(self, number: int, branch: int, length: int, space: int, within: float) -> bool:
        """A request of this number will come, or so the engine thinks."""
        if number in self.requests:
            return False
        self._asked |= prompt_digests(self.spaces[space], branch, length, BLOCK)
        self.hints.add(number)
        self.manager.expect(f"r{number}", prompt(branch, length), within, **_SPACES[space])
        return True

    def reorder(self, number: int, within: float) -> bool:
        self.manager.reorder({f"r{number}": within})
        return True

    def dismiss(self, number: int) -> bool:
        # It stays among the hints: what was brought for it is given back by a later step.
        self.manager.dismiss(f"r{number}")
        return True

    def measure(self, tokens: int, context: int, seconds: float) -> bool:
        """What the engine's computing took: what loading is weighed against."""
        self.manager.observe_prefill(tokens, context, seconds)
        return True

    def locate(self, branch: int, length: int, space: int) -> bool:
        """Nothing may be found that was not computed under this very namespace."""
        found = self.manager.locate(prompt(branch, length), **_SPACES[space])
        fingerprint = self.spaces[space]
        names = BlockNames(fingerprint, self.plane.generation(fingerprint), BLOCK)
        version = b"%d" % self.versions[space]
        identities = names.extend(prompt(branch, length).tolist())[: sum(found.values()) // BLOCK]
        if not all(identity + version in self._made for identity in identities):
            raise ViolationError(f"located {found} of a prompt, more than was computed in its namespace")
        return True

    def evict(self, tier: int, first: int, last: int, length: int, space: int) -> bool:
        """What nobody uses of some prompts, the branches from ``first`` to ``last``."""
        if Tier(tier) not in self.plane.content:
            return False
        self.manager.locate(prompt(first, length), **_SPACES[space])  # what was computed before is stored by that
        _, before = pages_of(self.catalog, Tier(tier))
        for branch in range(first, last + 1):
            gone = self.manager.evict(Tier(tier), prompt(branch, length), **_SPACES[space])
            self.plane.decisions.update(gone.tobytes())
            self.counts["pages evicted by name"] += len(gone)
        if any(space_of(identity) != self.spaces[space] for identity in before - pages_of(self.catalog, Tier(tier))[1]):
            raise ViolationError("an eviction by name took pages of another namespace")
        return True

    def flush(self, seconds: float) -> bool:
        self.manager.flush(seconds)
        for request in self.requests.values():  # flush polls for itself, so what it heard has to be asked for
            if request.state is LOADING and self.manager.ready(request.name):
                self._ready(request, None)
        return True

    def invalidate(self, space: int, durable: bool) -> bool:
        self._forget([space], durable, lambda: self.manager.invalidate(**_SPACES[space]))
        self.counts["invalidated"] += 1
        return True

    def reset(self, durable: bool) -> bool:
        """As after a change of weights."""
        self._forget(range(len(self.spaces)), durable, self.manager.reset)
        self.counts["reset"] += 1
        return True

    def _forget(self, spaces: Sequence[int], durable: bool, call: Callable[[], int]) -> None:
        self._serial += 1
        for space in spaces:
            self.versions[space] = self._serial
        self.plane.disk.durable = durable
        try:
            call()
            self._durable_versions = list(self.versions)
        except OSError:
            self.counts["fault: not durable"] += 1
        self.plane.disk.durable = True
        for request in self.requests.values():
            request.doomed |= request.space in spaces

    # ---- checks --------------------------------------------------------------------------------------------------

    def _get(self, number: int, *states: str) -> Request | None:
        request = self.requests.get(number)
        return request if request is not None and request.state in states else None

    def look(self) -> None:
        look(self)

    def audit(self) -> None:
        audit(self)

    def finish(self) -> None:
        finish(self)
