"""The data plane's front: transfers in, completions out.

The control plane submits :class:`Transfer`s and polls :class:`Completion`s; native threads move the bytes and never
need the GIL. This is the only module that knows threads and the event loop: a background thread with a uvloop loop,
started at the first use of :meth:`Mover.wait_for` or :meth:`Mover.call_at`, hears of completions through one eventfd.

Protocol. A ticket is the caller's and unused by any transfer that is not reported to its end. A transfer is reported
finally once, and at most once before that: when it was cancelled, overdue or hung and only disk I/O of it is still
under way. A status that is not PENDING never changes; until a page's hop has one, its source must stay and its
destination may still be written. Every completion comes out of
:meth:`Mover.poll`, also of those that somebody awaits, or is settled by :meth:`Mover.settle`.

After ``fork()`` a mover works in the parent alone; in the child every method raises :class:`RuntimeError`.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import uvloop

from kvtier import _core
from kvtier.config import CudaConfig
from kvtier.messages import Completion, HopReport, Priority, Transfer
from kvtier.tiers.copy_paths import choose

if TYPE_CHECKING:
    from kvtier.config import CacheConfig
    from kvtier.tiers.copy_paths import Choice
    from kvtier.tiers.device import DevicePool
    from kvtier.tiers.disk import DiskStore
    from kvtier.tiers.host import HostArena

    Pools = tuple[DevicePool | None, HostArena | None, DiskStore | None]

__all__ = ["Completion", "HopReport", "Mover", "Priority", "Timer", "Transfer"]

INBOX_LIMIT = 4096  # completions collected and not polled, after which nothing more is taken
JOIN_LIMIT = 10.0  # seconds that close() waits for the background thread

_kept: list[tuple[_core.Mover, Pools]] = []  # with an I/O that never returned and may still write to its page


def _completion(native: _core.Completion) -> Completion:
    ticket, final, hops, submitted, finished, whole = native.told()
    status = _whole(len(hops), native.pages) if whole else native.status
    return Completion(ticket, final, status, tuple(map(HopReport._make, hops)), submitted, finished, whole)


@lru_cache(maxsize=1024)
def _whole(hops: int, pages: int) -> npt.NDArray[np.uint8]:
    """All pages well: nearly always so, and the same array then."""
    status = np.full((hops, pages), _core.PageStatus.OK, np.uint8)
    status.flags.writeable = False
    return status


def _end(native: _core.Mover, pools: Pools) -> bool:
    """End a mover's threads; what points into its ``pools`` does so no longer, or they stay for ever."""
    clean = native.close()
    if not clean:
        _kept.append((native, pools))
    return clean


