"""What a look-ahead is worth, and that deciding costs nothing: kvtier against always loading and always computing.

A cell is a look-ahead, a drive and a share of the prompt that was seen before. Each of its prompts is served once by
each arm, in an order drawn anew for each prompt, with its prefix on disk only (on the device for "device"). So all arms
share the machine's good and bad moments, and everything is compared prompt by prompt. Beside where its pages are, they
differ in nothing:

- each is announced, and before it starts it idles as long as the others (but 50 ms at most where it has nothing to
  bring) and polls as often; "recompute" is announced with what nobody has, so that nothing is brought to it;
- each knows of lanes and prefills what its own requests have taught it;
- each starts behind the same small request, so that none has the warmer caches.

A look-ahead that has nothing left to bring does not last to its end: the cache is told that the request starts sooner,
and the engine idles a moment more. For one prompt of ``hold_every`` it does, and what was brought is held until then.

The rate that loads are held against is of other loads: those of all the documents at once, between the prompts, while
nothing else runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch

from kvtier._core import Throttle
from kvtier.config import CacheConfig, DiskConfig, HostConfig, PrefetchConfig
from kvtier.costmodel import CostModel
from kvtier.lab import machine
from kvtier.lab.engine import LabEngine
from kvtier.lab.paced import PacedModel
from kvtier.lab.prefetch_results import ARMS, Arm, Cell, PrefetchResult, PrefetchRow
from kvtier.lab.rig import ProofError, empty_faster, open_model
from kvtier.lab.stores import temporary_store
from kvtier.manager import CacheManager
from kvtier.plane import LocalDataPlane
from kvtier.tiers.device import DevicePool

if TYPE_CHECKING:
    from kvtier.lab.model import LabModel
    from kvtier.lab.request import Result

__all__ = ["PrefetchBench", "PrefetchSettings", "run"]

_RULES: dict[Arm, Literal["cost", "always", "never"]] = {
    "load": "always",
    "recompute": "never",
    "kvtier": "cost",
    "device": "never",
}
_WARM_UP = 4  # prompts of a cell that do not count: each arm learns the drive from them
_DOCUMENTS = 4
_IDLE_EVERY, _IDLE_S = 25, 0.1  # behind so many prompts the lane is measured for so many seconds, or by one load
_POLL_S = 0.01  # between two polls of an engine that waits
_REST_S = 0.01  # idle behind a look-ahead that ended sooner
_IDLES_S = 0.05  # at most as long as one that had something to bring: beside such a load nothing else is seen


@dataclass(frozen=True, slots=True)
class PrefetchSettings:
    """What to measure. ``gbps`` 0 is the machine's own drive.

    ``hold_every``: of so many prompts one has its look-ahead pass as a whole.
    ``page_cache``: the store is read through it, so that a drive may be faster than the machine's own.
    """

    lookaheads_ms: tuple[float, ...] = (0.0, 50.0, 200.0, 1000.0)
    gbps: tuple[float, ...] = (0.01, 0.1, 1.0, 0.0)
    reuses: tuple[float, ...] = (0.5, 0.9)
    prompts: int = 100
    hold_every: int = 20
    prompt_tokens: int = 1024
    block_size: int = 16
    chunk_tokens: int = 64
    token_us: float = 50.0
    model: str | None = None
    disk_path: Path = Path(".")
    page_cache: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, values in (("lookahead", self.lookaheads_ms), ("gbps", self.gbps)):
            if not values or min(values) < 0:
                raise ValueError(f"{name}: {list(values)}; accepted: one or more numbers, 0 or more")
        if not self.reuses or not all(0 < reuse < 1 for reuse in self.reuses):
            raise ValueError(f"reuse: {list(self.reuses)}; accepted: one or more shares between 0 and 1")
        blocks = self.prompt_tokens // self.block_size
        for name, count in (("prompts", self.prompts), ("hold_every", self.hold_every), ("prompt_tokens", blocks)):
            if count < 1:
                raise ValueError(f"{name}: {count}; accepted: 1 or more, and whole blocks")


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
                disk=DiskConfig(
                    path=store,
                    size=(pages + 64) * (geometry.page_bytes + 8192),
                    write="second_use",
                    direct="off" if settings.page_cache else "auto",
                ),
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
        self.known = {arm: CostModel(self.page_bytes) for arm in ARMS}
        """What the requests of each arm have taught it."""
        self._waited = 0.0  # seconds in which the last look-ahead had something to bring, in this cell
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
        """Serve the prompts of one cell. ProofError when an arm did not do what its name says."""
        settings, documents, found = self.settings, self._documents[reuse], self.found(reuse)
        self.throttle.set(gbps * 1e9, 0.0)
        size = found // settings.block_size * self.page_bytes
        cell = Cell(lookahead_ms, gbps or None, reuse, settings.prompt_tokens, found, size)
        self._waited = 0.0
        for number in range(-_WARM_UP, settings.prompts):
            if number >= 0 and number % _IDLE_EVERY == 0:
                began = time.monotonic()
                while time.monotonic() < began + _IDLE_S:
                    cell.idle_gbps.append(self._load_idly(documents))
            hold = number >= 0 and number % settings.hold_every == 0
            if hold:
                cell.held.append(number)
            document = documents[number % _DOCUMENTS]
            # A drawn order, for one that only turns has each arm always follow the same other.
            for arm in (ARMS[place] for place in self._rng.permutation(len(ARMS))):
                prompt = document + self._tokens(settings.prompt_tokens - found)  # an end that nobody has seen before
                self._measure(cell, arm, prompt, hold=hold, count=number >= 0)
        return cell.row(settings.seed)

    def _load_idly(self, documents: Sequence[list[int]]) -> float:
        """GB/s of the lane from disk, over all these at once, where nothing else is asked of it."""
        for document in documents:
            empty_faster(self.manager, self.device, document, "disk")
        before, busy = self._moved()["stage"], self._busy()
        for document in documents:
            self.manager.prefetch(document)
        self._settle()
        moved, wanted = self._moved()["stage"] - before, sum(map(len, documents)) // self.settings.block_size
        if moved != wanted:
            raise ProofError(f"an idle load: {moved} pages came from disk; {wanted} should have")
        return moved * self.page_bytes / (self._busy() - busy) / 1e9

    def _measure(self, cell: Cell, arm: Arm, prompt: list[int], *, hold: bool, count: bool) -> None:
        document = prompt[: cell.found_tokens]
        if arm == "device":  # what is there may be evicted, but by nothing that runs here
            self._serve("load", [*document, 1])
        else:
            self._settle()
            empty_faster(self.manager, self.device, document, "disk")
        # What was computed last is as warm in the processor's caches for each arm: less than a block, so nothing stays.
        self._serve("load", self._tokens(self.settings.block_size // 2))
        self._settle()
        with self._knowing(arm):
            before, busy = self._moved(), self._busy()
            result = self._serve(arm, prompt, cell, hold=hold)
            self._settle()  # what was cut, or asked to see whether the disk is fast again, teaches this arm too
        if not count:
            return
        after = self._moved()
        self._prove(cell, arm, result, {lane: after[lane] - before[lane] for lane in after})
        assert result.ttft is not None
        cell.ttft_ms[arm].append(round(1e3 * result.ttft, 3))
        if arm == "kvtier":
            cell.loaded_tokens += cell.prompt_tokens - result.tokens_by_tier["computed"]
        if arm == "load":
            cell.own_bytes += cell.load_bytes
            cell.own_s += self._busy() - busy

    def _prove(self, cell: Cell, arm: Arm, result: Result, moved: dict[str, int]) -> None:
        """That it did what its name says: by the tokens that were computed, and by the pages that came up."""
        if result.ttft is None or (result.lost_tokens and arm == "load"):
            raise ProofError(f"{arm}: {result.lost_tokens} tokens of the prefix were lost, {result.finish_reason}")
        if arm == "kvtier":
            return
        loaded = cell.prompt_tokens - result.tokens_by_tier["computed"]
        wanted = 0 if arm == "recompute" else cell.found_tokens
        if loaded != wanted:
            raise ProofError(f"{arm}: {loaded} tokens were not computed; {wanted} should have been")
        pages = wanted // self.settings.block_size if arm == "load" else 0
        for lane in ("stage", "onboard"):
            if moved[lane] != pages:
                raise ProofError(f"{arm}: {moved[lane]} pages came by the lane {lane!r}; {pages} should have")

    def _moved(self) -> dict[str, int]:
        """Pages by lane."""
        return {name: int(lane["pages"]) for name, lane in self.plane.mover.stats()["lanes"].items()}

    def _busy(self) -> float:
        return float(self.plane.mover.stats()["lanes"]["stage"]["busy_s"])

    @contextmanager
    def _knowing(self, arm: Arm) -> Iterator[None]:
        """The cache knows of lanes and prefills what this arm's requests have taught it, and they alone teach it."""
        costs, known = self.manager.costs, self.known[arm]
        costs.recall(known)
        yield
        known.recall(costs)

    def _serve(self, arm: Arm, prompt: Sequence[int], cell: Cell | None = None, *, hold: bool = False) -> Result:
        """Serve one request, ahead of which it is announced as ``cell`` says."""
        self.manager.policy.rule = _RULES[arm]
        self._count += 1
        request_id = f"bench-{self._count}"
        if cell is not None and cell.lookahead_ms:
            unseen = arm == "recompute"
            self.manager.expect(request_id, prompt[cell.found_tokens :] if unseen else prompt, cell.lookahead_ms / 1e3)
            self._look_ahead(arm, request_id, cell.lookahead_ms / 1e3, hold=hold)
        self.engine.add(request_id, prompt, 1, ignore_eos=True)
        (result,) = self.engine.run(3600.0)
        return result

    def _look_ahead(self, arm: Arm, request_id: str, seconds: float, *, hold: bool) -> None:
        began = time.monotonic()
        end = began + seconds
        if hold:
            self._idle(end)
            return
        if arm in ("load", "kvtier"):
            self._idle(end, until_quiet=True)
            self.manager.reorder({request_id: 0.0})  # what is left of a long look-ahead is skipped
            self._idle(end, until_quiet=True)
            self._waited = time.monotonic() - began
        else:
            self._idle(min(end, began + min(self._waited, _IDLES_S)))
            self.manager.reorder({request_id: 0.0})
        self._idle(min(end, time.monotonic() + _REST_S))

    def _idle(self, end: float, *, until_quiet: bool = False) -> None:
        """Poll as an engine does that has nothing to compute."""
        self.manager.poll()
        while (left := end - time.monotonic()) > 0 and not (until_quiet and not self.manager.placement.under_way):
            self.manager.poll(min(left, _POLL_S))

    def _settle(self) -> None:
        if not self.manager.flush(600.0):
            raise ProofError("transfers did not end within 600 s")


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
            notes=[
                f"kvtier knew at the end: {bench.known['kvtier'].describe()}",
                bench.plane.describe(),
                "a look-ahead ended when it had nothing left to bring, but for the prompts in held, where it passed as "
                "a whole",
            ],
        )
