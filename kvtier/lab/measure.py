"""What the lab measures of a run, under the names and definitions of ``vllm bench serve``.

    ttft   seconds from a request's submission to its first token
    tpot   (time of last token - time of first token) / (output tokens - 1); a request of one token has none
    itl    time between a token and the next, over all requests together
    e2el   seconds from submission to the last token

Percentiles interpolate linearly between order statistics, as NumPy does by default and vLLM with it; one that fewer
than 1 / (1 - p) values cannot tell from the maximum is null: p90 below 10 values, p95 below 20, p99 below 100.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kvtier.lab.request import Result

__all__ = ["PeakMemory", "add_counts", "difference", "outputs_match", "percentiles", "summarise"]

Stats = dict[str, float | None]

_LEAST = {50: 1, 90: 10, 95: 20, 99: 100}


def percentiles(seconds: Iterable[float]) -> Stats:
    """``{mean, p50, p90, p95, p99}`` in milliseconds; None for what so few values do not support."""
    values = np.fromiter(seconds, float) * 1e3
    stats: Stats = {"mean": float(values.mean()) if len(values) else None}
    for percent, least in _LEAST.items():
        stats[f"p{percent}"] = float(np.percentile(values, percent)) if len(values) >= least else None
    return stats


def summarise(results: Sequence[Result], seconds: float) -> dict[str, object]:
    """The row fields that a set of finished requests has in common with every other, over a run of ``seconds``.

    Requests that ended by "abort" or "no room" count as failed, and in nothing else.
    """
    done = [r for r in results if r.finish_reason in ("stop", "length")]
    gaps = [float(gap) for r in done for gap in np.diff(r.token_times)]
    output = sum(len(r.tokens) for r in done)
    return {
        "n": len(done),
        "failed": len(results) - len(done),
        "ttft_ms": percentiles(r.ttft for r in done if r.ttft is not None),
        "tpot_ms": percentiles(r.tpot for r in done if r.tpot is not None),
        "itl_ms": percentiles(gaps),
        "e2el_ms": percentiles(r.token_times[-1] - r.submitted for r in done),
        "request_throughput": len(done) / seconds if seconds > 0 else None,
        "output_throughput": output / seconds if seconds > 0 else None,
        "input_tokens": sum(r.prompt_tokens for r in done),
        "output_tokens": output,
        "tokens_by_tier": add_counts(r.tokens_by_tier for r in done),
        "preemptions": sum(r.preemptions for r in results),
        "recomputed_tokens": sum(r.recomputed_tokens for r in results),
        "lost_tokens": sum(r.lost_tokens for r in results),
    }


def add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum of counters by key; every tier has its key, also at 0."""
    total = dict.fromkeys(("device", "host", "disk", "remote", "computed"), 0)
    for each in counts:
        for key, value in each.items():
            total[key] = total.get(key, 0) + value
    return total


def difference(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """What counters that only grow, such as bytes moved by lane, grew by."""
    return {key: value - before.get(key, 0) for key, value in after.items()}


def outputs_match(results: Sequence[Result], reference: Mapping[str, Sequence[int]] | Sequence[Sequence[int]]) -> bool:
    """Whether every request generated exactly the reference's tokens, given by request id or in the same order.

    Nothing to compare, or a missing reference, is no match.
    """
    if not results or len(results) != len(reference):
        return False
    if isinstance(reference, Mapping):
        return all(r.request_id in reference and r.tokens == list(reference[r.request_id]) for r in results)
    return all(r.tokens == list(tokens) for r, tokens in zip(results, reference, strict=True))


class PeakMemory:
    """Peak resident memory of this process inside ``with``, as the kernel counts it, huge pages and pools included.

    ``rss_bytes``: the peak. ``since_start`` is True where the kernel's mark could not be reset, and the peak is
    therefore that of the process's life. ``device_bytes``: peak allocated by torch on a CUDA device, None without
    one.
    """

    rss_bytes: int = 0
    rss_before: int = 0
    device_bytes: int | None = None
    since_start: bool = False

    def __enter__(self) -> PeakMemory:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # 5: reset the high-water mark, proc(5)
        except OSError:
            self.since_start = True
        self.rss_before = _resident()
        cuda = _cuda()
        if cuda is not None:
            cuda.reset_peak_memory_stats()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.rss_bytes = _high_water()
        cuda = _cuda()
        if cuda is not None:
            self.device_bytes = int(cuda.max_memory_allocated())


def _resident() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _high_water() -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _cuda() -> Any | None:
    import torch

    return torch.cuda if torch.cuda.is_available() else None
