"""Stories by the thousand. Usage: python tests/property/soak.py --seeds N [--first N] [--steps N] [--minutes N]
[--processes N] [--out FILE]

Prints how far it is about every ten seconds, and at the end (or an interrupt) the counts of all that happened.
They also go to FILE as JSON. A story that goes wrong ends the soak with status 1, its seed and the shortest story that
does the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import NoReturn

from kvtier.sim.draw import BrokenStoryError, draw_story
from kvtier.sim.shrink import shrink

AUDIT_EVERY = 8  # changes of the control plane between two comparisons of the bytes of all pages
MOST_SECONDS = 200.0  # of computing for one story, which takes about one; then something in it never ends


class EndlessStory(BaseException):
    """A call does not come back. No Exception: neither the product nor the simulator may take it for its own."""


def tell_one(task: tuple[int, int]) -> tuple[int, dict[str, int], str]:
    """(seed, counts, what went wrong)"""
    seed, steps = task
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
        _, simulation = draw_story(seed, steps, audit_every=AUDIT_EVERY)
    except EndlessStory:
        return seed, {}, f"seed {seed} does not end:\n{traceback.format_exc()}"
    except BrokenStoryError as error:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        short = shrink(error.story)
        return seed, {}, f"{error}\nshrunk to {len(short.steps)} steps:\n{short.to_text()}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return seed, dict(simulation.counts), ""


def give_up(number: int, frame: object) -> NoReturn:
    raise EndlessStory


def begin() -> None:
    """In each process of the soak."""
    signal.signal(signal.SIGVTALRM, give_up)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the soak, with what it has


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(".")[0])
    parser.add_argument("--seeds", type=int, default=4000, help="how many stories")
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--steps", type=int, default=3000, help="steps of each story")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after that long; 0: when all are told")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file for the counts")
    args = parser.parse_args()

    soak = Soak(args)
    with multiprocessing.Pool(args.processes, begin) as pool, contextlib.suppress(KeyboardInterrupt):
        tasks = ((seed, args.steps) for seed in range(args.first, args.first + args.seeds))
        for seed, found, wrong in pool.imap_unordered(tell_one, tasks):
            soak.take(seed, found, wrong)
            if wrong or (args.minutes and soak.seconds > 60 * args.minutes):
                break
        pool.terminate()
    print(soak.write())
    return 1 if soak.broken else 0


class Soak:
    """What has been counted so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.counts: Counter[str] = Counter()
        self.broken: list[int] = []
        self._started, self._said = time.monotonic(), 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def take(self, seed: int, counts: dict[str, int], wrong: str) -> None:
        self.counts.update(counts)
        self.counts["stories"] += not wrong
        if wrong:
            self.broken.append(seed)
            print(wrong, flush=True)
        if self.seconds - self._said < 10:
            return
        self._said = self.seconds
        faults = sum(count for name, count in self.counts.items() if name.startswith("fault: "))
        done = [f"{self.counts[name]} {name}" for name in ("stories", "steps", "events")]
        print(f"{self._said:6.0f} s  {'  '.join(done)}  {faults} faults", flush=True)
        self.write()

    def write(self) -> str:
        """The counts as JSON, also into the file."""
        report = {
            "first_seed": self.args.first,
            "steps_drawn_per_story": self.args.steps,
            "audit_every": AUDIT_EVERY,
            "processes": self.args.processes,
            "seconds": round(self.seconds, 1),
            "broken_seeds": self.broken,
            "counts": dict(sorted(self.counts.items())),
        }
        text = json.dumps(report, indent=1)
        if self.args.out:
            self.args.out.parent.mkdir(parents=True, exist_ok=True)
            self.args.out.write_text(text + "\n")
        return text


if __name__ == "__main__":
    sys.exit(main())
