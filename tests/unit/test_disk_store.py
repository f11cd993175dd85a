"""The disk store: what it serves, what it refuses, and what it remembers."""

import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from disk_kit import (
    HEADER,
    IDENTITY_BYTES,
    JOURNAL,
    LABEL_BYTES,
    PAGE,
    PAYLOAD,
    RECORD_BYTES,
    SLOTS,
    SPACE_A,
    SPACE_B,
    TAG,
    checksum,
    disk_folder,
    held,
    identity,
    in_child,
    make,
    put,
    served,
)
from kvtier.config import ConfigError
from kvtier.tiers.disk import slots_in


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with disk_folder(tmp_path) as found:
        yield found


class TestServing:
    def test_serves_a_page_only_under_its_own_identity(self, folder: Path) -> None:
        with make(folder) as store:
            assert put(store, 3, 30) == 0
            assert served(store, 3, 30)
            assert not served(store, 2, 30)
            assert not served(store, 3, 31)
            assert not served(store, 3, 30, SPACE_B)
            assert not served(store, 3, 30, generation=1)

    def test_a_slot_holds_its_last_page_only(self, folder: Path) -> None:
        with make(folder) as store:
            put(store, 3, 30)
            put(store, 3, 31)
            assert not served(store, 3, 30)
            assert served(store, 3, 31)
            assert held(store) == {3: identity(31).tobytes()}

    def test_clear_forgets(self, folder: Path) -> None:
        with make(folder) as store:
            for slot in range(4):
                put(store, slot, slot)
            store.clear([1, 2])
            store.clear(np.array([], np.uint32))
            assert [served(store, slot, slot) for slot in range(4)] == [True, False, False, True]
        with make(folder) as store:
            assert set(held(store)) == {0, 3}

    def test_refuses_slots_and_identities_that_are_not_there(self, folder: Path) -> None:
        with make(folder) as store:
            for slots in ([SLOTS], [-1], [0, 2**32]):
                with pytest.raises(ValueError, match=r"^disk slot .*; expected 0 to 7$"):
                    store.clear(slots)
            assert store.native.write_record(SLOTS, identity(1), 5) == -errno.EINVAL
            assert store.native.write_record(0, identity(1), 0) == -errno.EINVAL
            assert store.native.checksum_for(2**32 - 1, identity(1)) == 0
            with pytest.raises(ValueError, match=r"^identity: 100 bytes were given, 176 aligned to 8 are needed$"):
                store.native.write_record(0, np.zeros(100, np.uint8), 5)
            with pytest.raises(ValueError, match=r"^disk space: 3 bytes were given, 32 are needed$"):
                store.generation(b"abc")

    def test_a_closed_store_says_so(self, folder: Path) -> None:
        store = make(folder)
        store.close()
        store.close()
        with pytest.raises(ValueError, match="is closed"):
            store.records()


