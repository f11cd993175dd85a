"""What crosses between the scheduler's process and the workers', inside vLLM's own messages."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvtier.geometry import KVGeometry
from kvtier.messages import Completion, Hello, Order

__all__ = ["Introduction", "Load", "StepOrders", "WorkerReport"]


@dataclass(frozen=True)
class Introduction(KVConnectorHandshakeMetadata):
    """A worker, once its KV cache exists: what its data plane has, and what its pages are."""

    hello: Hello
    geometry: KVGeometry
    attention: str
    """The kernel, and the instruction set that decides how it lays out a block."""
    about: str


@dataclass(frozen=True)
class Load:
    """One request's load: it has ended when all tickets have; ``lost`` blocks were promised and cannot come."""

    tickets: tuple[int, ...]
    blocks: npt.NDArray[np.uint32]
    lost: npt.NDArray[np.uint32]
    synchronous: bool = False
    """This step reads the blocks: it waits for them."""
    stores: tuple[int, ...] = ()
    """Of what the step computes behind a synchronous load: worth nothing where that fails."""


@dataclass
class StepOrders(KVConnectorMetadata):
    """Scheduler to workers, once a step."""

    orders: tuple[Order, ...] = ()
    must_end: tuple[int, ...] = ()
    """Stores that read blocks which this step writes: to end before it does."""
    loads: dict[str, Load] = field(default_factory=dict)
    void: tuple[str, ...] = ()
    """Requests whose loads are to be reported as failed, whatever arrives."""
    idle: bool = False
    """Nothing is computed in this step: a worker may wait a little for news."""
    timed: int = 0
    """The number of this step's pass where a worker is to say how long it took; 0: nobody asks."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers to scheduler, once a step: completions by rank, and seconds that passes took, by number."""

    told: dict[int, list[Completion]]
    passes: dict[int, float] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        slowest = {
            number: max(self.passes.get(number, 0.0), other.passes.get(number, 0.0))
            for number in self.passes.keys() | other.passes.keys()
        }
        return WorkerReport(self.told | other.told, slowest)
