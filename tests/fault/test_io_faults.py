"""Every operation of a whole life goes wrong once, in every way: what is served is right, what is not is counted.

The soak (tests/fault/soak.py) runs all of it; here each life is spoiled at every few operations.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.disk_kit import disk_folder
from tests.fault_kit import FAULTS, Folders, On, Surroundings, every_operation, manager_life, store_life

KINDS = list(FAULTS)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    @contextmanager
    def fresh() -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=tmp_path) as parent, disk_folder(Path(parent)) as folder:
            yield folder

    return fresh


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_survives_a_fault_at_any_operation(kind: str, folders: Folders) -> None:
    step = 1 if FAULTS[kind].on == On.MEMORY else 5  # a step that shares no factor with the pages of a transfer
    tally = every_operation(store_life, folders, FAULTS[kind], 1 + KINDS.index(kind) % step, step)
    print(kind, dict(tally))
    assert tally["faults"] > 0
    assert tally["pages served"] > 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hang"])  # to it, "hang" is a longer delay
def test_a_manager_survives_a_fault_at_any_operation(kind: str, folders: Folders) -> None:
    step = 1 if FAULTS[kind].on == On.MEMORY else 4 if FAULTS[kind].on == On.READ else 37
    tally = every_operation(manager_life, folders, FAULTS[kind], 1 + KINDS.index(kind) % step, step)
    print(kind, dict(tally))
    assert tally["faults"] > 0
    assert tally["pages served"] > 0


def test_a_thread_that_stays_is_a_leak_and_is_named() -> None:
    before, end = Surroundings.now(), threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert any("threads: " in leak for leak in Surroundings.leaks(before, patience_s=0))
    finally:
        end.set()
        thread.join()
    assert Surroundings.leaks(before) == []
