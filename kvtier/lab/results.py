"""What a benchmark run found, as typed rows: the content of ``result.json``.

Times are named and defined as ``vllm bench serve`` does: TTFT runs from the submission of a request to its first token,
TPOT is (latency - TTFT) / (output tokens - 1) of a request with two output tokens or more; both in milliseconds. A
percentile that so few samples cannot tell is null, not a guess.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from kvtier.lab.measure import add_counts, difference, percentiles

SCHEMA = "kvtier.bench/1"

Source = Literal["recompute", "device", "host", "disk"]
SOURCES: tuple[Source, ...] = ("recompute", "device", "host", "disk")


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Spread(_Row):
    """Mean and percentiles of a sample, in milliseconds; null where the sample is too small."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Self:
        """Of any number of times, none included; p90 needs 10 of them, p95 20 and p99 100."""
        return cls(**percentiles(seconds))


class TokensByTier(_Row):
    """Prompt tokens by where their KV came from."""

    device: int = 0
    host: int = 0
    disk: int = 0
    remote: int = 0
    computed: int = 0

    @classmethod
    def total(cls, parts: Iterable[Mapping[str, int]]) -> Self:
        """The sum of several requests' counts."""
        return cls(**add_counts(parts))


class BytesMoved(_Row):
    """Bytes of pages by lane."""

    device_to_host: int = 0
    host_to_device: int = 0
    host_to_disk: int = 0
    disk_to_host: int = 0
    host_to_remote: int = 0
    remote_to_host: int = 0

    def since(self, before: BytesMoved) -> Self:
        """What two readings of ever-growing counters differ by."""
        return type(self)(**difference(self.model_dump(), before.model_dump()))

    @classmethod
    def mean(cls, parts: Sequence[BytesMoved]) -> Self:
        """Of several requests, rounded to bytes."""
        each = [part.model_dump() for part in parts]
        return cls(**{lane: round(sum(part[lane] for part in each) / len(each)) for lane in cls.model_fields})


class ContextRow(_Row):
    """Table 1: one context length, with its prefix found in one place."""

    context: int
    """Tokens of the prefix; the prompt has one block more, which is always computed."""
    tier: Source
    kind: Literal["measured", "modelled", "measured load"]
    """"modelled": FLOPs over a rate, nothing was run. "measured load": pages really moved, nothing was computed."""
    n: int
    ttft_ms: Spread
    tpot_ms: Spread
    tokens_by_tier: TokensByTier
    """Of one request; every repeat had the same, or the run would have ended."""
    bytes_moved: BytesMoved
    """For one request, its background stores included; mean of the repeats."""
    device_bytes: int
    outputs_match: bool | None
    """Whether every repeat gave the tokens that computing everything gives; on "measured load", the same page bytes."""
    ttft_to_recompute: float | None = None
    """Median over rounds of TTFT / TTFT of the same round's recompute. Below 1: a hit is faster."""
    floor_ms: float | None = None
    """Bytes over rate of the lane that was busy longest in the load; median. Lanes work side by side."""
    floor_is: str | None = None
    ttft_to_floor: float | None = None
    """Median over rounds of TTFT over that round's floor; above 1 it is computing the last block, and us."""


class LoadRow(_Row):
    """Table 2: a number of users in multi-round chat, with offload off or on."""

    users: int
    """Requests in flight at a time: each user has one, and sends the next when it has ended."""
    working_set: float
    """KV of all conversations at their end over the device pool."""
    offload: bool
    conversations: int
    tokens_per_conversation: int
    rounds: int
    n: int
    """Requests that ended; the figures are over all of them, first rounds included."""
    duration_s: float
    ttft_ms: Spread
    tpot_ms: Spread
    requests_per_s: float
    peak_memory_bytes: int | None
    """Largest resident size of the process, its model included, while this row was measured."""
    tokens_by_tier: TokensByTier
    recomputed_tokens: int
    """Tokens computed again although some round before had computed them."""
    preemptions: int
    bytes_moved: BytesMoved
    device_bytes: int
    outputs_match: bool | None
    """Whether every answer equals that of the same conversation and round with offload off."""


class ConcurrencyRow(_Row):
    """The largest N, found by running, of chats side by side that all finish without recomputing a prefix."""

    offload: bool
    max_concurrent_requests: int
    at_least: bool
    """True: the search ended at its limit and the real number may be larger."""
    tokens_per_conversation: int
    device_bytes: int


class LaneRate(_Row):
    """The speed of one lane over the whole run: bytes over the seconds in which it was moving them."""

    lane: str
    bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float | None:
        return self.bytes / self.seconds if self.bytes > 0 and self.seconds > 0 else None


class Machine(_Row):
    """Where it was measured."""

    cpu: str
    cores: int
    memory_bytes: int
    os: str
    gpu: str | None
    disk: str
    """Device and file system of the disk tier's directory."""
    software: dict[str, str]


class Model(_Row):
    """What was served."""

    name: str
    revision: str | None
    dtype: str
    weights: Literal["real", "random", "none"]
    """"none": a geometry, whose pages are random bytes."""
    kv_bytes_per_token: int
    context_limit: int | None


class BenchResult(_Row):
    """A whole run: header, tables and what is worth knowing about them."""

    schema_: Literal["kvtier.bench/1"] = "kvtier.bench/1"
    date: str
    machine: Machine
    model: Model
    config: dict[str, Any]
    """The cache's configuration and the benchmark's options, as used."""
    io: str
    """How the disk was read: "direct" or "buffered", and through what; "none" without a disk tier."""
    device: str
    """What the device tier really is: "host memory" on a machine without a GPU."""
    contexts: list[ContextRow] = []
    load: list[LoadRow] = []
    concurrency: list[ConcurrencyRow] = []
    lanes: list[LaneRate] = []
    notes: list[str] = []

    # A field called `schema` would hide a method of pydantic's.
    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"), populate_by_name=True)

    def to_json(self) -> str:
        """The text of result.json."""
        return self.model_dump_json(indent=2, by_alias=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read `to_json`'s text back. ValueError of one line: not JSON, another schema, or a wrong field."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            where = ".".join(map(str, fault["loc"])) or "result"
            given = "" if isinstance(fault["input"], (dict, list)) else f" {str(fault['input'])[:60]!r}:"
            raise ValueError(f"{where}:{given} {fault['msg']}; expected a result of schema {SCHEMA!r}") from None

    def save(self, path: Path) -> None:
        """Write result.json; a reader sees the old file or the new one, never half of it."""
        write_private(path, self.to_json().encode())

    @classmethod
    def load_file(cls, path: Path) -> Self:
        return cls.from_json(path.read_text(encoding="utf-8"))


def write_private(path: Path, content: bytes) -> None:
    """Write a file of mode 0600 under another name, and rename it."""
    work = path.with_name(f".{path.name}.part")
    try:
        with open(os.open(work, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)
