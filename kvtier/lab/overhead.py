"""What kvtier costs an engine's step: CPU time where nothing is reused, and the worst steps with all lanes saturated.

The compute is paced (:mod:`kvtier.lab.paced`), the pages and the control plane are real. Every step counts. Those that
only decode and those in which a request enters are told apart as well, since they cost different things: a call for a
new prompt looks at all of its tokens, and its blocks are indexed and copied down at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import torch

from kvtier.config import CacheConfig, DiskConfig, HostConfig, PrefetchConfig
from kvtier.lab.engine import LabEngine
from kvtier.lab.figures import Figure
from kvtier.lab.meter import CallMeter
from kvtier.lab.paced import PacedModel
from kvtier.lab.stores import temporary_store
from kvtier.manager import CacheManager
from kvtier.tiers.device import DevicePool

if TYPE_CHECKING:
    from kvtier.lab.model import LabModel

__all__ = ["Spent", "figures"]

_BLOCK = 16
_BATCH = 16
_PROMPT = 512
_STEP_S = 0.01
_WARM_UP = 50  # steps that do not count


@dataclass(frozen=True, slots=True)
class Spent:
    """In a cache's calls, in seconds, and how many requests entered; an entry for each step."""

    wall: npt.NDArray[np.float64]
    cpu: npt.NDArray[np.float64]
    entered: npt.NDArray[np.int64]

    @property
    def entering(self) -> npt.NDArray[np.bool_]:
        """The steps in which a request entered."""
        return self.entered > 0

    @property
    def cpu_of_a_request(self) -> float:
        """CPU time that a request's entering adds to a step that decodes, the mean of all that entered."""
        added = self.cpu[self.entering] - self.cpu[~self.entering].mean()
        return float(added.sum() / self.entered.sum())


def figures(path: Path, steps: int = 2000, seed: int = 0) -> Iterator[Figure]:
    """How cold code is here, CPU time of a step without reuse against the step, then the worst steps against 100 µs."""
    torch.set_num_threads(1)
    yield _coldness()
    yield from _plain(_run(path, steps, seed, saturated=False))
    yield from _saturated(_run(path, steps, seed, saturated=True))


def _plain(spent: Spent) -> Iterator[Figure]:
    decoding = spent.cpu[~spent.entering]
    for name, cpu in (
        ("mean of all steps", spent.cpu.mean()),
        ("median of all steps", np.median(spent.cpu)),
        ("mean step that decodes", decoding.mean()),
        ("median step that decodes", np.median(decoding)),
        ("what a request that enters adds", spent.cpu_of_a_request),
    ):
        title, taken = f"CPU in kvtier's calls, {name}, no reuse", float(cpu)
        yield Figure(title, 1e6 * taken, "us", 1e6 * _STEP_S, "the step", taken / _STEP_S)


def _saturated(spent: Spent) -> Iterator[Figure]:
    for name, which in (("all steps", slice(None)), ("steps that decode", ~spent.entering)):
        for clock, seconds in (("wall", spent.wall), ("CPU", spent.cpu)):
            worst = float(np.percentile(seconds[which], 99))
            title = f"{clock} in kvtier's calls, p99 of {name}, saturated"
            yield Figure(title, 1e6 * worst, "us", 100.0, "the promise", worst / 1e-4)


def _coldness(times: int = 100) -> Figure:
    """What this machine makes of code that was left alone for as long as a pass takes: the same loop of plain Python,
    behind a pause and in turns with itself. Where neighbours share the caches it is several times as long."""
    paused: list[float] = []
    at_once: list[float] = []
    for pause, spent in ((_STEP_S, paused), (0.0, at_once)):
        for _ in range(times):
            time.sleep(pause)
            time.thread_time()
            before = time.thread_time()
            [number * number for number in range(300)]
            spent.append(time.thread_time() - before)
    cold, warm = float(np.median(paused)), float(np.median(at_once))
    return Figure("300 squares in plain Python, after a pause", 1e6 * cold, "us", 1e6 * warm, "in a loop", cold / warm)


def _run(path: Path, steps: int, seed: int, *, saturated: bool) -> Spent:
    """Decode steps of a full batch of prompts that nobody has seen before; a finished one is replaced.

    Saturated: other prompts are on their way up from disk all the time, and each computed block goes down at once.
    """
    model, rng = PacedModel(token_s=0.0, pass_s=_STEP_S), np.random.default_rng(seed)
    geometry = model.geometry(_BLOCK)
    blocks = _BATCH * (_PROMPT // _BLOCK + 8)
    with ExitStack() as stack:
        store = stack.enter_context(temporary_store(path))
        config = CacheConfig(
            block_size=_BLOCK,
            host=HostConfig(size=blocks * geometry.page_bytes),
            disk=DiskConfig(path=store, size=4 * blocks * (geometry.page_bytes + 8192)),
            prefetch=PrefetchConfig(share=0.5, grace_seconds=0.2),
        )
        pool = model.new_pool(2 * blocks, _BLOCK)
        device = DevicePool(geometry, pool.tensors)
        manager = stack.enter_context(CacheManager(config, geometry, model.namespace(_BLOCK), device))
        meter = CallMeter(manager)
        engine = LabEngine(cast("LabModel", model), meter.manager, pool, chunk_tokens=_PROMPT, max_batch=_BATCH)
        seen: list[list[int]] = []
        entered: list[int] = []
        number = 0
        while len(meter.wall) < _WARM_UP + steps:
            entered.append(_BATCH - engine.unfinished)
            while engine.unfinished < _BATCH:
                number += 1
                prompt = rng.integers(0, model.vocab_size, _PROMPT).tolist()
                seen.append(prompt)
                engine.add(f"r{number}", prompt, 64, ignore_eos=True)
            if saturated and len(seen) > 4 * _BATCH:
                number += 1
                meter.manager.expect(f"ahead{number}", seen[int(rng.integers(0, len(seen) - 2 * _BATCH))], 0.05)
            engine.step()
            meter.step()
            engine.take_results()
        wall, cpu, requests = (np.array(each[_WARM_UP:]) for each in (meter.wall, meter.cpu, entered))
        return Spent(wall, cpu, requests)
