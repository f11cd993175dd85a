"""Stories from a seed. What is drawn fits the state at that moment; what is kept is data, and no longer needs the seed.

Each seed draws its own sizes and its own habits, some kinds of steps left out and others in abundance: a swarm of
different stories finds more than many stories of one mixture (Groce et al., "Swarm testing", ISSTA 2012).
"""

from __future__ import annotations

import random
from bisect import bisect
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from kvtier.catalog import Tier
from kvtier.sim.engine import SimulatedEngine
from kvtier.sim.events import READ_FAULTS, WRITE_ERROR
from kvtier.sim.requests import BLOCK, LOADING, MATCHED, PREEMPTED, RUNNING
from kvtier.sim.simulation import Simulation
from kvtier.sim.story import Setup, Story

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.config import WritePolicy
    from kvtier.sim.events import EventPlane
    from kvtier.sim.story import Step

__all__ = ["BrokenStoryError", "Drawer", "draw_setup", "draw_story"]

_WRITES: list[WritePolicy] = ["at_once", "at_once", "at_once", "at_once", "second_use", "ahead", "ahead", "never"]
_LANES = [(Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE), (Tier.HOST, Tier.DISK), (Tier.DISK, Tier.HOST)]

# How often each kind of step comes, before a story's own habits.
_ENGINE = {
    "arrive": 10.0,
    "again": 0.3,
    "start": 8.0,
    "grow": 1.0,
    "compute": 20.0,
    "decode": 4.0,
    "append": 1.5,
    "free": 9.0,
    "preempt": 1.0,
    "resume": 4.0,
    "poll": 6.0,
    "wait": 0.2,
    "hint": 0.8,
    "expect": 2.0,
    "reorder": 0.3,
    "dismiss": 0.3,
    "measure": 0.5,
    "locate": 0.3,
    "evict": 2.0,
    "flush": 0.05,
    "invalidate": 0.07,
    "reset": 0.05,
}
_CALM = {"advance": 30.0, "tick": 2.5, "unstall": 0.6, "find": 0.3}
_FAULTS = {"repeat": 0.3, "lose": 0.8, "refuse": 0.15, "stall": 0.3, "offline": 0.015, "crash": 0.015}
_ALWAYS = {"arrive", "start", "compute", "poll", "free", "advance", "tick", "unstall", "find", "resume"}

_MOST_LOST = 2  # reports at a time: each keeps slots
_MOST_STALLED = 2


def draw_setup(rng: random.Random) -> Setup:
    tiers = rng.choice([3, 3, 3, 3, 2, 1])
    setup = Setup(
        device=rng.choice([rng.randint(6, 14), rng.randint(10, 28)]),
        host=rng.choice([rng.randint(3, 9), rng.randint(4, 36)]) if tiers > 1 else 0,
        disk=rng.randint(6, 60) if tiers > 2 else 0,
        host_write=rng.choice(_WRITES),
        disk_write=rng.choice(_WRITES),
        splits=rng.random() < 0.3,
        layers=rng.random() < 0.25,
        low=rng.choice([0.0, 0.1, 0.3]),
        high=rng.choice([0.4, 0.6, 1.0]),
        lease_seconds=rng.choice([0.3, 2.0, 30.0]),
        load_policy=rng.choice(["always", "always", "always", "cost", "cost", "never"]),
        grace_seconds=rng.choice([0.1, 1.0]),
        load_seconds=rng.choice([0.02, 0.05, 0.2, 1.0, 10.0]),
        queue_pages=rng.choice([4, 8, 24, 1000]),
        spare_nodes=rng.choice([2, 20, 200]),
        spaces=rng.choice([1, 1, 1, 2, 3, 5]),
        requests=rng.randint(2, 6),
    )
    if setup.splits:
        setup = replace(setup, load_policy="cost")
    if tiers < 3 or rng.random() < 0.5:
        return setup
    # Much is read from disk: the host is smaller than the device, and all that is computed goes down.
    return replace(
        setup,
        host=rng.randint(3, 6),
        disk=rng.randint(20, 60),
        host_write="at_once",
        disk_write="at_once",
        load_policy="cost" if setup.splits else "always",
        spaces=rng.randint(1, 2),
        queue_pages=rng.choice([6, 24, 1000]),
    )


