"""What a failing disk does to transfers: never a wrong byte, never a wait without end, each cause by its name."""

import time
from pathlib import Path

import numpy as np
import pytest

from kvtier import _core
from tests.unit.mover_rig import DEVICE, DISK, HOST, rig, span

Status, Kind, On = _core.PageStatus, _core.FaultPlan.Kind, _core.FaultPlan.On
EIO = 5


@pytest.mark.parametrize(
    ("kind", "value", "status"),
    [(Kind.ERROR, EIO, Status.READ_ERROR), (Kind.SHORT, 512, Status.SHORT_READ), (Kind.FLIP, 4321, Status.CORRUPT)],
)
@pytest.mark.parametrize("io", ["auto", "threads"])
def test_a_bad_read_is_named_and_never_reaches_the_device(
    tmp_path: Path, io: str, kind: _core.FaultPlan.Kind, value: int, status: _core.PageStatus, seed: int
) -> None:
    with rig(tmp_path, io=io, op_bytes=1) as r:  # no merging: the n-th read is the n-th page
        pages = r.store(4, seed)
        r.faults.add(kind, 2, value, on=On.READ)
        got = r.move((DISK, HOST, DEVICE), [span(0, 4), span(8, 4), span(0, 4)], range(4))
        assert (got[0] != Status.OK).any(), f"a page whose read ended in {status.name} was served: it was not verified"
        bad = int(np.flatnonzero(got[0] != Status.OK)[0])
        assert got[0].tolist() == [status if i == bad else Status.OK for i in range(4)]
        assert got[1].tolist() == [Status.SKIPPED if i == bad else Status.OK for i in range(4)]
        for i in range(4):
            assert (r.memory[i] == (0xEE if i == bad else pages[i])).all()
        assert r.host.checksum(8 + bad) == 0
        # The medium is as good as before: the same page is read again.
        assert (r.move((DISK, HOST), [span(bad, 1), span(20, 1)], [bad]) == Status.OK).all()


@pytest.mark.parametrize(("kind", "value"), [(Kind.ERROR, 28), (Kind.SHORT, 512)])
def test_a_failed_write_leaves_nothing_to_read(
    tmp_path: Path, kind: _core.FaultPlan.Kind, value: int, seed: int
) -> None:
    with rig(tmp_path) as r:
        r.store(1, seed)
        r.faults.add(kind, 1 + 1, value, on=On.WRITE)
        got = r.move((DEVICE, HOST, DISK), [span(3, 1), span(3, 1), span(0, 1)], [7])
        assert got.tolist() == [[Status.OK], [Status.WRITE_ERROR]]
        for block in (0, 7):
            assert (r.move((DISK, HOST), [span(0, 1), span(9, 1)], [block]) == Status.STALE).all()


def test_a_bit_that_flips_on_the_way_to_the_disk_is_found_when_it_is_read(tmp_path: Path, seed: int) -> None:
    with rig(tmp_path) as r:
        r.faults.add(Kind.FLIP, 1, 99, on=On.WRITE)
        r.store(1, seed)
        assert (r.move((DISK, HOST), [span(0, 1), span(9, 1)], [0]) == Status.CORRUPT).all()


def test_a_byte_changed_in_the_file_is_found(tmp_path: Path, seed: int) -> None:
    with rig(tmp_path, payload=65_536) as r:
        r.store(2, seed)
        with (tmp_path / "slab").open("r+b", buffering=0) as slab:
            slab.seek(r.disk.offset(1) + 40_000)
            byte = slab.read(1)[0]
            slab.seek(r.disk.offset(1) + 40_000)
            slab.write(bytes([byte ^ 0x40]))
        got = r.move((DISK, HOST), [span(0, 2), span(9, 2)], range(2))
        assert got.tolist() == [[Status.OK, Status.CORRUPT]]


@pytest.mark.parametrize("hops", [1, 2])
def test_the_first_failing_operation_never_loses_a_ticket(tmp_path: Path, hops: int, seed: int) -> None:
    """Fail at the n-th operation, for every n, until a run passes without reaching it."""
    path = (DEVICE, HOST, DISK)[2 - hops :]
    for nth in range(1, 100):
        directory = tmp_path / str(nth)
        directory.mkdir()
        with rig(directory, op_bytes=1, slots=16) as r:
            r.memory[:] = np.random.default_rng(seed).integers(0, 256, r.memory.shape, np.uint8)
            r.faults.add(Kind.ERROR, nth, EIO)
            places = span(0, 6)
            stored = r.move(path, [places] * (hops + 1), range(6))[-1]
            read = r.move((DISK, HOST, DEVICE), [places, span(8, 6), span(8, 6)], range(6))
            assert (stored == Status.WRITE_ERROR).sum() + (read[0] == Status.READ_ERROR).sum() == r.faults.fired
            assert ((read[0] == Status.OK) <= (stored == Status.OK)).all()
            assert (read[1] == np.where(read[0] == Status.OK, Status.OK, Status.SKIPPED)).all()
            if hops == 2:
                good = np.flatnonzero(read[1] == Status.OK)
                assert (r.memory[8 + good] == r.memory[good]).all()
            if not r.faults.fired:
                return
    raise AssertionError("no run passed clean")


def test_hung_operations_are_given_up_and_the_disk_goes_out_of_service(tmp_path: Path, seed: int) -> None:
    with rig(tmp_path, io_limit_s=1.0, op_bytes=1) as r:  # far above what a healthy operation takes
        r.store(16, seed)
        r.faults.add(Kind.DELAY, 1, _core.FaultPlan.FOREVER, count=1000, on=On.READ)
        tickets = [r.submit((DISK, HOST, DEVICE), [span(i, 1), span(20 + i, 1), span(i, 1)], [i]) for i in range(16)]
        for ticket in tickets:
            done = r.next(ticket)
            assert not done.final
            assert done.status.tolist() == [[Status.PENDING], [Status.OVERDUE]]
        while not r.mover.stats()["disk"]["offline"]:
            r.mover.wait(0.01)
        assert len(r.mover.warnings()) == 1
        assert "Connection timed out" in r.mover.warnings()[0]
        assert (r.move((DISK, HOST), [span(0, 1), span(60, 1)], [0]) == Status.OFFLINE).all()
        assert (r.move((HOST, DEVICE), [span(0, 1), span(60, 1)], [0]) == Status.OK).all()
        r.faults.release()
        for ticket in tickets:
            assert r.next(ticket).final


def test_memory_of_an_operation_that_never_returned_is_kept(tmp_path: Path, seed: int) -> None:
    with rig(tmp_path, close_limit_s=0.05) as r:
        r.store(1, seed)
        r.faults.add(Kind.DELAY, 1, _core.FaultPlan.FOREVER, on=On.READ)
        ticket = r.submit((DISK, HOST), [span(0, 1), span(1, 1)], [0])
        while not r.faults.fired:  # closed before it begins, it would never begin
            time.sleep(0.001)
        assert not r.mover.close()
        assert not r.mover.close()
        assert (r.next(ticket).status == Status.CANCELLED).all()
