"""Content: what a sequence is made of, and what its blocks are called by it.

A block's label is its token ids and, where it touches an image or other media, a digest of that: the placeholder tokens
of every image are one repeated id, so that tokens alone would serve one image the KV of another.

    label   block_size × u32 token ids ‖ 32 bytes: zeros where the block touches no media, else
    media   SHA-256("kvtier.media.v1" ‖ for each span that the block touches, in order of position:
                    i64 where it begins, counted from the block's first token ‖ u64 its length ‖ its 32-byte digest)

All numbers are little-endian, and every piece has a fixed length: no two lists of spans are written alike.
"""

from __future__ import annotations

from array import array
from operator import index
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier import _core
from kvtier.arguments import items

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    *("MEDIA_BYTES", "Content", "Labels", "Media", "TokenIds"),
    *("as_media", "as_tokens", "label_bytes", "label_words"),
]

TokenIds = npt.NDArray[np.uint32]
Labels = npt.NDArray[np.uint32]
"""Of whole blocks: uint32 [blocks, label_words(block_size)]."""

Media = tuple[int, int, bytes]
"""A span of placeholder tokens: the position of its first token, how many there are, and the 32-byte cryptographic
digest of all that an encoder made of them depends on: the image's bytes with the settings of its processor."""

MEDIA_BYTES = 32
_FAR = 1 << 62  # tokens: so that no sum of two positions overflows


def label_words(block_size: int) -> int:
    """32-bit words of a label."""
    return block_size + MEDIA_BYTES // 4


def label_bytes(block_size: int) -> int:
    return 4 * label_words(block_size)


class Content:
    """The tokens of a sequence and the media among them. It only grows, so that no label ever changes.

    Whatever is looked up or indexed by tokens goes through one of these: there is no way to leave the media out.
    """

    __slots__ = ("native",)

    def __init__(self, tokens: Iterable[int] | npt.NDArray[np.integer] = (), media: Iterable[Media] = ()) -> None:
        self.native = _core.Content()
        self.append(tokens, media)

    def __len__(self) -> int:
        return len(self.native)

    def append(self, tokens: Iterable[int] | npt.NDArray[np.integer], media: Iterable[Media] = ()) -> None:
        """Add tokens and the media that begin among them or behind; positions count from the sequence's beginning.

        A span may reach beyond the tokens that are known so far. ValueError, and nothing is changed, for what is no
        token id, no span, or a span that begins before the first of ``tokens``.
        """
        no_media = isinstance(media, (tuple, list)) and not media  # nearly always
        if no_media and self.native.append(tokens):
            return
        ids = as_tokens(tokens)
        self.native.extend(ids, [] if no_media else as_media(media, len(self)))

    def labels(self, first: int, last: int, block_size: int) -> Labels:
        """The labels of the blocks [first, last), which must be whole."""
        return self.native.labels(first, last, block_size)

    def whole(self, block_size: int) -> Labels:
        """The labels of all whole blocks."""
        return self.labels(0, len(self) // block_size, block_size)


def as_media(media: Iterable[Media], first: int = 0) -> list[Media]:
    """The spans, each found right; ValueError names the first one that is no span or begins before token ``first``."""
    return [_checked(i, span, first) for i, span in enumerate(items("media", media, "spans (start, length, digest)"))]


def _checked(i: int, span: Media, first: int) -> Media:
    try:
        start, length, digest = span
        start, length = index(start), index(length)
    except (TypeError, ValueError):
        raise ValueError(f"media[{i}]: {span!r}; expected (start, length, 32-byte digest)") from None
    if not isinstance(digest, bytes) or len(digest) != MEDIA_BYTES:
        raise ValueError(f"media[{i}]: digest {digest!r}; expected {MEDIA_BYTES} bytes over the whole content")
    if not first <= start < _FAR:
        where = f"{first} or later, where new tokens begin" if start < first else "less than 2^62"
        raise ValueError(f"media[{i}]: starts at token {start}; expected {where}")
    if not 1 <= length < _FAR:
        raise ValueError(f"media[{i}]: {length} tokens long; expected 1 or more, less than 2^62")
    return start, length, digest


def _as_words(tokens: Iterable[int] | npt.NDArray[np.integer]) -> array[int] | None:
    """A list of token ids, as it mostly is one; None for anything else."""
    if isinstance(tokens, list):
        try:
            if bool not in map(type, tokens):
                return array("I", tokens)
        except (TypeError, OverflowError):
            pass  # to be named by whoever takes the others
    return None


def as_tokens(tokens: Iterable[int] | npt.NDArray[np.integer], field_name: str = "tokens") -> TokenIds:
    """Token ids as uint32; ValueError names the first one that is not a token id."""
    words = _as_words(tokens)
    if words is not None:
        return np.frombuffer(words, np.uint32)
    ids = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(items(field_name, tokens, "token ids")))
    if ids.size == 0:
        return np.empty(0, np.uint32)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{field_name}: expected a flat sequence of integers, got {ids.dtype} of shape {ids.shape}")
    if ids.dtype != np.uint32:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high > 0xFFFFFFFF:
            raise ValueError(f"{field_name}: {low if low < 0 else high} is not a token id; accepted: 0 to 4294967295")
    return np.ascontiguousarray(ids, dtype=np.uint32)
