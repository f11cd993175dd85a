"""A small continuous-batching engine over paged K/V that asks a CacheManager for every block it uses.

One :meth:`LabEngine.step` computes one token for every running sequence, in a batch of fixed width, and then one
chunk of the oldest unfinished prompt. Chunks lie on a fixed absolute grid and are padded to full width:

    positions     0          64         128        192
    chunks        |----------|----------|----------|-----
    a hit ends here                  ^ 112
    next step computes       |ppppppppww|                 p: phantom, computed again, not written; w: written

so that every row of every product has the same place in the same shape whether its prefix was computed, or loaded from
any tier, and the same bytes come out. Preemption takes the youngest sequence off the device; loads are waited for by
their request, not by the engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtier.lab.arrival import Arrival, NotThereError
from kvtier.lab.request import OnToken, Phase, Request, Result
from kvtier.waiting import Waiting

if TYPE_CHECKING:
    from kvtier.lab.attention import KVPool
    from kvtier.lab.model import LabModel
    from kvtier.manager import CacheManager

__all__ = ["LabEngine"]

_TIERS = ("device", "host", "disk", "remote")
_IDLE_WAIT = 0.01  # seconds in which a step with nothing to compute waits for a load


class LabEngine:
    """Runs requests of ``model`` on the blocks of ``pool``, which ``manager`` hands out and fills.

    ``chunk_tokens``: rows of a prefill chunk; a larger one is no faster on a CPU and makes a hit recompute more.
    ``max_batch``: sequences admitted at a time, and the width of the decode batch.
    ``keep_logits``: keep the logits of each first token in its Result.
    ``stall_seconds``: how long a request may wait for blocks that nothing else holds before it ends with "no room".
    """

    def __init__(
        self,
        model: LabModel,
        manager: CacheManager,
        pool: KVPool,
        *,
        chunk_tokens: int = 64,
        max_batch: int = 16,
        max_waiting: int = 4096,
        keep_logits: bool = False,
        stall_seconds: float = 30.0,
    ) -> None:
        for name, value in (("chunk_tokens", chunk_tokens), ("max_batch", max_batch), ("max_waiting", max_waiting)):
            if value < 1:
                raise ValueError(f"{name}: {value}; accepted: 1 or more")
        self.model, self.manager, self.pool = model, manager, pool
        self.chunk_tokens, self.max_batch, self.max_waiting = chunk_tokens, max_batch, max_waiting
        self.keep_logits, self.stall_seconds = keep_logits, stall_seconds
        self.clock = time.perf_counter
        self.by_layer = True
        """Whether a pass may begin beside the load of its prefix, where that comes layer by layer."""
        manager.can_split()
        manager.can_wait_for_layers()
        self.steps = 0
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []  # in order of admission: LOADING, PREFILL, DECODE
        self._requests: dict[str, Request] = {}
        self._results: list[Result] = []
        self._events: list[tuple[Request, int, float]] = []
        self._preempted_now = False
        self._last_worked = 0.0
        self._ahead = Waiting(self.clock)  # who waits, for the cache

    # ---- requests ------------------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        tokens: Sequence[int],
        max_new_tokens: int,
        *,
        ignore_eos: bool = False,
        salt: str | None = None,
        on_token: OnToken | None = None,
    ) -> None:
        """Submit a request; its time to first token runs from here. Greedy, to an end token or ``max_new_tokens``.

        ValueError: an id in use, no tokens, ids outside the vocabulary, more than the model's context or the pool
        holds, or a full queue.
        """
        submitted = self.clock()
        ids = [int(token) for token in tokens]
        if request_id in self._requests:
            raise ValueError(f"request_id: {request_id!r} is in use; accepted: an id of no living request")
        if not ids or max_new_tokens < 1:
            raise ValueError(
                f"request {request_id!r}: {len(ids)} tokens, {max_new_tokens} to generate; accepted: 1 or more"
            )
        if min(ids) < 0 or max(ids) >= self.model.vocab_size:
            raise ValueError(f"tokens: {min(ids)} to {max(ids)}; accepted: 0 to {self.model.vocab_size - 1}")
        total, room = len(ids) + max_new_tokens, self.pool.blocks * self.pool.block_size
        if total > self.model.context_limit:
            raise ValueError(
                f"context: {total} tokens with the output; {self.model.name} allows {self.model.context_limit}"
            )
        if total - 1 > room:  # the last token's K/V is never computed
            raise ValueError(
                f"device pool: {total} tokens with the output; it holds {room}: enlarge it or ask for less"
            )
        if len(self._waiting) >= self.max_waiting:
            raise ValueError(f"max_waiting: {len(self._waiting)} requests wait already; accepted: {self.max_waiting}")
        stop = frozenset() if ignore_eos else self.model.eos_tokens
        request = Request(request_id, ids, len(ids), max_new_tokens, stop, salt, on_token, submitted)
        self._requests[request_id] = request
        self._waiting.append(request)
        self._ahead.enter(request_id)

    def abort(self, request_id: str) -> bool:
        """End a request, in whatever phase it is; False if there is none of that id."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request, "abort")
        return True

    @property
    def unfinished(self) -> int:
        return len(self._requests)

    def phase(self, request_id: str) -> Phase:
        """Where a request is; FINISHED for an id that is not living."""
        request = self._requests.get(request_id)
        return Phase.FINISHED if request is None else request.phase

    def take_results(self) -> list[Result]:
        """The results of what has ended since the last call, in order of ending."""
        results, self._results = self._results, []
        return results

    def run(self, timeout_s: float = 600.0) -> list[Result]:
        """Step until no request is left; what has not ended in time is aborted. Returns :meth:`take_results`."""
        deadline = self.clock() + timeout_s
        while self._requests:
            if self.clock() > deadline:
                for request_id in list(self._requests):
                    self.abort(request_id)
                break
            self.step()
        return self.take_results()

    # ---- a step --------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one batch; True when something was computed. Waits at most some milliseconds, for loads, when not."""
        self.steps += 1
        self._preempted_now = False
        self._take_loaded(0.0)
        self._admit()
        self._announce()
        worked = self._decode()
        worked = self._prefill() or worked
        if worked:
            self._last_worked = self.clock()
        elif self._requests:
            self._take_loaded(_IDLE_WAIT)
            self._end_stalled()
        events, self._events = self._events, []
        for request, token, when in events:
            if request.on_token is not None:
                request.on_token(request.request_id, token, when)
        return worked

    def _take_loaded(self, timeout: float) -> None:
        for loaded in self.manager.poll(timeout):
            request = self._requests.get(loaded.request_id)
            if request is not None and request.phase is Phase.LOADING:
                self._begin(request, loaded.num_computed_tokens, dict(loaded.tokens_by_tier))

    def _admit(self) -> None:
        """Give the oldest waiting requests their slots, in order, until one finds no room."""
        while self._waiting and len(self._active) < self.max_batch and not self._preempted_now:
            request = self._waiting[0]
            if not self._start(request):
                if request.stalled_since is None:
                    request.stalled_since = self.clock()
                return
            self._waiting.popleft()
            self._active.append(request)
            self._ahead.leave(request.request_id)

    def _announce(self) -> None:
        """Tell the cache of those that have to wait, and about when each will start."""
        if not self._waiting:
            return
        for request_id, within in self._ahead.news():
            request = self._requests[request_id]
            self.manager.expect(request_id, request.tokens, within, salt=request.salt)
        if changes := self._ahead.changes():
            self.manager.reorder(changes)

    def _start(self, request: Request) -> bool:
        rid, manager = request.request_id, self.manager
        if request.preempted:
            found = manager.resume(rid)
        else:
            found = manager.get_computed_blocks(rid, request.tokens, salt=request.salt)
        request.promised, request.promised_by_tier = found.num_tokens, dict(found.tokens_by_tier)
        table = manager.allocate_slots(rid, len(request.tokens))
        if table is None:  # let go of the match: what it pins may be what the others need
            manager.preempt(rid) if request.preempted else manager.free(rid)
            return False
        request.preempted, request.phase, request.stalled_since = False, Phase.LOADING, None
        if manager.ready(rid):  # all of it is on the device; anything else is heard of by poll
            self._begin(request, request.promised, request.promised_by_tier)
        elif len(request.tokens) - request.promised > min(request.generated, 1):  # else the rest is decoded
            request.arriving = self.by_layer and manager.comes_by_layer(rid)
        return True

    def _begin(self, request: Request, computed: int, by_tier: dict[str, int]) -> None:
        """The cached prefix is on the device: what lies behind it is to be computed."""
        result = request.result
        result.lost_tokens += request.promised - computed
        if not result.tokens_by_tier:
            result.tokens_by_tier = {tier: by_tier.get(tier, 0) for tier in _TIERS}
            result.tokens_by_tier["computed"] = request.prompt_tokens - computed
        else:
            result.recomputed_tokens += max(request.computed - computed, 0)
        request.computed = computed
        request.table = self.manager.block_table(request.request_id)
        resumed_whole = request.generated > 0 and computed == len(request.tokens) - 1
        request.phase = Phase.DECODE if resumed_whole else Phase.PREFILL

    def _decode(self) -> bool:
        # Oldest first: what a need of theirs preempts is younger, and so not in the batch yet.
        batch = [r for r in list(self._active) if r.phase is Phase.DECODE and self._cover(r, len(r.tokens))]
        if not batch:
            return False
        device = self.pool.device
        positions = np.zeros(self.max_batch, np.int64)
        tokens = np.zeros(self.max_batch, np.int64)
        positions[: len(batch)] = [r.computed for r in batch]
        tokens[: len(batch)] = [r.tokens[-1] for r in batch]
        step = self.pool.decode_step([r.table for r in batch], positions[: len(batch)])
        rows = torch.from_numpy(tokens).to(device), torch.from_numpy(positions).to(device)
        logits = self.model.forward(*rows, step, -1)
        assert logits is not None
        chosen = logits[: len(batch)].argmax(dim=-1).tolist()
        self._advance(dict(zip((r.request_id for r in batch), chosen, strict=True)), self.clock())
        return True

    def _prefill(self) -> bool:
        for request in list(self._active):
            if request.phase is Phase.PREFILL:
                self._skip(request)
                start = request.computed // self.chunk_tokens * self.chunk_tokens
                end = min(start + self.chunk_tokens, len(request.tokens))
                if self._cover(request, end):
                    self._prefill_chunk(request, start, end)
                    return True
        if all(request.phase is Phase.LOADING for request in self._active):  # else the others' work hides the load
            for request in self._active:
                if request.arriving:
                    return self._prefill_early(request)
        return False

    def _prefill_early(self, request: Request) -> bool:
        """The first chunk behind a prefix that comes by layers, each computed as soon as its K/V is there."""
        request.arriving, request.computed = False, request.promised
        request.table = self.manager.block_table(request.request_id)
        start = request.computed // self.chunk_tokens * self.chunk_tokens
        end = min(start + self.chunk_tokens, len(request.tokens))
        try:
            self._prefill_chunk(request, start, end, Arrival(self.manager, request.request_id, self.clock))
        except NotThereError:  # poll says what is, and it is computed again from there
            return False
        return True

    def _skip(self, request: Request) -> None:
        """Go on behind what was loaded while the front was computed."""
        loaded = self.manager.skip(request.request_id)
        if loaded is None:
            return
        by_tier = request.result.tokens_by_tier
        for tier, tokens in loaded.tokens_by_tier.items():
            by_tier[tier] += tokens
            by_tier["computed"] -= tokens
        request.computed = loaded.num_computed_tokens
        request.table = self.manager.block_table(request.request_id)

    def _prefill_chunk(self, request: Request, start: int, end: int, arrival: Arrival | None = None) -> None:
        began, width, device = self.clock(), self.chunk_tokens, self.pool.device
        tokens = np.zeros(width, np.int64)
        tokens[: end - start] = request.tokens[start:end]
        # Padding keeps its own position, so it must stay within the model's table of positions.
        positions = np.minimum(np.arange(start, start + width), self.model.context_limit - 1)
        step = self.pool.prefill_step(request.table, start, width, request.computed, end, arrival)
        last = end == len(request.tokens)
        rows = torch.from_numpy(tokens).to(device), torch.from_numpy(positions).to(device)
        logits = self.model.forward(*rows, step, end - 1 - start if last else None)
        token = int(logits[0].argmax()) if logits is not None else -1
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # else only the launch would be timed
        waited = 0.0 if arrival is None else arrival.waited
        self.manager.observe_prefill(width, start, self.clock() - began - waited, request.request_id)
        if arrival is not None and not self._has_arrived(request):
            return
        now = self.clock()
        if logits is None:
            self._computed(request, end)
            return
        if self.keep_logits and request.generated == 0:
            request.result.first_logits = logits[0].float().cpu().numpy()
        request.phase = Phase.DECODE
        self._advance({request.request_id: token}, now)

    def _has_arrived(self, request: Request) -> bool:
        """Whether the cache says, now that the pass has ended, that all it promised is there; else the pass is void."""
        promised = request.promised
        self._take_loaded(0.0)
        return request.phase is Phase.PREFILL and request.computed == promised

    # ---- bookkeeping ---------------------------------------------------------------------------------------------

    def _computed(self, request: Request, upto: int) -> None:
        """K/V of the first ``upto`` tokens is in its slots; full blocks become everyone's."""
        self._count_computed(request, upto)
        self.manager.cache_blocks(request.request_id, upto)

    def _advance(self, made: dict[str, int], now: float) -> None:
        """K/V of all tokens of these requests is in their slots, and each has made another one."""
        ended = {}
        for request_id, token in made.items():
            request = self._requests[request_id]
            self._count_computed(request, len(request.tokens))
            reason = self._emit(request, token, now)
            if reason:
                ended[request_id] = reason
        going_on = {request_id: token for request_id, token in made.items() if request_id not in ended}
        for request_id, slots in self.manager.advance(going_on).items():
            if slots is not None:
                request = self._requests[request_id]
                request.table = np.append(request.table, np.array(slots, np.uint32))
        for request_id, reason in ended.items():  # of the last token nothing is computed
            request = self._requests[request_id]
            self.manager.cache_blocks(request_id, request.computed)
            self._finish(request, reason)

    def _count_computed(self, request: Request, upto: int) -> None:
        request.result.computed_tokens += upto - request.computed
        request.computed = upto

    def _emit(self, request: Request, token: int, now: float) -> str:
        """Give it its next token; returns why it ends with that, or nothing."""
        request.tokens.append(token)
        request.result.tokens.append(token)
        request.result.token_times.append(now)
        self._events.append((request, token, now))
        if token in request.stop:
            return "stop"
        return "length" if request.generated >= request.max_new_tokens else ""

    def _cover(self, request: Request, tokens: int) -> bool:
        """Make the request's table cover so many tokens; False when it has to wait, or was itself preempted."""
        if tokens <= len(request.table) * self.pool.block_size:
            return True
        table = self.manager.allocate_slots(request.request_id, tokens)
        if table is None and not self._preempted_now:
            # One a step: its pages may have to be stored before their slots are free, which takes no more than a step.
            self._preempted_now = True
            victim = self._active[-1]
            self._preempt(victim)
            if victim is not request:
                table = self.manager.allocate_slots(request.request_id, tokens)
        if table is None:
            if request.stalled_since is None:
                request.stalled_since = self.clock()
            return False
        request.table, request.stalled_since = table, None
        return True

    def _preempt(self, request: Request) -> None:
        self.manager.preempt(request.request_id)
        request.preempted, request.phase = True, Phase.WAITING
        request.result.preemptions += 1
        self._active.remove(request)
        self._waiting.appendleft(request)
        self._ahead.enter(request.request_id, first=True)

    def _end_stalled(self) -> None:
        """End what has waited for blocks too long while no other sequence was there to give any back."""
        now = self.clock()
        for request in [*self._active, *list(self._waiting)[:1]]:
            since = request.stalled_since
            if since is not None and now - max(since, self._last_worked) > self.stall_seconds:
                self._finish(request, "no room")

    def _finish(self, request: Request, reason: str) -> None:
        self.manager.free(request.request_id)
        self.manager.dismiss(request.request_id)
        if request in self._active:
            self._active.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
            self._ahead.drop(request.request_id)
        del self._requests[request.request_id]
        request.phase = Phase.FINISHED
        request.result.finish_reason, request.result.finished = reason, self.clock()
        self._results.append(request.result)
