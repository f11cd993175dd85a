"""The end of a story: with a data plane that works again every request ends, and then nothing is held any more."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kvtier.sim.plane import ViolationError
from kvtier.sim.requests import LOADING, MATCHED, PREEMPTED, RUNNING

if TYPE_CHECKING:
    from kvtier.sim.engine import SimulatedEngine

__all__ = ["finish"]

_LONGEST_HINT = 10.0  # seconds ahead


def finish(engine: SimulatedEngine) -> None:
    """With a data plane that works, every request comes to its end; then nothing is held any more."""
    engine.plane.find()
    engine.plane.unstall()
    engine.plane.refusals = 0
    rounds = 20 * len(engine.requests) + 20
    for _ in range(rounds):
        if not engine.requests:
            break
        engine.plane.step(16 * engine.setup.slots)
        engine.poll()
        moved = [_advance(engine, number) for number in list(engine.requests)]
        if not any(moved):
            _make_way(engine)
        engine.look()
    if engine.requests:
        states = {request.name: request.state for request in engine.requests.values()}
        raise ViolationError(f"requests starve: after {rounds} rounds there are still {states}")
    if not engine.manager.flush(60.0):
        raise ViolationError("transfers do not end")
    engine.plane.clock.advance(_LONGEST_HINT + engine.setup.grace_seconds)
    for _ in range(len(engine.hints) + 1):  # hints for requests that never came are given up, some in each step
        engine.poll()
    engine.manager.flush(60.0)
    _check_nothing_is_held(engine)


def _advance(engine: SimulatedEngine, number: int) -> bool:
    """One round of a request's life; False: it could do nothing."""
    request = engine.requests[number]
    if request.state is PREEMPTED:
        running = any(other.state in (LOADING, RUNNING) for other in engine.requests.values())
        return not running and engine.resume(number)
    if request.state is MATCHED:
        engine.start(number)
    if request.state is RUNNING:
        before = request.computed
        engine.compute(number, len(request.tokens))
        if request.computed == len(request.tokens):
            return engine.free(number)
        return request.computed > before
    return request.state is not MATCHED


def _make_way(engine: SimulatedEngine) -> None:
    """The device is full of requests that wait for each other: the youngest gives way, as in any engine. Where none
    runs yet, what they were promised keeps them from starting; a lease ends that."""
    running = [number for number, request in engine.requests.items() if request.state is RUNNING]
    if running:
        engine.preempt(running[-1])
    else:
        engine.plane.clock.advance(engine.setup.lease_seconds)


def _check_nothing_is_held(engine: SimulatedEngine) -> None:
    engine.catalog.check()
    engine.audit()
    for tier in engine.plane.content:
        use = engine.catalog.usage(tier)
        if use.free + use.ready != use.capacity or use.pinned or use.private:
            raise ViolationError(f"{tier.name} leaks: {use}")
    stats = engine.catalog.stats()
    if stats["leases"] or stats["transfers"] or engine.manager.placement.under_way:
        raise ViolationError(f"leases or transfers stay open: {stats}")
    with contextlib.suppress(OSError):
        engine.manager.reset()
    for tier in engine.plane.content:
        use = engine.catalog.usage(tier)
        if use.free != use.capacity:
            raise ViolationError(f"{tier.name} holds pages after a reset: {use}")
    if engine.catalog.stats()["nodes"]:
        raise ViolationError(f"blocks are named after a reset: {engine.catalog.stats()}")
