"""The journal: which generation of each namespace is the valid one, where the stores themselves are in other processes.

A small JSON file that the control plane replaces as a whole, durably, before anything else hears of an invalidation:

    {"version": 1, "all": 3, "spaces": {"<fingerprint in hex>": 5}}

generation(space) = max(all, the space's own). It only ever rises. A journal that is missing or damaged beside stores
that hold pages cannot say what was invalidated; then everything was.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvtier.messages import Hello

__all__ = ["Journal"]

MOST_SPACES = 2048  # beyond this all generations rise together
MOST_BYTES = 1 << 20
MOST_GENERATION = 1 << 40


class Journal:
    """``path`` None: nothing is kept on disk, and nothing needs to be remembered."""

    def __init__(self, path: Path | None, everything: int = 0, spaces: dict[bytes, int] | None = None) -> None:
        self._path = path
        self._all = everything
        self._spaces = spaces or {}
        self.warnings: list[str] = []

    @classmethod
    def open(cls, path: Path | None, hellos: Sequence[Hello]) -> Self:
        """The journal at ``path``, made where there is none; never behind what the stores of ``hellos`` say.

        Raises OSError when it cannot be read or written.
        """
        floor = max((hello.generation for hello in hellos), default=0)
        if path is None:
            return cls(None, floor)
        journal, wrong = cls(path), ""
        try:
            data = path.read_bytes()[: MOST_BYTES + 1]
        except FileNotFoundError:
            wrong = "it is missing"
        else:
            wrong = journal._parse(data)
        kept = [hello for hello in hellos if len(hello.inventory_slots)]
        if not wrong:
            journal._all = max(journal._all, floor)
        elif kept or floor:
            newest = max((_newest(hello) for hello in kept), default=0)
            journal._all, journal._spaces = max(floor, newest) + 1, {}
            journal.warnings.append(f"{path}: {wrong}, so all pages on disk were dropped")
        journal._write()
        return journal

    def _parse(self, data: bytes) -> str:
        """Empty, or what is wrong with it."""
        try:
            if len(data) > MOST_BYTES:
                return "it is too large"
            content = json.loads(data)
            everything = content["all"]
            spaces = {bytes.fromhex(space): generation for space, generation in content["spaces"].items()}
            numbers = [everything, *spaces.values()]
            if content["version"] != 1 or any(len(space) != 32 for space in spaces):
                return "it is of another kind"
            if not all(type(n) is int and 0 <= n < MOST_GENERATION for n in numbers):
                return "its numbers are out of range"
        except (ValueError, KeyError, TypeError, AttributeError):
            return "it is damaged"
        self._all, self._spaces = everything, spaces
        return ""

    def entries(self) -> Iterator[tuple[bytes | None, int]]:
        """Every generation above 0 and whose it is; None: everybody's."""
        if self._all:
            yield None, self._all
        yield from ((space, n) for space, n in self._spaces.items() if n > self._all)

    def generation(self, space: bytes) -> int:
        return max(self._all, self._spaces.get(space, 0))

    def advance(self, space: bytes | None) -> int:
        """The new generation of ``space`` (None: of all), durable on return. OSError: in force, but not durable."""
        if space is not None and (space in self._spaces or len(self._spaces) < MOST_SPACES):
            self._spaces[space] = self.generation(space) + 1
        else:
            self._all = max(self._all, *self._spaces.values(), 0) + 1
            self._spaces.clear()
        self._write()
        return self.generation(space or b"")

    def _write(self) -> None:
        if self._path is None:
            return
        spaces = {space.hex(): generation for space, generation in self._spaces.items()}
        data = json.dumps({"version": 1, "all": self._all, "spaces": spaces}).encode()
        fresh = self._path.with_name(self._path.name + ".new")
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _newest(hello: Hello) -> int:
    """The highest generation of any page in the inventory; identities have it at bytes 96 to 104."""
    return int(np.ascontiguousarray(hello.inventory_identities[:, 96:104]).view(np.uint64).max())
