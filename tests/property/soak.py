"""Stories by the thousand. Usage: python tests/property/soak.py --seeds N [--first N] [--steps N] [--minutes N]
[--processes N] [--out FILE]

Prints how far it is about every ten seconds, and at the end the counts of all that happened, which also go to FILE as
JSON. A story that goes wrong ends the soak with status 1, its seed and the shortest story that does the same.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from pathlib import Path

from kvtier.sim.draw import BrokenStoryError, draw_story
from kvtier.sim.shrink import shrink

AUDIT_EVERY = 8  # changes of the control plane between two comparisons of the bytes of all pages


def tell_one(task: tuple[int, int]) -> tuple[int, dict[str, int], str]:
    """(seed, counts, what went wrong)"""
    seed, steps = task
    try:
        _, simulation = draw_story(seed, steps, audit_every=AUDIT_EVERY)
    except BrokenStoryError as error:
        short = shrink(error.story)
        return seed, {}, f"{error}\nshrunk to {len(short.steps)} steps:\n{short.to_text()}"
    return seed, dict(simulation.counts), ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(".")[0])
    parser.add_argument("--seeds", type=int, default=4000, help="how many stories")
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--steps", type=int, default=3000, help="steps of each story")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after that long; 0: when all are told")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file for the counts")
    args = parser.parse_args()

    started, said = time.monotonic(), 0.0
    counts: Counter[str] = Counter()
    broken = []
    with multiprocessing.Pool(args.processes) as pool:
        tasks = ((seed, args.steps) for seed in range(args.first, args.first + args.seeds))
        for seed, found, wrong in pool.imap_unordered(tell_one, tasks):
            counts.update(found)
            counts["stories"] += not wrong
            if wrong:
                broken.append(seed)
                print(wrong, flush=True)
                break
            seconds = time.monotonic() - started
            if seconds - said > 10:
                said = seconds
                faults = sum(count for name, count in counts.items() if name.startswith("fault: "))
                print(
                    f"{seconds:6.0f} s  {counts['stories']} stories  {counts['steps']} steps  {faults} faults",
                    flush=True,
                )
            if args.minutes and seconds > 60 * args.minutes:
                break
        pool.terminate()
    report = {
        "first_seed": args.first,
        "steps_drawn_per_story": args.steps,
        "audit_every": AUDIT_EVERY,
        "processes": args.processes,
        "seconds": round(time.monotonic() - started, 1),
        "broken_seeds": broken,
        "counts": dict(sorted(counts.items())),
    }
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
