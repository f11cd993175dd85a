"""Nobody waits for ever: a file operation that does not return takes the disk out of service, and close comes back."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier import _core
from tests.disk_kit import SPACE_A, SPACE_B, disk_folder, in_child
from tests.unit.mover_rig import DEVICE, DISK, HOST, Rig, span

Kind, On, Status = _core.FaultPlan.Kind, _core.FaultPlan.On, _core.PageStatus


@pytest.fixture
def hang() -> Iterator[_core.FaultPlan]:
    """Hangs the next file operation of a store that changes or syncs a file; released at the end."""
    plan = _core.FaultPlan()
    yield plan
    plan.clear()
    plan.release()
    _core.use_faults(None)


@pytest.mark.parametrize("nth", [1, 2])  # writing the first page's record; clearing it when its slot is used again
def test_a_record_that_is_never_written_holds_up_nobody(tmp_path: Path, hang: _core.FaultPlan, nth: int) -> None:
    with disk_folder(tmp_path) as folder:
        rig = Rig(folder, faults=_core.FaultPlan(), io_limit_s=1.0, close_limit_s=0.1)
        kept = rig.store(2, 0)
        hang.add(Kind.DELAY, nth, _core.FaultPlan.FOREVER, on=On.WRITE)
        _core.use_faults(hang)
        stuck = rig.submit((HOST, DISK), [span(4, 1), span(nth - 1, 1)], [9])
        while not rig.mover.stats()["disk"]["offline"]:
            rig.mover.wait(0.01)
            rig.reported += rig.mover.poll()
        assert "an operation on the table of" in rig.mover.warnings()[0]
        assert not rig.next(stuck).final  # its pages are not free before it is known what became of them
        assert (rig.move((DISK, HOST), [span(1, 1), span(9, 1)], [1]) == Status.OFFLINE).all()
        rig.memory[3] = kept[0]
        assert (rig.move((DEVICE, HOST, DEVICE)[:2], [span(3, 1), span(3, 1)], [3]) == Status.OK).all()
        assert not rig.mover.close()
        last = rig.next(stuck)
        assert last.final
        assert (last.status == Status.CANCELLED).all()
        assert rig.mover.pending() == 0
        hang.clear()
        hang.release()


def test_an_invalidation_on_a_disk_that_hangs_ends_in_time_and_holds_here(
    tmp_path: Path, hang: _core.FaultPlan
) -> None:
    with disk_folder(tmp_path) as folder:
        options = {"slots": 8, "payload_bytes": 3000, "label_bytes": 64, "geometry_tag": bytes(32)}
        store = _core.DiskStore(str(folder), *options.values(), journal_entries=64, sync_limit_s=0.2)
        hang.add(Kind.DELAY, 1, _core.FaultPlan.FOREVER, on=On.OTHER)  # the sync
        _core.use_faults(hang)
        for generation in (1, 2):  # the second finds the first still hanging
            with pytest.raises(OSError, match=r"cannot make .*/generations durable") as failed:
                store.invalidate(SPACE_A)
            assert failed.value.errno == errno.ETIMEDOUT
            assert store.generation(SPACE_A) == generation
        hang.clear()
        hang.release()
        while True:  # until the thread that hung is back
            try:
                assert store.invalidate(SPACE_B) >= 1
                break
            except OSError:
                continue
        store.close()
        del store
        again = _core.DiskStore(str(folder), *options.values(), journal_entries=64)
        assert again.generation(SPACE_A) == 2  # made durable by the one that succeeded
        again.close()


def test_a_process_ends_although_its_disk_hangs() -> None:
    child = in_child(
        """
import tempfile
from pathlib import Path
from kvtier import _core
from tests.disk_kit import disk_folder
from tests.unit.mover_rig import *

with tempfile.TemporaryDirectory() as parent, disk_folder(Path(parent)) as folder:
    rig = Rig(folder, faults=_core.FaultPlan(), io_limit_s=0.2, close_limit_s=0.1)
    rig.store(1, 0)
    plan = _core.FaultPlan()
    plan.add(_core.FaultPlan.Kind.DELAY, 1, _core.FaultPlan.FOREVER, on=_core.FaultPlan.On.WRITE)
    _core.use_faults(plan)
    rig.submit((HOST, DISK), [span(4, 1), span(1, 1)], [9])
    while not plan.fired:
        rig.mover.wait(0.001)
    assert not rig.mover.close()
"""
    )
    assert child.returncode == 0, child.stderr
