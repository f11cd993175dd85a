"""What kvtier costs an engine's step: CPU time where nothing is reused, and the worst steps with all lanes saturated.

The compute is paced (:mod:`kvtier.lab.paced`), the pages and the control plane are real. Steps in which a request
enters are left out: a call for a new prompt looks at all of its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
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

__all__ = ["figures"]

_BLOCK = 16
_BATCH = 16
_PROMPT = 512
_STEP_S = 0.01


def figures(path: Path, steps: int = 2000, seed: int = 0) -> Iterator[Figure]:
    """How cold code is here, CPU time of a step without reuse against the step, then the worst steps against 100 µs."""
    torch.set_num_threads(1)
    yield _coldness()
    plain = _run(path, steps, seed, saturated=False)
    step = _STEP_S
    for name, cpu in (("median", plain.percentile(50, cpu=True)), ("mean", float(np.mean(plain.cpu)))):
        yield Figure(
            f"CPU in kvtier's calls, {name} step, no reuse", 1e6 * cpu, "us", 1e6 * step, "the step", cpu / step
        )
    busy = _run(path, steps, seed, saturated=True)
    worst = busy.percentile(99)
    yield Figure("wall in kvtier's calls, p99 step, saturated", 1e6 * worst, "us", 100.0, "the promise", worst / 1e-4)
    cpu = busy.percentile(99, cpu=True)
    yield Figure("CPU in kvtier's calls, p99 step, saturated", 1e6 * cpu, "us", 100.0, "the promise", cpu / 1e-4)


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


def _run(path: Path, steps: int, seed: int, *, saturated: bool) -> CallMeter:
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
        number = 0
        kept = CallMeter(manager)
        while len(kept.wall) < steps:
            entered = engine.unfinished < _BATCH
            while engine.unfinished < _BATCH:
                number += 1
                prompt = rng.integers(0, model.vocab_size, _PROMPT).tolist()
                seen.append(prompt)
                engine.add(f"r{number}", prompt, 64, ignore_eos=True)
            if saturated and len(seen) > 4 * _BATCH:
                number += 1
                manager.expect(f"ahead{number}", seen[int(rng.integers(0, len(seen) - 2 * _BATCH))], 0.05)
            engine.step()
            meter.step()
            if not entered and len(meter.wall) > 50:
                kept.wall.append(meter.wall[-1])
                kept.cpu.append(meter.cpu[-1])
            engine.take_results()
        return kept
