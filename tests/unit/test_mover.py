"""The mover's face: transfers, reports, waiting, the background loop."""

import asyncio
import gc
import os
import select
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvtier import _core
from kvtier.mover import Completion, Mover, Priority, Transfer
from tests.unit.mover_rig import DEVICE, DISK, HOST, PATIENCE, identities, rig, span

OK = _core.PageStatus.OK


@pytest.mark.parametrize("io", ["auto", "threads"])
@pytest.mark.parametrize("payload", [4096, 10_000, 65_536])
def test_every_path_brings_every_byte(tmp_path: Path, io: str, payload: int, seed: int) -> None:
    with rig(tmp_path, payload=payload, io=io, slots=32) as r:
        pages = r.store(16, seed)
        disk = np.random.default_rng(seed).permutation(16).astype(np.uint32)
        assert (r.move((DISK, HOST, DEVICE), [disk, span(16, 16), span(5, 16)], disk) == OK).all()
        assert (r.memory[5:21] == pages[disk]).all()
        r.memory[:] = 0
        assert (r.move((HOST, DEVICE), [span(16, 16), span(0, 16)], disk) == OK).all()
        assert (r.memory[:16] == pages[disk]).all()
        assert (r.move((DEVICE, HOST), [span(0, 16), span(0, 16)], disk) == OK).all()
        assert (r.move((HOST, DISK), [span(0, 16), span(16, 16)], disk) == OK).all()
        assert (r.move((DISK, HOST), [span(16, 16), span(16, 16)], disk) == OK).all()
        for slot, block in zip(range(16, 32), disk, strict=True):
            assert (r.host.page(slot)[:payload] == pages[block]).all()


def test_a_completion_says_what_each_hop_took(tmp_path: Path, seed: int) -> None:
    with rig(tmp_path) as r:
        r.store(8, seed)
        before = time.monotonic()
        done = r.next(r.submit((DISK, HOST, DEVICE), [span(0, 8), span(8, 8), span(8, 8)], range(8)))
        after = time.monotonic()
        assert done.final
        assert done.status.shape == (2, 8)
        assert [hop.lane for hop in done.hops] == ["stage", "onboard"]
        assert [hop.bytes for hop in done.hops] == [8 * r.host.page_bytes, 8 * r.host.payload_bytes]
        assert all(0 < hop.busy_s <= after - before and hop.queue_s >= 0 for hop in done.hops)
        assert before <= done.submitted_s <= done.finished_s <= after
        assert all(done.submitted_s <= hop.started_s < hop.ended_s <= done.finished_s for hop in done.hops)


def test_transfers_finish_while_the_main_thread_holds_the_gil(tmp_path: Path, seed: int) -> None:
    """Judged by the data plane's own clock and counters, whatever the machine's speed."""
    count = 24
    with rig(tmp_path, slots=count) as r:
        pages = r.store(count, seed)
        numbers = list(np.random.default_rng(seed).random(200_000))
        for _ in range(8):
            r.memory[:] = 0
            tickets = []
            long = numbers * 4
            begun = time.monotonic()
            for first in range(0, count, 4):
                places = span(first, 4)
                tickets.append(r.submit((DISK, HOST, DEVICE), [places, places, places], range(first, first + 4)))
            long.sort()  # one native call; it never lets go of the GIL
            ended = time.monotonic()
            reports = r.mover.native.reports  # read after the call, without letting anything run in between
            done = {c.ticket: c for c in r.mover.poll()}
            if set(tickets) <= set(done):
                break
            numbers *= 2  # a machine that moves pages slower than this sorts: hold the GIL for longer
            for ticket in set(tickets) - set(done):
                r.next(ticket)
        assert set(done) == set(tickets)
        assert reports() >= len(tickets)
        for completion in done.values():
            assert (completion.status == OK).all()
            assert begun < completion.submitted_s < completion.finished_s < ended
        assert (r.memory == pages).all()


def test_a_higher_priority_is_served_first(tmp_path: Path, seed: int) -> None:
    with rig(tmp_path, bytes_in_flight=1) as r:
        r.store(16, seed)
        operations = r.faults.operations
        r.faults.add(_core.FaultPlan.Kind.DELAY, operations + 1, _core.FaultPlan.FOREVER)
        first = r.submit((DISK, HOST), [span(0, 8), span(16, 8)], range(8), Priority.BACKGROUND)
        while r.faults.operations == operations:
            time.sleep(0.001)
        low = r.submit((DISK, HOST), [span(8, 1), span(30, 1)], [8], Priority.BACKGROUND)
        high = r.submit((DISK, HOST), [span(9, 1), span(40, 1)], [9], Priority.DEMAND)
        r.faults.release()
        ends = {ticket: r.next(ticket).finished_s for ticket in (first, low, high)}
        assert ends[high] < ends[first] < ends[low]


