"""What of a simulated machine outlives its process: the disk's pages, their records and the generations.

A record is cleared before its slot is overwritten and written after the page, as in the real store; an invalidation is
durable when it returns, and one that raises is in force until the process ends.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["TORN", "Content", "SimulatedDisk", "generation_of", "space_of", "told_apart"]

Content = bytes | None
"""What a slot holds: the identity of a page followed by whatever its writer added, or None."""

TORN = b"torn"
"""The content of a slot that is being written, or was when the machine stopped."""

_SPACE = slice(64, 96)
_GENERATION = slice(96, 104)


def space_of(identity: bytes) -> bytes:
    """The fingerprint of the namespace in a page's identity; the layout is csrc/common/identity.hpp's."""
    return identity[_SPACE]


def generation_of(identity: bytes) -> int:
    """The generation in a page's identity."""
    return int.from_bytes(identity[_GENERATION], "little")


def told_apart(held: Content, wanted: bytes) -> str:
    """In what the content of a slot differs from what it should be, in words; both begin with an identity."""
    if held is None or len(held) != len(wanted):
        if held is TORN:
            return "bytes that are being written, or were when that was broken off"
        return "no page" if held is None else "what was never cached"
    if space_of(held) != space_of(wanted):
        return "bytes of another namespace"
    if generation_of(held) != generation_of(wanted):
        return "bytes of another generation"
    return "bytes of other tokens" if held[: _SPACE.start] != wanted[: _SPACE.start] else "bytes of other weights"


class SimulatedDisk:
    """``slots`` pages, which may be 0: then it only keeps the generations."""

    def __init__(self, slots: int) -> None:
        self.pages: list[Content] = [None] * slots
        self.durable = True
        """Whether the next invalidation can be made durable."""
        self._records: dict[int, bytes] = {}  # oldest first
        self.floor = 0
        """The generation of every namespace that was not invalidated on its own since."""
        self._spaces: dict[bytes, int] = {}
        self._kept: tuple[int, dict[bytes, int]] = (0, {})

    # ---- generations ---------------------------------------------------------------------------------------------

    def generation(self, space: bytes) -> int:
        return max(self.floor, self._spaces.get(space, 0))

    def invalidate(self, space: bytes | None) -> int:
        """The new generation; OSError when it is not durable, in force until the process ends."""
        if space is None:
            self.floor = generation = max(self.floor, *self._spaces.values(), 0) + 1
            self._spaces.clear()
        else:
            self._spaces[space] = generation = self.generation(space) + 1
        if not self.durable:
            raise OSError("simulated: the generation could not be made durable")
        self._kept = (self.floor, dict(self._spaces))
        return generation

    # ---- records -------------------------------------------------------------------------------------------------

    def clear(self, slot: int) -> None:
        self._records.pop(slot, None)

    def write_record(self, slot: int, identity: bytes) -> bool:
        """False: the page was invalidated meanwhile, and the slot stays cleared."""
        if not self.valid(identity):
            return False
        self._records[slot] = identity
        return True

    def record(self, slot: int) -> bytes | None:
        return self._records.get(slot)

    def valid(self, identity: bytes) -> bool:
        return self.generation(space_of(identity)) == generation_of(identity)

    def inventory(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
        """Slots and identities of the valid records, oldest first."""
        found = [(slot, identity) for slot, identity in self._records.items() if self.valid(identity)]
        if not found:
            return np.empty(0, np.uint32), np.empty((0, 0), np.uint8)
        identities = np.frombuffer(b"".join(identity for _, identity in found), np.uint8)
        return np.array([slot for slot, _ in found], np.uint32), identities.reshape(len(found), -1)

    # ---- the end of the process ----------------------------------------------------------------------------------

    def restart(self, torn: int = 0) -> int:
        """Go on as after a crash. ``torn``: of that many of the newest pages the record arrived and the bytes did not,
        as after a loss of power. Returns how many there were."""
        self.floor, self._spaces = self._kept[0], dict(self._kept[1])
        # A generation that never became durable is given out again: what was written under it may not be there then.
        for slot, identity in list(self._records.items()):
            if generation_of(identity) > self.generation(space_of(identity)):
                del self._records[slot]
        victims = list(self._records)[-torn:] if torn else []
        for slot in victims:
            self.pages[slot] = TORN
        return len(victims)