class Mover:
    """Lanes between the tiers that are given; paths through a tier that is None are refused.

    ``bytes_in_flight`` and ``queue_pages`` bound each lane. ``verify``: the checksum of every page read from disk is
    compared before the page counts as there; ``verify_host``: that of host pages too. Pages side by side in both tiers
    share an I/O of up to ``op_bytes``. An I/O older than ``io_limit_s`` ends its transfer as overdue; ``close_limit_s``
    is how long :meth:`close` waits for what is under way. ``faults`` spoils chosen I/O (by default what the process's
    plan says), and ``throttle`` makes the disk as slow as it says, for tests and benchmarks.

    Methods may be called from any thread; none blocks but ``wait`` and ``close``.
    """

    def __init__(
        self,
        device: DevicePool | None,
        host: HostArena | None,
        disk: DiskStore | None,
        io: str = "auto",
        *,
        copy_threads: int = 1,
        bytes_in_flight: int = 8 << 20,
        queue_pages: int = 1 << 16,
        verify_host: bool = False,
        verify: bool = True,
        io_limit_s: float = 5.0,
        close_limit_s: float = 2.0,
        op_bytes: int = 1 << 20,
        faults: _core.FaultPlan | None = None,
        throttle: _core.Throttle | None = None,
        cuda: CudaConfig | None = None,
    ) -> None:
        self._cuda = device.cuda if device is not None else None
        self.copies: Choice | None = None
        """By which paths pages cross the link to a GPU; None: the device is host memory."""
        copies = self._copies(cuda, device, host)
        self.native = _core.Mover(
            device.native if device is not None else None,
            host.native if host is not None else None,
            disk.native if disk is not None else None,
            io,
            copy_threads=copy_threads,
            bytes_in_flight=bytes_in_flight,
            queue_pages=queue_pages,
            verify_host=verify_host,
            verify=verify,
            io_limit_s=io_limit_s,
            close_limit_s=close_limit_s,
            op_bytes=op_bytes,
            faults=faults,
            throttle=throttle,
            cuda=copies,
        )
        self._pools = (device, host, disk)  # kept alive with what the native side points into
        # One that nobody closes ends as well: without the GIL, and before the memory goes that its threads copy.
        self._ending = weakref.finalize(self, _end, self.native, self._pools)
        self._ending.atexit = False
        self._lock = threading.Lock()  # of what follows; held for a few operations, never while waiting
        self.inbox: deque[Completion] = deque()
        """Collected for somebody who awaits some of it, and not polled."""
        self._waiters: dict[int, list[tuple[asyncio.AbstractEventLoop, asyncio.Future[Completion]]]] = {}
        self._background: _Background | None = None
        self._clean: bool | None = None  # what close() found

    @classmethod
    def open(
        cls,
        config: CacheConfig,
        device: DevicePool | None,
        host: HostArena | None,
        disk: DiskStore | None,
        throttle: _core.Throttle | None = None,
    ) -> Self:
        """A mover as ``config`` describes it."""
        return cls(
            device,
            host,
            disk,
            config.disk.io,
            copy_threads=config.mover.copy_threads,
            bytes_in_flight=int(config.mover.bytes_in_flight),
            queue_pages=config.mover.queue_pages,
            verify_host=config.mover.verify_host,
            verify=config.mover.verify,
            throttle=throttle,
            cuda=config.cuda,
        )

    def _copies(
        self, config: CudaConfig | None, device: DevicePool | None, host: HostArena | None
    ) -> _core.CudaCopies | None:
        """How pages are copied where the device is a GPU; begins to pin the host's."""
        if device is None or device.cuda is None or host is None:
            return None
        config = CudaConfig() if config is None else config
        self.copies = choose(config, device)
        return _core.CudaCopies(
            device.cuda.native,
            _core.PinnedArena(device.cuda.native, host.native),
            offload=self.copies.offload,
            onboard=self.copies.onboard,
            processor_share=config.processor_share,
            host_calls=self.copies.ends == "call",
        )

    # ---- transfers ---------------------------------------------------------------------------------------------------

    def submit(self, transfer: Transfer) -> bool:
        """Queue a transfer; False: the queue is full (or the mover closed), and nothing of it will run.

        A full queue first drops queued stores that are worth less than this one, if that makes room; they are reported
        as CANCELLED. On a GPU the copies come after all that the calling thread's current stream was given until now.
        Raises :class:`ValueError` for a path, slot, identity or ticket that makes no sense.
        """
        if self.crowded:
            return False
        ticket, path, slots, identities, priority, deadline, cuts = transfer
        return self.native.submit(ticket, path, slots, identities, int(priority), deadline, self.stream(), cuts)

    @property
    def crowded(self) -> bool:
        """So much was reported and not polled that nothing more is taken."""
        return len(self.inbox) >= INBOX_LIMIT

    def stream(self) -> int:
        """The calling thread's current stream of a GPU, 0 where the device is none: what copies come behind."""
        return 0 if self._cuda is None else self._cuda.current_stream()

    def cancel(self, ticket: int) -> bool:
        """Start no further hop of it; False when there is nothing left to cancel. May be repeated."""
        return self.native.cancel(ticket)

    def promote(self, ticket: int, priority: Priority, deadline: float) -> bool:
        """Serve it at least as urgently as ``priority`` and this deadline from now on, and end it no earlier than then;
        False when there is nothing left to serve."""
        return self.native.promote(ticket, int(priority), deadline)

    def poll(self) -> list[Completion]:
        """What was reported since the last poll. Never blocks, so it may leave something for the next one."""
        if not self.inbox and not self.native.has_reports():
            return []
        if not self._lock.acquire(blocking=False):
            return []
        try:
            self._collect()
            if not self.inbox:
                return []
            out = list(self.inbox)
            self.inbox.clear()
            return out
        finally:
            self._lock.release()

    def settle(self, orders: _core.Orders, spill: bool) -> dict[int, bool] | None:
        """What :meth:`poll` would say, settled by ``orders`` in the same call. None: somebody awaits some of it, so
        that it has to be polled."""
        if not self._lock.acquire(blocking=False):
            return {}
        try:
            return None if self.inbox or self._waiters else orders.settle(spill)
        finally:
            self._lock.release()

    def wait(self, timeout: float) -> bool:
        """Wait, without the GIL, until there is something to poll; False: nothing within ``timeout`` seconds."""
        seen = self.native.reports()  # before looking, so that what is reported after the look ends the wait
        if self.inbox:
            return True
        return self.native.wait(max(timeout, 0.0), seen)

    def wait_for_slices(self, ticket: int, count: int, timeout: float) -> bool:
        """Wait, without the GIL, until the first ``count`` slices of all pages of a transfer that was not polled to its
        end are there. False: not within ``timeout`` seconds, or some page will never be whole."""
        if self.native.wait_slices(ticket, count, max(timeout, 0.0)):
            return True
        ended = next((done for done in list(self.inbox) if done.ticket == ticket and done.final), None)
        return ended is not None and bool((ended.status == _core.PageStatus.OK).all())

    def pending(self) -> int:
        """Transfers whose final completion was not polled."""
        return self.native.pending() + sum(done.final for done in list(self.inbox))

    def stats(self) -> dict[str, Any]:
        """``lanes``: for each, counts, bytes, seconds, pages by PageStatus since the start; ``disk``; ``pending``."""
        return self.native.stats()

    def warnings(self) -> list[str]:
        """One line for each thing that works worse than it could."""
        stats = self.native.stats()
        disk = stats["disk"]
        return [text for text in (disk["warning"], disk["note"], stats["device_note"]) if text]

    def close(self) -> bool:
        """Cancel everything and end all threads; :meth:`poll` then tells what was left. May be repeated.

        False: an I/O never returned. It may still write to its page, so the pools' memory is kept for as long as the
        process lives, and the disk's files must stay open.
        """
        if self._clean is None:
            self._clean = _end(self.native, self._pools)
            self._ending.detach()
            with self._lock:
                self._collect()
                background, self._background = self._background, None
            if background is not None:
                background.close()
        return self._clean

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- waiting in an event loop --------------------------------------------------------------------------------

    async def wait_for(self, ticket: int, timeout: float) -> Completion:
        """The final completion of a transfer that was not polled to its end; from any event loop.

        Raises :class:`TimeoutError` after ``timeout`` seconds (the transfer goes on), :class:`LookupError` when there
        is no such transfer (any more).
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        waiter = (loop, future)
        with self._lock:
            for done in self.inbox:
                if done.ticket == ticket and done.final:
                    return done
            if not self.native.knows(ticket):
                raise LookupError(f"ticket = {ticket}: no transfer that is still to be reported")
            self._waiters.setdefault(ticket, []).append(waiter)
            background = self._start()
        background.watch()
        try:
            async with asyncio.timeout(timeout):
                return await future
        finally:
            with self._lock:
                waiting = self._waiters.get(ticket, [])
                if waiter in waiting:
                    waiting.remove(waiter)
                if not waiting:
                    self._waiters.pop(ticket, None)

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Call ``callback`` in the background thread at ``when`` (``time.monotonic()``'s clock). It must not block."""
        with self._lock:
            background = self._start()
        return background.call_at(when, callback)

    def _start(self) -> _Background:
        if self._clean is not None:
            raise RuntimeError("the mover is closed")
        if self._background is None:
            self._background = _Background(self.native, self._notice)
        return self._background

    def _notice(self) -> bool:
        """Runs in the background thread when something was reported; False: nobody waits any more."""
        with self._lock:
            self._collect()
            return bool(self._waiters)

    def _collect(self) -> None:
        """Move what was reported to the inbox and tell those who wait for it; with the lock held."""
        for native in self.native.poll():
            done = _completion(native)
            self.inbox.append(done)
            if not done.final:
                continue
            for loop, future in self._waiters.pop(done.ticket, ()):
                try:
                    loop.call_soon_threadsafe(_resolve, future, done)
                except RuntimeError:  # its loop was closed: nobody waits
                    continue


