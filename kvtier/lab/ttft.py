"""Table 1: the time to first token by context and by where the prefix is found.

A round of one context: everything is dropped and the prompt is computed; then it is served from each tier, in an
order that turns from round to round, the faster tiers emptied first. Recompute and hits so share the machine's good and
bad moments, and their ratio is taken within the round.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.lab.results import BytesMoved, ContextRow, LaneRate, Source, Spread, TokensByTier
from kvtier.lab.rig import Progress, ProofError, Rig, busiest, empty_faster, lane_rates
from kvtier.lab.workload import document, question

if TYPE_CHECKING:
    from kvtier.lab.request import Result
    from kvtier.lab.settings import Fitted

__all__ = ["ContextBench", "Sample", "rows"]

_ROUNDS = 2  # a context is worth that many rounds of all; where there is no time for them it is left out
_ROUND = 1.7  # a round's time over that of computing its contexts, roughly


@dataclass(slots=True)
class Sample:
    """The measurements of one row, in seconds, one entry for each round."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    moved: list[BytesMoved] = field(default_factory=list)
    tokens_by_tier: TokensByTier = field(default_factory=TokensByTier)
    floors: list[LaneRate | None] = field(default_factory=list)
    """The lane that was busy longest in the load."""
    matches: list[bool] = field(default_factory=list)


class ContextBench:
    """Measures the rows of table 1 on one rig."""

    def __init__(self, rig: Rig, fitted: Fitted, progress: Progress) -> None:
        self._rig, self._fitted, self._progress = rig, fitted, progress
        self._block = rig.block_size
        seed = fitted.settings.seed
        self._prompts = {
            context: document(rig.model, context, seed, context) + question(rig.model, self._block, seed, context)
            for context in fitted.contexts
        }
        self.contexts = fitted.contexts
        """Those that are measured: the longest are left out where a few rounds would take too long with them."""
        self.tokens_per_s = 0.0
        """Prefill speed, as the last prompt that was computed had it."""
        self._answers: dict[int, list[int]] = {}
        self.samples: dict[tuple[int, Source], Sample] = {}

    def run(self, seconds: float | None) -> None:
        """All rounds, or as many whole ones, at least one, as ``seconds`` allow."""
        settings = self._fitted.settings
        end = None if seconds is None else time.monotonic() + seconds
        self._progress("warming up", 0.0)
        for _ in range(2):  # the first is slower than any other
            prompt = self._prompts[self.contexts[0]]
            empty_faster(self._rig.manager, self._rig.device, prompt, "recompute")
            warm = self._rig.serve(prompt, settings.output_tokens)
            self._rig.settle()
        self.tokens_per_s = len(prompt) / (warm.ttft or 1.0)
        for number in range(settings.repeat):
            began = time.monotonic()
            self._round(number, end)
            now = time.monotonic()
            if end is not None and now + (now - began) > end:
                break
        self._progress("contexts done", 1.0)

    def _round(self, number: int, end: float | None) -> None:
        settings = self._fitted.settings
        hits = [source for source in settings.tiers if source != "recompute"]
        turned = hits[number % len(hits) :] + hits[: number % len(hits)] if hits else []
        for index, context in enumerate(self.contexts):
            rounds = min(_ROUNDS, settings.repeat) * _ROUND * context / self.tokens_per_s
            too_long = end is not None and time.monotonic() + rounds > end
            if too_long and number == 0 and index and settings.contexts is None:
                self.contexts = self.contexts[:index]
                break
            for source in ("recompute", *turned):
                where = "computing" if source == "recompute" else f"from {source}"
                done = (number + index / len(self.contexts)) / settings.repeat
                self._progress(f"round {number + 1}: {context} tokens {where}", done)
                self._measure(context, source)  # type: ignore[arg-type]

    def _measure(self, context: int, source: Source) -> None:
        rig, tokens = self._rig, self._prompts[context]
        empty_faster(rig.manager, rig.device, tokens[:context], source)
        before, lanes = rig.bytes_moved(), lane_rates(rig.manager)
        result = rig.serve(tokens, self._fitted.settings.output_tokens)
        rig.settle()
        found = TokensByTier(**result.tokens_by_tier)
        _prove(context, self._block, source, found, result)
        answer = self._answers.setdefault(context, list(result.tokens))
        sample = self.samples.setdefault((context, source), Sample())
        sample.ttft.append(result.ttft or 0.0)
        if source == "recompute" and result.ttft:
            self.tokens_per_s = len(tokens) / result.ttft
        if result.tpot is not None:
            sample.tpot.append(result.tpot)
        sample.moved.append(rig.bytes_moved().since(before))
        sample.floors.append(busiest(lanes, lane_rates(rig.manager), source))
        sample.tokens_by_tier = found
        sample.matches.append(result.tokens == answer)


def _prove(context: int, block: int, source: Source, found: TokensByTier, result: Result) -> None:
    wanted = TokensByTier(computed=context + block)
    if source != "recompute":
        wanted = TokensByTier(**{source: context}, computed=block)
    if found != wanted or result.lost_tokens:
        counts = {tier: count for tier, count in found.model_dump().items() if count}
        raise ProofError(f"{source}, {context} tokens: the prefix was served from {counts}, {result.lost_tokens} lost")


def rows(
    samples: dict[tuple[int, Source], Sample],
    tiers: Sequence[Source],
    device_bytes: int,
    *,
    loads_only: bool = False,
) -> list[ContextRow]:
    """The rows of table 1 in order; recompute is measured always and shown where ``tiers`` has it."""
    found = []
    for (context, source), sample in sorted(samples.items(), key=lambda item: (item[0][0], tiers_order(item[0][1]))):
        if source not in tiers:
            continue
        floor_ms, floor_is, to_floor = _floor(sample)
        base = samples.get((context, "recompute")) if source != "recompute" and not loads_only else None
        found.append(
            ContextRow(
                context=context,
                tier=source,
                kind="measured load" if loads_only else "measured",
                n=len(sample.ttft),
                ttft_ms=Spread.of(sample.ttft),
                tpot_ms=Spread.of(sample.tpot),
                tokens_by_tier=sample.tokens_by_tier,
                bytes_moved=BytesMoved.mean(sample.moved),
                device_bytes=device_bytes,
                outputs_match=all(sample.matches),
                ttft_to_recompute=_paired(sample, base) if base else None,
                floor_ms=floor_ms,
                floor_is=floor_is,
                ttft_to_floor=to_floor,
            )
        )
    return found


def tiers_order(source: Source) -> int:
    return ("recompute", "device", "host", "disk").index(source)


def _paired(sample: Sample, base: Sample) -> float:
    return statistics.median(own / other for own, other in zip(sample.ttft, base.ttft, strict=False))


def _floor(sample: Sample) -> tuple[float | None, str | None, float | None]:
    """Median floor in milliseconds, what it is, and the median over rounds of TTFT over the round's own floor."""
    pairs = [(ttft, lane) for ttft, lane in zip(sample.ttft, sample.floors, strict=True) if lane is not None]
    if not pairs:
        return None, None, None
    names = Counter(lane.lane for _, lane in pairs)
    name = max(names, key=names.__getitem__)
    rate = statistics.median(lane.bytes_per_s or 0.0 for _, lane in pairs if lane.lane == name)
    floor_ms = 1000 * statistics.median(lane.seconds for _, lane in pairs)
    return floor_ms, f"{name} at {rate / 1e9:.2f} GB/s", statistics.median(t / lane.seconds for t, lane in pairs)
