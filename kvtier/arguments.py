"""Arguments of public calls: each is found right, or refused in one line with its name, its value and what is accepted.

Nothing is converted that could mean something else: no float, string or truth value counts as a number of tokens.
"""

from __future__ import annotations

import math
from operator import index
from typing import TYPE_CHECKING, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["digests", "instance", "items", "seconds", "whole", "words"]

T = TypeVar("T")


def whole(name: str, value: SupportsIndex, least: int = 0, request: str | None = None) -> int:
    """A whole number of ``least`` or more, Python's or NumPy's; ``request`` says in an error whose it is."""
    try:
        number = value if type(value) is int else None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        of = "" if request is None else f" for request {request!r}"
        raise ValueError(f"{name}: {value!r}{of}; accepted: whole numbers from {least}")
    return number


def seconds(name: str, value: float, least: float | None = None, of: str = "") -> float:
    """A finite number of seconds, of ``least`` or more if given."""
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or (least is not None and number < least):
        more = "" if least is None else f" from {least:g}"
        raise ValueError(f"{name}: {value!r}{of}; accepted: finite numbers of seconds{more}")
    return number


def words(name: str, value: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise ValueError(f"{name}: {value!r}; accepted: a string")
    return value


def instance(name: str, value: T, kind: type[T]) -> T:
    """An object of ``kind``."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}: {value!r}; accepted: a {kind.__name__}")
    return value


def items(name: str, value: Iterable[T], what: str) -> Iterable[T]:
    """Anything that can be gone through, of ``what``; its members are the caller's to look at."""
    if isinstance(value, (str, bytes)) or not hasattr(type(value), "__iter__"):
        raise ValueError(f"{name}: {value!r}; accepted: a sequence of {what}")
    return value


def digests(name: str, value: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """32 bytes for each block."""
    if not isinstance(value, np.ndarray):
        raise ValueError(f"{name}: {value!r}; accepted: an array, uint8 [blocks, 32]")
    if value.dtype != np.uint8 or value.ndim != 2 or value.shape[1] != 32:
        raise ValueError(f"{name}: {value.dtype} {list(value.shape)}; accepted: uint8 [blocks, 32]")
    return value
