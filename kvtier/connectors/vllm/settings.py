"""What `kv_connector_extra_config` may say: the cache's own configuration, and a few things of this connector's."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.config import CacheConfig, ConfigError
from kvtier.offload import LoadMode

__all__ = ["Settings"]

_OWN: dict[str, tuple[type, Any, str]] = {
    "min_load_tokens": (int, 64, "a number of tokens, 0 or more"),
    "load_mode": (str, "auto", "'auto', 'async' or 'sync'"),
    "weights_revision": (str, "", "a commit hash or a digest of the weights"),
    "unverified_gpu": (bool, False, "true or false"),
}
_MODES = ("auto", "async", "sync")
MOST_TOKENS = 1 << 30


@dataclass(frozen=True, slots=True)
class Settings:
    """``cache``: as :class:`kvtier.config.CacheConfig`; its block size is the engine's."""

    cache: CacheConfig
    min_load_tokens: int
    """A shorter prefix is computed: what a load costs beside the bytes is then more than it saves."""
    load_mode: LoadMode
    """Whether an engine's step may wait for a load from host memory: as is faster, never, or always."""
    weights_revision: str
    """What the weights are, where it cannot be found out or takes too long to read; "": find out."""
    unverified_gpu: bool = False
    """Whether to serve an engine on a GPU although no run on one has proven it."""

    @classmethod
    def read(cls, extra: Mapping[str, Any], block_size: int) -> Settings:
        """Raises :class:`kvtier.config.ConfigError`, a line per fault, naming the key and what would be accepted.

        Keys are dotted (``"host.size"``) or sections (``{"host": {"size": …}}``); KVTIER_* variables and the file that
        KVTIER_CONFIG names come before them.
        """
        given = dict(extra)
        for key in given.keys() - _OWN.keys():
            if near := difflib.get_close_matches(key, _OWN, n=1, cutoff=0.8):
                raise ConfigError(f"{key}: unknown key (value {given[key]!r}); did you mean {near[0]}?")
        own: dict[str, Any] = {name: given.pop(name, default) for name, (_, default, _) in _OWN.items()}
        for name, (kind, _, wanted) in _OWN.items():
            value = own[name]
            if type(value) is not kind or (isinstance(value, int) and not 0 <= value <= MOST_TOKENS):
                raise ConfigError(f"{name}: {value!r}: expected {wanted}")
        if own["load_mode"] not in _MODES:
            raise ConfigError(f"load_mode: {own['load_mode']!r}: expected {_OWN['load_mode'][2]}")
        if given.pop("block_size", block_size) != block_size:
            raise ConfigError(
                f"block_size: {extra['block_size']!r}: expected {block_size}, the engine's own, or nothing"
            )
        return cls(CacheConfig.load(**given | {"block_size": block_size}), **own)
