"""kvtier: a KV-cache tiering engine for transformer inference.

The public names below are imported when first used, so that `import kvtier` stays cheap and needs neither torch nor any
other extra.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.catalog import Catalog as Catalog
    from kvtier.catalog import Tier as Tier
    from kvtier.catalog import TierSpec as TierSpec
    from kvtier.config import CacheConfig as CacheConfig
    from kvtier.config import ConfigError as ConfigError
    from kvtier.config import DiskConfig as DiskConfig
    from kvtier.config import HostConfig as HostConfig
    from kvtier.config import parse_size as parse_size
    from kvtier.geometry import KVGeometry as KVGeometry
    from kvtier.manager import CacheManager as CacheManager
    from kvtier.namespace import Namespace as Namespace
    from kvtier.namespace import adapter_digest as adapter_digest
    from kvtier.namespace import chain_digests as chain_digests
    from kvtier.namespace import model_revision as model_revision
    from kvtier.tiers.device import DevicePool as DevicePool
    from kvtier.tiers.disk import DiskStore as DiskStore
    from kvtier.tiers.host import HostArena as HostArena

__version__ = "0.1.0"  # the one place: the package's metadata is read from here

_HOMES = {
    "CacheConfig": "config",
    "CacheManager": "manager",
    "Catalog": "catalog",
    "ConfigError": "config",
    "DevicePool": "tiers.device",
    "DiskConfig": "config",
    "DiskStore": "tiers.disk",
    "HostArena": "tiers.host",
    "HostConfig": "config",
    "KVGeometry": "geometry",
    "Namespace": "namespace",
    "Tier": "catalog",
    "TierSpec": "catalog",
    "adapter_digest": "namespace",
    "chain_digests": "namespace",
    "model_revision": "namespace",
    "parse_size": "config",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
    value = getattr(import_module(f"kvtier.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
