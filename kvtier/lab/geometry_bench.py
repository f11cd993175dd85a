"""Table 1 for a geometry without its model: pages of true size, random bytes, moved by the real manager and mover.

Nothing is computed, so a hit's time ends when its prefix is on the device. What computing it instead would take is
modelled, FLOPs over a rate, and kept apart from what was measured.
"""

from __future__ import annotations

import time
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtier.geometry import KVGeometry
from kvtier.lab.results import BytesMoved, ContextRow, Source, Spread, TokensByTier
from kvtier.lab.rig import FLUSH_SECONDS, Progress, ProofError, busiest, empty_faster, lane_rates
from kvtier.lab.settings import Shape
from kvtier.lab.stores import with_store
from kvtier.lab.ttft import Sample
from kvtier.manager import CacheManager
from kvtier.namespace import Namespace
from kvtier.tiers.device import DevicePool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.lab.settings import Fitted

__all__ = ["Cost", "GeometryBench", "cost_of", "measured_flops", "shape_of_geometry"]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a token costs to compute: weights that it is multiplied with, and attention to those before it."""

    weights: float
    """Of all layers, embeddings left out; of a mixture of experts those that are active."""
    attention: float
    """Layers × heads × (K + V elements of a head): FLOPs for each pair of a token and one before it, over 2."""

    def flops(self, tokens: int) -> float:
        """Of prefilling ``tokens`` tokens: each pair of tokens counts once, since attention is causal."""
        return 2 * self.weights * tokens + self.attention * tokens * tokens


def _dense(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int) -> Cost:
    projections = hidden * head_dim * 2 * (heads + kv_heads)
    return Cost(layers * (projections + 3 * hidden * inner), layers * heads * 2 * head_dim)


# From the models' published configurations; DeepSeek-V3's 37e9 active weights from its report.
_COSTS = {
    "llama-3-8b": _dense(32, 4096, 14336, 32, 8, 128),
    "llama-3-70b": _dense(80, 8192, 28672, 64, 8, 128),
    "qwen3-8b": _dense(36, 4096, 12288, 32, 8, 128),
    "qwen3-32b": _dense(64, 5120, 25600, 64, 8, 128),
    "smollm2-135m": _dense(30, 576, 1536, 9, 3, 64),
    "deepseek-v3": Cost(37e9, 61 * 128 * (192 + 128)),
}


def cost_of(name: str) -> Cost | None:
    """The cost of a geometry's model; None where it is not known, and then nothing is modelled."""
    return _COSTS.get(name.lower())


def measured_flops(seconds: float = 0.5) -> float:
    """Operations per second of a float32 matrix product on this machine, the best of some."""
    size = 1024
    left, right = (np.random.default_rng(seed).random((size, size), np.float32) for seed in (0, 1))
    best, end = 0.0, time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < end:
        began = time.perf_counter()
        left @ right
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def shape_of_geometry(name: str, block_size: int) -> Shape:
    """What sizes are reckoned with. ValueError lists the names when there is none of that name."""
    geometry = KVGeometry.named(name, block_size=block_size)
    return Shape(name.lower(), block_size, geometry.payload_bytes, geometry.page_bytes, None)