class Drawer:
    """Draws the next step for an engine and a data plane as they are now."""

    def __init__(self, rng: random.Random, setup: Setup, *, faults: bool = True) -> None:
        self._rng = rng
        self._setup = setup
        self._numbers = 0
        self._branches = (1 << rng.choice([2, 3, 3, 4])) - 1  # of prompts: how much requests share
        self._pace = 1e-3 if setup.splits else rng.choice([1e-4, 1e-3, 1e-2])  # seconds to compute a token
        self._chunks = [1, 4, 4, 8, 16] if setup.splits else [1, 5, 16, 64, 64, 64]  # tokens of one pass
        self._impatience = rng.choice([0.1, 0.3, 1.0])  # how often what has not ended is aborted
        self._longest = min(setup.device * BLOCK // rng.choice([1, 2, 3, 3]), 48)
        self._page_fault = rng.choice([0.0, 0.05, 0.1, 0.1, 0.1]) if faults else 0.0
        kinds = {**_ENGINE, **_CALM, **(_FAULTS if faults else {})}
        habits = {kind: 1.0 if kind in _ALWAYS else rng.choice([0.0, 1.0, 1.0, 4.0]) for kind in kinds}
        if rng.random() < 0.4:  # loads take longer than they may
            habits |= {"advance": 0.25, "tick": 2.0}
        if not setup.disk:
            habits |= {kind: 0.0 for kind in ("offline", "evict") if kind in habits}
        self._weights = list(accumulate(kinds[kind] * habits[kind] for kind in kinds))
        self._draw: list[Callable[[SimulatedEngine, EventPlane], Step | None]] = [
            getattr(self, f"_{kind}") for kind in kinds
        ]

    def next(self, engine: SimulatedEngine, plane: EventPlane) -> Step:
        while True:
            step = self._draw[bisect(self._weights, self._rng.random() * self._weights[-1])](engine, plane)
            if step is not None:
                return step

    # ---- the engine's steps --------------------------------------------------------------------------------------

    def _pick(self, engine: SimulatedEngine, *states: str) -> int | None:
        numbers = [number for number, request in engine.requests.items() if not states or request.state in states]
        return self._rng.choice(numbers) if numbers else None

    def _prompt(self) -> tuple[int, int]:
        return self._rng.getrandbits(8) & self._branches, self._rng.randint(1, self._longest)

    def _space(self) -> int:
        """The first ones more often, so that there is something to find."""
        return min(self._rng.randrange(self._setup.spaces) for _ in range(3))

    def _arrive(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        if len(engine.requests) >= self._setup.requests:
            return None
        self._numbers += 1
        branch, length = self._prompt()
        length = self._rng.choice([length, self._longest])
        room = self._setup.device * BLOCK - length
        tail = tuple(self._rng.randint(1, 2) for _ in range(min(room, self._rng.randint(0, 3))))
        return "arrive", self._numbers, branch, length, tail, self._space()

    def _again(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        number = self._pick(engine, MATCHED)
        return None if number is None else ("again", number)

    def _start(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        number = self._pick(engine, MATCHED)
        if number is None:
            return None
        request = engine.requests[number]
        missing = -(-len(request.tokens) // BLOCK) - request.promised // BLOCK
        room = engine.catalog.usage(Tier.DEVICE).free + engine.catalog.evictable(Tier.DEVICE)
        return ("start", number) if missing <= room or self._rng.random() < 0.1 else None

    def _grow(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        number = self._pick(engine, LOADING, RUNNING)
        return None if number is None else ("grow", number, self._rng.randint(1, 3 * BLOCK))

    def _compute(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        numbers = [
            number
            for number, request in engine.requests.items()
            if request.state is RUNNING and request.computed < len(request.tokens)
        ]
        if not numbers:
            return None
        return "compute", self._rng.choice(numbers), self._rng.choice(self._chunks)

    def _decode(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        if self._pick(engine, RUNNING) is None:
            return None
        most = self._rng.choice([1, 1, BLOCK + 1])
        return "decode", tuple(self._rng.randint(1, most) for _ in range(3)), self._rng.choice([0, 0, 2, 3])

    def _append(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        number = self._pick(engine, *(() if self._rng.random() < 0.1 else (RUNNING,)))
        if number is None:
            return None
        return "append", number, tuple(self._rng.randint(1, 2) for _ in range(self._rng.randint(1, 5)))

    def _free(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        ended = [number for number, request in engine.requests.items() if request.computed == len(request.tokens)]
        if ended and self._rng.random() < 0.7:
            return "free", self._rng.choice(ended)
        if self._rng.random() >= self._impatience:
            return None
        number = self._pick(engine, self._rng.choice([MATCHED, *[LOADING] * 5, RUNNING, PREEMPTED]))
        return None if number is None else ("free", number)

    def _preempt(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        number = self._pick(engine, self._rng.choice([MATCHED, *[LOADING] * 3, *[RUNNING] * 6]))
        return None if number is None else ("preempt", number)

    def _resume(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        number = self._pick(engine, PREEMPTED)
        return None if number is None else ("resume", number)

    def _poll(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        count = self._rng.randint(0, plane.reports)
        if self._rng.random() < 0.7:
            return "poll", (0,) * count
        return "poll", tuple(self._rng.randrange(8) for _ in range(count))

    def _wait(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        return "wait", round(self._rng.random(), 3)

    def _hint(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        return "hint", *self._prompt(), self._space(), self._rng.choice([0.0, 0.02, 0.2, 5.0])

    def _expect(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        number = self._numbers + self._rng.randint(1, 3)  # one of the next to come; whether with this prompt is open
        return "expect", number, *self._prompt(), self._space(), self._rng.choice([0.02, 0.2, 2.0])

    def _reorder(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        return "reorder", self._numbers + self._rng.randint(1, 3), self._rng.choice([0.0, 0.1, 1.0])

    def _dismiss(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        return "dismiss", self._numbers + self._rng.randint(1, 3)

    def _measure(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        tokens = self._rng.randint(1, 64)
        return "measure", tokens, self._rng.randint(0, 64), round(tokens * self._pace * self._rng.uniform(0.8, 1.2), 6)

    def _locate(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        return "locate", *self._prompt(), self._space()

    def _evict(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        tier = self._rng.choice([Tier.DEVICE] * 8 + [Tier.HOST] * 8 + [Tier.DISK])
        first = self._rng.randint(0, self._branches)
        last = self._rng.choice([first, self._branches])
        return "evict", int(tier), first, min(last, first + 3), self._longest, self._space()

    def _flush(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        return "flush", 0.5

    def _invalidate(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        return "invalidate", self._space(), self._durable()

    def _reset(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        return "reset", self._durable()

    def _durable(self) -> bool:
        return not self._setup.disk or self._rng.random() < 0.8

    # ---- the data plane's events ---------------------------------------------------------------------------------

    def _advance(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        if not plane.running:
            return None
        which, page, fault = self._rng.randrange(16), self._rng.randrange(16), 0
        reads = plane.lane(which, page)[0] is Tier.DISK
        if self._rng.random() < self._page_fault * (8 if reads else 1):
            fault = self._rng.choice(READ_FAULTS if reads else (WRITE_ERROR,))
        return "advance", which, page, fault

    def _tick(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        return "tick", round(self._rng.expovariate(40.0) + (1.0 if self._rng.random() < 0.08 else 0.0), 4)

    def _repeat(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        return "repeat", self._rng.randrange(32)

    def _lose(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        return ("lose", self._rng.randrange(8)) if plane.reports and plane.lost < _MOST_LOST else None

    def _find(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        return ("find",) if plane.lost else None

    def _refuse(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        return "refuse", self._rng.randint(1, 3)

    def _stall(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        source, target = self._rng.choice(_LANES)
        return ("stall", int(source), int(target)) if len(plane.stalled) < _MOST_STALLED else None

    def _unstall(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        return ("unstall",) if plane.stalled else None

    def _offline(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        return None if plane.offline else ("offline",)

    def _crash(self, engine: SimulatedEngine, plane: EventPlane) -> Step | None:
        return "crash", self._rng.choice([0, 0, 1, 4])


class BrokenStoryError(AssertionError):
    """A drawn story broke a promise. ``story`` ends with the step that did; the cause is ``__cause__``."""

    def __init__(self, seed: int, story: Story, cause: BaseException) -> None:
        super().__init__(f"seed {seed}, step {len(story.steps)}: {type(cause).__name__}: {cause}")
        self.seed, self.story = seed, story


def draw_story(seed: int, steps: int, *, faults: bool = True, audit_every: int = 1) -> tuple[Story, Simulation]:
    """Draw ``steps`` steps, doing each as it is drawn, and bring all requests to their end.

    Raises :class:`BrokenStoryError` for whatever goes wrong.
    """
    rng = random.Random(seed)
    story = Story(draw_setup(rng), end="stop")
    drawer = Drawer(rng, story.setup, faults=faults)
    simulation = Simulation(story.setup, audit_every=audit_every)
    engine = simulation.engine
    assert isinstance(engine, SimulatedEngine)
    try:
        for _ in range(steps):
            step = drawer.next(engine, simulation.plane)
            story.steps.append(step)
            simulation.apply(step)
        story.end = "finish"
        simulation.finish()
    except Exception as error:
        raise BrokenStoryError(seed, story, error) from error
    return story, simulation
