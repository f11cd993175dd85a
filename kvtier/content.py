"""Content: what a sequence is made of, and what its blocks are called by it.

A block's label is its token ids and, where it touches an image or other media, a digest of that: the placeholder tokens
of every image are one repeated id, so that tokens alone would serve one image the KV of another.

    label   block_size × u32 token ids ‖ 32 bytes: zeros where the block touches no media, else
    media   SHA-256("kvtier.media.v1" ‖ for each span that the block touches, in order of position:
                    i64 where it begins, counted from the block's first token ‖ u64 its length ‖ its 32-byte digest)

All numbers are little-endian, and every piece has a fixed length: no two lists of spans are written alike.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from operator import index
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

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
_SPAN = struct.Struct("<qQ32s")
_NO_MEDIA = bytes(MEDIA_BYTES)
_FEW = 16  # labels that are sooner put together one by one than by NumPy
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

    __slots__ = ("_media", "_tokens")

    def __init__(self, tokens: Iterable[int] | npt.NDArray[np.integer] = (), media: Iterable[Media] = ()) -> None:
        self._tokens = array("I")
        self._media: list[Media] = []
        self.append(tokens, media)

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, tokens: Iterable[int] | npt.NDArray[np.integer], media: Iterable[Media] = ()) -> None:
        """Add tokens and the media that begin among them or behind; positions count from the sequence's beginning.

        A span may reach beyond the tokens that are known so far. ValueError, and nothing is changed, for what is no
        token id, no span, or a span that begins before the first of ``tokens``.
        """
        words = _as_words(tokens)
        if words is None:
            words = array("I")
            words.frombytes(as_tokens(tokens).data.cast("B"))
        if not (type(media) is tuple and not media):  # nearly always there is none
            self._media = sorted([*self._media, *as_media(media, len(self))])
        self._tokens.extend(words)

    def labels(self, first: int, last: int, block_size: int) -> Labels:
        """The labels of the blocks [first, last), which must be whole."""
        out = np.zeros((last - first, label_words(block_size)), np.uint32)
        # The view of the array must not outlive this call: while one exists the array cannot grow.
        tokens = np.frombuffer(self._tokens, np.uint32)[first * block_size : last * block_size]
        out[:, :block_size] = tokens.reshape(-1, block_size)
        touched: dict[int, list[bytes]] = {}
        for start, length, digest in self._media:
            for block in range(max(first, start // block_size), min(last, (start + length - 1) // block_size + 1)):
                touched.setdefault(block, []).append(_SPAN.pack(start - block * block_size, length, digest))
        for block, spans in touched.items():
            digest = hashlib.sha256(b"kvtier.media.v1" + b"".join(spans)).digest()
            out[block - first, block_size:] = np.frombuffer(digest, np.uint32)
        return out

    def packed(self, first: int, last: int, block_size: int) -> bytes:
        """The bytes of :meth:`labels`."""
        if self._media or last - first > _FEW:
            return self.labels(first, last, block_size).tobytes()
        tokens, places = self._tokens, range(first * block_size, last * block_size, block_size)
        return b"".join([tokens[at : at + block_size].tobytes() + _NO_MEDIA for at in places])

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
