"""The long run of the fault and crash tests. Usage: python -m tests.fault.soak [--faults N] [--total N] [--crashes N]
[--minutes N] [--processes N] [--seed N] [--out FILE]

Counts the faults of each kind that really happened, what became of the pages, and the points of each way of dying. Says
about every ten seconds how far it is, and at the end (or an interrupt) prints the counts as JSON; they also go to FILE.
At the first violation it ends with status 1 and the command that repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from kvtier._core import FaultPlan, use_faults
from tests.disk_kit import disk_folder
from tests.fault.test_killed import kill
from tests.fault.test_power_loss import lose_power
from tests.fault_kit import FAULTS, Life, On, Tally, live_through, manager_life, open_pages, store_life

APART = {On.READ: 5, On.MEMORY: 5}  # operations between two faults of one life: one at a time is what is promised
APART_ELSE = 11  # there are more of those
MOST = 200  # operations of the longest life of one round
LEAST = 20  # operations of a round, at least
ROUNDS = 100  # of the longest life: opening costs more than many rounds
LIVES = 8  # of one task
POINTS = 50  # of dying, of one task
DEATHS = {"power loss": ("crash points",), "kill": ("killed", "crashed")}  # way → what counts its points


def spoil(kind: str, rng: random.Random, folder: Path) -> Tally:
    """Some lives with a fault of this kind every few operations."""

    @contextmanager
    def folders() -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=folder) as parent, disk_folder(Path(parent)) as fresh:
            yield fresh

    tally = Tally()
    for _ in range(LIVES):
        fault = FAULTS[kind]
        seed = rng.randrange(1 << 20)
        if fault.kind.name != "ERROR":
            fault = fault._replace(value=lambda n, value=fault.value, seed=seed: value(n + seed))
        apart = APART.get(fault.on, APART_ELSE)
        first, rounds, end = rng.randint(1, apart), 1, MOST
        life: Life = manager_life if kind != "hang" and rng.random() < 0.15 else store_life
        if fault.on in (On.READ, On.WRITE):
            rounds = rng.randint(1, ROUNDS)
            end = MOST * rounds
        elif life is store_life and fault.on == On.ANY and kind != "hang" and rng.random() < 0.5:
            # Every opening would be refused for as long as there are faults: here they spare the first and end in time.
            rounds = rng.randint(1, ROUNDS)
            first += opening()
            end = first + LEAST * rounds
        life = partial(store_life, rounds=rounds) if life is store_life else life
        live_through(life, folders, fault, list(range(first, end, apart)), tally)
    return tally


@cache
def opening() -> int:
    """Operations of opening a new store."""
    plan = FaultPlan()
    plan.add(FaultPlan.Kind.ERROR, 1 << 30)  # counts, and never comes
    with tempfile.TemporaryDirectory() as parent, disk_folder(Path(parent)) as folder:
        use_faults(plan)
        try:
            with open_pages(folder, plan, Tally(), 60.0):
                return plan.count(On.ANY)
        finally:
            use_faults(None)


def do(what: str, seed: int) -> tuple[dict[str, int], str]:
    """(counts of one task, what went wrong)"""
    try:
        with tempfile.TemporaryDirectory() as folder, disk_folder(Path(folder)) as fresh:
            if what == "power loss":
                return dict(lose_power(fresh, seed, POINTS)), ""
            if what == "kill":
                return dict(kill(fresh, seed, POINTS, timeout=3600)), ""
            return dict(spoil(what, random.Random(seed), fresh)), ""
    except Exception:
        again = f"python -m tests.fault.soak --repeat {what!r} --seed {seed}"
        return {}, f"{traceback.format_exc()}\nto repeat it: {again}"


class Soak:
    """What is still to do, and what has been counted."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.counts = {what: Counter[str]() for what in (*FAULTS, *DEATHS)}
        self.wrong = ""
        self._rng = random.Random(args.seed)
        self._started, self._said = time.monotonic(), 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def faults(self) -> int:
        return sum(self.counts[kind]["faults"] for kind in FAULTS)

    def points(self, way: str) -> int:
        return sum(self.counts[way][name] for name in DEATHS[way])

    def next(self) -> tuple[str, int] | None:
        """What to do next, and its seed: what has come least far. None: all is done, or the time is over."""
        if self.wrong or self.seconds > 60 * self.args.minutes:
            return None
        far = {kind: self.counts[kind]["faults"] / self.args.faults for kind in FAULTS}
        far |= {way: self.points(way) / self.args.crashes for way in DEATHS}
        what = min(far, key=lambda what: (far[what], self._rng.random()))
        if far[what] >= 1:
            if self.faults >= self.args.total:
                return None
            what = self._rng.choice(list(FAULTS))
        return what, self._rng.randrange(1 << 32)

    def take(self, what: str, counts: dict[str, int], wrong: str) -> None:
        self.counts[what].update(counts)
        self.wrong = self.wrong or wrong
        if wrong:
            print(wrong, flush=True)
        if self.seconds - self._said < 10:
            return
        self._said = self.seconds
        least = min(FAULTS, key=lambda kind: self.counts[kind]["faults"])
        dead = ", ".join(f"{way} {self.points(way)}" for way in DEATHS)
        print(
            f"{self._said:6.0f} s  {self.faults} faults, least of {least} ({self.counts[least]['faults']}); {dead}",
            flush=True,
        )
        self.write()

    def write(self) -> str:
        """The counts as JSON, also into the file."""
        report: dict[str, Any] = {
            "seed": self.args.seed,
            "processes": self.args.processes,
            "seconds": round(self.seconds, 1),
            "violation": self.wrong,
            "faults in all": self.faults,
            "crash points in all": sum(map(self.points, DEATHS)),
            "counts": {what: dict(sorted(counts.items())) for what, counts in self.counts.items()},
        }
        text = json.dumps(report, indent=1)
        if self.args.out:
            self.args.out.parent.mkdir(parents=True, exist_ok=True)
            self.args.out.write_text(text + "\n")
        return text

    def run(self) -> None:
        started = multiprocessing.get_context("spawn")  # no thread of this process is taken along
        with ProcessPoolExecutor(self.args.processes, started) as pool, contextlib.suppress(KeyboardInterrupt):
            running: dict[Future[tuple[dict[str, int], str]], str] = {}
            while True:
                while len(running) < self.args.processes and (task := self.next()):
                    running[pool.submit(do, *task)] = task[0]
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    self.take(running.pop(future), *future.result())


def main() -> int:
    parser = argparse.ArgumentParser(description="The long run of the fault and crash tests.")
    parser.add_argument("--faults", type=int, default=1000, help="of each kind, at least")
    parser.add_argument("--total", type=int, default=0, help="faults in all, at least")
    parser.add_argument("--crashes", type=int, default=1000, help="points of each way of dying, at least")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after that long, with what there is")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--out", type=Path, help="JSON file for the counts")
    parser.add_argument("--repeat", choices=(*FAULTS, *DEATHS), help="do this once, with --seed, and nothing else")
    args = parser.parse_args()
    if args.repeat:
        counts, wrong = do(args.repeat, args.seed)
        print(wrong or json.dumps(counts))
        return 1 if wrong else 0
    soak = Soak(args)
    soak.run()
    print(soak.write())
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
