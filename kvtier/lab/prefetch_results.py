"""What ``kvtier bench prefetch`` found, as typed rows: the content of its ``result.json``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kvtier.lab.results import Spread

__all__ = ["Arms", "PrefetchResult", "PrefetchRow"]


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


class PrefetchRow(_Row):
    """One cell: a look-ahead, a drive and a share of the prompt that was seen before."""

    lookahead_ms: float
    lane_gbps: float | None
    """The drive that was emulated; null: the machine's own."""
    measured_gbps: float
    """Of the lane from disk, over this cell's loads."""
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
    """Median TTFT of loading everything over that of a device hit plus bytes over the measured rate."""
    hidden: float | None
    """1 - (TTFT of kvtier - TTFT of a device hit) / load time; null without a look-ahead."""
    load_ms: float
    """Bytes over the measured rate."""
    lookahead_exceeds_load: bool
    loaded_share: float
    """Of the found tokens, those that kvtier loaded, over all prompts."""


class PrefetchResult(_Row):
    """A run."""

    version: Literal["kvtier.bench.prefetch/1"] = "kvtier.bench.prefetch/1"
    date: str
    machine: dict[str, Any]
    model: str
    compute: Literal["paced", "real"]
    """"paced": the time of a forward pass is a sleep of the time it would take; all bytes and decisions are real."""
    config: dict[str, Any]
    rows: list[PrefetchRow]
    notes: list[str]

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"