class TestReopening:
    def test_returns_what_it_held_oldest_first(self, folder: Path) -> None:
        order = [5, 0, 7, 2]
        with make(folder) as store:
            assert store.adopted == 0
            for slot in order:
                put(store, slot, 10 + slot)
            put(store, 0, 100)  # renewed: now the youngest
        with make(folder) as store:
            slots, identities = store.records()
            assert slots.tolist() == [5, 7, 2, 0]
            assert [bytes(found) for found in identities] == [identity(n).tobytes() for n in (15, 17, 12, 100)]
            assert store.adopted == 4
            assert store.notes == ""
            assert served(store, 0, 100)
            put(store, 1, 11)
            assert store.records()[0].tolist() == [5, 7, 2, 0, 1]  # sequence numbers go on

    def test_a_large_table_is_scanned_in_pieces(self, folder: Path) -> None:
        slots = 40_000  # the table has 10 MB; it is read 4 MiB at a time
        chosen = [0, 16_382, 16_383, 16_384, 16_385, 32_767, 32_768, slots - 1]
        with make(folder, slots=slots, payload_bytes=1) as store:
            for slot in chosen:
                put(store, slot, slot)
        with make(folder, slots=slots, payload_bytes=1) as store:
            assert held(store) == {slot: identity(slot).tobytes() for slot in chosen}

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"slots": SLOTS + 1}, r"disk\.size: 9 pages wanted, but the store in .* has 8; expected the size"),
            ({"payload_bytes": PAYLOAD + 8}, r"disk\.path: .* payload_bytes 3000, 3008 is wanted"),
            ({"label_bytes": 68}, r"disk\.path: .* label_bytes 64, 68 is wanted"),
            ({"rank": 1, "world": 2}, r"disk\.path: .* rank 0, 1 is wanted"),
            ({"world": 2}, r"disk\.path: .* world 1, 2 is wanted"),
            (
                {"geometry_tag": TAG[::-1]},
                rf"disk\.path: .* another geometry .* tag {TAG.hex()[:16]}\.\.\. is stored",
            ),
        ],
    )
    def test_refuses_another_kind_of_page_and_says_how_to_go_on(
        self, folder: Path, changes: dict[str, object], named: str
    ) -> None:
        with make(folder) as store:
            put(store, 1, 1)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(ValueError, match=rf"^{named}.*delete the files in it to start anew$"):
            make(folder, **changes)
        after = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert after | {"lock": b""} == before | {"lock": b""}
        with make(folder) as store:
            assert served(store, 1, 1)

    def test_a_new_store_never_serves_the_records_of_an_old_one(self, folder: Path) -> None:
        with make(folder) as store:
            put(store, 1, 1)
        old = (folder / "table").read_bytes()
        (folder / "table").unlink()
        with make(folder) as store:
            assert store.adopted == 0
        table = folder / "table"
        table.write_bytes(table.read_bytes()[:HEADER] + old[HEADER:])
        with make(folder) as store:
            assert held(store) == {}

    def test_a_record_is_valid_in_its_own_slot_only(self, folder: Path) -> None:
        with make(folder) as store:
            put(store, 1, 1)
        table = bytearray((folder / "table").read_bytes())
        record = table[HEADER + RECORD_BYTES : HEADER + 2 * RECORD_BYTES]
        table[HEADER + 4 * RECORD_BYTES : HEADER + 5 * RECORD_BYTES] = record
        (folder / "table").write_bytes(table)
        with make(folder) as store:
            assert set(held(store)) == {1}


class TestGenerations:
    def test_invalidating_a_namespace_spares_the_others_for_good(self, folder: Path) -> None:
        with make(folder) as store:
            assert store.generation(SPACE_A) == store.generation(SPACE_B) == 0
            put(store, 0, 0, SPACE_A)
            put(store, 1, 1, SPACE_B)
            assert store.invalidate(SPACE_A) == 1
            assert (store.generation(SPACE_A), store.generation(SPACE_B)) == (1, 0)
            assert not served(store, 0, 0, SPACE_A)
            assert served(store, 1, 1, SPACE_B)
            assert set(held(store)) == {1}
        with make(folder) as store:
            assert (store.generation(SPACE_A), store.generation(SPACE_B)) == (1, 0)
            assert set(held(store)) == {1}
            assert put(store, 2, 2, SPACE_A, generation=1) == 0
        with make(folder) as store:
            assert set(held(store)) == {1, 2}
            assert served(store, 2, 2, SPACE_A, generation=1)

    def test_invalidating_all_raises_every_generation(self, folder: Path) -> None:
        with make(folder) as store:
            store.invalidate(SPACE_A)
            store.invalidate(SPACE_A)
            put(store, 0, 0, SPACE_A, generation=2)
            put(store, 1, 1, SPACE_B)
            assert store.invalidate(None) == 3
            assert store.generation(SPACE_A) == store.generation(SPACE_B) == store.generation(bytes(32)) == 3
            assert held(store) == {}
            assert store.invalidate(SPACE_B) == 4
        with make(folder) as store:
            assert (store.generation(SPACE_A), store.generation(SPACE_B)) == (3, 4)
            assert held(store) == {}

    def test_a_record_of_an_old_generation_is_refused_and_the_slot_stays_free(self, folder: Path) -> None:
        with make(folder) as store:
            put(store, 0, 7)
            store.invalidate(SPACE_A)
            assert put(store, 0, 8, generation=0) == -errno.ESTALE
            assert put(store, 0, 8, generation=2) == -errno.ESTALE
            assert not served(store, 0, 8)
        with make(folder) as store:
            assert held(store) == {}

    def test_an_old_record_that_reaches_the_table_later_is_invalid(self, folder: Path) -> None:
        with make(folder) as store:
            put(store, 0, 7)
        old = (folder / "table").read_bytes()
        with make(folder) as store:
            store.clear([0])
            store.invalidate(SPACE_A)
        (folder / "table").write_bytes(old)  # as if that write had been under way all the time
        with make(folder) as store:
            assert held(store) == {}
            assert not served(store, 0, 7)

    def test_the_journal_never_grows_and_forgets_no_invalidation(self, folder: Path) -> None:
        spaces = [number.to_bytes(32, "little") for number in range(20)]
        with make(folder) as store:
            size = (folder / "generations").stat().st_size
            for round_ in range(10):  # 200 entries: three times its places
                for space in spaces:
                    assert store.invalidate(space) == round_ + 1
            assert (folder / "generations").stat().st_size == size
            assert store.generation(SPACE_A) == 0
        with make(folder) as store:
            assert [store.generation(space) for space in spaces] == [10] * len(spaces)
            assert store.generation(SPACE_A) == 0
            assert store.notes == ""

    def test_more_namespaces_than_it_can_name_rise_together(self, folder: Path) -> None:
        spaces = [number.to_bytes(32, "little") for number in range(JOURNAL + 10)]
        with make(folder) as store:
            put(store, 0, 0)
            for space in spaces:
                store.invalidate(space)
            assert all(store.generation(space) >= 1 for space in spaces)
            last = store.generation(SPACE_A)
            assert last >= 1
        with make(folder) as store:
            assert held(store) == {}
            assert store.generation(SPACE_A) == last

    def test_invalidation_and_writing_from_two_threads_never_serve_an_old_page(self, folder: Path) -> None:
        with make(folder, slots=64) as store:
            stop = threading.Event()

            def invalidate() -> None:
                for _ in range(30):
                    store.invalidate(SPACE_A)
                stop.set()

            other = threading.Thread(target=invalidate)
            other.start()
            written = 0
            while not stop.is_set() or written < 64:
                slot = written % 64
                generation = store.generation(SPACE_A)
                put(store, slot, written, SPACE_A, generation)
                if served(store, slot, written, SPACE_A, generation):
                    assert store.generation(SPACE_A) >= generation
                written += 1
            other.join()
            last = store.generation(SPACE_A)
            assert last == 30
            assert all(np.frombuffer(found[96:104], "<u8")[0] == last for found in held(store).values())
        with make(folder, slots=64) as store:
            assert all(np.frombuffer(found[96:104], "<u8")[0] == last for found in held(store).values())


