"""A request as an engine knows it, with what each slot that it was given must hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.sim.names import BlockNames

__all__ = ["BLOCK", "LOADING", "MATCHED", "PREEMPTED", "RUNNING", "Request"]

BLOCK = 4
MATCHED, LOADING, RUNNING, PREEMPTED = "matched", "loading", "running", "preempted"


@dataclass(slots=True)
class Request:
    """One request as the engine knows it."""

    name: str
    space: int
    tokens: list[int]
    state: str = MATCHED
    promised: int = 0
    computed: int = 0
    doomed: bool = False
    """Its namespace was invalidated after the match: nothing of the promise may be used."""
    deadline: float = 0.0
    names: BlockNames = field(default_factory=lambda: BlockNames(bytes(32), 0, BLOCK))
    version: bytes = b""
    """Of the weights, when it was promised what it was."""
    table: list[int] = field(default_factory=list)
    held: list[bytes] = field(default_factory=list)
    """What each slot of ``table`` must hold."""

    _contents: list[bytes] = field(default_factory=list)

    def renew(self, generation: int, version: bytes) -> None:
        """What it is promised now, it is promised in this generation and of this version of the weights."""
        self.names.renew(generation)
        self.version = version
        self._contents = []

    def contents(self, blocks: int) -> list[bytes]:
        """What its first blocks hold once computed: their identities, and the version of the weights."""
        identities = self.names.extend(self.tokens)
        self._contents += [identity + self.version for identity in identities[len(self._contents) :]]
        return self._contents[:blocks]