def test_a_promoted_prefetch_is_served_with_the_demand(tmp_path: Path, seed: int) -> None:
    with rig(tmp_path, slots=16) as r:
        r.store(4, seed)
        r.faults.add(_core.FaultPlan.Kind.DELAY, 1, _core.FaultPlan.FOREVER, 1, _core.FaultPlan.On.READ)
        late = r.submit((DISK, HOST), [span(0, 4), span(4, 4)], range(4), Priority.PREFETCH)
        assert r.mover.promote(late, Priority.DEMAND, time.monotonic() + PATIENCE)
        assert not r.mover.promote(late + 1, Priority.DEMAND, 0.0)
        while not r.faults.fired:
            time.sleep(0.001)
        r.faults.release()
        assert (r.next(late).status == OK).all()
        assert not r.mover.promote(late, Priority.DEMAND, 0.0)


def test_a_throttled_disk_takes_the_time_of_the_drive_it_emulates(tmp_path: Path, seed: int) -> None:
    drive = _core.Throttle()
    with rig(tmp_path, payload=65_536, throttle=drive) as r:
        pages = r.store(16, seed)
        drive.set(16 * 65_536 / 0.2, 0.01)
        began = time.monotonic()
        places = span(0, 16)
        assert (r.move((DISK, HOST, DEVICE), [places, span(16, 16), places], range(16)) == OK).all()
        assert time.monotonic() - began >= 0.2 + 0.01
        assert (r.memory[:16] == pages).all()


def test_a_full_queue_refuses(tmp_path: Path) -> None:
    with rig(tmp_path, queue_pages=4) as r:
        assert not r.submit((HOST, DEVICE), [span(0, 5), span(0, 5)], range(5))
        assert r.submit((HOST, DEVICE), [span(0, 4), span(0, 4)], range(4))


