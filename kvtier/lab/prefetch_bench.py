"""What a look-ahead is worth, and that deciding costs nothing: kvtier against always loading and always computing.

A cell is a look-ahead, a drive and a share of the prompt that was seen before. Each of its prompts is served once by
each arm, in an order drawn anew for each prompt, with its prefix on disk only (on the device for "device"), after
the same hint as long before. So all arms share the machine's good and bad moments, and ratios are taken prompt by
prompt. An arm whose look-ahead has nothing left to bring does not wait for its end: the cache is told that the request
starts sooner. An arm that is given no hint idles as long as the last one that was: an engine that has slept finds its
caches cold.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch

from kvtier._core import Throttle
from kvtier.config import CacheConfig, DiskConfig, HostConfig, PrefetchConfig
from kvtier.lab import machine
from kvtier.lab.engine import LabEngine
from kvtier.lab.paced import PacedModel
from kvtier.lab.prefetch_results import Arms, PrefetchResult, PrefetchRow
from kvtier.lab.results import Spread
from kvtier.lab.rig import ProofError, empty_faster, open_model
from kvtier.lab.stores import temporary_store
from kvtier.manager import CacheManager
from kvtier.plane import LocalDataPlane
from kvtier.tiers.device import DevicePool

if TYPE_CHECKING:
    from kvtier.lab.model import LabModel
    from kvtier.lab.request import Result

__all__ = ["ARMS", "PrefetchBench", "PrefetchSettings", "bootstrap_upper", "run"]

Arm = Literal["load", "recompute", "kvtier", "device"]
ARMS: tuple[Arm, ...] = ("load", "recompute", "kvtier", "device")
_RULES: dict[Arm, Literal["cost", "always", "never"]] = {
    "load": "always",
    "recompute": "never",
    "kvtier": "cost",
    "device": "never",
}
_WARM_UP = 4  # prompts of a cell that do not count: the cost model learns the drive from them
_DOCUMENTS = 4


@dataclass(frozen=True, slots=True)
class PrefetchSettings:
    """What to measure. ``gbps`` 0 is the machine's own drive."""

    lookaheads_ms: tuple[float, ...] = (0.0, 50.0, 200.0, 1000.0)
    gbps: tuple[float, ...] = (0.01, 0.1, 1.0, 0.0)
    reuses: tuple[float, ...] = (0.5, 0.9)
    prompts: int = 100
    prompt_tokens: int = 1024
    block_size: int = 16
    chunk_tokens: int = 64
    token_us: float = 50.0
    model: str | None = None
    disk_path: Path = Path(".")
    seed: int = 0

    def __post_init__(self) -> None:
        for name, values in (("lookahead", self.lookaheads_ms), ("gbps", self.gbps)):
            if not values or min(values) < 0:
                raise ValueError(f"{name}: {list(values)}; accepted: one or more numbers, 0 or more")
        if not self.reuses or not all(0 < reuse < 1 for reuse in self.reuses):
            raise ValueError(f"reuse: {list(self.reuses)}; accepted: one or more shares between 0 and 1")
        for name, count in (("prompts", self.prompts), ("prompt_tokens", self.prompt_tokens // self.block_size)):
            if count < 1:
                raise ValueError(f"{name}: {count}; accepted: 1 or more, and whole blocks")


@dataclass(slots=True)
class _Cell:
    ttft: dict[Arm, list[float]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    loaded: int = 0
    bytes: int = 0
    busy_s: float = 0.0


class PrefetchBench:
    """An engine over a cache whose disk is as fast as each cell says; a context manager."""

    def __init__(self, settings: PrefetchSettings) -> None:
        self.settings = settings
        block, total = settings.block_size, settings.prompt_tokens
        paced = settings.model is None
        if paced:
            torch.set_num_threads(1)  # what is left for torch to do is small, and slower on more
        # The engine asks no more of a model than a paced one has.
        self.model: LabModel = cast(
            "LabModel", PacedModel(1e-6 * settings.token_us) if paced else open_model(settings.model, settings.seed)
        )
        geometry = self.model.geometry(block)
        blocks = -(-total // block) + 2
        with ExitStack() as stack:
            store = stack.enter_context(temporary_store(settings.disk_path))
            pages = len(settings.reuses) * _DOCUMENTS * blocks + 64 * blocks
            config = CacheConfig(
                block_size=block,
                host=HostConfig(size=8 * blocks * geometry.page_bytes, write="second_use"),
                disk=DiskConfig(path=store, size=(pages + 64) * (geometry.page_bytes + 8192), write="second_use"),
                prefetch=PrefetchConfig(share=0.5, grace_seconds=60.0),
                load_timeout_seconds=600.0,
                lease_seconds=600.0,
            )
            self.pool = self.model.new_pool(3 * blocks, block)
            self.device = DevicePool(geometry, self.pool.tensors)
            self.throttle = Throttle()
            self.plane = LocalDataPlane(config, geometry, self.device, throttle=self.throttle)
            stack.callback(self.plane.close)
            self.manager = CacheManager(config, geometry, self.model.namespace(block), self.device, plane=self.plane)
            stack.callback(self.manager.close)
            self.engine = LabEngine(
                self.model, self.manager, self.pool, chunk_tokens=settings.chunk_tokens, max_batch=1, stall_seconds=60.0
            )
            self._stack = stack.pop_all()
        self.page_bytes = geometry.page_bytes
        self._count = 0
        self._waited = 0.0  # seconds of the last look-ahead, in this cell
        self._rng = np.random.default_rng(settings.seed)
        self._documents = {
            reuse: [self._tokens(self.found(reuse)) for _ in range(_DOCUMENTS)] for reuse in settings.reuses
        }

    def __enter__(self) -> PrefetchBench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def found(self, reuse: float) -> int:
        """Tokens of a prompt that were seen before: whole blocks."""
        block = self.settings.block_size
        return max(1, round(reuse * self.settings.prompt_tokens / block)) * block

    def _tokens(self, count: int) -> list[int]:
        return [int(token) for token in self._rng.integers(0, self.model.vocab_size, count)]

    def prepare(self) -> None:
        """Have every document on disk."""
        self.throttle.set(0.0)
        for documents in self._documents.values():
            for document in documents:
                for _ in range(3):  # computed, stored on its second use, and on disk by the next
                    self._serve("load", [*document, 1])
                    self._settle()

    def cell(self, lookahead_ms: float, gbps: float, reuse: float) -> PrefetchRow:
        settings = self.settings
        self.throttle.set(gbps * 1e9, 0.0)
        cell = _Cell()
        self._waited = 0.0
        for number in range(-_WARM_UP, settings.prompts):
            document = self._documents[reuse][number % _DOCUMENTS]
            # A drawn order, for one that only turns has each arm always follow the same other.
            for arm in (
                ARMS[place] for place in self._rng.permutation(len(ARMS))
            ):  # each with an end of its own, that nobody has seen before
                prompt = document + self._tokens(settings.prompt_tokens - len(document))
                self._measure(cell, arm, prompt, len(document), lookahead_ms / 1e3, count=number >= 0)
        return self._row(cell, lookahead_ms, gbps, reuse)

    def _measure(self, cell: _Cell, arm: Arm, prompt: list[int], found: int, lookahead: float, *, count: bool) -> None:
        document = prompt[:found]
        if arm == "device":  # what is there may be evicted, but by nothing that runs here
            self._serve("load", [*document, 1])
        else:
            self._settle()
            empty_faster(self.manager, self.device, document, "disk")
        # What was computed last is as warm in the processor's caches for each arm: less than a block, so nothing stays.
        self._serve("load", self._tokens(self.settings.block_size // 2))
        self._settle()
        before = self._lane()
        result = self._serve(arm, prompt, lookahead)
        if not count:
            return
        if result.ttft is None or (result.lost_tokens and arm == "load"):
            raise ProofError(f"{arm}: {result.lost_tokens} tokens of the prefix were lost, {result.finish_reason}")
        loaded = found - max(0, result.tokens_by_tier["computed"] - (len(prompt) - found))
        wanted = {"load": found, "device": found, "recompute": 0}.get(arm, loaded)
        if loaded != wanted:
            raise ProofError(f"{arm}: {loaded} tokens were not computed; {wanted} should have been")
        cell.ttft[arm].append(result.ttft)
        if arm == "kvtier":
            cell.loaded += loaded
        if arm == "load":
            after = self._lane()
            cell.bytes += after[0] - before[0]
            cell.busy_s += after[1] - before[1]

    def _lane(self) -> tuple[int, float]:
        lane = self.plane.mover.stats()["lanes"]["stage"]
        return int(lane["bytes"]), float(lane["busy_s"])

    def _serve(self, arm: Arm, prompt: Sequence[int], lookahead: float = 0.0) -> Result:
        self.manager.policy.rule = _RULES[arm]
        self._count += 1
        request_id = f"bench-{self._count}"
        if arm in ("load", "kvtier") and lookahead > 0:
            self._look_ahead(request_id, prompt, lookahead)
        elif lookahead > 0:
            time.sleep(self._waited)
        self.engine.add(request_id, prompt, 1, ignore_eos=True)
        (result,) = self.engine.run(3600.0)
        return result

    def _look_ahead(self, request_id: str, prompt: Sequence[int], seconds: float) -> None:
        began = time.monotonic()
        self.manager.expect(request_id, prompt, seconds)
        self._until_quiet(began + seconds)
        self.manager.reorder({request_id: 0.0})  # what is left of a long look-ahead is skipped
        self._until_quiet(began + seconds)
        self._waited = time.monotonic() - began

    def _until_quiet(self, end: float) -> None:
        self.manager.poll()
        while (left := end - time.monotonic()) > 0 and self.manager.placement.under_way:
            self.manager.poll(min(left, 0.01))

    def _settle(self) -> None:
        if not self.manager.flush(600.0):
            raise ProofError("transfers did not end within 600 s")

    def _row(self, cell: _Cell, lookahead_ms: float, gbps: float, reuse: float) -> PrefetchRow:
        found = self.found(reuse)
        medians = {arm: statistics.median(times) for arm, times in cell.ttft.items()}
        best: Literal["load", "recompute"] = "load" if medians["load"] < medians["recompute"] else "recompute"
        ratios = [own / other for own, other in zip(cell.ttft["kvtier"], cell.ttft[best], strict=True)]
        oracle = [
            own / min(pair)
            for own, *pair in zip(cell.ttft["kvtier"], cell.ttft["load"], cell.ttft["recompute"], strict=True)
        ]
        rate = cell.bytes / cell.busy_s
        load_s = found // self.settings.block_size * self.page_bytes / rate
        return PrefetchRow(
            lookahead_ms=lookahead_ms,
            lane_gbps=gbps or None,
            measured_gbps=rate / 1e9,
            reuse=reuse,
            prompt_tokens=self.settings.prompt_tokens,
            found_tokens=found,
            n=len(ratios),
            ttft_ms=Arms(**{arm: Spread.of(times) for arm, times in cell.ttft.items()}),
            best=best,
            ratio_to_best=statistics.median(ratios),
            ratio_to_best_upper=bootstrap_upper(ratios, self.settings.seed),
            ratio_to_oracle=statistics.median(oracle),
            load_to_floor=medians["load"] / (medians["device"] + load_s),
            hidden=1 - (medians["kvtier"] - medians["device"]) / load_s if lookahead_ms else None,
            load_ms=1e3 * load_s,
            lookahead_exceeds_load=lookahead_ms > 1e3 * load_s,
            loaded_share=cell.loaded / (found * len(ratios)),
        )


def bootstrap_upper(values: Sequence[float], seed: int, resamples: int = 2000) -> float:
    """Upper end of the 95 % percentile bootstrap interval of the median (Efron 1979)."""
    array = np.asarray(values)
    drawn = np.random.default_rng(seed).integers(0, len(array), (resamples, len(array)))
    return float(np.percentile(np.median(array[drawn], axis=1), 97.5))


def run(settings: PrefetchSettings, progress: Callable[[str, float], None]) -> PrefetchResult:
    """Measure every cell. ProofError when an arm did not do what its name says."""
    cells = [(a, g, r) for g in settings.gbps for r in settings.reuses for a in settings.lookaheads_ms]
    rows = []
    with PrefetchBench(settings) as bench:
        progress("storing the documents", 0.0)
        bench.prepare()
        for number, (lookahead, gbps, reuse) in enumerate(cells):
            drive = f"{gbps:g} GB/s" if gbps else "the machine's drive"
            progress(f"{drive}, reuse {reuse:g}, look-ahead {lookahead:g} ms", number / len(cells))
            rows.append(bench.cell(lookahead, gbps, reuse))
        options = {name: getattr(settings, name) for name in settings.__slots__}
        options["disk_path"] = str(settings.disk_path)
        paced = settings.model is None
        return PrefetchResult(
            date=time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
            machine=machine.describe(settings.disk_path).model_dump(mode="json"),
            model=bench.model.name,
            compute="paced" if paced else "real",
            config={"options": options, "cache": bench.manager.config.model_dump(mode="json")},
            rows=rows,
            notes=[bench.manager.costs.describe(), bench.plane.describe()],
        )
