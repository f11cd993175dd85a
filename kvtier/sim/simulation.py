"""One run of a story: an engine over a simulated data plane, every step followed by the checks of what it can break."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from kvtier.catalog import Tier
from kvtier.sim.clock import VirtualClock
from kvtier.sim.disk import SimulatedDisk
from kvtier.sim.engine import SimulatedEngine
from kvtier.sim.events import EventPlane

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.catalog import Catalog
    from kvtier.sim.story import Setup, Step, Story

__all__ = ["Engine", "Simulation", "tell"]


class Engine(Protocol):
    """What a simulation asks of whoever drives a control plane: :class:`kvtier.sim.engine.SimulatedEngine`, say."""

    calls: dict[str, Callable[..., bool]]
    """Its steps by name; each says whether it did anything."""
    catalog: Catalog

    def restart(self, plane: EventPlane) -> None:
        """Its process died: go on over another data plane, with no request alive."""

    def look(self) -> None:
        """Raise ViolationError if a slot that a request relies on holds other bytes than its own."""

    def audit(self) -> None:
        """Raise ViolationError if any ready page of any tier does."""

    def finish(self) -> None:
        """Bring every request to its end, and raise ViolationError if one starves or anything stays held."""


class Simulation:
    """``apply`` does one step and checks. ``audit_every``: after how many changes of the control plane the bytes of
    all ready pages are compared; everything else is compared at each change.

    Counted as ``steps`` is what the control plane handled, a call of the engine's (one of them the poll that brings
    completions) or a restart, and as ``events`` what happened in the data plane meanwhile, of which it has not heard.
    """

    def __init__(
        self,
        setup: Setup,
        make_engine: Callable[[Setup, EventPlane, Counter[str]], Engine] = SimulatedEngine,
        *,
        audit_every: int = 1,
    ) -> None:
        self.setup = setup
        self.counts: Counter[str] = Counter()
        self.clock = VirtualClock()
        self._capacity = {Tier.DEVICE: setup.device, Tier.HOST: setup.host, Tier.DISK: setup.disk}
        self._capacity = {tier: slots for tier, slots in self._capacity.items() if slots}
        self._digests: list[str] = []
        self._audit_every = self._until_audit = audit_every
        self.plane = self._new_plane(SimulatedDisk(setup.disk))
        self.engine = make_engine(setup, self.plane, self.counts)
        self._events: dict[str, Callable[..., bool]] = {}
        self._listen()

    def _new_plane(self, disk: SimulatedDisk) -> EventPlane:
        return EventPlane(
            self._capacity, disk=disk, clock=self.clock, queue_pages=self.setup.queue_pages, counts=self.counts
        )

    def _listen(self) -> None:
        plane = self.plane
        self._events = {
            "advance": plane.advance,
            "repeat": plane.repeat,
            "lose": plane.lose,
            "find": plane.find,
            "refuse": plane.refuse,
            "stall": plane.stall,
            "unstall": plane.unstall,
            "offline": plane.go_offline,
            "tick": self._tick,
        }

    def apply(self, step: Step) -> bool:
        """Do one step; False when it did not fit. Raises ViolationError or AssertionError for a broken promise."""
        name, *arguments = step
        event = self._events.get(name)
        if event is not None:  # the control plane has not heard of it yet
            done = event(*arguments)
        elif name == "crash":
            done = self._crash(*arguments)
        else:
            done = self.engine.calls[name](*arguments)
            if done:
                self._check()
        self.engine.look()
        self.counts["steps" if event is None else "events"] += done
        return done

    def _check(self) -> None:
        self.engine.catalog.check()
        self._until_audit -= 1
        if self._until_audit <= 0:
            self._until_audit = self._audit_every
            self.engine.audit()

    def _tick(self, seconds: float) -> bool:
        self.clock.advance(seconds)
        self.plane.expire()
        return True

    def _crash(self, torn: int) -> bool:
        """The process dies in the middle of everything, and the next one finds what the disk has."""
        self._digests.append(self.plane.decisions.hexdigest())
        self.counts["fault: crash"] += 1
        self.counts["fault: torn page"] += self.plane.disk.restart(torn)
        self.plane = self._new_plane(self.plane.disk)
        self._listen()
        self.engine.restart(self.plane)
        self._check()
        return True

    def finish(self) -> None:
        self.engine.finish()

    @property
    def digest(self) -> str:
        """Of every decision that the control plane took so far."""
        return "".join([*self._digests, self.plane.decisions.hexdigest()])


def tell(story: Story, *, audit_every: int = 1) -> Simulation:
    """Run a story from its beginning. The simulation's error, if any, passes through."""
    simulation = Simulation(story.setup, audit_every=audit_every)
    for step in story.steps:
        simulation.apply(step)
    if story.end == "finish":
        simulation.finish()
    return simulation
