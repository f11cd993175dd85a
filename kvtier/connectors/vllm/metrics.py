"""What the cache did since the last step, in the form that vLLM's stats logger and its Prometheus endpoint take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.stats import CacheStats

__all__ = ["PromMetrics", "Stats", "flatten"]

COUNTERS: dict[str, tuple[str, str]] = {
    "loaded_tokens": ("tier", "Prompt tokens whose KV was loaded, by the tier it came from."),
    "bytes_moved": ("lane", "Bytes moved between tiers, by lane."),
    "failures": ("cause", "Pages that did not arrive, by cause."),
    "evictions": ("tier", "Pages evicted that a lower tier still held."),
    "dropped": ("tier", "Pages evicted that were the last copy."),
    "prefetched": ("outcome", "Blocks brought from disk for requests that waited, by what became of them."),
    "stores_dropped": ("", "Pages that were to go down and found no room or no place in the queue."),
    "stores_put_off": ("", "Pages that were left where they are, the lane being too far behind or their room needed."),
    "loads_cut": ("", "Loads, and waits for what others bring, given up because computing the rest was faster."),
    "loads_synchronous": ("", "Loads that a step waited for."),
    "expired": ("", "Promises that ended because the request did not come back in time."),
}
PLAIN = [metric for metric, (label, _) in COUNTERS.items() if not label]
GAUGES: dict[str, tuple[str, str]] = {
    "pages": ("tier", "Pages that are ready to be served."),
    "capacity_pages": ("tier", "Pages that the tier can hold."),
}


def flatten(stats: CacheStats) -> dict[str, float]:
    """Every number as ``metric`` or ``metric:label``."""
    flat: dict[str, float] = {name: getattr(stats, name) for name in PLAIN}
    named = (
        ("loaded_tokens", stats.tokens_found),
        ("bytes_moved", stats.bytes_moved),
        ("failures", stats.failures),
        ("prefetched", stats.prefetched),
    )
    for metric, values in named:
        flat |= {f"{metric}:{label}": value for label, value in values.items()}
    for tier, slots in stats.slots.items():
        flat |= {f"{metric}:{tier}": slots[metric] for metric in ("evictions", "dropped")}
        flat |= {f"pages:{tier}": slots["ready"], f"capacity_pages:{tier}": slots["capacity"]}
    return flat


def _is_gauge(key: str) -> bool:
    return key.partition(":")[0] in GAUGES


class Stats(KVConnectorStats):
    """``data``: counters as what was added since the last step, gauges as they are."""

    @classmethod
    def since(cls, before: Mapping[str, float], now: Mapping[str, float]) -> Stats:
        changed = {key: value for key, value in now.items() if value != before.get(key, 0)}
        return cls({key: value if _is_gauge(key) else value - before.get(key, 0) for key, value in changed.items()})

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> Stats:
        for key, value in other.data.items():
            self.data[key] = value if _is_gauge(key) else self.data.get(key, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    """``vllm:kvtier_<metric>`` by engine and, where it has one, by label."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: dict[int, list[object]]):
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._metrics: dict[str, Any] = {}
        for kind, known in ((self._counter_cls, COUNTERS), (self._gauge_cls, GAUGES)):
            for metric, (label, about) in known.items():
                labels = [*labelnames, *([label] if label else [])]
                self._metrics[metric] = kind(name=f"vllm:kvtier_{metric}", documentation=about, labelnames=labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            metric, _, label = key.partition(":")
            series = self._metrics[metric].labels(*self.per_engine_labelvalues[engine_idx], *([label] if label else []))
            series.set(value) if metric in GAUGES else series.inc(value)