class TestLedger:
    @pytest.mark.parametrize("size", [100_000, "1.3MB", 5_000_000])
    def test_never_takes_more_than_its_size(self, folder: Path, size: int | str) -> None:
        limit = 1_300_000 if size == "1.3MB" else int(size)
        with make(folder, size=size) as store:
            assert store.slots == slots_in(limit, PAYLOAD, LABEL_BYTES, JOURNAL)
            assert store.bytes <= limit < store.bytes + PAGE + RECORD_BYTES
            for slot in range(store.slots):
                put(store, slot, slot)
            for _ in range(JOURNAL + 10):
                store.invalidate(SPACE_B)
            on_disk = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
            assert on_disk <= store.bytes
            assert store.allocated_bytes == on_disk
            assert sum(path.stat().st_size for path in folder.iterdir()) <= store.bytes
        with make(folder, size=size) as store:
            assert len(held(store)) == store.slots

    def test_files_are_for_their_owner_only(self, folder: Path) -> None:
        old = os.umask(0)
        try:
            with make(folder) as store:
                store.invalidate(SPACE_A)
                names = {path.name for path in folder.iterdir()}
                modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        finally:
            os.umask(old)
        assert names == {"slab", "table", "generations", "lock"}
        assert modes == {0o600}

    def test_large_pages(self, folder: Path) -> None:
        payload = (20 << 20) + 1
        with make(folder, slots=2, payload_bytes=payload) as store:
            assert store.page_bytes == (20 << 20) + PAGE
            put(store, 1, 1)
            assert os.fstat(store.native.fd).st_size == 2 * store.page_bytes
        with make(folder, slots=2, payload_bytes=payload) as store:
            assert served(store, 1, 1)


