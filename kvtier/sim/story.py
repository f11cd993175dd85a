"""A story is data: what was set up, and a list of small steps. The same story is always the same run.

A step is a name and whole numbers or short lists of them; its meaning in a state where it does not fit is "nothing", so
that any step may be left out of a story and the rest can still be told.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from kvtier.config import WritePolicy

__all__ = ["Setup", "Step", "Story"]

Step = tuple[Any, ...]
"""A name, then its arguments: numbers, strings, tuples of numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Sizes in slots, times in seconds of the virtual clock."""

    device: int = 16
    host: int = 24
    """0: no such tier; the same for ``disk``."""
    disk: int = 40
    host_write: WritePolicy = "at_once"
    disk_write: WritePolicy = "at_once"
    load_policy: Literal["cost", "always", "never"] = "cost"
    splits: bool = False
    """Whether the engine computes the front of a prefix while its tail loads."""
    layers: bool = False
    """Whether the engine waits for what comes from host memory, layer by layer: then few loads last."""
    low: float = 0.1
    high: float = 0.3
    lease_seconds: float = 5.0
    load_seconds: float = 2.0
    grace_seconds: float = 1.0
    """How long pages that were brought ahead are kept after they were expected to be used."""
    queue_pages: int = 64
    spare_nodes: int = 200
    """How many blocks the catalog can name beyond those that the tiers can hold."""
    spaces: int = 3
    """Namespaces in use, up to 5: the cache's own, two tenants, an adapter, a tenant with it."""
    requests: int = 6
    """How many may live at a time."""

    @property
    def slots(self) -> int:
        return self.device + self.host + self.disk


@dataclass(slots=True)
class Story:
    """``steps`` in order; ``to_text`` and ``from_text`` are a round trip, a step a line."""

    setup: Setup
    steps: list[Step] = field(default_factory=list)
    end: Literal["finish", "stop"] = "finish"
    """Whether every request is to be brought to its end after the last step."""

    def to_text(self) -> str:
        head = json.dumps({"setup": asdict(self.setup), "end": self.end})
        return "\n".join([head, *(json.dumps(step) for step in self.steps)])

    @classmethod
    def from_text(cls, text: str) -> Self:
        head, *lines = text.strip().splitlines()
        known = json.loads(head)
        steps = [tuple(tuple(a) if isinstance(a, list) else a for a in json.loads(line)) for line in lines]
        return cls(Setup(**known["setup"]), steps, known["end"])
