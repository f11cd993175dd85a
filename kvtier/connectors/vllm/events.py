"""What the tiers hold, told as vLLM's own KV events: blocks that have come and blocks that have gone, by medium.

A tier's content is compared with what was told of it. That takes as long as the tier is large, so it is done when pages
have moved and rarely enough to be a small part of the time; a consumer is told what is so, not each thing that was.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvtier.catalog import Catalog, Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.distributed.kv_events import KVCacheEvent

__all__ = ["Events"]

MEDIA = {Tier.HOST: MEDIUM_CPU, Tier.DISK: MEDIUM_STORAGE}
LABEL = slice(112, 144)  # where an identity has vLLM's own hash of the block: csrc/common/identity.hpp
PATIENCE = 100  # times as long as the last look took, before the next

Labels = np.ndarray[Any, np.dtype[np.void]]


class Events:
    """Of the owned tiers of ``catalog``; ``block_size`` tokens are in a block."""

    def __init__(self, catalog: Catalog, block_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._catalog, self._block, self._clock = catalog, block_size, clock
        self._told: dict[Tier, Labels] = {
            spec.tier: np.zeros(spec.slots, "V32") for spec in catalog.tiers if spec.tier in MEDIA
        }
        self._moved = True  # the disk may have held pages from the start
        self._next = 0.0

    def moved(self) -> None:
        """Pages may have come or gone."""
        self._moved = True

    def take(self) -> list[KVCacheEvent]:
        """What has changed since last time, or nothing yet."""
        began = self._clock()
        if not self._moved or began < self._next:
            return []
        self._moved = False
        told = [event for tier in self._told for event in self._compare(tier)]
        now = self._clock()
        self._next = now + PATIENCE * (now - began)
        return told

    def _compare(self, tier: Tier) -> list[KVCacheEvent]:
        slots, ready, identities = self._catalog.contents(tier)
        now = np.zeros(len(self._told[tier]), "V32")
        now[slots[ready]] = np.ascontiguousarray(identities[ready, LABEL]).view("V32")[:, 0]
        before, self._told[tier] = self._told[tier], now
        changed = now != before
        gone, come = _names(before[changed]), _names(now[changed])
        events: list[KVCacheEvent] = []
        if lost := [_external(name) for name in gone if name not in come]:  # the others are in another slot now
            events.append(BlockRemoved(block_hashes=lost, medium=MEDIA[tier]))
        events.extend(self._stored(name, tier) for name in come.keys() - gone.keys())
        return events

    def _stored(self, name: bytes, tier: Tier) -> BlockStored:
        return BlockStored(
            block_hashes=[_external(name)],
            parent_block_hash=None,
            token_ids=[],
            block_size=self._block,
            lora_id=None,
            medium=MEDIA[tier],
            lora_name=None,
        )


def _names(labels: Labels) -> dict[bytes, None]:
    return dict.fromkeys(name for label in labels if any(name := label.tobytes()))


def _external(name: bytes) -> Any:
    return maybe_convert_block_hash(BlockHash(name))
