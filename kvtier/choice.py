"""How long a prefix to load and what to compute, and who waits: the decisions, and the account of what became of them.

With k blocks loaded and the rest computed behind them, a request of n tokens has its KV after

    load(k) + recompute(n - k·block, k·block)

Within a run of blocks from one tier, each further block costs the same to load and saves more than the one before it
(it lies deeper, and attends to more). So the best k is at the end of a run, or before it: few are looked at.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier._core import Tier

if TYPE_CHECKING:
    from kvtier.costmodel import CostModel

__all__ = [
    "ONBOARD",
    "STAGE",
    "STAGE_ONBOARD",
    "Choice",
    "History",
    "Outcome",
    "Progress",
    "Watch",
    "Weighed",
    "choose",
    "is_synchronous",
    "nothing",
    "split",
]

ONBOARD = (Tier.HOST, Tier.DEVICE)
STAGE = (Tier.DISK, Tier.HOST)
STAGE_ONBOARD = (Tier.DISK, Tier.HOST, Tier.DEVICE)

_ENDS = 8  # ends of runs that are looked at; where there are more, the last ones
_FAR = 1 / 4  # of what the other takes, up to which a split is looked at
_SPLIT = 0.8  # of the time of the better alone, up to which it is chosen
_OVERRUN = 1.25  # of the predicted time, from when a load is weighed again
_SLACK = 2e-3  # seconds on top, for what is noticed late
_DETOUR = 5e-3  # seconds that a load beside the steps costs its request at least: a step more, and what wakes it
_LONGEST = 50e-3  # seconds that a step is held for a load at most, also where nobody else waits: somebody may come
_CLEARLY = 0.97  # less is loaded than could be where that takes no more than this share of the time


class Choice(NamedTuple):
    """A prefix to load, in blocks, and why. Seconds are predictions; None: unknown."""

    blocks: int
    found: int
    load_s: float | None
    """Until the chosen prefix is on the device."""
    compute_s: float | None
    """To compute what follows it."""
    all_loaded_s: float | None
    """With all that was found loaded, the rest computed."""
    all_computed_s: float | None
    """With nothing loaded that is not on the device already."""
    why: str
    front: int = 0
    """Where above 0: nothing is waited for; so many blocks are expected to be computed while those behind them load."""
    trial: bool = False
    """Whether it is loaded to learn how long that takes, and ``load_s`` is what it may take."""

    @property
    def slower(self) -> bool:
        """Whether something was found that is not loaded because computing it is faster."""
        return self.blocks < self.found and not self.front


def nothing(model: CostModel, tokens: int) -> Choice:
    """Of a prompt of so many tokens no block was found."""
    return Choice(0, 0, 0.0, model.recompute(tokens, 0), None, None, "")


def choose(
    model: CostModel,
    tiers: npt.NDArray[np.uint8],
    filling: npt.NDArray[np.uint64],
    tokens: int,
    block: int,
    now: float,
    *,
    foreign: bool = False,
) -> Choice:
    """Of a prompt of ``tokens`` tokens, how many of the blocks that were found to load.

    ``tiers``: the fastest tier in which each found block is ready; ``filling``: the ticket that is bringing it to a
    faster one, or 0. Where a speed is unknown everything is loaded: that is what a cache is for, and how it is learnt.
    ``foreign``: the device is the engine's own, and what others bring there is in host memory for this request.
    """
    found = len(tiers)
    if not found:
        return nothing(model, tokens)
    runs = _runs(model, tiers, filling, foreign)
    if not runs:
        rest = model.recompute(tokens - found * block, found * block)
        return Choice(found, found, 0.0, rest, None, None, "all of it is on the device")
    first = runs[0].first
    all_computed = model.recompute(tokens - first * block, first * block)
    whole = _load(model, runs, first, found, now)
    rest = model.recompute(tokens - found * block, found * block)
    if all_computed is None or whole is None or rest is None:
        unknown = "the engine's prefill" if all_computed is None else "the lanes"
        return Choice(found, found, whole, rest, None, all_computed, f"nothing is known of {unknown} yet")
    best = (all_computed, 0.0, all_computed, first)
    for run in runs[-_ENDS:-1]:
        load = _load(model, runs, first, run.end, now)
        compute = model.recompute(tokens - run.end * block, run.end * block)
        if load is not None and compute is not None:
            best = min(best, (load + compute, load, compute, run.end))
    all_loaded = whole + rest
    if best[0] < _CLEARLY * all_loaded:
        _, load, compute, end = best
        return Choice(end, found, load, compute, all_loaded, all_computed, "computing is faster")
    return Choice(found, found, whole, rest, all_loaded, all_computed, "")


class _Run(NamedTuple):
    """Blocks [first, end) that come the same way."""

    first: int
    end: int
    tier: int
    ticket: int  # that brings them to a faster one, or 0
    lands: bool  # on the device, for this request too


def _runs(
    model: CostModel, tiers: npt.NDArray[np.uint8], filling: npt.NDArray[np.uint64], foreign: bool = False
) -> list[_Run]:
    """The blocks from the first that is not on the device."""
    away = tiers != Tier.DEVICE
    first = int(away.argmax()) if len(away) else 0
    if not len(away) or not away[first]:
        return []
    changes = tiers[first + 1 :] != tiers[first:-1]
    if filling.any():
        changes |= filling[first + 1 :] != filling[first:-1]
    starts = [first, *(changes.nonzero()[0] + (first + 1)).tolist()]
    ends = [*starts[1:], len(tiers)]
    runs = []
    for start, end in zip(starts, ends, strict=True):
        ticket = int(filling[start])
        lands = ticket != 0 and not foreign and model.onboards(ticket)
        runs.append(_Run(start, end, int(tiers[start]), ticket, lands))
    return runs


def split(
    model: CostModel,
    tiers: npt.NDArray[np.uint8],
    filling: npt.NDArray[np.uint64],
    tokens: int,
    block: int,
    now: float,
    choice: Choice,
) -> Choice:
    """``choice``, or to compute the front of what was found while its tail loads, where that is clearly faster.

    After x computed blocks the rest must just have come: recompute(x) = load(found - x), found by bisection. Where one
    of both takes several times as long as the other, little is to be won, and computing is not free to others.
    """
    if choice.all_loaded_s is None or choice.load_s is None or choice.compute_s is None:
        return choice
    found, runs = len(tiers), _runs(model, tiers, filling)
    first = runs[0].first if runs else found
    rest = model.recompute(tokens - found * block, found * block)
    whole = model.recompute((found - first) * block, first * block)
    if rest is None or whole is None or not _FAR < whole / max(choice.all_loaded_s - rest, 1e-9) < 1 / _FAR:
        return choice
    low, high = 0, found - first
    while high - low > 1:
        middle = (low + high) // 2
        load = _load(model, runs, first + middle, found, now)
        compute = model.recompute(middle * block, first * block)
        if load is None or compute is None:
            return choice
        low, high = (middle, high) if compute < load else (low, middle)
    front = model.recompute(high * block, first * block)
    if front is None or front + rest > _SPLIT * (choice.load_s + choice.compute_s):
        return choice
    why = "computing the front while the tail loads is faster"
    return choice._replace(blocks=first, load_s=front, compute_s=rest, why=why, front=high)


def is_synchronous(tiers: npt.NDArray[np.uint8], load_s: float | None, others: int) -> bool:
    """Whether an engine's step should wait for a load, in place of the request waiting for it beside the steps.

    ``tiers``: where each block of it is; ``load_s``: seconds that it is predicted to take, None: unknown; ``others``:
    requests that would wait with it. Only from host memory, since a disk may stall; only for a short time; and only
    where all the others together do not wait longer for it than the request gains.
    """
    if load_s is None or not len(tiers) or (tiers != Tier.HOST).any():
        return False
    return load_s <= _LONGEST and others * load_s <= _DETOUR


class Progress(NamedTuple):
    """How far what a request waits for has come, in its blocks.

    blocks     |<- arrived ->|== some are there, ``left`` are still to come ==|  computed in any case
               0                                                             end
    """

    arrived: int
    """All before it are there."""
    end: int
    come: int
    """Have come since it began to wait."""
    left: int
    orders: int
    """In which these come; nothing is heard of one before it has ended."""


class Weighed(NamedTuple):
    """A load that is overdue: what waiting for what is missing would take, and what computing it. Seconds."""

    wait_s: float
    compute_s: float | None

    @property
    def computing_wins(self) -> bool:
        return self.compute_s is not None and self.compute_s < self.wait_s


class Watch:
    """Of what a request waits for, its own load or what others bring: when that is weighed against computing.

    It is first done when it takes a quarter longer than predicted; where its time could not be predicted, when
    computing all of it would have ended. Where nothing is known of computing it never is.
    """

    __slots__ = ("_block", "_came", "_come", "_costs", "review", "since")

    def __init__(self, costs: CostModel, block: int, now: float, choice: Choice | None) -> None:
        """It is waited for from ``now`` on, because of ``choice``; None: it was not for the time that it takes.
        ``block``: tokens of one."""
        self._costs, self._block = costs, block
        self.since = self._came = now
        self._come = 0
        self.review = inf
        """When it is to be weighed next."""
        if choice is not None and choice.all_computed_s is not None:
            self.review = now + (choice.all_computed_s if choice.load_s is None else _OVERRUN * choice.load_s + _SLACK)

    def note(self, come: int, now: float) -> None:
        """So many blocks have come by now, whoever had them brought."""
        if come > self._come:
            self._come, self._came = come, now

    def overtaken(self, progress: Progress, now: float) -> Weighed | None:
        """What was weighed, where it is time to and computing wins; else None, and ``review`` says when to look again.
        ``progress`` is as of now."""
        self.note(progress.come, now)
        if now < self.review:
            return None
        weighed = self.weigh(progress, now)
        self.review = inf if weighed.computing_wins else now + (_OVERRUN - 1) * (now - self.since) + _SLACK
        return weighed if weighed.computing_wins else None

    def weigh(self, progress: Progress, now: float) -> Weighed:
        """What is left takes as long by the page as what has come did. Where the next order has taken longer than that
        already, it takes as long again, and so do the others; likewise where nothing has come."""
        arrived, end, come, left, orders = progress
        compute = self._costs.recompute((end - arrived) * self._block, arrived * self._block)
        if not come or not left:
            return Weighed(now - self.since if left else 0.0, compute)
        silent, usual = now - self._came, left * (self._came - self.since) / come
        late = silent * max(orders, 1)
        return Weighed(late if late > usual else usual - silent, compute)


def _load(model: CostModel, runs: list[_Run], first: int, end: int, now: float) -> float | None:
    """Seconds until blocks [first, end) are on the device. What others are bringing is waited for, not read again."""
    blocks, staged = 0, 0
    staging: set[int] = set()
    landing: set[int] = set()
    for run in runs:
        count = min(run.end, end) - max(run.first, first)
        if count <= 0:
            continue
        if run.ticket:
            (landing if run.lands else staging).add(run.ticket)
        elif run.tier == Tier.DISK:
            staged += count
        if run.tier != Tier.DEVICE and not run.lands:
            blocks += count
    stage = model.load(STAGE_ONBOARD, staged, now)
    onboard = model.load(ONBOARD, blocks, now)
    landed, there = model.expected_end(landing), model.expected_end(staging)
    if stage is None or onboard is None or landed is None or there is None:
        return None
    return max(stage, landed - now, max(0.0, there - now) + onboard)


@dataclass(slots=True)
class Outcome:
    """What was chosen for a request, and what became of it. Seconds."""

    choice: Choice
    block: int
    tokens: int
    by_tier: dict[str, int]
    """Tokens found, by tier."""
    began: float | None = None
    loaded_s: float | None = None
    loaded_tokens: int | None = None
    cut: str = ""
    computed_s: float = 0.0
    computed_tokens: int = 0

    def describe(self, request_id: str) -> str:
        """One line for people."""
        choice = self.choice
        found = ", ".join(f"{count} in {tier}" for tier, count in self.by_tier.items()) or "none"
        text = f"{request_id}: {self.tokens} tokens, found {found}; chose to load {choice.blocks * self.block}"
        text += f" ({choice.why})" if choice.why else ""
        text += f" (about {choice.front * self.block} tokens of it)" if choice.front else ""
        text += f"; predicted: load {_ms(choice.load_s)}, compute the rest {_ms(choice.compute_s)}"
        if choice.all_computed_s is not None or choice.all_loaded_s is not None:
            text += f" (all loaded {_ms(choice.all_loaded_s)}, all computed {_ms(choice.all_computed_s)})"
        if self.loaded_s is not None:
            text += f"; took: load of {self.loaded_tokens} tokens {_ms(self.loaded_s)}"
            text += f", compute of {self.computed_tokens} {_ms(self.computed_s)}" if self.computed_tokens else ""
        elif self.began is not None:
            text += "; loading"
        return text + (f"; {self.cut}" if self.cut else "")


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1e3 * seconds:.3g} ms"


class History:
    """The outcomes of the last ``limit`` requests."""

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._outcomes: OrderedDict[str, Outcome] = OrderedDict()

    def __getitem__(self, request_id: str) -> Outcome | None:
        return self._outcomes.get(request_id)

    def __setitem__(self, request_id: str, outcome: Outcome) -> None:
        self._outcomes.pop(request_id, None)
        self._outcomes[request_id] = outcome
        if len(self._outcomes) > self._limit:
            self._outcomes.popitem(last=False)
