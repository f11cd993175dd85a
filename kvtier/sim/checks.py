"""What must hold after every step of a simulated engine: whose bytes are where, and who holds anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.catalog import Catalog, Tier
from kvtier.sim.disk import TORN, space_of, told_apart
from kvtier.sim.plane import ViolationError

if TYPE_CHECKING:
    from kvtier.sim.engine import SimulatedEngine

__all__ = ["audit", "look", "pages_of"]


def pages_of(catalog: Catalog, tier: Tier) -> tuple[set[bytes], set[bytes]]:
    """The identities of a tier's ready pages, and of all."""
    _, ready, identities = catalog.contents(tier)
    every = [identity.tobytes() for identity in identities]
    return {identity for identity, is_ready in zip(every, ready, strict=True) if is_ready}, set(every)


def look(engine: SimulatedEngine) -> None:
    """Every slot of every running request holds what the request put or was given there."""
    held = engine.plane.content[Tier.DEVICE]
    for request in engine.requests.values():
        if [held[slot] for slot in request.table] != request.held:
            for block, slot in enumerate(request.table):
                if held[slot] != request.held[block]:
                    what = told_apart(held[slot], request.held[block])
                    raise ViolationError(f"{request.name}: block {block} of its table, slot {slot}, holds {what}")


def audit(engine: SimulatedEngine) -> None:
    """Every ready page of every tier holds the bytes of its block, of the namespace's present generation; and
    nobody else than the requests that live and the hints that wait holds anything."""
    leases, holders = engine.catalog.stats()["leases"], len(engine.requests) + len(engine.hints)
    if leases > holders:
        raise ViolationError(f"{leases} leases, and {holders} requests and hints: one was not released")
    versions = {space: b"%d" % version for space, version in zip(engine.spaces, engine.versions, strict=True)}
    for tier, contents in engine.plane.content.items():
        slots, ready, identities = engine.catalog.contents(tier)
        raw, size = identities.tobytes(), identities.shape[1]
        for index, slot in enumerate(slots.tolist()):
            identity = raw[index * size : (index + 1) * size]
            if not ready[index]:
                continue
            if tier == Tier.DISK:
                if engine.plane.disk.record(slot) != identity:
                    raise ViolationError(f"DISK slot {slot} is ready and its record names another block")
                if contents[slot] is TORN:  # by a loss of power: seen when it is read
                    continue
            wanted = identity + versions[space_of(identity)]
            if contents[slot] != wanted:
                what = told_apart(contents[slot], wanted)
                raise ViolationError(f"{tier.name} slot {slot} is ready and holds {what}")
