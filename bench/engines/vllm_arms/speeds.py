"""A run of engines that are up at the same time, of which some have kvtier over a disk that gets slower from speed to
speed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import narrow
from arms import BLOCK, Arm, by_turns, difference, kvtier, plan, throttle, words
from record import Record, ended

if TYPE_CHECKING:
    import argparse

__all__ = ["AtSpeeds", "case", "told"]

TOKEN_BYTES = 30 * 3 * 2 * 64 * 4  # of both models: layers, KV heads, K and V, head size, float32


class AtSpeeds:
    """``none``, an engine without a connector, and one for each of ``engines``: what kvtier is told there beside its
    sizes. ``documents`` are put on disk with answers of ``fill`` tokens; host memory holds ``host`` of them. What is
    asked at one speed, and what is made of it, is each benchmark's own.
    """

    def __init__(
        self, options: argparse.Namespace, engines: dict[str, dict[str, Any]], *, documents: int, fill: int, host: int
    ) -> None:
        self.options, self.fill, self.host = options, fill, host
        self.engines = engines
        self.documents = [words(f"document {n}", options.tokens) for n in range(documents)]
        self.arms: list[Arm] = []
        self.counted: dict[float, dict[str, dict[str, float]]] = {}

    def run(self, schema: str) -> None:
        """To its end, or until somebody stops it."""
        print(ended(Record(schema, self.options, self.found).run(self.measure)))

    def measure(self, record: Record) -> None:
        options = self.options
        with tempfile.TemporaryDirectory(dir=options.disk) as name:
            folder = Path(name)
            speed = folder / "speed.json"
            throttle(speed, 0)
            self.arms += self._arms(folder, speed)
            whole = plan(options.dtype, options.tokens + options.answer) | narrow.options(options.model, folder)
            try:
                for arm in self.arms:  # one after the other, since each looks at how much memory is free
                    arm.start(whole, record.logs / f"{options.out.stem}-{arm.name.replace(' ', '-')}.log")
                    if not arm.ready():
                        raise RuntimeError(f"{arm.name}: {arm.about}")
                for number, prompt in enumerate(self.documents):
                    for arm in by_turns(self.arms, number):
                        arm.ask("fill", number, prompt, self.fill)
                for each in options.speeds:
                    throttle(speed, each)
                    before = {arm.name: arm.metrics() for arm in self.arms}
                    self.at_one_speed(each, record)
                    self.counted[each] = {arm.name: difference(arm.metrics(), before[arm.name]) for arm in self.arms}
                    print(self.said(each), flush=True)
            finally:
                for arm in self.arms:
                    arm.stop()

    def _arms(self, folder: Path, speed: Path) -> list[Arm]:
        blocks = -(-(self.options.tokens + self.options.answer) // BLOCK)
        size = blocks * BLOCK * TOKEN_BYTES // (1 if self.options.dtype == "float32" else 2)
        found = [Arm("none", None)]
        for name, extra in self.engines.items():
            path = folder / name
            path.mkdir()
            sizes = {"host.size": self.host * size, "disk.size": (len(self.documents) + 2) * size}
            connector = kvtier(sizes | {"disk.path": str(path)} | extra, self.options.model, "BadDisk", "bad_disk")
            found.append(Arm(name, connector, {"BAD_DISK": str(speed)}))
        return found

    def at_one_speed(self, speed: float, record: Record) -> None:
        """Ask, as ``case(speed)``, and keep after each turn."""
        raise NotImplementedError

    def said(self, speed: float) -> str:
        """What was found at one speed, for people; where not all engines got there, what became of each."""
        if speed in self.asked:
            return self.line(self.row(speed))
        return f"{case(speed)}: nothing that all answered; " + "; ".join(f"{arm.name} {arm.about}" for arm in self.arms)

    def row(self, speed: float) -> dict[str, Any]:
        """Of a speed in ``asked``."""
        raise NotImplementedError

    def counts(self, number: int) -> bool:
        """Whether the prompt of this number is one of those that are compared."""
        return True

    def line(self, row: dict[str, Any]) -> str:
        """A row for people."""
        raise NotImplementedError

    @property
    def asked(self) -> list[float]:
        """The speeds at which there is a prompt to compare, one that every engine has answered."""
        return [speed for speed in self.options.speeds if self.arms and any(map(self.counts, self._common(speed)))]

    def _common(self, speed: float) -> set[int]:
        return set.intersection(*(set(arm.asked[case(speed)]) for arm in self.arms))

    def found(self) -> dict[str, Any]:
        return {
            "rows": [self.row(speed) for speed in self.asked],
            "block_size": BLOCK,
            "arms": {arm.name: arm.about for arm in self.arms},
        }


def case(speed: float) -> str:
    return f"{speed:g} MB/s"


def told(row: dict[str, Any]) -> str:
    """Its speed and its medians."""
    speed = row["disk_mb_per_s"]
    medians = ", ".join(f"{name} {value:.0f} ms" for name, value in row["ttft_ms_p50"].items())
    return f"{'not throttled' if speed is None else case(speed)}: {medians}"