SECOND = """
import pathlib, sys
import disk_kit
try:
    disk_kit.make(pathlib.Path(sys.argv[1]))
except ValueError as error:
    print(error)
"""


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"slots": 0}, "slots is 0; expected 1 to 4294967294"),
            ({"slots": 2**32 - 1}, "slots is 4294967295"),
            ({"slots": True}, "slots is True"),
            ({"slots": 4, "size": 5}, "exactly one of the two"),
            ({"slots": None}, "exactly one of the two"),
            ({"size": "10KiB"}, r"^disk\.size: 10KiB holds no page; expected at least .*, one page of 4KiB"),
            ({"size": "a lot"}, "64GiB"),
            ({"payload_bytes": 0}, "payload_bytes is 0"),
            ({"payload_bytes": 2**40}, "payload_bytes is 1099511627776"),
            ({"label_bytes": 6}, "label_bytes 6: a multiple of 4"),
            ({"geometry_tag": b"x"}, "geometry_tag: 1 bytes were given, 32 are needed"),
            ({"rank": 2, "world": 2}, "rank 2: must be below world, 2"),
            ({"rank": -1}, "rank is -1"),
            ({"io": "fast"}, r'^disk\.io: "fast"; expected "auto", "io_uring" or "threads"$'),
            ({"direct": "maybe"}, r'^disk\.direct: "maybe"; expected "auto", "on" or "off"$'),
        ],
    )
    def test_names_the_field_and_what_would_do(self, folder: Path, changes: dict[str, object], named: str) -> None:
        with pytest.raises(ValueError, match=named) as caught:
            make(folder, **changes)
        assert "\n" not in str(caught.value)
        assert list(folder.iterdir()) == []

    def test_more_than_the_disk_has_leaves_nothing_behind(self, folder: Path) -> None:
        free = shutil.disk_usage(folder).free
        with pytest.raises(
            ValueError, match=r"^disk\.size: \d+ pages need \d+ MiB more in .*, where \d+ MiB are free; expected"
        ):
            make(folder, slots=min(free // (1 << 30) + 64, 1 << 20), payload_bytes=1 << 30)
        assert list(folder.iterdir()) == []

    def test_a_second_process_is_refused_by_name_and_the_first_goes_on(self, folder: Path) -> None:
        with make(folder) as store:
            put(store, 1, 1)
            child = in_child(SECOND, folder)
            other = f"in use by another process (pid {os.getpid()}); expected a directory of its own for each cache"
            assert child.stdout == f"disk.path: {folder}: {other}\n"
            with pytest.raises(ConfigError, match=r"^disk\.path: .*: in use by this process; expected a directory"):
                make(folder)
            (folder / "lock").unlink()  # a cleaner's mistake
            child = in_child(SECOND, folder)
            assert "in use, though its lock file was removed" in child.stdout
            assert served(store, 1, 1)
        with make(folder) as store:
            assert served(store, 1, 1)

    @pytest.mark.parametrize("name", ["slab", "table", "generations", "lock"])
    def test_never_follows_a_symbolic_link(self, folder: Path, tmp_path: Path, name: str) -> None:
        with make(folder) as store:
            put(store, 1, 1)
        target = tmp_path / "precious"
        target.write_bytes(b"precious")
        (folder / name).unlink()
        (folder / name).symlink_to(target)
        with pytest.raises(ConfigError, match=r"^disk\.path: .* is a symbolic link, .*; expected a directory"):
            make(folder)
        assert target.read_bytes() == b"precious"

    @pytest.mark.parametrize("name", ["slab", "table", "generations", "lock"])
    def test_a_folder_or_fifo_in_a_files_place_is_an_error(self, folder: Path, name: str) -> None:
        make(folder).close()
        (folder / name).unlink()
        (folder / name).mkdir()
        with pytest.raises(ConfigError, match=rf"^disk\.path: .*{name}.*; expected a directory"):
            make(folder)
        (folder / name).rmdir()
        os.mkfifo(folder / name)
        with pytest.raises(ConfigError, match=rf"^disk\.path: .*{name}.*; expected a directory"):
            make(folder)


def test_survives_its_directory_being_deleted(folder: Path) -> None:
    with make(folder) as store:
        put(store, 1, 1)
        shutil.rmtree(folder)
        assert served(store, 1, 1)
        assert put(store, 2, 2) == 0
        assert set(held(store)) == {1, 2}
        assert store.invalidate(SPACE_A) == 1
        for _ in range(JOURNAL - 2):  # then the journal is full, and a new one has no place to be
            store.invalidate(SPACE_A)
        with pytest.raises(OSError, match="generations") as failed:
            store.invalidate(SPACE_A)
        assert failed.value.errno == errno.ENOENT
        assert held(store) == {}
    folder.mkdir()


@pytest.mark.parametrize("direct", ["on", "off"])
def test_says_what_it_is(folder: Path, direct: str) -> None:
    with make(folder) as store:
        if direct == "on" and not store.native.direct:
            pytest.skip("direct I/O is refused here")
    with make(folder, direct=direct, io="threads") as store:
        line = store.describe()
        assert store.native.direct == (direct == "on")
        assert line.startswith("disk: ")
        assert "8 pages of 4 KiB in " in line
        assert str(folder) in line
        assert store.native.io.why in line
        assert ("buffered I/O" in line) == (direct == "off") or not store.native.io.direct
        assert "\n" not in line


def test_identity_and_record_sizes_are_the_format_s() -> None:
    assert identity(0).size == IDENTITY_BYTES
    assert checksum(0) != 0
