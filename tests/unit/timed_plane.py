"""A data plane of lanes with speeds, in virtual time: pages are served one by one, the most urgent first."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

import numpy as np

from kvtier.catalog import PageStatus
from kvtier.costmodel import lanes_of
from kvtier.messages import Completion, Hello, HopReport, Priority, Transfer


@dataclass
class Job:
    transfer: Transfer
    submitted: float
    sequence: int
    priority: Priority
    deadline: float  # the latest of those who want it: then it ends
    due: float  # the earliest of those who wait for it: the order of service
    status: np.ndarray
    cancelled: bool = False
    started: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    carried: list[int] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    ready: list[deque[int]] = field(default_factory=list)  # pages that wait for each hop


class Lane:
    def __init__(self, rate, fixed):
        self.rate, self.fixed = rate, fixed  # pages per second; seconds that an idle lane takes to begin
        self.job = None
        self.hop = self.page = 0
        self.until = inf
        self.last = -inf


class TimedPlane:
    """``rates``: pages per second by lane. The clock is ``now``; only ``wait`` and ``advance`` turn it."""

    def __init__(self, capacity, rates=None, page_bytes=1 << 20, fixed=1e-4):
        self.capacity, self.page_bytes = capacity, page_bytes
        rates = {"offload": 8000, "onboard": 8000, "spill": 2000, "stage": 2000} | (rates or {})
        self.lanes = {name: Lane(rate, fixed) for name, rate in rates.items()}
        self.now = 1000.0
        self.jobs: dict[int, Job] = {}
        self.reports: list[Completion] = []
        self.count = 0
        self.log: list[Transfer] = []
        self.pages = dict.fromkeys(rates, 0)

    # -- DataPlane

    def hello(self):
        return Hello(dict(self.capacity), self.page_bytes, np.empty(0, np.uint32), np.empty((0, 0), np.uint8))

    def submit(self, transfer):
        self.count += 1
        hops, pages = len(transfer.path) - 1, transfer.slots.shape[1]
        job = Job(
            transfer,
            self.now,
            self.count,
            transfer.priority,
            transfer.deadline or inf,
            transfer.deadline or inf,
            np.zeros((hops, pages), np.uint8),
        )
        job.started, job.ended, job.carried = [0.0] * hops, [0.0] * hops, [0] * hops
        job.busy = [0.0] * hops
        job.ready = [deque(range(pages)), *(deque() for _ in range(hops - 1))]
        self.jobs[transfer.ticket] = job
        self.log.append(transfer)
        self._begin()
        return True

    def cancel(self, ticket):
        job = self.jobs.get(ticket)
        if job is not None:
            self._cancel(job, PageStatus.CANCELLED)

    def promote(self, ticket, priority, deadline):
        job = self.jobs.get(ticket)
        if job is not None:
            waited_for = job.priority == Priority.DEMAND
            job.due = min(job.due, deadline or inf) if waited_for else deadline or inf
            job.deadline = max(job.deadline, deadline or inf)
            job.priority = min(job.priority, priority)

    def poll(self):
        given, self.reports = self.reports, []
        return given

    def wait(self, timeout):
        """Until something is reported, at most so long."""
        end = self.now + timeout
        while not self.reports and self._step(end):
            pass
        if not self.reports:
            self.now = max(self.now, end)
        return bool(self.reports)

    def wait_for_slices(self, ticket, count, timeout):
        """Pages move whole here: all slices are there when all pages are."""
        end = self.now + timeout
        while ticket in self.jobs and self._step(end):
            pass
        if ticket in self.jobs:
            self.now = max(self.now, end)
        done = next((done for done in self.reports if done.ticket == ticket and done.final), None)
        return done is not None and bool((done.status == PageStatus.OK).all())

    def pending(self):
        return len(self.jobs) + len(self.reports)

    def generation(self, space):
        return 0

    def invalidate(self, space):
        return 1

    def forget(self, slots):
        pass

    def describe(self):
        return "timed"

    def warnings(self):
        return []

    def close(self):
        pass

    # -- time

    def advance(self, seconds):
        end = self.now + seconds
        while self._step(end):
            pass
        self.now = end

    def settle(self):
        while self._step(inf):
            pass

    def _step(self, end):
        """The next page's end, if it comes by ``end``."""
        name = min(self.lanes, key=lambda name: self.lanes[name].until)
        lane = self.lanes[name]
        if lane.until > end or lane.until == inf:
            return False
        self.now = max(self.now, lane.until)
        job, hop, page = lane.job, lane.hop, lane.page
        lane.job, lane.last, lane.until = None, self.now, inf
        self.pages[name] += 1
        job.ended[hop] = self.now
        job.carried[hop] += self.page_bytes
        job.status[hop, page] = PageStatus.CANCELLED if job.cancelled else PageStatus.OK
        if not job.cancelled and hop + 1 < len(job.ready):
            job.ready[hop + 1].append(page)
        self._report(job)
        self._begin()
        return True

    def _cancel(self, job, why):
        job.cancelled = True
        busy = {(lane.hop, lane.page) for lane in self.lanes.values() if lane.job is job}
        for page in range(job.status.shape[1]):
            for hop in range(len(job.status)):
                if job.status[hop, page] == PageStatus.PENDING and (hop, page) not in busy:
                    job.status[hop:, page] = np.where(job.status[hop:, page] == 0, why, job.status[hop:, page])
        for waiting in job.ready:
            waiting.clear()
        for hop, page in busy:  # what is being read goes no further
            job.status[hop + 1 :, page] = why
        self._report(job)
        if job.transfer.ticket in self.jobs:
            self.reports.append(Completion(job.transfer.ticket, False, job.status.copy(), (), job.submitted, self.now))

    def _report(self, job):
        if (job.status != PageStatus.PENDING).all() and job.transfer.ticket in self.jobs:
            del self.jobs[job.transfer.ticket]
            lanes = lanes_of(job.transfer.path)
            hops = tuple(
                HopReport(
                    lane, int((job.status[hop] == PageStatus.OK).sum()) * self.page_bytes, 0.0, job.busy[hop],
                    job.started[hop], job.ended[hop], job.carried[hop],
                )
                for hop, lane in enumerate(lanes)
            )  # fmt: skip
            self.reports.append(Completion(job.transfer.ticket, True, job.status, hops, job.submitted, self.now))

    def _begin(self):
        for job in list(self.jobs.values()):
            if job.deadline <= self.now and not job.cancelled:
                self._cancel(job, PageStatus.OVERDUE)
        for name, lane in self.lanes.items():
            if lane.job is not None:
                continue
            waiting = [
                (job.priority, job.due, job.sequence, hop, job)
                for job in self.jobs.values()
                for hop, known in enumerate(lanes_of(job.transfer.path))
                if known == name and job.ready[hop]
            ]
            if not waiting:
                continue
            *_, lane.hop, lane.job = min(waiting, key=lambda found: found[:4])
            lane.page = lane.job.ready[lane.hop].popleft()
            lane.until = self.now + 1 / lane.rate + (lane.fixed if lane.last < self.now else 0.0)
            lane.job.busy[lane.hop] += lane.until - self.now
            if not lane.job.started[lane.hop]:
                lane.job.started[lane.hop] = self.now