def test_poll_never_waits_and_wait_does(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        assert r.mover.poll() == []
        assert not r.mover.wait(0.0)
        assert r.mover.pending() == 0
        r.submit((HOST, DEVICE), [span(0, 1), span(0, 1)], [0])
        assert r.mover.wait(PATIENCE)
        assert r.mover.pending() == 1
        assert r.mover.wait(PATIENCE)  # until it is polled
        assert len(r.mover.poll()) == 1
        assert r.mover.pending() == 0


def test_wait_lets_other_threads_run(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        threading.Timer(0.01, lambda: r.submit((HOST, DEVICE), [span(0, 1), span(0, 1)], [0])).start()
        assert r.mover.wait(PATIENCE)


def test_the_eventfd_is_written_only_when_armed(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        native = r.mover.native

        def readable() -> bool:
            return bool(select.select([native.fileno()], [], [], 0)[0])

        r.submit((HOST, DEVICE), [span(0, 1), span(0, 1)], [0])
        r.mover.wait(PATIENCE)
        assert not readable()
        native.arm()
        assert readable()
        assert len(r.mover.poll()) == 1
        assert not readable()


def test_an_awaited_transfer_is_also_polled(tmp_path: Path, seed: int) -> None:
    with rig(tmp_path) as r:
        pages = r.store(8, seed)

        async def load() -> list[Completion]:
            tickets = [r.submit((DISK, HOST, DEVICE), [span(i, 1), span(8 + i, 1), span(i, 1)], [i]) for i in range(8)]
            return await asyncio.gather(*(r.mover.wait_for(ticket, PATIENCE) for ticket in tickets))

        done = asyncio.run(load())
        assert all((c.status == OK).all() for c in done)
        assert (r.memory[:8] == pages).all()
        assert sorted(c.ticket for c in r.mover.poll()) == sorted(c.ticket for c in done)
        assert r.mover.pending() == 0


def test_the_engine_may_poll_what_another_loop_awaits(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.faults.add(_core.FaultPlan.Kind.DELAY, 1, _core.FaultPlan.FOREVER)
        ticket = r.submit((HOST, DISK), [span(0, 1), span(0, 1)], [0])
        result: list[Completion] = []
        waiting = threading.Event()

        async def wait() -> None:
            asyncio.get_running_loop().call_soon(waiting.set)
            result.append(await r.mover.wait_for(ticket, PATIENCE))

        thread = threading.Thread(target=lambda: asyncio.run(wait()))
        thread.start()
        assert waiting.wait(PATIENCE)
        r.faults.release()
        assert r.next(ticket).final
        thread.join(PATIENCE)
        assert [done.ticket for done in result] == [ticket]


def test_waiting_for_nothing_or_for_too_long_says_so(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        with pytest.raises(LookupError, match="ticket = 7"):
            asyncio.run(r.mover.wait_for(7, PATIENCE))
        r.faults.add(_core.FaultPlan.Kind.DELAY, 1, _core.FaultPlan.FOREVER)
        ticket = r.submit((HOST, DISK), [span(0, 1), span(0, 1)], [0])
        with pytest.raises(TimeoutError):
            asyncio.run(r.mover.wait_for(ticket, 0.01))
        assert not r.mover._waiters
        r.faults.release()
        assert (r.next(ticket).status == OK).all()
        with pytest.raises(LookupError):
            asyncio.run(r.mover.wait_for(ticket, PATIENCE))


def test_timers_run_in_the_background_thread_unless_cancelled(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        ran = threading.Event()
        names: list[str] = []
        cancelled = r.mover.call_at(time.monotonic() + 0.005, lambda: names.append("cancelled"))
        cancelled.cancel()

        def note() -> None:
            names.append(threading.current_thread().name)
            ran.set()

        r.mover.call_at(time.monotonic() + 0.02, note)
        assert ran.wait(PATIENCE)
        assert names == ["kvtier-mover"]


def test_closing_ends_waiting_and_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    with rig(tmp_path, close_limit_s=0.05) as r:
        r.faults.add(_core.FaultPlan.Kind.DELAY, 1, _core.FaultPlan.FOREVER)
        ticket = r.submit((HOST, DISK), [span(0, 1), span(0, 1)], [0])

        async def wait_and_close() -> Completion:
            waiting = asyncio.ensure_future(r.mover.wait_for(ticket, PATIENCE))
            await asyncio.sleep(0)
            await asyncio.to_thread(r.mover.close)
            return await waiting

        done = asyncio.run(wait_and_close())
        assert (done.status == _core.PageStatus.CANCELLED).all()
        assert [c.final for c in r.mover.poll()] in ([True], [False, True])
        assert not r.submit((HOST, DEVICE), [span(0, 1), span(0, 1)], [0])
        with pytest.raises(RuntimeError, match="closed"):
            r.mover.call_at(0.0, lambda: None)
    assert threading.active_count() == before


def test_a_forked_child_is_refused_and_ends_cleanly(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                r.mover.poll()
            except RuntimeError as error:
                code = 0 if "fork" in str(error) else 2
            r.mover = None  # its destructor must not wait for threads that the child has not got
            gc.collect()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (r.move((HOST, DEVICE), [span(0, 1), span(0, 1)], [0]) == OK).all()


def test_an_order_that_makes_no_sense_is_refused_whole(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        good = Transfer(1, (HOST, DEVICE), np.zeros((2, 1), np.uint32), identities([0]))
        bad = {
            "ticket = 0": good._replace(ticket=0),
            "device -> disk": good._replace(path=(DEVICE, DISK)),
            "host slot 64": good._replace(slots=np.array([[64], [0]], np.uint32)),
            "slots has shape": good._replace(slots=np.zeros((2, 2), np.uint32)),
            "cuts: path = host -> disk": good._replace(path=(HOST, DISK), cuts=(10_000,)),
            "cuts: 24 after 16": good._replace(cuts=(16, 24, 10_000)),
            "cuts: 4096 after 0": good._replace(cuts=(4096,)),
            "identities: 120 bytes": good._replace(identities=np.zeros((1, 120), np.uint8)),
        }
        for text, transfer in bad.items():
            with pytest.raises(ValueError, match=text):
                r.mover.submit(transfer)
        assert r.mover.pending() == 0
        r.mover.submit(good)
        with pytest.raises(ValueError, match="still in use"):
            r.mover.submit(good)


def test_a_load_in_slices_brings_the_same_bytes_and_tells_of_each_slice(tmp_path: Path, seed: int) -> None:
    with rig(tmp_path) as r:
        pages = r.store(8, seed)
        assert (r.move((DISK, HOST), [span(0, 8), span(0, 8)], range(8)) == OK).all()
        r.memory[:] = 0
        payload = r.memory.shape[1]
        ticket = r.submit((HOST, DEVICE), [span(0, 8), span(8, 8)], range(8), cuts=(16, 4096, payload))
        assert r.mover.wait_for_slices(ticket, 2, 60.0)
        assert (r.memory[8:16, :4096] == pages[:, :4096]).all()
        assert r.mover.wait_for_slices(ticket, 3, 60.0)
        assert (r.memory[8:16] == pages).all()
        done = r.next(ticket)
        assert (done.status == OK).all()
        assert done.hops[0].carried == done.hops[0].bytes == 8 * payload
        assert not r.mover.wait_for_slices(ticket, 1, 60.0), "nobody knows of a transfer that was polled to its end"
        assert not r.mover.wait_for_slices(999, 1, 60.0)


@pytest.mark.parametrize(("slices", "pages"), [(1025, 1), (1024, (1 << 14) + 1)])
def test_a_load_in_more_slices_than_can_be_counted_is_refused(tmp_path: Path, slices: int, pages: int) -> None:
    """Each piece of a page is queued: in the caller's time, and by a number of 32 bits."""
    payload = 1 << 15
    with rig(tmp_path, payload=payload, disk=False) as r:
        cuts = (*range(16, 16 * slices, 16), payload)
        assert len(cuts) == slices
        places = np.zeros((2, pages), np.uint32)
        transfer = Transfer(1, (HOST, DEVICE), places, identities(np.zeros(pages)), cuts=cuts)
        with pytest.raises(ValueError, match=rf"^cuts: {slices} slices of {pages} pages: up to 1024 are possible, and"):
            r.mover.submit(transfer)
        assert r.mover.pending() == 0
        assert r.mover.submit(transfer._replace(cuts=(*cuts[:3], payload)))


def test_waiting_for_slices_ends_with_the_load(tmp_path: Path, seed: int) -> None:
    with rig(tmp_path, verify_host=True) as r:
        r.store(4, seed)
        r.move((DISK, HOST), [span(0, 4), span(0, 4)], range(4))
        ticket = r.submit((HOST, DEVICE), [span(0, 4), span(8, 4)], [0, 1, 99, 3], cuts=(4096, r.memory.shape[1]))
        assert not r.mover.wait_for_slices(ticket, 2, 60.0), "a page of it is another than was asked for"
        assert r.next(ticket).status[0].tolist() == [OK, OK, _core.PageStatus.CORRUPT, OK]


def test_tiers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from types import SimpleNamespace

    host = SimpleNamespace(native=_core.HostArena(4, 8192))
    store = SimpleNamespace(native=_core.DiskStore(str(tmp_path), 4, 4096, 16, bytes(32)))
    with pytest.raises(ValueError, match="disk pages have 4096 bytes, host pages 8192"):
        Mover(None, host, store)
    with pytest.raises(ValueError, match="needs a host tier"):
        Mover(None, None, store)
    with pytest.raises(ValueError, match="copy_threads = 0"):
        Mover(None, host, None, copy_threads=0)
    with pytest.raises(ValueError, match="io = "):
        Mover(None, host, None, "aio")
    with Mover(None, host, None) as mover, pytest.raises(ValueError, match="no device tier"):
        mover.submit(Transfer(1, (HOST, DEVICE), np.zeros((2, 1), np.uint32), identities([0])))


def test_statistics_tell_what_was_moved(tmp_path: Path, seed: int) -> None:
    with rig(tmp_path) as r:
        r.store(8, seed)
        r.move((DISK, HOST), [span(0, 8), span(8, 8)], [0, 1, 2, 3, 4, 5, 6, 99])
        stats = r.mover.stats()
        assert set(stats["lanes"]) == {"offload", "onboard", "spill", "stage"}
        assert stats["lanes"]["stage"]["by_status"] == {OK: 7, _core.PageStatus.STALE: 1}
        assert stats["lanes"]["stage"]["bytes"] == 7 * r.host.page_bytes
        assert stats["lanes"]["stage"]["queued_pages"] == stats["lanes"]["stage"]["bytes_in_flight"] == 0
        assert stats["disk"]["engine"]
        assert not stats["disk"]["offline"]
