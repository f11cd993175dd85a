"""LMCache's arm. Of its two ways into vLLM the one inside the engine's process has no copies for a machine without a
GPU: it logs that, and vLLM computes everything. So it runs in the other, as a server that vLLM's worker starts; the
server has the memory, and the worker copies from and to it."""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path

from arms import Arm

__all__ = ["lmcache"]


def lmcache(gpu: bool, host: int, block: int) -> Arm:
    """With ``host`` bytes, in chunks of one block: the default of 256 tokens would leave more of a prompt to compute.
    Without a GPU its memory is shared memory; otherwise its server would get each chunk as a message."""
    requests, web = _free_ports(2)
    server = {"chunk-size": block, "l1-size-gb": host / (1 << 30), "eviction-policy": "LRU", "http-port": web}
    options = [f"--{name} {value}" for name, value in server.items()] + ["--disable-observability"]
    pool = f"lmcache_l1_pool_kvtier_bench_{os.getpid()}"
    if not gpu:
        options += [f"--supported-transfer-mode engine_driven --no-l1-use-lazy --shm-name {pool}"]
    extra = {
        "lmcache.mp.host": "tcp://127.0.0.1",
        "lmcache.mp.port": requests,
        "lmcache.mp.autostart": True,
        "lmcache.mp.autostart.server_args": " ".join(options),
    }
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",  # vLLM's own is for an older one
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    arm = Arm("lmcache", connector, {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"})
    arm.leaves = Path("/dev/shm") / pool
    if importlib.util.find_spec("lmcache") is None:
        arm.about = "not installed"
    return arm


def _free_ports(count: int) -> list[int]:
    """Of this machine, all different. Nobody holds them, so that the next to ask may get one too."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
