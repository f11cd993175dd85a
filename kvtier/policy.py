"""LoadPolicy: how long a prefix each request has loaded, reconsidered while it loads, and the account of it.

    "cost"     as far as loading is predicted to be faster than computing; what is not known yet is loaded
    "always"   all that was found
    "never"    nothing but what is on the device

When a prediction errs, the harm is bounded. A load that takes a quarter longer than predicted is weighed again, what is
still to come against computing it, and is cut at the prefix that has arrived where computing wins. Where nothing could
be predicted, that is first done when computing all of it would have ended: so it takes at most twice as long, as any
rule for an unknown price does at best (ski rental; Karlin et al. 1988).

A lane that was left for being slow is asked again: :class:`kvtier.probe.Probes`.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvtier.catalog import Catalog, Match, Residency, Tier
from kvtier.choice import Choice, History, Outcome, Progress, Watch, choose, nothing, split
from kvtier.probe import Probes
from kvtier.sequence import Sequence, State, tokens_by_tier

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvtier.config import CacheConfig
    from kvtier.costmodel import CostModel
    from kvtier.placement import Placement

__all__ = ["LoadPolicy"]

_NONE: frozenset[int] = frozenset()
_STALE = 5e-3  # seconds after which a choice is made again before loads are ordered; at once where others ordered some


class LoadPolicy:
    """Decides by ``costs``. ``clock`` is in monotonic seconds."""

    def __init__(
        self,
        config: CacheConfig,
        catalog: Catalog,
        placement: Placement,
        costs: CostModel,
        clock: Callable[[], float],
    ) -> None:
        self.rule = config.load_policy
        self.splits = False
        """Whether the engine can compute the front of a prefix while its tail loads."""
        self.history = History()
        self.cuts = 0
        self.orders = 0
        """Loads that somebody waits for, ordered so far: what was chosen before the last of them did not know of it."""
        self.probes = Probes(placement, costs, config.load_timeout_seconds)
        self._block = config.block_size
        self._catalog = catalog
        self._placement = placement
        self._costs = costs
        self._clock = clock

    # ---- the decision --------------------------------------------------------------------------------------------

    def decide(self, sequence: Sequence, match: Match) -> Choice:
        """How many of the found blocks to load, as things stand; ``match`` must still be leased."""
        now = self._clock()
        if not match.hit:  # nobody has seen it before, and nothing is to be weighed
            return self._take(sequence, nothing(self._costs, sequence.num_tokens), now, match.tiers, _NONE)
        reach = self._placement.within_reach(match.tiers)
        tiers, filling = match.tiers[:reach], match.filling[:reach]
        if self.rule == "cost":
            choice = choose(self._costs, tiers, filling, sequence.num_tokens, self._block, now)
            if self.splits:
                choice = split(self._costs, tiers, filling, sequence.num_tokens, self._block, now, choice)
            if choice.slower:
                self.probes.ask(match, choice.blocks, now)
        elif self.rule == "always":
            choice = Choice(reach, reach, None, None, None, None, "the policy is to load always")
        else:
            lower = np.flatnonzero(tiers != Tier.DEVICE)
            blocks = int(lower[0]) if len(lower) else reach
            choice = Choice(blocks, reach, None, None, None, None, "the policy is never to load")
        return self._take(sequence, choice, now, tiers, frozenset(filling[: choice.blocks].tolist()) - {0})

    def _take(
        self, sequence: Sequence, choice: Choice, now: float, tiers: npt.NDArray[np.uint8], fetched: frozenset[int]
    ) -> Choice:
        """This is the choice, for a request of which blocks were found in these ``tiers``."""
        again = sequence.choice is not None and sequence.state is State.MATCHED
        sequence.choice, sequence.chosen_at, sequence.chosen_after = choice, now, self.orders
        sequence.fetched = fetched
        outcome = self.history[sequence.request_id] if again else None
        if outcome is not None:
            outcome.choice = choice
        else:
            found = tokens_by_tier(tiers, self._block)
            self.history[sequence.request_id] = Outcome(choice, self._block, sequence.num_tokens, found)
        return choice

    def is_stale(self, sequence: Sequence) -> bool:
        """Whether what was chosen for it should be chosen again before loads are ordered."""
        if (
            self.rule != "cost"
            or sequence.broken
            or sequence.tail is not None
            or not (sequence.origin != Tier.DEVICE).any()
        ):
            return False
        return self.orders != sequence.chosen_after or self._clock() - sequence.chosen_at > _STALE

    # ---- while it loads ------------------------------------------------------------------------------------------

    def begun(self, sequence: Sequence) -> None:
        """Its loads have been ordered: say when to look at them again, and that those it waits for are in demand."""
        now = self._clock()
        sequence.watch = Watch(self._costs, self._block, now, sequence.choice if self.rule == "cost" else None)
        outcome = self.history[sequence.request_id]
        if outcome is not None:
            outcome.began = now
        if sequence.fetched:
            self._placement.promote(sequence.fetched, sequence.deadline)

    def should_cut(self, sequence: Sequence, now: float) -> bool:
        """Whether to go on with what has arrived: computing the rest is faster than to wait for it any longer."""
        if sequence.watch.review == inf:
            return False
        progress = self._progress(sequence)
        weighed = sequence.watch.overtaken(progress, now)
        if weighed is None:
            return False
        self.cuts += 1
        self._costs.overran(sequence.tickets, now)
        outcome = self.history[sequence.request_id]
        if outcome is not None and weighed.compute_s is not None:
            took, there = 1e3 * (now - sequence.watch.since), f"{progress.arrived} of {progress.end}"
            outcome.cut = (
                f"cut after {took:.3g} ms with {there} blocks there: {1e3 * weighed.compute_s:.3g} ms to compute the "
                f"others, {1e3 * weighed.wait_s:.3g} to wait for them"
            )
        return True

    def _progress(self, sequence: Sequence) -> Progress:
        """Of all that it was promised, whoever brings it."""
        there = self._catalog.state(sequence.nodes)[1][:, Tier.DEVICE] == Residency.READY
        arrived = len(there) if there.all() else int(np.argmin(there))
        before = int(np.count_nonzero(sequence.origin[: len(there)] == Tier.DEVICE))
        count = int(np.count_nonzero(there))
        orders = len(sequence.tickets.union(filter(self._placement.runs, sequence.fetched)))
        return Progress(arrived, len(there), count - before, len(there) - count, orders)

    # ---- the account ---------------------------------------------------------------------------------------------

    def loads_nothing(self, sequence: Sequence) -> None:
        """It has its slots, and computes all of it."""
        outcome = self.history[sequence.request_id]
        if outcome is not None:
            outcome.loaded_s, outcome.loaded_tokens = 0.0, 0

    def ended(self, sequence: Sequence, blocks: int) -> None:
        """So many blocks of the request are on the device now, and no more will come."""
        outcome = self.history[sequence.request_id]
        if outcome is not None:
            outcome.loaded_s = 0.0 if outcome.began is None else self._clock() - outcome.began
            outcome.loaded_tokens = blocks * self._block

    def skipped(self, sequence: Sequence, tokens: int) -> None:
        """The engine goes on behind so many more tokens, which were loaded while it computed."""
        outcome = self.history[sequence.request_id]
        if outcome is not None:
            outcome.loaded_tokens = (outcome.loaded_tokens or 0) + tokens
            outcome.loaded_s = 0.0 if outcome.began is None else self._clock() - outcome.began

    def computed(self, request_id: str, tokens: int, seconds: float) -> None:
        """The engine computed so many of the request's tokens."""
        outcome = self.history[request_id]
        if outcome is not None:
            outcome.computed_tokens += tokens
            outcome.computed_s += seconds

    def explain(self, request_id: str) -> str:
        """What was chosen for a request and why, with predicted and actual times; ValueError for one not known."""
        outcome = self.history[request_id]
        if outcome is None:
            raise ValueError(f"request_id: {request_id!r}; accepted: one of the last 1024 requests")
        return outcome.describe(request_id)
