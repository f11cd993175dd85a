"""CostModel: measured lane speeds and prefill speed → how long a load and a recompute will take, as things stand.

Pure arithmetic: no thread, no clock and no bytes. Who calls what: whoever issues transfers says ``submitted`` and
``completed``; the engine's prefill timings come by ``observe_prefill``; whoever decides asks ``load`` and
``recompute``. Both answer None while they know nothing, and never guess.

    load      = wait for what the lanes have to do first + fixed cost + bytes / rate        (each lane learns both)
    recompute = passes · fixed + tokens · each + Σ (token, all it attends to) · each         (a pass: one prefill chunk)

A lane's seconds are those that it was *occupied* by a transfer: from its first page being taken, or the end of the
transfer before it, to its last page's end. So transfers that overlap are not counted twice, and the fixed cost is
learnt from those that found the lane idle. Of a hop that is fed by another, only the time in which it moved something.
How a coefficient is learnt from that: :class:`kvtier.fit.Fit`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from math import ceil
from typing import TYPE_CHECKING

from kvtier._core import Tier
from kvtier.fit import Fit
from kvtier.messages import Priority

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtier.messages import Completion

__all__ = ["LANES", "CostModel", "lanes_of"]

LANES = {
    (Tier.DEVICE, Tier.HOST): "offload",
    (Tier.HOST, Tier.DEVICE): "onboard",
    (Tier.HOST, Tier.DISK): "spill",
    (Tier.DISK, Tier.HOST): "stage",
}
_STORES = ("offload", "spill")
_SAMPLE = 7  # of how many stores one is learnt from
_NEAR_ZERO = 1e-9


@cache
def lanes_of(path: tuple[Tier, ...]) -> tuple[str, ...]:
    """The lanes of a path through tiers, e.g. stage, onboard."""
    return tuple(LANES[path[hop], path[hop + 1]] for hop in range(len(path) - 1))


@dataclass(slots=True)
class _Lane:
    fit: Fit = field(default_factory=lambda: Fit(ridge=(1e-3, 1e-6)))  # features: found idle or not, bytes
    began: float = 0.0  # of the transfer that ended last
    ended: float = 0.0
    busy_since: float = 0.0
    queued: list[int] = field(default_factory=lambda: [0] * len(Priority))  # bytes under way, by priority
    seen: int = 0
    pending: int = 0  # bytes that ended together with others and are counted with the next ones

    def occupied(self, ahead: int, now: float) -> float:
        """Seconds until ``ahead`` bytes that are under way have passed."""
        each = self.fit.coefficients[1] if self.fit.coefficients else 0.0
        spent = now - max(self.ended, self.busy_since)
        return max(0.0, ahead * each - max(0.0, spent)) if ahead else 0.0


@dataclass(slots=True)
class _UnderWay:
    lanes: tuple[str, ...]
    bytes: int
    priority: Priority
    submitted: float
    expected_end: float | None


class CostModel:
    """Predicts loads of blocks of ``page_bytes`` and prefills, in seconds.

    ``bytes_in_flight``: of less urgent work a lane may have taken before it looks at what is more urgent.
    """

    def __init__(self, page_bytes: int, *, bytes_in_flight: int = 8 << 20) -> None:
        if page_bytes < 1:
            raise ValueError(f"page_bytes: {page_bytes}; accepted: 1 or more")
        self.page_bytes = page_bytes
        self._in_flight = bytes_in_flight
        self._lanes = {name: _Lane() for name in LANES.values()}
        self._under_way: dict[int, _UnderWay] = {}
        # Features: passes, tokens, tokens × what they attend to. A request has many passes, so more of them may agree.
        self._prefill = Fit(ridge=(1e-3, 1e-6, 1e-4), window=7)
        self._pass_tokens = 1

    # ---- learning ------------------------------------------------------------------------------------------------

    def submitted(self, ticket: int, path: tuple[Tier, ...], blocks: int, priority: Priority, now: float) -> None:
        """A transfer of ``blocks`` pages was queued."""
        lanes, size = lanes_of(path), blocks * self.page_bytes
        # For what goes down nobody waits.
        seconds = self.load(path, blocks, now, priority) if lanes[0] not in _STORES else None
        for name in lanes:
            lane = self._lanes[name]
            if not any(lane.queued):
                lane.busy_since = now
            lane.queued[priority] += size
        self._under_way[ticket] = _UnderWay(lanes, size, priority, now, None if seconds is None else now + seconds)

    def promoted(self, ticket: int, priority: Priority) -> None:
        """A transfer under way is now served with another priority."""
        known = self._under_way.get(ticket)
        if known is None:
            return
        for name in known.lanes:
            self._lanes[name].queued[known.priority] -= known.bytes
            self._lanes[name].queued[priority] += known.bytes
        known.priority = priority

    def completed(self, done: Completion) -> None:
        """A transfer was reported. Only what moved is learnt from; a report that is not final is none."""
        if not done.final:
            return
        known = self._under_way.pop(done.ticket, None)
        if known is not None:
            for name in known.lanes:
                self._lanes[name].queued[known.priority] -= known.bytes
        for index, hop in enumerate(done.hops):
            lane = self._lanes.get(hop.lane)
            if lane is None or not (hop.carried and hop.ended_s > hop.started_s > 0):
                continue
            lane.seen += 1
            if hop.lane in _STORES and lane.seen % _SAMPLE != 1:  # no decision needs it: a sample is enough to tell of
                lane.ended = max(lane.ended, hop.ended_s)
                continue
            if index == 0:
                self._learn(lane, hop.carried, hop.started_s, hop.ended_s)
            else:  # it was fed by the hop before, and idle in between
                lane.ended = max(lane.ended, hop.ended_s)
                lane.fit.observe((0.0, float(hop.carried)), hop.busy_s)

    def _learn(self, lane: _Lane, size: int, started: float, ended: float) -> None:
        """The lane's time between two ends, or from an idle lane's start, belongs to the bytes that ended with it."""
        if ended <= lane.ended or started < lane.began:  # overtaken by others, or others were served in between
            lane.pending += size if ended <= lane.ended else 0
            lane.ended = max(lane.ended, ended)
            return
        idle = started >= lane.ended
        seconds = ended - (started if idle else lane.ended)
        size += 0 if idle else lane.pending
        lane.began, lane.ended, lane.pending = started, ended, 0
        lane.fit.observe((1.0 if idle else 0.0, float(size)), seconds)

    def overran(self, tickets: Iterable[int], now: float) -> None:
        """These have not ended by now: their first lane takes at least that long, whenever they will have ended."""
        waiting = [known for known in (self._under_way.get(ticket) for ticket in tickets) if known is not None]
        if not waiting:
            return
        lane = self._lanes[waiting[0].lanes[0]]
        size = sum(known.bytes for known in waiting if self._lanes[known.lanes[0]] is lane)
        seconds = now - max(lane.ended, min(known.submitted for known in waiting))
        features = (1.0, float(size))
        expected = lane.fit.predict(features)
        if expected is None or seconds > expected:
            lane.fit.observe(features, seconds)

    def observe_prefill(self, new_tokens: int, context: int, seconds: float) -> None:
        """One pass of the model computed ``new_tokens`` behind ``context`` tokens of one request in ``seconds``."""
        if new_tokens < 1 or context < 0:
            raise ValueError(f"new_tokens: {new_tokens}, context: {context}; accepted: 1 or more, 0 or more")
        self._pass_tokens = max(new_tokens, self._pass_tokens)
        self._prefill.observe((1.0, float(new_tokens), new_tokens * (context + 0.5 * new_tokens)), seconds)

    # ---- predicting ----------------------------------------------------------------------------------------------

    def queue_wait(self, lane: str, now: float, priority: Priority = Priority.DEMAND) -> float:
        """Seconds until ``lane`` would take a new transfer's first page, by what is under way as of now."""
        found = self._lanes[lane]
        if not any(found.queued):
            return 0.0
        ahead = sum(found.queued[: priority + 1])
        later = sum(found.queued[priority + 1 :])
        return found.occupied(ahead + min(later, self._in_flight), now)

    def load(
        self, path: tuple[Tier, ...], blocks: int, now: float, priority: Priority = Priority.DEMAND
    ) -> float | None:
        """Seconds until ``blocks`` pages have come along ``path``; None: one of its lanes has never been seen.

        Hops overlap, so the slowest lane counts, and of the others what they take for one page.
        """
        if blocks < 1:
            return 0.0
        slowest, rest = 0.0, 0.0
        for name in lanes_of(path):
            fit = self._lanes[name].fit
            if fit.coefficients is None:
                return None
            fixed, each = fit.coefficients
            whole = self.queue_wait(name, now, priority) + fixed + each * blocks * self.page_bytes
            one = fixed + each * self.page_bytes
            if whole > slowest:
                slowest, rest = whole, rest + (min(one, slowest) if slowest else 0.0)
            else:
                rest += one
        return slowest + rest

    def recompute(self, tokens: int, context: int) -> float | None:
        """Seconds to compute ``tokens`` behind ``context`` tokens, in passes as the engine makes them."""
        if tokens < 1:
            return 0.0
        if self._prefill.coefficients is None:
            return None
        passes = float(ceil(tokens / self._pass_tokens))
        return self._prefill.predict((passes, float(tokens), tokens * (context + 0.5 * tokens)))

    def expected_end(self, tickets: Iterable[int]) -> float | None:
        """By when the transfers were predicted to have ended, at their submission; None: of one nothing was known."""
        latest = 0.0
        for ticket in tickets:
            known = self._under_way.get(ticket)
            if known is not None:
                if known.expected_end is None:
                    return None
                latest = max(latest, known.expected_end)
        return latest

    def last_end(self, lane: str) -> float:
        """When a transfer last ended on the lane; 0: never."""
        return self._lanes[lane].ended

    # ---- a profile -----------------------------------------------------------------------------------------------

    def lane_speed(self, lane: str) -> tuple[float, float] | None:
        """(fixed seconds, bytes per second) as learnt; None: never seen."""
        coefficients = self._lanes[lane].fit.coefficients
        if coefficients is None:
            return None
        return coefficients[0], 1.0 / max(coefficients[1], 1e-15)

    def prefill_speed(self) -> tuple[tuple[float, ...], int] | None:
        """Seconds per pass, per token and per token × token attended to, and the tokens of a pass; None: never seen."""
        return None if self._prefill.coefficients is None else (self._prefill.coefficients, self._pass_tokens)

    def seed_lane(self, lane: str, fixed_s: float, bytes_per_s: float) -> None:
        """Begin with a lane's measured speed. ValueError for a lane that does not exist or a speed of no lane."""
        if lane not in self._lanes or not bytes_per_s > 0 or not fixed_s >= 0:
            raise ValueError(
                f"lane {lane!r}: {fixed_s} s, {bytes_per_s} bytes/s; accepted: {', '.join(self._lanes)}, "
                "0 or more seconds, more than 0 bytes/s"
            )
        self._lanes[lane].fit.seed((max(fixed_s, _NEAR_ZERO), 1.0 / bytes_per_s))

    def seed_prefill(self, coefficients: Sequence[float], pass_tokens: int) -> None:
        """Begin with measured coefficients, as :meth:`prefill_speed` gives them."""
        if pass_tokens < 1:
            raise ValueError(f"pass_tokens: {pass_tokens}; accepted: 1 or more")
        self._prefill.seed(tuple(coefficients))
        self._pass_tokens = pass_tokens

    def describe(self) -> str:
        """One line: what is known of every lane and of the engine's prefill."""
        parts = []
        for name in self._lanes:
            speed = self.lane_speed(name)
            if speed is not None:
                parts.append(f"{name} {speed[1] / 1e9:.3g} GB/s + {1e3 * speed[0]:.2g} ms")
        alone = self.recompute(self._pass_tokens, 0)
        if alone is not None:
            parts.append(f"prefill {self._pass_tokens / max(alone, 1e-12):,.0f} tokens/s")
        return ", ".join(parts) or "nothing measured yet"
