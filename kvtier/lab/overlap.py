"""What loading hides behind computing, and one lane behind the other: a hit from host memory layer by layer against the
same one waited for as a whole, and a hit from disk over both lanes.

The compute is paced (:mod:`kvtier.lab.paced`): a pass takes about as long as the load, where there is most to win.
Bytes, lanes and waits are real. The arms of a round are served in an order drawn anew.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from kvtier.config import CacheConfig, DiskConfig, HostConfig
from kvtier.lab.engine import LabEngine
from kvtier.lab.figures import Figure
from kvtier.lab.paced import PacedModel
from kvtier.lab.rig import ProofError, empty_faster
from kvtier.lab.stores import temporary_store
from kvtier.manager import CacheManager
from kvtier.plane import LocalDataPlane
from kvtier.tiers.device import DevicePool

if TYPE_CHECKING:
    from kvtier.lab.model import LabModel

__all__ = ["figures"]

_BLOCK = 16
_ARMS = ("device", "whole", "layers", "disk")


@dataclass(slots=True)
class _Times:
    """Seconds, one entry a round."""

    first: dict[str, list[float]] = field(default_factory=lambda: {arm: [] for arm in _ARMS})
    busy: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {arm: [] for arm in _ARMS})
    """Of the lanes from disk and to the device."""


class _Bench:
    """One prompt of 64 KiB a token over all tiers."""

    def __init__(self, path: Path, tokens: int, seed: int, stack: ExitStack) -> None:
        torch.set_num_threads(1)
        self.model = PacedModel(token_s=0.0, pass_s=0.0, layers=16, kv_heads=8, head_dim=128)
        geometry, blocks = self.model.geometry(_BLOCK), tokens // _BLOCK
        store = stack.enter_context(temporary_store(path))
        config = CacheConfig(
            block_size=_BLOCK,
            load_policy="always",
            host=HostConfig(size=(blocks + 16) * geometry.page_bytes),
            disk=DiskConfig(path=store, size=(blocks + 64) * (geometry.page_bytes + 8192)),
        )
        pool = self.model.new_pool(2 * blocks, _BLOCK)
        self.device = DevicePool(geometry, pool.tensors)
        self.plane = LocalDataPlane(config, geometry, self.device)
        stack.callback(self.plane.close)
        self.manager = CacheManager(config, geometry, self.model.namespace(_BLOCK), self.device, plane=self.plane)
        stack.callback(self.manager.close)
        self.engine = LabEngine(cast("LabModel", self.model), self.manager, pool, chunk_tokens=_BLOCK, max_batch=1)
        self.rng = np.random.default_rng(seed)
        self.prompt = self.rng.integers(0, self.model.vocab_size, tokens + 1).tolist()
        self._count = 0

    def serve(self) -> float:
        self._count += 1
        self.engine.add(f"r{self._count}", self.prompt, 1, ignore_eos=True)
        (result,) = self.engine.run(600.0)
        if result.ttft is None or result.lost_tokens:
            raise ProofError(f"{result.lost_tokens} tokens of the prefix were lost, {result.finish_reason}")
        return result.ttft

    def settle(self) -> None:
        if not self.manager.flush(600.0):
            raise ProofError("transfers did not end within 600 s")

    def measure(self, arm: str, times: _Times) -> None:
        prefix = self.prompt[:-1]
        if arm != "device":
            empty_faster(self.manager, self.device, prefix, "disk")
        if arm in ("whole", "layers"):
            self.manager.prefetch(prefix)
        self.settle()
        self.engine.by_layer = arm == "layers"
        before = self._busy()
        times.first[arm].append(self.serve())
        self.settle()
        stage, onboard = (after - earlier for after, earlier in zip(self._busy(), before, strict=True))
        times.busy[arm].append((stage, onboard))

    def _busy(self) -> tuple[float, float]:
        lanes = self.plane.mover.stats()["lanes"]
        return float(lanes["stage"]["busy_s"]), float(lanes["onboard"]["busy_s"])


def figures(path: Path, rounds: int = 30, seed: int = 0, tokens: int = 1024) -> Iterator[Figure]:
    """First tokens in ms from host memory by layers and as a whole, what the layers hid, and the two lanes'
    overlap. ProofError when a hit was none."""
    with ExitStack() as stack:
        bench = _Bench(path, tokens, seed, stack)
        for _ in range(3):
            bench.serve()
            bench.settle()
        tuning = _Times()
        for _ in range(5):
            bench.measure("whole", tuning)
        bench.model.pass_s = statistics.median(tuning.first["whole"])  # nearly all of it is the load
        times = _Times()
        for _ in range(rounds):
            for place in bench.rng.permutation(len(_ARMS)):
                bench.measure(_ARMS[place], times)
    yield from _one_lane(times, tokens)
    yield from _two_lanes(times, tokens)


def _one_lane(times: _Times, tokens: int) -> Iterator[Figure]:
    device, whole, layers = (times.first[arm] for arm in ("device", "whole", "layers"))
    name = f"first token, {tokens} tokens from host memory"
    for arm, words in (("whole", "as a whole"), ("layers", "layer by layer")):
        longer = [max(hit, load) for hit, (_, load) in zip(device, times.busy[arm], strict=True)]
        ratio = statistics.median(own / most for own, most in zip(times.first[arm], longer, strict=True))
        limit = 1e3 * statistics.median(longer)
        yield Figure(
            f"{name}, {words}", 1e3 * statistics.median(times.first[arm]), "ms", limit, "the longer of both", ratio
        )
    hidden = statistics.median((w - c) / (w - d) for w, c, d in zip(whole, layers, device, strict=True))
    yield Figure("of that load, hidden by layers", hidden, "share", 1.0, "all of it", hidden)


def _two_lanes(times: _Times, tokens: int) -> Iterator[Figure]:
    """Of the time that the shorter lane works, what passes while the longer one works too."""
    loads = [own - hit for own, hit in zip(times.first["disk"], times.first["device"], strict=True)]
    lanes = times.busy["disk"]
    slower = [max(both) for both in lanes]
    ratio = statistics.median(load / most for load, most in zip(loads, slower, strict=True))
    name, limit = f"load of {tokens} tokens from disk to the device", 1e3 * statistics.median(slower)
    yield Figure(name, 1e3 * statistics.median(loads), "ms", limit, "the slower lane alone", ratio)
    together = statistics.median(
        (sum(both) - load) / min(both) for load, both in zip(loads, lanes, strict=True) if min(both) > 0
    )
    yield Figure("of the faster lane, hidden by the slower", together, "share", 1.0, "all of it", together)
