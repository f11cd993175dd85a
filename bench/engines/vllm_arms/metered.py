"""KVTierConnector whose calls are metered, for benchmarks: ``kv_connector`` "Metered".

In the folder that $METERED names there is a file for each of vLLM's connectors, the scheduler's and the worker's; see
meter.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from meter import Meter, public
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvtier.connectors.vllm import KVTierConnector

__all__ = ["Metered"]


class Metered(KVTierConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        names = public(KVTierConnector)
        meter = Meter(Path(os.environ["METERED"]) / role.name.lower(), names)
        for number, name in enumerate(names):
            setattr(self, name, meter.around(number, getattr(self, name)))
