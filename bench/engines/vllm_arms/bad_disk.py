"""KVTierConnector over a disk that is as bad as a file says, for benchmarks and tests: ``kv_connector`` "BadDisk".

The file that $BAD_DISK names holds JSON and is looked at before each step, so that a disk may get worse, or better,
under an engine that runs:

    {"bytes_per_s": 1e7}                              as slow as that; 0: as it is
    {"errno": 28, "on": "WRITE", "count": 5}          its next so many reads or writes fail
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvtier import _core
from kvtier.connectors.vllm import KVTierConnector, worker
from kvtier.plane import LocalDataPlane

__all__ = ["BadDisk"]


class BadDisk(KVTierConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._throttle, self._faults, self._seen = _core.Throttle(), _core.FaultPlan(), 0
        if role == KVConnectorRole.WORKER:
            _core.use_faults(self._faults)
            worker.LocalDataPlane = partial(LocalDataPlane, throttle=self._throttle)  # type: ignore[misc]
        super().__init__(vllm_config, role, kv_cache_config)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._look()
        super().handle_preemptions(kv_connector_metadata)

    def _look(self) -> None:
        file = Path(os.environ["BAD_DISK"])
        changed = file.stat().st_mtime_ns if file.exists() else 0
        if changed == self._seen:
            return
        self._seen, said = changed, json.loads(file.read_text())
        self._throttle.set(said.get("bytes_per_s", 0.0))
        self._faults.clear()
        if "errno" in said:
            on = getattr(_core.FaultPlan.On, said["on"])
            self._faults.add(_core.FaultPlan.Kind.ERROR, self._faults.count(on) + 1, said["errno"], said["count"], on)
