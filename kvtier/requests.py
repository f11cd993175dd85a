"""Requests: those that live, found by their ids until the cache is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.sequence import Sequence

__all__ = ["Requests"]


class Requests:
    """What calls name, or are refused for in one line."""

    def __init__(self) -> None:
        self.by_id: dict[str, Sequence] = {}
        self.closed = False

    def check_open(self, call: str) -> None:
        """ValueError for a call that would begin or change something after the end."""
        if self.closed:
            raise ValueError(f"{call}: the cache is closed; make a new one, which serves what is on disk")

    def known(self, request_id: str) -> Sequence:
        """The request of this id; ValueError: there is none."""
        sequence = self.by_id.get(request_id)
        if sequence is None or self.closed:
            self.check_open(f"request_id {request_id!r}")
            raise ValueError(f"request_id: {request_id!r} is not known; call get_computed_blocks first")
        return sequence
