"""The long run of the fault and crash tests: `python -m tests.fault.soak --faults 1000 --crashes 1000 --seed 1`.

Prints its counts as one line of JSON: faults of each kind that really happened and what became of the pages, crash
points by way of dying. Ends with a traceback that names the seed, the kind and the operation at the first violation.
`--minutes` ends it earlier, with what it has.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.disk_kit import disk_folder
from tests.fault.test_killed import kill
from tests.fault.test_power_loss import lose_power
from tests.fault_kit import FAULTS, Folders, On, Tally, live_through, manager_life, store_life

APART = 11  # operations between two faults of one life: one fault at a time is what is promised
MOST = 200  # the longest life, in operations


def spoil(kind: str, rng: random.Random, folders: Folders, tally: Tally) -> None:
    """One life with a fault of this kind every few operations."""
    fault = FAULTS[kind]
    seed = rng.randrange(1 << 20)
    if fault.kind.name != "ERROR":
        fault = fault._replace(value=lambda n, f=FAULTS[kind].value: f(n + seed))
    life = manager_life if kind != "hang" and rng.random() < 0.15 else store_life
    apart = APART if fault.on != On.READ else APART // 2  # there are fewer reads
    live_through(life, folders, fault, list(range(rng.randint(1, apart), MOST, apart)), tally)


def soak(faults: int, crashes: int, seed: int, seconds: float, folder: Path) -> dict[str, Any]:
    end = time.monotonic() + seconds
    rng = random.Random(seed)

    @contextmanager
    def folders() -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=folder) as parent, disk_folder(Path(parent)) as fresh:
            yield fresh

    tallies = {kind: Tally() for kind in FAULTS}
    losses, kills = Tally(), Tally()
    points = 50
    while time.monotonic() < end:
        todo = [kind for kind, tally in tallies.items() if tally["faults"] < faults]
        for kind in todo:
            spoil(kind, rng, folders, tallies[kind])
        if losses["crash points"] < crashes and rng.random() < 0.1:
            with folders() as fresh:
                losses.update(lose_power(fresh, rng.randrange(1 << 32), points))
        if kills["killed"] + kills["crashed"] < crashes and rng.random() < 0.1:
            with folders() as fresh:
                kills.update(kill(fresh, rng.randrange(1 << 32), points, timeout=3600))
        if not todo and losses["crash points"] >= crashes and kills["killed"] + kills["crashed"] >= crashes:
            break
    return {
        "seed": seed,
        "faults": {kind: dict(tally) for kind, tally in tallies.items()},
        "power losses": dict(losses),
        "killed": dict(kills),
        "faults in all": sum(tally["faults"] for tally in tallies.values()),
        "crash points in all": losses["crash points"] + kills["killed"] + kills["crashed"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=1000, help="of each kind")
    parser.add_argument("--crashes", type=int, default=1000, help="points of each way of dying")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--minutes", type=float, default=1e6)
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        counts = soak(options.faults, options.crashes, options.seed, 60 * options.minutes, Path(folder))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
