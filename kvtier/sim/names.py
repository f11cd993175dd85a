"""Who a block is, worked out beside the catalog and not by it: identities of blocks, and the prompts of simulations."""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import TYPE_CHECKING

from kvtier.content import MEDIA_BYTES
from kvtier.namespace import root_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BlockNames", "prompt"]

_SEGMENT = 6  # tokens between two branches; no multiple of a usual block size
_BRANCH_BITS = 2


class BlockNames:
    """The identities of one sequence's blocks under one namespace and generation, as the tokens come."""

    __slots__ = ("_block", "_digest", "_generation", "_label", "_space", "identities")

    def __init__(self, space: bytes, generation: int, block_size: int) -> None:
        self._space, self._generation = space, generation
        self._digest = root_digest(space, 0)
        self._block = block_size
        self._label = struct.Struct(f"<{block_size}I{MEDIA_BYTES}x{4 * (block_size % 2)}x")  # tokens and no media
        self.identities: list[bytes] = []

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """The identities of all full blocks of ``tokens``, which continues what was given before."""
        for position in range(len(self.identities), len(tokens) // self._block):
            label = self._label.pack(*tokens[position * self._block : (position + 1) * self._block])
            parent = self._digest
            self._digest = hashlib.sha256(parent + label[: 4 * self._block + MEDIA_BYTES]).digest()
            head = struct.pack("<QII", self._generation, 0, position)
            self.identities.append(self._digest + parent + self._space + head + label)
        return self.identities


@lru_cache(maxsize=4096)
def prompt(branch: int, length: int) -> tuple[int, ...]:
    """Token ids of a walk through an endless tree: two bits of ``branch`` say where to go at each fork."""
    tokens: list[int] = []
    place = 0
    while len(tokens) < length:
        place = ((place << _BRANCH_BITS) + (branch & 3) + 1) & 0xFFFFFF
        branch >>= _BRANCH_BITS
        tokens += range(place * 8, place * 8 + _SEGMENT)
    return tuple(tokens[:length])
