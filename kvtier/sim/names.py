"""Who a block is, worked out beside the catalog and not by it: identities of blocks, and the prompts of simulations."""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.content import MEDIA_BYTES
from kvtier.namespace import DIGEST_BYTES, root_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BlockNames", "prompt", "prompt_digests"]

_BEFORE = 3 * DIGEST_BYTES  # what of an identity comes before the generation
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

    def renew(self, generation: int) -> None:
        """The same blocks in another generation of their namespace."""
        if generation != self._generation:
            self._generation, head = generation, struct.pack("<Q", generation)
            self.identities = [b"%b%b%b" % (named[:_BEFORE], head, named[_BEFORE + 8 :]) for named in self.identities]


@lru_cache(maxsize=1 << 14)
def prompt(branch: int, length: int) -> npt.NDArray[np.uint32]:
    """Token ids of a walk through an endless tree: two bits of ``branch`` say where to go at each fork."""
    tokens: list[int] = []
    place = 0
    while len(tokens) < length:
        place = ((place << _BRANCH_BITS) + (branch & 3) + 1) & 0xFFFFFF
        branch >>= _BRANCH_BITS
        tokens += range(place * 8, place * 8 + _SEGMENT)
    ids = np.array(tokens[:length], np.uint32)
    ids.flags.writeable = False
    return ids


@lru_cache(maxsize=1 << 16)
def prompt_digests(space: bytes, branch: int, length: int, block_size: int) -> frozenset[bytes]:
    """The digests of a prompt's blocks."""
    names = BlockNames(space, 0, block_size).extend(prompt(branch, length).tolist())
    return frozenset(name[:DIGEST_BYTES] for name in names)
