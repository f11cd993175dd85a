"""What ``kvtier bench prefetch`` found, as typed rows: the content of its ``result.json``.

A row keeps what was measured prompt by prompt, and everything else in it follows from that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from kvtier.lab.results import Spread

__all__ = ["ARMS", "Arm", "Arms", "Cell", "Each", "PrefetchResult", "PrefetchRow", "bootstrap_bounds"]

Arm = Literal["load", "recompute", "kvtier", "device"]
ARMS: tuple[Arm, ...] = ("load", "recompute", "kvtier", "device")


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Arms(_Row):
    """Time to first token of the same prompts, served by turns."""

    load: Spread
    """Everything found is loaded, with the same hints."""
    recompute: Spread
    """Nothing is loaded."""
    kvtier: Spread
    device: Spread
    """Found on the device: nothing to load."""


class Each(_Row):
    """The same by prompt, rounded to a microsecond: the n-th number of each list is of the n-th prompt."""

    load: list[float]
    recompute: list[float]
    kvtier: list[float]
    device: list[float]


class PrefetchRow(_Row):
    """One cell: a look-ahead, a drive and a share of the prompt that was seen before."""

    lookahead_ms: float
    lane_gbps: float | None
    """The drive that was emulated; null: the machine's own."""
    idle_gbps: float
    """Of the lane from disk where nothing else is asked of it: median of ``idle_gbps_each``."""
    measured_gbps: float
    """Of the same lane over the very loads that are served."""
    reuse: float
    prompt_tokens: int
    found_tokens: int
    n: int
    ttft_ms: Arms
    best: Literal["load", "recompute"]
    """The reference with the lower median."""
    ratio_to_best: float
    """Median over prompts of kvtier's TTFT over the better reference's with the same prompt."""
    ratio_to_best_upper: float
    """Upper end of its 95 % bootstrap interval."""
    ratio_to_oracle: float
    """The same to the better of both for each prompt, known afterwards."""
    load_to_floor: float
    """Median over prompts of the TTFT of loading everything over a device hit's plus ``load_ms``."""
    load_to_floor_upper: float
    """Upper end of its 95 % bootstrap interval."""
    load_to_floor_nominal: float | None
    """The same with bytes over the rate of the emulated drive; null on the machine's own."""
    load_to_floor_own: float
    """The same with bytes over ``measured_gbps``. The loads set their own limit here, so it tells only of what is
    beside the lane."""
    hidden: float | None
    """Median over prompts of 1 - (kvtier's TTFT - a device hit's) / ``load_ms``; null without a look-ahead."""
    hidden_lower: float | None
    hidden_upper: float | None
    """The ends of its 95 % bootstrap interval."""
    hidden_held: float | None
    """The same of the prompts in ``held`` alone."""
    load_ms: float
    """Bytes of the pages that were found over ``idle_gbps``."""
    lookahead_exceeds_load: bool
    loaded_share: float
    """Of the found tokens, those that kvtier loaded, over all prompts."""
    held: list[int]
    """The prompts whose look-ahead passed as a whole, in every arm. That of the others ended when it had nothing left
    to bring."""
    idle_gbps_each: list[float]
    """Bytes over the seconds in which a page was on the lane, of loads between the prompts: of all documents at once,
    with nothing else running. So what is before the first page and behind the last is no part of it."""
    ttft_ms_each: Each


