"""Decoding: a batch of running requests makes a few tokens each, in every step and by one native call.

    tokens    |<---------- computed by the pass ---------->|<- made ->|
    blocks    |  indexed  | may wait to be |  not full yet     |      |
    table     |<-------------------- slots --------------------------->|   for all of them, where there is room

Nearly always a request stays within its last block, and has a slot for that: its tokens are noted, and nothing else is
done. Whose block is full is handed to :class:`kvtier.gathering.Gathering`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier import _core
from kvtier.content import as_tokens
from kvtier.sequence import State

if TYPE_CHECKING:
    from kvtier.gathering import Gathering
    from kvtier.requests import Requests
    from kvtier.sequence import Sequence

__all__ = ["Decoding", "Made"]

Made: TypeAlias = "Mapping[str, int | Iterable[int] | npt.NDArray[np.integer]]"
"""Token ids, one or some, by request id."""


class Decoding:
    """Of ``requests`` those that run, in blocks of ``block_size``. ``grow`` gives one more of them, as far as there is
    room: :meth:`kvtier.loading.Loader.grow`; ``running`` are those that run."""

    def __init__(
        self,
        requests: Requests,
        gathering: Gathering,
        grow: Callable[[Sequence, int], bool],
        running: _core.Decoding,
        block_size: int,
    ) -> None:
        self._requests = requests
        self._gathering = gathering
        self._grow = grow
        self._block = block_size
        self._native = running

    def advance(self, made: Made) -> dict[str, list[int] | None]:
        """The tokens that each had are computed, and these are those that follow; returns the slots by which tables
        have grown for them, None where there is no room. ValueError, and nothing has changed, for what cannot be."""
        if self._gathering.stream is not None:
            self._gathering.heed_stream()
        done = self._native.advance(made)
        if done is None:
            done = self._native.advance(self._checked(made))
            assert done is not None
        grown, completed, blocks = done
        if blocks:
            self._gathering.note(completed, blocks)
        if grown and None in grown.values():
            self._try_again(grown)
        return grown

    def _try_again(self, grown: dict[str, list[int] | None]) -> None:
        """Those that found no room may find what has become free since somebody looked."""
        for request_id in [name for name, slots in grown.items() if slots is None]:
            sequence = self._requests.by_id[request_id]
            had = len(sequence.growing)
            if self._grow(sequence, -(-sequence.num_tokens // self._block)):
                grown[request_id] = sequence.table[had:].tolist()

    def forget(self, request_id: str) -> None:
        """The request runs no longer."""
        self._native.forget(request_id)

    def close(self) -> None:
        """No request does."""
        self._native.clear()

    def _checked(self, made: Made) -> dict[str, list[int]]:
        """The same, found right: of running requests, and in plain numbers."""
        if not isinstance(made, Mapping):
            raise ValueError(f"tokens: {made!r}; accepted: token ids by request id")
        plain = {}
        for request_id, tokens in made.items():
            sequence = self._requests.known(request_id)
            if sequence.state is not State.RUNNING:
                raise ValueError(f"request_id: {request_id!r} is {sequence.state.value}; only a ready request computes")
            some = [tokens] if isinstance(tokens, (int, np.integer)) else tokens
            plain[request_id] = as_tokens(some, f"tokens[{request_id!r}]").tolist()
        return plain
