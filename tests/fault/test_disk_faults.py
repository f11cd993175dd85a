"""Damaged, cut, torn and failing files: a fault makes pages misses and is said; it never serves a wrong page."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from disk_kit import (
    HEADER,
    JOURNAL,
    PAGE,
    RECORD_BYTES,
    SLOTS,
    SPACE_A,
    SPACE_B,
    disk_folder,
    held,
    identity,
    make,
    put,
    served,
)
from kvtier import _core
from kvtier.config import ConfigError

Kind = _core.FaultPlan.Kind
COPY = 4096  # where the journal's second copy begins


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with disk_folder(tmp_path) as found:
        yield found


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    _core.use_faults(None)


def fail_at(nth: int, error: int) -> _core.FaultPlan:
    """Make the n-th file operation from here on fail."""
    plan = _core.FaultPlan()
    plan.add(_core.FaultPlan.Kind.ERROR, nth, error)
    _core.use_faults(plan)
    return plan


def filled(folder: Path, slots: int = SLOTS) -> None:
    with make(folder, slots=slots) as store:
        for slot in range(slots):
            put(store, slot, slot)


def change(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize("bit", range(0, 8, 3))
def test_a_flipped_bit_in_any_byte_of_a_record_makes_it_free(folder: Path, bit: int) -> None:
    slots = RECORD_BYTES + 1
    filled(folder, slots)
    table = bytearray((folder / "table").read_bytes())
    for slot in range(RECORD_BYTES):  # byte n of slot n's record
        table[HEADER + slot * RECORD_BYTES + slot] ^= 1 << bit
    (folder / "table").write_bytes(table)
    with make(folder, slots=slots) as store:
        assert set(held(store)) == {slots - 1}
        assert not any(served(store, slot, slot) for slot in range(slots - 1))
        assert put(store, 0, 999) == 0  # a garbage record is a free slot
        assert served(store, 0, 999)


def test_garbage_in_place_of_records_is_free_slots(folder: Path, seed: int) -> None:
    filled(folder)
    rng = np.random.default_rng(seed)
    for garbage in (rng.bytes(SLOTS * RECORD_BYTES), b"\xff" * SLOTS * RECORD_BYTES):
        change(folder / "table", HEADER, garbage)
        with make(folder) as store:
            assert held(store) == {}


def test_a_damaged_byte_anywhere_in_the_header_is_refused(folder: Path) -> None:
    filled(folder)
    table = folder / "table"
    good = table.read_bytes()
    for at in [*range(0, 120, 5), 2000, HEADER - 9, HEADER - 1]:
        change(table, at, bytes([good[at] ^ 0x10]))
        with pytest.raises(ValueError, match=r"^disk\.path: .*(to start anew)$"):
            make(folder)
        change(table, at, good[at : at + 1])
    with make(folder) as store:
        assert len(held(store)) == SLOTS


@pytest.mark.parametrize("size", [0, 1, 100, HEADER - 1])
def test_a_table_without_its_header_is_refused_and_nothing_is_lost(folder: Path, size: int) -> None:
    filled(folder)
    good = (folder / "table").read_bytes()
    os.truncate(folder / "table", size)
    with pytest.raises(ValueError, match=rf"its table's header only {size} of 4096 bytes are there; delete"):
        make(folder)
    (folder / "table").write_bytes(good)
    with make(folder) as store:
        assert len(held(store)) == SLOTS


@pytest.mark.parametrize("extra", [0, 1, 200, RECORD_BYTES, 3 * RECORD_BYTES + 7])
def test_a_cut_table_keeps_the_records_that_are_whole(folder: Path, extra: int) -> None:
    filled(folder)
    os.truncate(folder / "table", HEADER + extra)
    with make(folder) as store:
        assert set(held(store)) == set(range(extra // RECORD_BYTES))
        assert "table was cut" in store.describe()
        put(store, 7, 70)
    with make(folder) as store:
        assert set(held(store)) == {*range(extra // RECORD_BYTES), 7}


@pytest.mark.parametrize("size", [0, PAGE - 1, PAGE, 5 * PAGE + 100])
def test_pages_that_a_cut_slab_lost_are_not_served_now_or_later(folder: Path, size: int) -> None:
    filled(folder)
    os.truncate(folder / "slab", size)
    for attempt in range(2):  # the slab is whole again the second time: with zeros
        with make(folder) as store:
            assert set(held(store)) == set(range(size // PAGE))
            assert ("slab was cut" in store.notes) == (attempt == 0)
            assert (folder / "slab").stat().st_size == SLOTS * PAGE


def test_files_that_are_too_long_are_brought_back_to_size(folder: Path) -> None:
    filled(folder)
    sizes = {name: (folder / name).stat().st_size for name in ("slab", "table", "generations")}
    for name in ("slab", "table"):
        with (folder / name).open("ab") as file:
            file.write(b"\xa5" * 100_000)
    with make(folder) as store:
        assert len(held(store)) == SLOTS
        assert {name: (folder / name).stat().st_size for name in sizes} == sizes


class TestJournal:
    def invalidated(self, folder: Path) -> bytes:
        """Slot 0 holds an invalidated page, slot 1 one that was written after that, slot 2 another namespace's."""
        record = slice(HEADER, HEADER + RECORD_BYTES)
        with make(folder) as store:
            put(store, 0, 0)
            old = (folder / "table").read_bytes()[record]
            put(store, 2, 2, SPACE_B)
            store.invalidate(SPACE_A)
            put(store, 1, 1, SPACE_A, generation=1)
        assert old == (folder / "table").read_bytes()[record]  # the old record still lies there
        with make(folder) as store:
            assert set(held(store)) == {1, 2}
        return (folder / "generations").read_bytes()

    def check(self, folder: Path) -> None:
        for _ in range(2):
            with make(folder) as store:
                assert not served(store, 0, 0)
                assert held(store) == {}
                generation = store.generation(SPACE_A)
                assert generation > 1
        with make(folder) as store:
            assert put(store, 3, 3, SPACE_A, generation) == 0
            assert store.invalidate(SPACE_B) > generation
        with make(folder) as store:
            assert set(held(store)) == {3}
            assert store.notes == ""

    @pytest.mark.parametrize("cut", [0, 1, 63, 64, 65, 100, 127, 128, 129, 64 * JOURNAL - 1])
    def test_torn_at_any_byte_drops_all_and_never_serves_an_invalidated_page(self, folder: Path, cut: int) -> None:
        self.invalidated(folder)
        os.truncate(folder / "generations", cut)
        with make(folder) as store:
            assert "generations: it has" in store.describe()
            assert "pages were dropped" in store.notes
        self.check(folder)

    @pytest.mark.parametrize("at", [*range(64, 128, 9), 127, 200])
    def test_a_damaged_entry_drops_all(self, folder: Path, at: int) -> None:
        good = self.invalidated(folder)
        for copy in (0, COPY):
            change(folder / "generations", copy + at, bytes([good[at] ^ 0x40]))
        self.check(folder)

    @pytest.mark.parametrize("copy", [0, COPY])
    @pytest.mark.parametrize("damage", [bytes(COPY), b"\xff" * COPY, b""])
    def test_one_of_its_two_copies_is_enough(self, folder: Path, copy: int, damage: bytes) -> None:
        good = self.invalidated(folder)
        change(folder / "generations", copy, damage or bytes([good[0] ^ 1]))  # another byte than is there
        for attempt in range(2):
            with make(folder) as store:
                assert set(held(store)) == {1, 2}
                assert not served(store, 0, 0)
                assert ("one of its two copies was damaged" in store.notes) == (attempt == 0)
                assert store.invalidate(SPACE_B) == attempt + 1  # writes both anew
                put(store, 2, 2, SPACE_B, attempt + 1)

    @pytest.mark.parametrize("on_copy", [1, 2])
    @pytest.mark.parametrize("kind", [Kind.LOST, Kind.TORN, Kind.FLIP, Kind.MISDIRECTED])
    def test_an_invalidation_outlives_a_write_that_never_arrived(
        self, folder: Path, kind: _core.FaultPlan.Kind, on_copy: int
    ) -> None:
        with make(folder) as store:
            put(store, 0, 0)
            plan = _core.FaultPlan()
            plan.add(kind, on_copy, 40, on=_core.FaultPlan.On.WRITE)
            _core.use_faults(plan)
            assert store.invalidate(SPACE_A) == 1
            _core.use_faults(None)
            assert plan.fired == 1
        with make(folder) as store:
            assert store.generation(SPACE_A) >= 1
            assert held(store) == {}

    @pytest.mark.parametrize("size", [64, 10])
    def test_an_entry_that_became_zeros_is_noticed(self, folder: Path, size: int) -> None:
        self.invalidated(folder)
        for copy in (0, COPY):
            change(folder / "generations", copy + 64, bytes(size))
        self.check(folder)

    def test_a_missing_journal_drops_all(self, folder: Path) -> None:
        self.invalidated(folder)
        (folder / "generations").unlink()
        self.check(folder)

    def test_the_journal_of_another_store_drops_all(self, folder: Path) -> None:
        good = self.invalidated(folder)
        for name in ("slab", "table", "generations", "lock"):
            (folder / name).unlink()
        self.invalidated(folder)
        (folder / "generations").write_bytes(good)
        self.check(folder)

    def test_an_invalidation_that_cannot_be_durable_says_so_and_holds_here(self, folder: Path) -> None:
        with make(folder) as store:
            put(store, 0, 0)
            fail_at(3, errno.EIO)  # the sync after the two writes
            with pytest.raises(OSError, match=r"cannot make .*/generations durable") as failed:
                store.invalidate(SPACE_A)
            assert failed.value.errno == errno.EIO
            assert not served(store, 0, 0)
            assert store.generation(SPACE_A) == 1
            _core.use_faults(None)
            assert store.invalidate(SPACE_B) == 1  # the next one makes both durable
        with make(folder) as store:
            assert (store.generation(SPACE_A), store.generation(SPACE_B)) == (1, 1)
            assert held(store) == {}

    def test_a_generation_that_was_lost_with_its_process_brings_nothing_back_when_it_is_reached_again(
        self, folder: Path
    ) -> None:
        with make(folder) as store:
            fail_at(1, errno.EIO)
            with pytest.raises(OSError, match="generations"):
                store.invalidate(SPACE_A)
            _core.use_faults(None)
            assert put(store, 0, 0, SPACE_A, 1) == 0  # computed by weights that the next process does not know
        with make(folder) as store:
            assert held(store) == {}
            assert store.invalidate(SPACE_A) == 1
            assert held(store) == {}
        with make(folder) as store:
            assert held(store) == {}
            assert not served(store, 0, 0, SPACE_A, 1)