class GeometryBench:
    """Measures the rows of table 1 for ``fitted``'s geometry; a context manager."""

    def __init__(self, fitted: Fitted, store_parent: Path | None, progress: Progress) -> None:
        self._fitted, self._progress = fitted, progress
        shape = fitted.shape
        geometry = KVGeometry.named(shape.name, block_size=shape.block_size)
        namespace = Namespace(
            model=shape.name, revision="random pages", dtype=geometry.dtype, rope={}, layout=geometry.layout_tag,
            attention="none", block_size=shape.block_size,
        )  # fmt: skip
        self._rng = np.random.default_rng(fitted.settings.seed)
        self._served = 0
        self.samples: dict[tuple[int, Source], Sample] = {}
        with ExitStack() as stack:
            config = with_store(fitted.cache_config(), stack, store_parent)
            self.device = DevicePool.allocate(geometry, fitted.device_blocks)
            self.manager = CacheManager(config, geometry, namespace, self.device)
            stack.callback(self.manager.close)
            self._stack = stack.pop_all()

    def __enter__(self) -> GeometryBench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, seconds: float | None) -> None:
        """All contexts, each with all its rounds, or as many rounds, at least one, as ``seconds`` allow it."""
        settings, contexts = self._fitted.settings, self._fitted.contexts
        hits = [source for source in settings.tiers if source != "recompute"]
        for index, context in enumerate(contexts):
            self._progress(f"{context} tokens: writing random pages", index / len(contexts))
            tokens, sums = self._write(context)
            began = time.monotonic()
            for number in range(settings.repeat):
                share = (index + number / settings.repeat) / len(contexts)
                for source in hits[number % max(len(hits), 1) :] + hits[: number % max(len(hits), 1)]:
                    self._progress(f"{context} tokens, round {number + 1}: from {source}", share)
                    self._measure(context, source, tokens, sums)
                used = time.monotonic() - began
                if seconds is not None and used + used / (number + 1) > seconds / len(contexts):
                    break
            empty_faster(self.manager, self.device, tokens[:context], "recompute")
        self._progress("contexts done", 1.0)

    def _write(self, context: int) -> tuple[list[int], list[int]]:
        """Give a prefix random pages as if they had been computed; returns its prompt and each page's CRC."""
        block = self._fitted.shape.block_size
        tokens = [int(token) for token in self._rng.integers(0, 1 << 32, context + block, np.uint64)]
        self.manager.get_computed_blocks("write", tokens)
        table = self.manager.allocate_slots("write", len(tokens))
        if table is None:
            raise ProofError(f"{context} tokens: the device pool has no room for them")
        sums = []
        for slot in table[: context // block]:
            page = self._rng.integers(0, 256, self.device.payload_bytes, np.uint8)
            self.device.write_page(int(slot), page)
            sums.append(zlib.crc32(page.data))
        self.manager.cache_blocks("write", context)
        self.manager.free("write")
        self._settle()
        return tokens, sums

    def _measure(self, context: int, source: Source, tokens: Sequence[int], sums: Sequence[int]) -> None:
        manager = self.manager
        empty_faster(manager, self.device, tokens[:context], source)
        before, lanes = BytesMoved(**manager.stats().bytes_moved), lane_rates(manager)
        self._served += 1
        request_id = f"bench-{self._served}"
        prompt = np.array(tokens, np.uint32)
        began = time.perf_counter()
        found = dict(manager.get_computed_blocks(request_id, prompt).tokens_by_tier)
        if manager.allocate_slots(request_id, len(prompt)) is None:
            raise ProofError(f"{source}, {context} tokens: the device pool has no room for them")
        while not manager.ready(request_id):
            for loaded in manager.poll(0.05):
                found = dict(loaded.tokens_by_tier)
        seconds = time.perf_counter() - began
        if {tier: count for tier, count in found.items() if count} != {source: context}:
            raise ProofError(f"{source}, {context} tokens: the prefix was served from {found}")
        table = manager.block_table(request_id)
        same = all(zlib.crc32(self.device.read_page(int(s)).data) == c for s, c in zip(table, sums, strict=False))
        manager.free(request_id)
        self._settle()
        sample = self.samples.setdefault((context, source), Sample())
        sample.ttft.append(seconds)
        sample.moved.append(BytesMoved(**manager.stats().bytes_moved).since(before))
        sample.floors.append(busiest(lanes, lane_rates(manager), source))
        sample.tokens_by_tier = TokensByTier(**found, computed=len(tokens) - context)
        sample.matches.append(same)

    def _settle(self) -> None:
        if not self.manager.flush(FLUSH_SECONDS):
            raise ProofError(f"stores did not end within {FLUSH_SECONDS:.0f} s")

    def modelled(self) -> tuple[list[ContextRow], str | None]:
        """Recompute's rows and a note that says where they come from; none where the model's cost is not known."""
        settings, name = self._fitted.settings, self._fitted.shape.name
        cost = cost_of(name)
        if cost is None or "recompute" not in settings.tiers:
            return [], None
        rate = settings.flops or measured_flops()
        rows = []
        for context in self._fitted.contexts:
            ms = 1000 * cost.flops(context) / rate
            rows.append(
                ContextRow(
                    context=context,
                    tier="recompute",
                    kind="modelled",
                    n=0,
                    ttft_ms=Spread(mean=ms, p50=ms),
                    tpot_ms=Spread(),
                    tokens_by_tier=TokensByTier(computed=context),
                    bytes_moved=BytesMoved(),
                    device_bytes=self.device.bytes,
                    outputs_match=None,
                )
            )
        source = "as stated" if settings.flops else "as measured here by a float32 matrix product"
        return rows, f"Recompute is modelled: the FLOPs of {name}'s prefill at {rate / 1e12:.3g} TFLOP/s, {source}."