@dataclass(slots=True)
class Cell:
    """What is measured of one look-ahead, drive and share."""

    lookahead_ms: float
    lane_gbps: float | None
    reuse: float
    prompt_tokens: int
    found_tokens: int
    load_bytes: int
    """Of the pages that a prompt finds."""
    ttft_ms: dict[Arm, list[float]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    """By prompt."""
    held: list[int] = field(default_factory=list)
    idle_gbps: list[float] = field(default_factory=list)
    loaded_tokens: int = 0
    """By kvtier, of all prompts."""
    own_bytes: int = 0
    own_s: float = 0.0
    """The lane from disk in the loads of "load"."""

    def row(self, seed: int) -> PrefetchRow:
        """The row; ``seed`` draws the resamples of its intervals."""
        times = self.ttft_ms
        is_load = median(times["load"]) < median(times["recompute"])
        best: Literal["load", "recompute"] = "load" if is_load else "recompute"
        ratios = [own / other for own, other in zip(times["kvtier"], times[best], strict=True)]
        both = zip(times["load"], times["recompute"], strict=True)
        oracle = [own / min(pair) for own, pair in zip(times["kvtier"], both, strict=True)]
        idle = median(self.idle_gbps)
        load_ms, own_gbps = self._load_ms(idle), self.own_bytes / self.own_s / 1e9
        to_floor = self._to_floor(load_ms)
        hidden = [
            1 - (own - hit) / load_ms
            for own, hit in zip(times["kvtier"], times["device"], strict=True)
            if self.lookahead_ms
        ]
        lower, upper = bootstrap_bounds(hidden, seed) if hidden else (None, None)
        held = [hidden[number] for number in self.held] if hidden else []
        return PrefetchRow(
            lookahead_ms=self.lookahead_ms,
            lane_gbps=self.lane_gbps,
            idle_gbps=idle,
            measured_gbps=own_gbps,
            reuse=self.reuse,
            prompt_tokens=self.prompt_tokens,
            found_tokens=self.found_tokens,
            n=len(ratios),
            ttft_ms=Arms(**{arm: Spread.of(1e-3 * ms for ms in each) for arm, each in times.items()}),
            best=best,
            ratio_to_best=median(ratios),
            ratio_to_best_upper=bootstrap_bounds(ratios, seed)[1],
            ratio_to_oracle=median(oracle),
            load_to_floor=median(to_floor),
            load_to_floor_upper=bootstrap_bounds(to_floor, seed)[1],
            load_to_floor_nominal=median(self._to_floor(self._load_ms(self.lane_gbps))) if self.lane_gbps else None,
            load_to_floor_own=median(self._to_floor(self._load_ms(own_gbps))),
            hidden=median(hidden) if hidden else None,
            hidden_lower=lower,
            hidden_upper=upper,
            hidden_held=median(held) if held else None,
            load_ms=load_ms,
            lookahead_exceeds_load=self.lookahead_ms > load_ms,
            loaded_share=self.loaded_tokens / (self.found_tokens * len(ratios)),
            held=self.held,
            idle_gbps_each=self.idle_gbps,
            ttft_ms_each=Each(**times),
        )

    def _load_ms(self, gbps: float) -> float:
        return self.load_bytes / gbps / 1e6

    def _to_floor(self, load_ms: float) -> list[float]:
        pairs = zip(self.ttft_ms["load"], self.ttft_ms["device"], strict=True)
        return [own / (hit + load_ms) for own, hit in pairs]


def bootstrap_bounds(values: Sequence[float], seed: int, resamples: int = 2000) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of the median (Efron 1979)."""
    array = np.asarray(values)
    drawn = np.random.default_rng(seed).integers(0, len(array), (resamples, len(array)))
    low, high = np.percentile(np.median(array[drawn], axis=1), (2.5, 97.5))
    return float(low), float(high)


class PrefetchResult(_Row):
    """A run."""

    version: Literal["kvtier.bench.prefetch/2"] = "kvtier.bench.prefetch/2"
    """/1 had no values by prompt, no rate of an idle lane and no look-ahead that was held."""
    date: str
    machine: dict[str, Any]
    model: str
    compute: Literal["paced", "real"]
    """"paced": the time of a forward pass is a sleep of the time it would take; all bytes and decisions are real."""
    config: dict[str, Any]
    rows: list[PrefetchRow]
    notes: list[str]

    def to_json(self) -> str:
        """Lists of numbers each in a line of their own."""
        text = self.model_dump_json(indent=2)
        return re.sub(r"\[[^][{}\"]*\]", lambda numbers: " ".join(numbers[0].split()), text) + "\n"