def _resolve(future: asyncio.Future[Completion], done: Completion) -> None:
    if not future.done():
        future.set_result(done)


class Timer:
    """A call that is still to come."""

    def __init__(self) -> None:
        self._cancelled = False

    def cancel(self) -> None:
        """Do not call; without effect once called. From any thread."""
        self._cancelled = True

    def _run(self, callback: Callable[[], object]) -> None:
        if not self._cancelled:
            callback()


class _Background:
    """A thread with a uvloop loop, which listens to the mover's eventfd for as long as somebody waits."""

    def __init__(self, native: _core.Mover, notice: Callable[[], bool]) -> None:
        self.native = native
        self._notice = notice
        self._loop = uvloop.new_event_loop()
        self._loop.add_reader(native.fileno(), self._on_report)
        self._thread = threading.Thread(target=self._run, name="kvtier-mover", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def watch(self) -> None:
        """Hear of reports from now on; of those that wait already, at once."""
        self.native.arm(True)

    def _on_report(self) -> None:
        # Nobody waits: the engine's own thread polls, and waking this one would only cost it the GIL.
        self.native.arm(False)
        if self._notice():
            self.native.arm(True)

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        timer = Timer()

        def schedule() -> None:
            delay = when - time.monotonic()
            self._loop.call_later(max(0.0, delay), timer._run, callback)

        self._loop.call_soon_threadsafe(schedule)
        return timer

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(JOIN_LIMIT)

    def _stop(self) -> None:
        self._loop.remove_reader(self.native.fileno())
        self._loop.stop()
