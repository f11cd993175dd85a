"""Power is lost at any moment of a store's life: only right pages are served, and no invalidation is undone."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np
import pytest

from kvtier import _core
from kvtier.mover import Transfer
from tests.disk_kit import disk_folder
from tests.fault_kit import DEVICE, DISK, HOST, SPACE, Pages, Tally, names, page
from tests.power_loss import Disk, Event

SLOTS, NUMBERS, VERSIONS = 12, 30, 3


def use(rig: Pages, rng: random.Random, steps: int, durable: list[tuple[int, int]]) -> None:
    """Stores, several at a time, over each other; invalidations, noted in ``durable`` with the log's length then."""
    for _ in range(steps):
        generation = rig.disk.generation(SPACE)
        if rng.random() < 0.08:
            durable.append((rig.disk.invalidate(SPACE), _core.file_trace_length()))
            continue
        slots = rng.sample(range(SLOTS), rng.randint(1, 6))
        tickets = []
        while slots:
            count = rng.randint(1, len(slots))
            mine, slots = sorted(slots[:count]), slots[count:]
            numbers = [rng.randrange(NUMBERS) for _ in mine]
            for slot, number in zip(mine, numbers, strict=True):
                rig.memory[slot] = page(number, generation, rng.randrange(VERSIONS))
            rig.tickets += 1
            places = np.array([mine] * 3, np.uint32)
            assert rig.mover.submit(Transfer(rig.tickets, (DEVICE, HOST, DISK), places, names(numbers, generation)))
            tickets.append(rig.tickets)
        for ticket in tickets:
            assert (rig.next(ticket).status == _core.PageStatus.OK).all()


def log_of_a_life(folder: Path, rng: random.Random, steps: int) -> tuple[list[Event], list[tuple[int, int]]]:
    """What a store's life writes and syncs; the generations that were durable, and from which event on."""
    durable: list[tuple[int, int]] = []
    _core.start_file_trace()
    try:
        for _ in range(2):
            with open_store(folder, rng) as rig:
                use(rig, rng, steps // 2, durable)
    finally:
        log = _core.stop_file_trace()
    return log, durable


def open_store(folder: Path, rng: random.Random) -> Pages:
    op_bytes = rng.choice((1, 1 << 20))
    return Pages(folder, slots=SLOTS, faults=_core.FaultPlan(), op_bytes=op_bytes, journal_entries=4)


def lose_power(tmp_path: Path, seed: int, points: int, steps: int = 30) -> Tally:
    """At ``points`` random moments of a life, each in a random state of what was not synced."""
    tally = Tally()
    rng = random.Random(seed)
    with disk_folder(tmp_path) as folder:
        log, durable = log_of_a_life(folder, rng, steps)
        moments = sorted(rng.randint(0, len(log)) for _ in range(points))
        disk, played = Disk(), 0
        for moment in moments:
            for event in log[played:moment]:
                disk.play(event)
            played = moment
            least = max((generation for generation, since in durable if since <= moment), default=0)
            with tempfile.TemporaryDirectory(dir=folder) as lost:
                disk.lose_power(rng, Path(lost))
                tally["writes not synced"] += disk.unsynced()
                reopen(Path(lost), rng, least, tally)
            tally["crash points"] += 1
    return tally


def reopen(folder: Path, rng: random.Random, least: int, tally: Tally, again: int = 1) -> None:
    """What is there now is right; power may be lost once more while it is being mended."""
    before = Disk(folder)
    _core.start_file_trace()
    try:
        with open_store(folder, rng) as rig:
            mended = _core.file_trace_length()
            assert rig.disk.generation(SPACE) >= least, "an invalidation that had returned was undone"
            rig.serve_all(tally, VERSIONS)
            use(rig, rng, 2, [])
            rig.serve_all(tally, VERSIONS)
    finally:
        log = _core.stop_file_trace()
    if again and rng.random() < 0.2:
        for event in log[: rng.randint(0, mended)]:
            before.play(event)
        with tempfile.TemporaryDirectory(dir=folder.parent) as lost:
            before.lose_power(rng, Path(lost))
            reopen(Path(lost), rng, least, tally, again - 1)
        tally["crash points"] += 1


def test_only_right_pages_are_served_after_a_loss_of_power(tmp_path: Path, seed: int) -> None:
    tally = lose_power(tmp_path, seed, points=60)
    print(dict(tally))
    assert tally["crash points"] >= 60
    assert tally["pages served"] > 50
    assert tally["miss: corrupt"] > 0, "no record outlived its page: the emulation loses too little"


def test_pages_of_a_generation_that_was_never_durable_do_not_come_back_with_its_number(tmp_path: Path) -> None:
    tally, rng = Tally(), random.Random(0)
    with disk_folder(tmp_path) as folder:
        with open_store(folder, rng) as rig:
            plan = _core.FaultPlan()
            plan.add(_core.FaultPlan.Kind.ERROR, 1, 5, on=_core.FaultPlan.On.WRITE)  # nothing of it reaches the file
            _core.use_faults(plan)
            with pytest.raises(OSError, match="generations"):
                rig.disk.invalidate(SPACE)
            _core.use_faults(None)
            rig.put([0], [7], generation=1)  # by weights that the next process does not have
        before = Disk(folder)
        _core.start_file_trace()
        try:
            with open_store(folder, rng) as rig:
                assert rig.disk.invalidate(SPACE) == 1
        finally:
            log = _core.stop_file_trace()
        for event in log:
            before.play(event)
        with tempfile.TemporaryDirectory(dir=folder) as lost:
            before.lose_power(rng, Path(lost), keep=0.0)
            with open_store(Path(lost), rng) as rig:
                assert rig.disk.generation(SPACE) == 1
                assert rig.get([0], [7], 1, tally) == []