def life(folder: Path) -> None:
    """Every operation of a store once: creation, records, invalidation, a full journal, reopening."""
    with make(folder, journal_entries=4) as store:
        for slot in range(4):
            if put(store, slot, slot) < 0:
                raise OSError(errno.EIO, "record")
        store.clear([1])
        for _ in range(4):
            store.invalidate(SPACE_B)
    with make(folder, journal_entries=4) as store:
        store.records()
        if put(store, 4, 4) < 0:
            raise OSError(errno.EIO, "record")
        store.invalidate(SPACE_A)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_every_file_operation_may_fail_and_the_store_can_be_opened_again(tmp_path: Path, error: int) -> None:
    """n = 1, 2, 3, ... until the run is clean."""
    failures = 0
    for n in range(1, 500):
        (tmp_path / str(n)).mkdir()
        with disk_folder(tmp_path / str(n)) as folder:
            plan = fail_at(n, error)
            try:
                life(folder)
            except (OSError, ConfigError, AssertionError):
                failures += 1
            finally:
                _core.use_faults(None)
            left = {path.name for path in folder.iterdir()}
            assert "table" in left or not left, f"operation {n} left {left}"
            with make(folder, journal_entries=4) as store:
                for slot, found in held(store).items():
                    assert found == identity(slot).tobytes()
                    assert store.generation(SPACE_A) == 0
                generation = store.generation(SPACE_A)
                assert put(store, 5, 5, SPACE_A, generation) == 0
            with make(folder, journal_entries=4) as store:
                assert 5 in held(store)
        if not plan.fired:
            break
    else:
        pytest.fail("never clean")
    assert failures > 25
